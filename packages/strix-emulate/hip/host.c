/* SPDX-License-Identifier: BSD-3-Clause */
/* Pinning of existing host memory: its pages are replaced by pages of the pool at the same
   addresses. */
#define _GNU_SOURCE
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ull
/* Consecutive pages that were moved into the pool together. Several pinned ranges may share such
   pages, because a range may begin or end in the middle of a page. */
struct backing {
    char *start;
    size_t size, users;
    char *in_pool;
    struct backing *next;
};
struct range {
    char *start;
    size_t size;
    unsigned flags;
    struct range *next;
};
static struct backing *backings;
static struct range *ranges;

static char *page_of(const char *p) { return (char *)((uintptr_t)p / PAGE * PAGE); }
static char *page_behind(const char *p) { return page_of(p + PAGE - 1); }

static struct backing *backing_at(const char *page) {
    return FIND(backings, page >= it->start && page < it->start + it->size);
}

/* Returns whether all of the memory is mapped privately by this process, readable and writable. */
static bool is_private(const char *start, const char *end) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], rights[5];
    unsigned long low, high;
    while (maps && start < end && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s", &low, &high, rights) == 3 && (uintptr_t)start >= low &&
            (uintptr_t)start < high) {
            if (memcmp(rights, "rw", 2) || rights[3] != 'p') break;
            start = (char *)high;
        }
    if (maps) fclose(maps);
    return start >= end;
}

static hipError_t back(char *start, size_t size) {
    struct backing *made = malloc(sizeof *made);
    void *in_pool = NULL;
    hipError_t error = made ? pool_allocate(&in_pool, size, KIND_REGISTERED) : hipErrorOutOfMemory;
    if (error) return free(made), error;
    memcpy(in_pool, start, size);
    void *got = mmap(start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pool_file(),
                     (off_t)((uint64_t)in_pool - POOL_BASE));
    if (got != start) {
        pool_free(in_pool, KIND_REGISTERED);
        return free(made), hipErrorOutOfMemory;
    }
    *made = (struct backing){start, size, 0, in_pool, backings};
    backings = made;
    return hipSuccess;
}

/* Replaces pages of the pool by private pages of the process with the same content. */
static void give_back(struct backing *b) {
    struct backing **at = PLACE(backings, it == b);
    void *own = mmap(NULL, b->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) return; /* the pages stay in the pool */
    memcpy(own, b->start, b->size);
    mremap(own, b->size, b->size, MREMAP_MAYMOVE | MREMAP_FIXED, b->start);
    pool_free(b->in_pool, KIND_REGISTERED);
    *at = b->next;
    free(b);
}

static struct range **range_at(const char *p) {
    return PLACE(ranges, p >= it->start && p < it->start + it->size);
}

/* Divides a pinned range into parts, each of which lies in one `struct backing`. For each part, the
   function adds a view if `add` is true, or removes one user of the backing otherwise. */
static bool each_part(char *start, char *end, bool add) {
    bool right = true;
    for (char *at = start; at < end;) {
        struct backing *b = backing_at(page_of(at));
        char *last = b->start + b->size < end ? b->start + b->size : end;
        if (add) {
            uint64_t offset = (uint64_t)b->in_pool - POOL_BASE + (uint64_t)(at - b->start);
            right = view_add(at, (size_t)(last - at), offset, 3) && right;
            b->users++;
        } else if (!--b->users) {
            give_back(b);
        }
        at = last;
    }
    return right;
}

API(hipHostRegister)(void *p, size_t size, unsigned flags) {
    char *start = p, *end = start + size;
    ENTER();
    REQUIRE(p && size && end > start, hipErrorInvalidValue);
    REQUIRE(!(flags & ~(15u | hipExtHostRegisterUncached)), hipErrorInvalidValue);
    hipError_t error = pool_map();
    REQUIRE(!error, error);
    REQUIRE(!pool_find(p), hipErrorHostMemoryAlreadyRegistered);
    for (struct range *r = ranges; r; r = r->next)
        REQUIRE(end <= r->start || start >= r->start + r->size,
                hipErrorHostMemoryAlreadyRegistered);
    struct range *made = malloc(sizeof *made);
    REQUIRE(made, hipErrorOutOfMemory);
    for (char *page = page_of(start); !error && page < page_behind(end);) {
        struct backing *b = backing_at(page);
        char *next = b ? b->start + b->size : page;
        while (!b && next < page_behind(end) && !backing_at(next)) next += PAGE;
        if (!b && !is_private(page, next)) {
            free(made);
            LEAVE(device_lacks("pinning of memory at %p that is not private and writable", p));
        }
        if (!b) error = back(page, (size_t)(next - page));
        page = next;
    }
    if (!error && !each_part(start, end, true)) {
        view_remove(start, size);
        each_part(start, end, false);
        error = hipErrorOutOfMemory;
    }
    if (error) {
        free(made);
        LEAVE(error);
    }
    *made = (struct range){start, size, flags, ranges};
    ranges = made;
    LEAVE(hipSuccess);
}

API(hipHostUnregister)(void *p) {
    ENTER();
    REQUIRE(p, hipErrorInvalidValue);
    struct range **at = range_at(p), *one = *at;
    REQUIRE(one && one->start == p, hipErrorHostMemoryNotRegistered);
    view_remove(one->start, one->size);
    *at = one->next;
    each_part(one->start, one->start + one->size, false);
    free(one);
    LEAVE(hipSuccess);
}

API(hipHostGetDevicePointer)(void **device, void *host, unsigned flags) {
    ENTER();
    REQUIRE(device && pool_find(host), hipErrorInvalidValue);
    *device = host;
    LEAVE(hipSuccess);
}

unsigned host_flags(const void *address) {
    const struct pool_entry *entry = pool_find(address);
    const struct range *range = *range_at(address);
    return range ? range->flags : entry ? entry->flags : 0;
}

API(hipHostGetFlags)(unsigned *flags, void *host) {
    ENTER();
    const struct pool_entry *entry = pool_find(host);
    REQUIRE(flags && entry && entry->kind & (KIND_HOST | KIND_REGISTERED), hipErrorInvalidValue);
    *flags = host_flags(host);
    LEAVE(hipSuccess);
}

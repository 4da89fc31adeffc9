/* SPDX-License-Identifier: BSD-3-Clause */
/* Virtual memory management: reserved address ranges, physical memory without an address, and
   mappings of physical memory into address ranges. */
#define _GNU_SOURCE
#include "device.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The granularity of allocations, in bytes. The size of physical memory is a multiple of it. */
#define GRANULE (2ull << 20)

struct reserved {
    char *start;
    size_t size;
    struct reserved *next;
};
/* references: one of the creator, one for each call of hipMemRetainAllocationHandle, and one for
   each mapping. */
struct ihipMemGenericAllocationHandle {
    char *in_pool;
    size_t size;
    unsigned references;
    hipMemAllocationProp properties;
    hipMemGenericAllocationHandle_t next;
};
struct mapping {
    char *start;
    size_t size;
    hipMemGenericAllocationHandle_t handle;
    struct mapping *next;
};
static struct reserved *reservations;
static hipMemGenericAllocationHandle_t handles;
static struct mapping *mappings;

static bool is_handle(hipMemGenericAllocationHandle_t handle) {
    return handle && FIND(handles, it == handle);
}

static void drop(hipMemGenericAllocationHandle_t handle) {
    if (--handle->references) return;
    hipMemGenericAllocationHandle_t *at = PLACE(handles, it == handle);
    *at = handle->next;
    pool_free(handle->in_pool, KIND_PHYSICAL);
    free(handle);
}

static bool is_reserved(const char *start, size_t size) {
    return FIND(reservations, start >= it->start && start + size <= it->start + it->size);
}

API(hipMemGetAllocationGranularity)(size_t *granularity, const hipMemAllocationProp *p,
                                    hipMemAllocationGranularity_flags option) {
    ENTER();
    REQUIRE(granularity && p && p->type == hipMemAllocationTypePinned, hipErrorInvalidValue);
    *granularity = GRANULE;
    LEAVE(hipSuccess);
}

API(hipMemAddressReserve)(void **address, size_t size, size_t alignment, void *hint,
                          unsigned long long flags) {
    ENTER();
    REQUIRE(address && size && size % 4096 == 0 && !flags && !(alignment & (alignment - 1)),
            hipErrorInvalidValue);
    if (alignment < GRANULE) alignment = GRANULE;
    struct reserved *made = malloc(sizeof *made);
    REQUIRE(made, hipErrorOutOfMemory);
    char *got =
        mmap(hint, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) {
        free(made);
        LEAVE(hipErrorOutOfMemory);
    }
    char *start = (char *)(((uintptr_t)got + alignment - 1) / alignment * alignment);
    if (start > got) munmap(got, (size_t)(start - got));
    munmap(start + size, (size_t)(got + alignment - start));
    *made = (struct reserved){start, size, reservations};
    reservations = made;
    *address = start;
    LEAVE(hipSuccess);
}
API(hipMemAddressFree)(void *address, size_t size) {
    ENTER();
    struct reserved **at = PLACE(reservations, it->start == address), *one = *at;
    REQUIRE(one && one->size == size, hipErrorInvalidValue);
    for (struct mapping *m = mappings; m; m = m->next)
        REQUIRE(m->start < one->start || m->start >= one->start + size, hipErrorInvalidValue);
    munmap(one->start, size);
    *at = one->next;
    free(one);
    LEAVE(hipSuccess);
}

API(hipMemCreate)(hipMemGenericAllocationHandle_t *handle, size_t size,
                  const hipMemAllocationProp *p, unsigned long long flags) {
    ENTER();
    REQUIRE(handle && size && size % GRANULE == 0 && !flags && p &&
                p->type == hipMemAllocationTypePinned && device_exists(p->location.id),
            hipErrorInvalidValue);
    hipMemGenericAllocationHandle_t made = malloc(sizeof *made);
    REQUIRE(made, hipErrorOutOfMemory);
    void *in_pool;
    hipError_t error = pool_allocate(&in_pool, size, KIND_PHYSICAL);
    if (error) {
        free(made);
        LEAVE(error);
    }
    *made = (struct ihipMemGenericAllocationHandle){in_pool, size, 1, *p, handles};
    *handle = handles = made;
    LEAVE(hipSuccess);
}
API(hipMemRelease)(hipMemGenericAllocationHandle_t handle) {
    CHECKED(is_handle(handle), hipErrorInvalidValue, (drop(handle), hipSuccess));
}
API(hipMemRetainAllocationHandle)(hipMemGenericAllocationHandle_t *handle, void *address) {
    ENTER();
    REQUIRE(handle, hipErrorInvalidValue);
    struct mapping *m =
        FIND(mappings, (char *)address >= it->start && (char *)address < it->start + it->size);
    REQUIRE(m, hipErrorInvalidValue);
    m->handle->references++;
    *handle = m->handle;
    LEAVE(hipSuccess);
}
API(hipMemGetAllocationPropertiesFromHandle)(hipMemAllocationProp *p,
                                             hipMemGenericAllocationHandle_t handle) {
    CHECKED(p && is_handle(handle), hipErrorInvalidValue, (*p = handle->properties, hipSuccess));
}

API(hipMemMap)(void *p, size_t size, size_t offset, hipMemGenericAllocationHandle_t handle,
               unsigned long long flags) {
    ENTER();
    REQUIRE(is_handle(handle) && size && size % 4096 == 0 && offset % 4096 == 0 && !flags &&
                offset <= handle->size && size <= handle->size - offset && is_reserved(p, size),
            hipErrorInvalidValue);
    for (struct mapping *m = mappings; m; m = m->next)
        REQUIRE((char *)p + size <= m->start || (char *)p >= m->start + m->size,
                hipErrorInvalidValue);
    uint64_t from = (uint64_t)handle->in_pool - POOL_BASE + offset;
    struct mapping *made = malloc(sizeof *made);
    REQUIRE(made && view_add(p, size, from, 0), hipErrorOutOfMemory);
    mmap(p, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pool_file(), (off_t)from);
    *made = (struct mapping){p, size, handle, mappings};
    mappings = made;
    handle->references++;
    LEAVE(hipSuccess);
}
/* Removes the mappings in a range. They must fill the range. */
API(hipMemUnmap)(void *p, size_t size) {
    char *start = p;
    size_t found = 0;
    ENTER();
    for (struct mapping *m = mappings; m; m = m->next)
        if (m->start >= start && m->start + m->size <= start + size) found += m->size;
    REQUIRE(size && found == size, hipErrorInvalidValue);
    for (struct mapping **at, *m;
         (m = *(at = PLACE(mappings, it->start >= start && it->start < start + size)));) {
        *at = m->next;
        drop(m->handle);
        free(m);
    }
    view_remove(p, size);
    mmap(p, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    LEAVE(hipSuccess);
}
/* Only the last descriptor has an effect, because all devices share one memory. */
API(hipMemSetAccess)(void *p, size_t size, const hipMemAccessDesc *access, size_t count) {
    ENTER();
    REQUIRE(access && count && view_holds(p, size), hipErrorInvalidValue);
    for (size_t i = 0; i < count; i++)
        REQUIRE(device_exists(access[i].location.id), hipErrorInvalidValue);
    view_set(p, size, (unsigned)access[count - 1].flags);
    LEAVE(hipSuccess);
}
API(hipMemGetAccess)(unsigned long long *flags, const hipMemLocation *location, void *p) {
    ENTER();
    const struct pool_view *view = view_find(p);
    REQUIRE(flags && location && view, hipErrorInvalidValue);
    *flags = view->access;
    LEAVE(hipSuccess);
}

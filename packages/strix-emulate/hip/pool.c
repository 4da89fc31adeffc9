/* SPDX-License-Identifier: BSD-3-Clause */
/* Device memory: one file in memory that client and server map. Addresses of allocations are valid
   on the host, too. A table in its first bytes says what is allocated: the client writes it, the
   server reads it. */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Allocations start at a page, and at least a page of nothing lies behind each, so that a kernel
   that runs over an end is caught. */
#define PAGE 4096ull
#define DEFAULT_SIZE (8ull << 30)
/* New memory is not zero, as on a GPU: NaN in float32 and float16. Above this size it is zero,
   since filling it would take the machine's memory. */
#define POISON 0x7FB57FB5u
#define POISON_LIMIT (256ull << 20)

static char *base;
static int file = -1;
static size_t total, used, peak, reach;

static struct pool_header *header(void) { return (struct pool_header *)base; }

static size_t wanted_size(void) {
    const char *text = getenv("STRIX_EMULATE_MEMORY");
    if (!text || !*text) {
        size_t half = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) / 2;
        return half < DEFAULT_SIZE ? half / PAGE * PAGE : DEFAULT_SIZE;
    }
    char *end;
    errno = 0;
    unsigned long long bytes = strtoull(text, &end, 10);
    if (errno || *end || bytes < POOL_HEAP + PAGE || bytes > 1ull << 42) return 0;
    return bytes / PAGE * PAGE;
}

size_t pool_size(void) { return (base ? total : wanted_size()) - POOL_HEAP; }
size_t pool_used(void) { return used; }
size_t pool_peak(void) { return peak; }
int pool_file(void) { return file; }

hipError_t pool_map(void) {
    if (base) return hipSuccess;
    total = wanted_size();
    if (!total) {
        device_say("STRIX_EMULATE_MEMORY is not a number of bytes from %llu on", POOL_HEAP + PAGE);
        return hipErrorNoDevice;
    }
    file = memfd_create("strix-emulate", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0 || ftruncate(file, (off_t)total) || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK)) {
        device_say("no file in memory of %zu bytes: %s", total, strerror(errno));
        return hipErrorNoDevice;
    }
    void *got = mmap((void *)POOL_BASE, total, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, file, 0);
    if (got != (void *)POOL_BASE) {
        device_say("cannot map %zu bytes at %#llx: %s", total, POOL_BASE, strerror(errno));
        return hipErrorNoDevice;
    }
    base = got;
    device_own();
    header()->size = total;
    views_begin(header());
    return hipSuccess;
}

static bool insert(uint64_t offset, size_t size, enum pool_kind kind) {
    struct pool_header *table = header();
    if (table->count >= POOL_ENTRIES) return false;
    uint64_t at = table->count++;
    for (; at && table->entries[at - 1].offset > offset; at--)
        table->entries[at] = table->entries[at - 1];
    table->entries[at] = (struct pool_entry){offset, size, kind, (uint32_t)device_current()};
    return true;
}

static void take_out(const struct pool_entry *entry) {
    struct pool_header *table = header();
    size_t at = (size_t)(entry - table->entries);
    table->count--;
    memmove(table->entries + at, table->entries + at + 1,
            (table->count - at) * sizeof *table->entries);
}

static size_t round_up(size_t value) { return (value + PAGE - 1) / PAGE * PAGE; }

hipError_t pool_allocate(void **address, size_t size, enum pool_kind kind) {
    *address = NULL;
    if (!size) return hipSuccess;
    hipError_t error = pool_map();
    if (error) return error;
    struct pool_header *table = header();
    if (size > total) return hipErrorOutOfMemory;
    uint64_t start = POOL_HEAP, at = 0;
    for (; at < table->count && table->entries[at].offset < start + size + PAGE; at++)
        start = round_up(table->entries[at].offset + table->entries[at].size) + PAGE;
    if (start + size + PAGE > total || !insert(start, size, kind)) return hipErrorOutOfMemory;
    used += size;
    peak = used > peak ? used : peak;
    *address = base + start;
    if (!(kind & (KIND_IMAGE | KIND_REGISTERED)) && size <= POISON_LIMIT)
        for (uint32_t *p = *address; p < (uint32_t *)(base + start + size / 4 * 4); p++)
            *p = POISON;
    return hipSuccess;
}

static bool in_pool(const void *address) {
    return base && (const char *)address >= base && (const char *)address < base + total + reach;
}

/* What lies there in the pool, whichever address shows it. */
const struct pool_entry *pool_find(const void *address) {
    const struct pool_view *view = view_find(address);
    if (view) address = base + view->offset + ((uint64_t)address - view->address);
    if (!in_pool(address)) return NULL;
    uint64_t offset = (uint64_t)((const char *)address - base), low = 0, high = header()->count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        const struct pool_entry *entry = header()->entries + middle;
        if (offset < entry->offset) high = middle;
        else if (offset >= entry->offset + entry->size) low = middle + 1;
        else return entry;
    }
    return NULL;
}

bool pool_is_device(const void *address) { return in_pool(address) || view_find(address); }

void pool_range(const void *address, void **start, size_t *size) {
    const struct pool_view *view = view_find(address);
    const struct pool_entry *entry = view ? NULL : pool_find(address);
    if (start) *start = (void *)(view ? view->address : POOL_BASE + entry->offset);
    if (size) *size = view ? view->size : entry->size;
}

bool pool_holds(const void *address, size_t size) {
    if (!pool_is_device(address)) return address != NULL;
    if (!in_pool(address)) return view_holds(address, size);
    const struct pool_entry *entry = pool_find(address);
    return entry && size <= entry->offset + entry->size - (size_t)((const char *)address - base);
}

hipError_t pool_free(void *address, unsigned kinds) {
    const struct pool_entry *entry = in_pool(address) ? pool_find(address) : NULL;
    if (!entry || base + entry->offset != address || !(entry->kind & kinds))
        return hipErrorInvalidValue;
    madvise(address, round_up(entry->size), MADV_REMOVE);
    used -= entry->size;
    take_out(entry);
    return hipSuccess;
}

/* An allocation of another process's pool, behind our own; places are not used again. */
hipError_t pool_import(void **address, const char *path, uint64_t offset, size_t size) {
    hipError_t error = pool_map();
    if (error) return error;
    size_t whole = round_up(size);
    if (reach + whole + PAGE > POOL_ROOM) return hipErrorOutOfMemory;
    int other = open(path, O_RDWR | O_CLOEXEC);
    if (other < 0) return hipErrorInvalidHandle;
    char *place = base + total + reach;
    void *got = mmap(place, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, other,
                     (off_t)offset);
    close(other);
    if (got != place || !insert(total + reach, size, KIND_FOREIGN)) return hipErrorOutOfMemory;
    reach += whole + PAGE;
    *address = place;
    return hipSuccess;
}

void pool_drop(void *address) {
    const struct pool_entry *entry = pool_find(address);
    munmap(address, round_up(entry->size));
    take_out(entry);
}

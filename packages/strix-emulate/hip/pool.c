/* SPDX-License-Identifier: BSD-3-Clause */
/* The pool: device memory, which is a file in memory that client and server both map. The host can
   use the addresses of allocations, too. The first bytes of the pool are a table of the
   allocations. */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* An allocation starts at a page boundary. At least one unallocated page follows it, so that a
   kernel that accesses memory past the end of an allocation traps. */
#define PAGE 4096ull
#define DEFAULT_SIZE (8ull << 30)
/* As on a GPU, new memory is not zero. It is filled with this value, which is NaN in float32 and in
   float16. An allocation of more than POISON_LIMIT bytes is not filled and is zero, because filling
   it would take up the machine's memory. */
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
        device_say("STRIX_EMULATE_MEMORY must be a number of bytes from %llu to %llu",
                   POOL_HEAP + PAGE, 1ull << 42);
        return hipErrorNoDevice;
    }
    file = memfd_create("strix-emulate", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0 || ftruncate(file, (off_t)total) || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK)) {
        device_say("cannot create a file of %zu bytes in memory: %s", total, strerror(errno));
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

static size_t round_up(size_t value) { return (value + PAGE - 1) / PAGE * PAGE; }

/* Freed memory is kept unallocated for a while, so that a kernel that still uses it traps. These
   are the limits of the kept memory, which consists of the ranges that were freed last. All of it
   is released if there is no other room for an allocation. */
#define KEPT_BYTES (64ull << 20)
#define KEPT_RANGES 256
static struct pool_view kept[KEPT_RANGES]; /* a ring buffer that begins at kept_first */
static size_t kept_first, kept_count, kept_bytes;

static void keep(uint64_t offset, size_t size) {
    if (kept_count == KEPT_RANGES) kept_bytes -= kept[kept_first].size, kept_count--, kept_first++;
    kept_first %= KEPT_RANGES;
    kept[(kept_first + kept_count++) % KEPT_RANGES] =
        (struct pool_view){.offset = offset, .size = size};
    for (kept_bytes += size; kept_bytes > KEPT_BYTES; kept_count--) {
        kept_bytes -= kept[kept_first].size;
        kept_first = (kept_first + 1) % KEPT_RANGES;
    }
}

/* Returns an offset at which `size` bytes are free, or 0 if there is no room. */
static uint64_t fit(size_t size) {
    const struct pool_header *table = header();
    uint64_t start = POOL_HEAP, at = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (; at < table->count && table->entries[at].offset < start + size + PAGE; at++)
            start = round_up(table->entries[at].offset + table->entries[at].size) + PAGE;
        for (size_t i = 0; i < kept_count; i++) {
            const struct pool_view *old = kept + (kept_first + i) % KEPT_RANGES;
            if (start >= old->offset + old->size || start + size + PAGE <= old->offset) continue;
            start = round_up(old->offset + old->size) + PAGE;
            moved = true;
        }
    }
    return start + size + PAGE <= total ? start : 0;
}

static bool insert(uint64_t offset, size_t size, enum pool_kind kind) {
    struct pool_header *table = header();
    if (table->count >= POOL_ENTRIES) return false;
    uint64_t at = table->count++;
    for (; at && table->entries[at - 1].offset > offset; at--)
        table->entries[at] = table->entries[at - 1];
    table->entries[at] = (struct pool_entry){
        .offset = offset, .size = size, .kind = kind, .device = (uint16_t)device_current()};
    return true;
}

static void take_out(const struct pool_entry *entry) {
    struct pool_header *table = header();
    size_t at = (size_t)(entry - table->entries);
    table->count--;
    memmove(table->entries + at, table->entries + at + 1,
            (table->count - at) * sizeof *table->entries);
}

static void poison(char *start, size_t size) {
    if (size > POISON_LIMIT) return;
    for (uint32_t *p = (uint32_t *)start; p < (uint32_t *)(start + size / 4 * 4); p++) *p = POISON;
}

hipError_t pool_allocate(void **address, size_t size, enum pool_kind kind) {
    *address = NULL;
    if (!size) return hipSuccess;
    hipError_t error = pool_map();
    if (error) return error;
    if (size > total) return hipErrorOutOfMemory;
    uint64_t start = fit(size);
    if (!start) kept_count = kept_bytes = 0, start = fit(size);
    if (!start || !insert(start, size, kind)) return hipErrorOutOfMemory;
    used += size;
    peak = used > peak ? used : peak;
    *address = base + start;
    if (!(kind & (KIND_IMAGE | KIND_REGISTERED | KIND_GRAPH))) poison(base + start, size);
    return hipSuccess;
}

static bool in_pool(const void *address) {
    return base && (const char *)address >= base && (const char *)address < base + total + reach;
}

/* Returns the allocation at an address of the pool or of a view, or NULL. */
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
    if (!entry || entry->kind == KIND_GRAPH) return false;
    return size <= entry->offset + entry->size - (size_t)((const char *)address - base);
}

/* Returns the allocation that starts at the address, or NULL. */
static struct pool_entry *starting(const void *address) {
    struct pool_entry *entry = in_pool(address) ? (struct pool_entry *)pool_find(address) : NULL;
    return entry && base + entry->offset == address ? entry : NULL;
}

static void drop(const struct pool_entry *entry) {
    madvise(base + entry->offset, round_up(entry->size), MADV_REMOVE);
    used -= entry->size;
    keep(entry->offset, entry->size);
    take_out(entry);
}

hipError_t pool_free(void *address, unsigned kinds) {
    struct pool_entry *entry = starting(address);
    if (!entry || !(entry->kind & kinds)) return hipErrorInvalidValue;
    if (!(entry->kind & KIND_GRAPH)) return drop(entry), hipSuccess;
    madvise(address, round_up(entry->size), MADV_REMOVE);
    entry->kind = KIND_GRAPH;
    return hipSuccess;
}

void pool_clear(int device) {
    const unsigned kept = KIND_IMAGE | KIND_PHYSICAL | KIND_REGISTERED | KIND_FOREIGN | KIND_GRAPH;
    for (uint64_t i = base ? header()->count : 0; i--;) {
        const struct pool_entry *entry = header()->entries + i;
        if (entry->device == device && !(entry->kind & kept)) drop(entry);
    }
}

hipError_t pool_occupy(void *address) {
    struct pool_entry *entry = starting(address);
    if (!entry || entry->kind != KIND_GRAPH) return hipErrorInvalidValue;
    entry->kind |= KIND_DEVICE;
    poison(address, entry->size);
    return hipSuccess;
}

void pool_give_up(void *address) {
    struct pool_entry *entry = starting(address);
    if (entry->kind == KIND_GRAPH) drop(entry);
    else entry->kind = KIND_DEVICE;
}

size_t pool_count(unsigned kinds) {
    size_t found = 0;
    for (uint64_t i = base ? header()->count : 0; i--;)
        if ((header()->entries[i].kind & kinds) == kinds) found += header()->entries[i].size;
    return found;
}

size_t pool_count_of(unsigned memory_pool) {
    size_t found = 0;
    for (uint64_t i = base ? header()->count : 0; i--;)
        if (header()->entries[i].memory_pool == memory_pool) found += header()->entries[i].size;
    return found;
}

void pool_assign(void *address, unsigned memory_pool) {
    struct pool_entry *entry = starting(address);
    if (entry) entry->memory_pool = (uint16_t)memory_pool;
}

void pool_set_flags(void *address, unsigned flags) {
    struct pool_entry *entry = starting(address);
    if (entry) entry->flags = flags;
}

/* Maps an allocation of another process's pool at an address above our own pool. The address is not
   used again after the allocation has been unmapped. */
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

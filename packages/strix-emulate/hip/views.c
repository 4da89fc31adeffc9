/* SPDX-License-Identifier: BSD-3-Clause */
/* The table of views. A view is a part of the pool that has an address outside of the pool, too:
   pinned memory of the host, or mapped virtual memory. The table is sorted by address. The server
   reads it. */
#include "device.h"
#include <string.h>
#include <sys/mman.h>

static struct pool_header *header; /* the header of the pool; NULL before the pool is mapped */

void views_begin(struct pool_header *pool) { header = pool; }

static struct pool_view *table(void) { return (struct pool_view *)((char *)header + POOL_VIEWS); }
static uint64_t *count(void) { return &header->views; }

const struct pool_view *view_find(const void *address) {
    if (!header) return NULL;
    uint64_t at = (uint64_t)address, low = 0, high = *count();
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        const struct pool_view *view = table() + middle;
        if (at < view->address) high = middle;
        else if (at >= view->address + view->size) low = middle + 1;
        else return view;
    }
    return NULL;
}

bool view_holds(const void *address, size_t size) {
    for (const struct pool_view *view = view_find(address); view;
         view = view_find((void *)(view->address + view->size)))
        if (size <= view->address + view->size - (uint64_t)address) return true;
    return false;
}

/* Adds a view of `size` bytes from `offset` in the pool. Returns false if the table is full. */
bool view_add(void *address, size_t size, uint64_t offset, unsigned access) {
    uint64_t i = *count();
    if (i >= POOL_VIEW_COUNT) return false;
    for (; i && table()[i - 1].address > (uint64_t)address; i--) table()[i] = table()[i - 1];
    table()[i] = (struct pool_view){(uint64_t)address, size, offset, access, 0};
    ++*count();
    return true;
}

void view_set(void *address, size_t size, unsigned access) {
    for (uint64_t i = 0; i < *count(); i++)
        if (table()[i].address >= (uint64_t)address &&
            table()[i].address < (uint64_t)address + size)
            table()[i].access = access;
}

void view_remove(void *address, size_t size) {
    uint64_t left = 0;
    for (uint64_t i = 0; i < *count(); i++)
        if (table()[i].address < (uint64_t)address ||
            table()[i].address >= (uint64_t)address + size)
            table()[left++] = table()[i];
    *count() = left;
}

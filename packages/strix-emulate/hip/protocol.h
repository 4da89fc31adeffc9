/* SPDX-License-Identifier: BSD-3-Clause */
/* What client and server say to each other: strix_emulate/device/protocol.py has the same numbers,
   and a test compares them. All integers are little-endian. */
#pragma once
#include <stdint.h>

#define PROTOCOL_VERSION 4
/* Where the pool is in the client's address space: device addresses. */
#define POOL_BASE 0x200000000000ull
/* The pool: header and table, what a launch needs (arguments, packet), then allocations. */
#define POOL_LAUNCH (1ull << 20)
#define POOL_HEAP (2ull << 20)
#define POOL_VIEWS (POOL_LAUNCH + (768ull << 10))
#define POOL_VIEW_COUNT ((POOL_HEAP - POOL_VIEWS) / sizeof(struct pool_view))
#define POOL_ENTRIES ((POOL_LAUNCH - 64) / sizeof(struct pool_entry))

/* PHYSICAL and REGISTERED are reached through views alone: memory that
   hipMemCreate made, and the host's. FOREIGN is another process's. GRAPH is a graph's, and nobody's
   unless it is DEVICE as well. */
enum pool_kind {
    KIND_DEVICE = 1,
    KIND_HOST = 2,
    KIND_MANAGED = 4,
    KIND_IMAGE = 8,
    KIND_PHYSICAL = 16,
    KIND_REGISTERED = 32,
    KIND_FOREIGN = 64,
    KIND_GRAPH = 128,
};
/* Behind the pool: what processes map of other processes' pools. */
#define POOL_ROOM (1ull << 40)
/* Bytes of the pool that stand at another address as well; sorted by it. access: 0 none, 1 only
   reading, 3 all (hipMemAccessFlags). */
struct pool_view {
    uint64_t address, size, offset;
    uint32_t access, unused;
};
/* offset and size in bytes; the table is sorted by offset. The client writes it, and the server for
   the heap of kernels, while the client waits. */
struct pool_entry {
    uint64_t offset, size;
    uint32_t kind;
    uint16_t device, memory_pool;
};
struct pool_header {
    uint64_t size, count, views, unused[5];
    struct pool_entry entries[];
};

enum operation {
    OP_LOAD = 1,
    OP_PLACE,
    OP_UNLOAD,
    OP_FUNCTION,
    OP_SYMBOL,
    OP_LAUNCH,
    OP_IMPORT,
    OP_KERNELS,
};
struct request {
    uint32_t operation, unused;
    uint64_t size;
};
/* status is a hipError_t; with an error, the bytes that follow are a message, and lasting says that
   every later call is to give it, as after a fault on a GPU */
struct reply {
    uint32_t status, lasting;
    uint64_t size;
};
/* The server's first message is a reply with this in it. */
struct hello {
    uint32_t version, unused;
};
/* OP_LOAD: the path of the library or program that has the image, then the image */
struct load_request {
    uint32_t origin_size, unused;
};
struct load_reply {
    uint32_t module, unused;
    uint64_t size;
};
struct place_request {
    uint32_t module, unused;
    uint64_t offset;
};
/* OP_UNLOAD, OP_KERNELS; OP_FUNCTION and OP_SYMBOL, with a name behind it */
struct module_request {
    uint32_t module, unused;
};
/* lds and scratch: bytes per workgroup and lane; waves: resident ones per SIMD by registers */
struct function_reply {
    uint32_t function, kernarg, lds, scratch, max_threads, vgprs, waves, arguments;
};
struct function_argument {
    uint32_t offset, size;
};
struct symbol_reply {
    uint64_t offset, size;
};
/* where in our pool, how much, from where in the other one; that one's path follows */
struct import_request {
    uint64_t offset, size, from;
};
/* the arguments' bytes follow; heap: of kernels that call malloc, in pages of 4096 bytes */
struct launch_request {
    uint32_t function, grid[3], block[3], lds, cooperative, stack, heap;
};

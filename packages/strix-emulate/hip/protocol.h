/* SPDX-License-Identifier: BSD-3-Clause */
/* The messages between client and server, and the layout of the pool, which is the memory that both
   map. strix_emulate/device/protocol.py has the same numbers, and a test compares them. All
   integers are little-endian. */
#pragma once
#include <stdint.h>

#define PROTOCOL_VERSION 5
/* Address of the pool in the client. Device addresses are the client's addresses. */
#define POOL_BASE 0x200000000000ull
/* Layout of the pool: the header with the table of allocations, then the data of a launch
   (arguments, hostcalls and dispatch packet) and the table of views, then the allocations. */
#define POOL_LAUNCH (1ull << 20)
#define POOL_HEAP (2ull << 20)
#define POOL_VIEWS (POOL_LAUNCH + (768ull << 10))
#define POOL_VIEW_COUNT ((POOL_HEAP - POOL_VIEWS) / sizeof(struct pool_view))
#define POOL_ENTRIES ((POOL_LAUNCH - 64) / sizeof(struct pool_entry))

/* KIND_PHYSICAL is memory from hipMemCreate, and KIND_REGISTERED is pinned memory of the host. Both
   can be accessed only through views. KIND_FOREIGN is memory of another process. KIND_GRAPH is
   memory that is reserved for a graph. It is allocated only while its entry has KIND_DEVICE too. */
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
/* Bytes of address space above the pool, where memory of other processes' pools is mapped. */
#define POOL_ROOM (1ull << 40)
/* A view: a part of the pool that has another address, too. The table of views is sorted by that
   address. access: hipMemAccessFlags, where 0 is no access, 1 is reading, 3 is reading and
   writing. */
struct pool_view {
    uint64_t address, size, offset;
    uint32_t access, unused;
};
/* An allocation. Offset and size are in bytes. The table is sorted by offset. The client writes the
   table. The server writes it only to allocate the heap of kernels, while the client waits. flags:
   the flags of hipHostMalloc. */
struct pool_entry {
    uint64_t offset, size;
    uint32_t kind;
    uint16_t device, memory_pool;
    uint32_t flags, unused;
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
/* status: a hipError_t. If it is an error, the bytes that follow are a message. lasting: whether
   every later call must return the error, as after a fault on a GPU. */
struct reply {
    uint32_t status, lasting;
    uint64_t size;
};
/* The server's first message is a reply with these bytes. */
struct hello {
    uint32_t version, unused;
};
/* The request OP_LOAD. The path of the library or program that contains the image follows, and then
   the image. */
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
/* The requests OP_UNLOAD and OP_KERNELS, and the requests OP_FUNCTION and OP_SYMBOL, in which a
   name follows. */
struct module_request {
    uint32_t module, unused;
};
/* lds: bytes per workgroup. scratch: bytes per lane. waves: number of waves for which a SIMD has
   enough registers. */
struct function_reply {
    uint32_t function, kernarg, lds, scratch, max_threads, vgprs, waves, arguments;
};
struct function_argument {
    uint32_t offset, size;
};
/* offset: offset of the variable in the module's image. size: bytes of the variable. */
struct symbol_reply {
    uint64_t offset, size;
};
/* offset: offset in the client's pool. size: number of bytes. from: offset in the other process's
   pool, whose path follows. */
struct import_request {
    uint64_t offset, size, from;
};
/* The bytes of the arguments follow. heap: size of the heap for malloc in kernels, in pages of 4096
   bytes. */
struct launch_request {
    uint32_t function, grid[3], block[3], lds, cooperative, stack, heap;
};

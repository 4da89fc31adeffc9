/* SPDX-License-Identifier: BSD-3-Clause */
/* HIP's memory pools. All of them allocate from the device's only memory, and each counts its own
   allocations. They keep no freed memory: a free returns the memory to the device at once, whatever
   the release threshold is. */
#include "device.h"
#include <stdlib.h>

#define DEVICES 16
/* number: the pool's number in the table of allocations. reuse, threshold: the values that the
   program has set, which have no effect. */
struct ihipMemPoolHandle_t {
    int device;
    unsigned number;
    int reuse[3];
    uint64_t threshold, high;
    hipMemPool_t next;
};
static struct ihipMemPoolHandle_t defaults[DEVICES];
static hipMemPool_t pools, current[DEVICES];
static unsigned made_so_far = DEVICES;

static bool pool_is_valid(hipMemPool_t pool) {
    if (pool >= defaults && pool < defaults + DEVICES) return true;
    return pool && FIND(pools, it == pool);
}

static struct ihipMemPoolHandle_t fresh(int device, unsigned number) {
    return (struct ihipMemPoolHandle_t){.device = device, .number = number, .reuse = {1, 1, 1}};
}

static hipMemPool_t default_of(int device) {
    if (!defaults[device].number) defaults[device] = fresh(device, 1 + (unsigned)device);
    return defaults + device;
}

static hipMemPool_t current_of(int device) {
    return current[device] ? current[device] : default_of(device);
}

API(hipMemPoolCreate)(hipMemPool_t *pool, const hipMemPoolProps *p) {
    ENTER();
    REQUIRE(pool && p && device_exists(p->location.id), hipErrorInvalidValue);
    hipMemPool_t made = made_so_far < UINT16_MAX ? malloc(sizeof *made) : NULL;
    REQUIRE(made, hipErrorOutOfMemory);
    *made = fresh(p->location.id, ++made_so_far);
    made->next = pools;
    *pool = pools = made;
    LEAVE(hipSuccess);
}
API(hipMemPoolDestroy)(hipMemPool_t pool) {
    ENTER();
    hipMemPool_t *at = PLACE(pools, it == pool);
    REQUIRE(pool && *at, hipErrorInvalidValue);
    *at = pool->next;
    for (int i = 0; i < DEVICES; i++)
        if (current[i] == pool) current[i] = NULL;
    free(pool);
    LEAVE(hipSuccess);
}
/* Setting the access has no effect: all devices share one memory, so each device can access it. */
API(hipMemPoolSetAccess)(hipMemPool_t pool, const hipMemAccessDesc *access, size_t count) {
    CHECKED(pool_is_valid(pool) && access && count, hipErrorInvalidValue, hipSuccess);
}
API(hipMemPoolGetAccess)(hipMemAccessFlags *flags, hipMemPool_t pool, hipMemLocation *location) {
    CHECKED(flags && pool_is_valid(pool) && location, hipErrorInvalidValue,
            (*flags = hipMemAccessFlagsProtReadWrite, hipSuccess));
}
API(hipDeviceGetDefaultMemPool)(hipMemPool_t *pool, int device) {
    CHECKED(pool && device_exists(device), hipErrorInvalidValue,
            (*pool = default_of(device), hipSuccess));
}
API(hipDeviceGetMemPool)(hipMemPool_t *pool, int device) {
    CHECKED(pool && device_exists(device), hipErrorInvalidValue,
            (*pool = current_of(device), hipSuccess));
}
API(hipDeviceSetMemPool)(int device, hipMemPool_t pool) {
    ENTER();
    REQUIRE(device_exists(device), hipErrorInvalidDevice);
    REQUIRE(pool_is_valid(pool) && pool->device == device, hipErrorInvalidValue);
    current[device] = pool;
    LEAVE(hipSuccess);
}

/* Allocates memory. If the stream is captured, adds an allocation node to the graph instead. */
static hipError_t allocate(void **p, size_t size, hipMemPool_t pool, hipStream_t stream) {
    if (capture_of(stream)) {
        hipError_t error = region_make(p, size);
        if (error) return error;
        struct work work = {.kind = WORK_ALLOCATE, .memory = {*p, size}};
        return work_submit(stream, &work);
    }
    hipError_t error = pool_allocate(p, size, KIND_DEVICE);
    if (error) return error;
    pool_assign(*p, pool->number);
    size_t now = pool_count_of(pool->number);
    pool->high = now > pool->high ? now : pool->high;
    return hipSuccess;
}
API(hipMallocAsync)(void **p, size_t size, hipStream_t stream) {
    CHECKED(p && stream_is_valid(stream), hipErrorInvalidValue,
            allocate(p, size, current_of(device_current()), stream));
}
API(hipMallocFromPoolAsync)(void **p, size_t size, hipMemPool_t pool, hipStream_t stream) {
    CHECKED(p && pool_is_valid(pool) && stream_is_valid(stream), hipErrorInvalidValue,
            allocate(p, size, pool, stream));
}
API(hipFreeAsync)(void *p, hipStream_t stream) {
    ENTER();
    REQUIRE(p && stream_is_valid(stream), hipErrorInvalidValue);
    if (!capture_of(stream)) LEAVE(pool_free(p, KIND_DEVICE));
    REQUIRE(pool_find(p), hipErrorInvalidValue);
    struct work work = {.kind = WORK_FREE, .memory = {p, 0}};
    LEAVE(work_submit(stream, &work));
}

/* Returns the place of one of the three attributes that control the reuse of memory, or NULL for
   other attributes. A pool stores these attributes, but they have no effect. */
static int *reuse_of(hipMemPool_t pool, hipMemPoolAttr attribute) {
    unsigned which = attribute - hipMemPoolReuseFollowEventDependencies;
    return which < sizeof pool->reuse / sizeof *pool->reuse ? &pool->reuse[which] : NULL;
}
API(hipMemPoolGetAttribute)(hipMemPool_t pool, hipMemPoolAttr attribute, void *value) {
    ENTER();
    REQUIRE(pool_is_valid(pool) && value, hipErrorInvalidValue);
    int *reuse = reuse_of(pool, attribute);
    switch ((int)attribute) {
    case hipMemPoolAttrReleaseThreshold: *(uint64_t *)value = pool->threshold; break;
    case hipMemPoolAttrReservedMemCurrent:
    case hipMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool_count_of(pool->number); break;
    case hipMemPoolAttrReservedMemHigh:
    case hipMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool->high; break;
    default:
        if (!reuse) LEAVE(device_lacks("attribute %d of memory pools", (int)attribute));
        *(int *)value = *reuse;
    }
    LEAVE(hipSuccess);
}
/* Of the counters, only the two high-water marks can be set. Setting one to 0 resets both to the
   current value. */
API(hipMemPoolSetAttribute)(hipMemPool_t pool, hipMemPoolAttr attribute, void *value) {
    ENTER();
    REQUIRE(pool_is_valid(pool) && value, hipErrorInvalidValue);
    int *reuse = reuse_of(pool, attribute);
    switch ((int)attribute) {
    case hipMemPoolAttrReleaseThreshold: pool->threshold = *(uint64_t *)value; break;
    case hipMemPoolAttrReservedMemHigh:
    case hipMemPoolAttrUsedMemHigh:
        REQUIRE(!*(uint64_t *)value, hipErrorInvalidValue);
        pool->high = pool_count_of(pool->number);
        break;
    default: REQUIRE(reuse, hipErrorInvalidValue); *reuse = *(int *)value;
    }
    LEAVE(hipSuccess);
}
HINT(hipMemPoolTrimTo)(hipMemPool_t pool, size_t size) { return hipSuccess; }

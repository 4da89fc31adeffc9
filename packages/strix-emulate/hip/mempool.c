/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory pools: names for the device's one memory. */
#include "device.h"
#include <stdlib.h>

struct ihipMemPoolHandle_t {
    int device;
    hipMemPool_t next;
};
static struct ihipMemPoolHandle_t defaults[16];
static hipMemPool_t pools;

static bool pool_is_valid(hipMemPool_t pool) {
    if (pool >= defaults && pool < defaults + 16) return true;
    hipMemPool_t p = pools;
    while (p && p != pool) p = p->next;
    return pool && p;
}

API(hipMemPoolCreate)(hipMemPool_t *pool, const hipMemPoolProps *p) {
    ENTER();
    REQUIRE(pool && p && device_exists(p->location.id), hipErrorInvalidValue);
    hipMemPool_t made = malloc(sizeof *made);
    REQUIRE(made, hipErrorOutOfMemory);
    *made = (struct ihipMemPoolHandle_t){p->location.id, pools};
    *pool = pools = made;
    LEAVE(hipSuccess);
}
API(hipMemPoolDestroy)(hipMemPool_t pool) {
    ENTER();
    hipMemPool_t *at = &pools;
    while (*at && *at != pool) at = &(*at)->next;
    REQUIRE(pool && *at, hipErrorInvalidValue);
    *at = pool->next;
    free(pool);
    LEAVE(hipSuccess);
}
/* All devices have the same memory. */
API(hipMemPoolSetAccess)(hipMemPool_t pool, const hipMemAccessDesc *access, size_t count) {
    ENTER();
    REQUIRE(pool_is_valid(pool) && access && count, hipErrorInvalidValue);
    LEAVE(hipSuccess);
}
API(hipMemPoolGetAccess)(hipMemAccessFlags *flags, hipMemPool_t pool, hipMemLocation *location) {
    ENTER();
    REQUIRE(flags && pool_is_valid(pool) && location, hipErrorInvalidValue);
    *flags = hipMemAccessFlagsProtReadWrite;
    LEAVE(hipSuccess);
}
API(hipDeviceGetDefaultMemPool)(hipMemPool_t *pool, int device) {
    ENTER();
    REQUIRE(pool && device_exists(device), hipErrorInvalidValue);
    *pool = defaults + device;
    LEAVE(hipSuccess);
}
API(hipDeviceGetMemPool)(hipMemPool_t *pool, int device) {
    return hipDeviceGetDefaultMemPool(pool, device);
}
API(hipMallocAsync)(void **p, size_t size, hipStream_t stream) {
    ENTER();
    REQUIRE(p && stream_is_valid(stream), hipErrorInvalidValue);
    if (capture_of(stream)) LEAVE(device_lacks("an allocation in a captured stream"));
    LEAVE(pool_allocate(p, size, KIND_DEVICE));
}
API(hipMallocFromPoolAsync)(void **p, size_t size, hipMemPool_t pool, hipStream_t stream) {
    if (!pool_is_valid(pool)) return device_enter(), device_leave(hipErrorInvalidValue);
    return hipMallocAsync(p, size, stream);
}
API(hipFreeAsync)(void *p, hipStream_t stream) {
    ENTER();
    REQUIRE(p && stream_is_valid(stream), hipErrorInvalidValue);
    if (capture_of(stream)) LEAVE(device_lacks("freeing in a captured stream"));
    LEAVE(pool_free(p, KIND_DEVICE));
}
API(hipMemPoolGetAttribute)(hipMemPool_t pool, hipMemPoolAttr attribute, void *value) {
    ENTER();
    REQUIRE(pool_is_valid(pool) && value, hipErrorInvalidValue);
    switch ((int)attribute) {
    case hipMemPoolReuseFollowEventDependencies:
    case hipMemPoolReuseAllowOpportunistic:
    case hipMemPoolReuseAllowInternalDependencies: *(int *)value = 1; break;
    case hipMemPoolAttrReleaseThreshold: *(uint64_t *)value = 0; break;
    case hipMemPoolAttrReservedMemCurrent:
    case hipMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool_used(); break;
    case hipMemPoolAttrReservedMemHigh:
    case hipMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool_peak(); break;
    default: LEAVE(device_lacks("attribute %d of memory pools", (int)attribute));
    }
    LEAVE(hipSuccess);
}
HINT(hipMemPoolSetAttribute)(hipMemPool_t pool, hipMemPoolAttr attribute, void *value) {
    return (void)pool, (void)attribute, (void)value, hipSuccess;
}
HINT(hipMemPoolTrimTo)(hipMemPool_t pool, size_t size) {
    return (void)pool, (void)size, hipSuccess;
}

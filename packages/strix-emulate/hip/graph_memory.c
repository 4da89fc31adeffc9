/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory that graphs allocate. The address of an allocation node stays reserved as long as any
   graph has the node. */
#include "device.h"
#include <stdlib.h>

struct region {
    void *address;
    unsigned users;
    struct region *next;
};
static struct region *regions;
static size_t used_high, reserved_high;

static struct region **at_address(const void *address) {
    return PLACE(regions, it->address == address);
}

static void note(size_t *high, size_t now) { *high = now > *high ? now : *high; }
static size_t in_use(void) { return pool_count(KIND_GRAPH | KIND_DEVICE); }

hipError_t region_make(void **address, size_t size) {
    struct region *made = malloc(sizeof *made);
    hipError_t error = made ? pool_allocate(address, size, KIND_GRAPH) : hipErrorOutOfMemory;
    if (error) return free(made), error;
    *made = (struct region){*address, 1, regions};
    regions = made;
    note(&reserved_high, pool_count(KIND_GRAPH));
    return hipSuccess;
}
hipError_t region_occupy(void *address) {
    hipError_t error = pool_occupy(address);
    note(&used_high, in_use());
    return error;
}
bool region_use(void *address) {
    struct region *region = *at_address(address);
    return region && ++region->users;
}
void region_drop(void *address) {
    struct region **at = at_address(address), *region = *at;
    if (--region->users) return;
    pool_give_up(address);
    *at = region->next;
    free(region);
}

API(hipDeviceGetGraphMemAttribute)(int device, hipGraphMemAttributeType attribute, void *value) {
    ENTER();
    REQUIRE(device_exists(device), hipErrorInvalidDevice);
    REQUIRE(value, hipErrorInvalidValue);
    switch ((int)attribute) {
    case hipGraphMemAttrUsedMemCurrent: *(uint64_t *)value = in_use(); break;
    case hipGraphMemAttrUsedMemHigh: *(uint64_t *)value = used_high; break;
    case hipGraphMemAttrReservedMemCurrent: *(uint64_t *)value = pool_count(KIND_GRAPH); break;
    case hipGraphMemAttrReservedMemHigh: *(uint64_t *)value = reserved_high; break;
    default: LEAVE(hipErrorInvalidValue);
    }
    LEAVE(hipSuccess);
}
/* Only the two high-water marks can be set. Setting one to 0 resets it to the current value. */
API(hipDeviceSetGraphMemAttribute)(int device, hipGraphMemAttributeType attribute, void *value) {
    ENTER();
    REQUIRE(device_exists(device), hipErrorInvalidDevice);
    REQUIRE(value && !*(uint64_t *)value, hipErrorInvalidValue);
    if (attribute == hipGraphMemAttrUsedMemHigh) used_high = in_use();
    else if (attribute == hipGraphMemAttrReservedMemHigh) reserved_high = pool_count(KIND_GRAPH);
    else LEAVE(hipErrorInvalidValue);
    LEAVE(hipSuccess);
}

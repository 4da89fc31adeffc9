// SPDX-License-Identifier: BSD-3-Clause
// Host memory that is pinned after its allocation, and virtual memory. Kernels must read what the host wrote,
// and the host must read what kernels wrote. Exits with 0 if all numbers are right.
#include "hip.h"
#include <stdlib.h>
#include <string.h>

extern "C" {
hipError_t hipHostRegister(void *, size_t, unsigned);
hipError_t hipHostUnregister(void *);
hipError_t hipHostGetDevicePointer(void **, void *, unsigned);
hipError_t hipPointerGetAttributes(hipPointerAttribute_t *, const void *);
hipError_t hipMemGetAllocationGranularity(size_t *, const hipMemAllocationProp *, int);
hipError_t hipMemAddressReserve(void **, size_t, size_t, void *, unsigned long long);
hipError_t hipMemAddressFree(void *, size_t);
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *, size_t, const hipMemAllocationProp *,
                        unsigned long long);
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t);
hipError_t hipMemMap(void *, size_t, size_t, hipMemGenericAllocationHandle_t, unsigned long long);
hipError_t hipMemUnmap(void *, size_t);
hipError_t hipMemSetAccess(void *, size_t, const hipMemAccessDesc *, size_t);
hipError_t hipMemRetainAllocationHandle(hipMemGenericAllocationHandle_t *, void *);
}

__global__ void add(int *data, int more) {
    data[__builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x()] += more;
}

static int pinned() {
    enum { N = 5000 };
    /* small arrays that share a page, and a large one */
    int *large = (int *)malloc(N * 64 * 4), *small = (int *)malloc(64 * 4), *near = (int *)malloc(64 * 4);
    void *device_pointer;
    hipPointerAttribute_t attributes;
    for (int i = 0; i < N * 64; i++) large[i] = i;
    for (int i = 0; i < 64; i++) small[i] = near[i] = i;
    CHECK(hipHostRegister(small, 64 * 4, 0));
    CHECK(hipHostRegister(near, 64 * 4, 0));
    CHECK(hipHostRegister(large, N * 64 * 4, 0));
    printf("again: %s\n", NAME(hipHostRegister(large + 5, 4, 0)));
    CHECK(hipHostGetDevicePointer(&device_pointer, large, 0));
    CHECK(hipPointerGetAttributes(&attributes, large + 100));
    if (device_pointer != large || attributes.type != 1) return printf("type %d\n", attributes.type), 1;
    large[7] = 70;
    add<<<N, 64>>>(large, 1);
    add<<<1, 64>>>(small, 2);
    CHECK(hipHostUnregister(small));
    add<<<1, 64>>>(near, 3);
    CHECK(hipDeviceSynchronize());
    if (large[7] != 71 || large[N * 64 - 1] != N * 64 || small[5] != 7 || near[63] != 66)
        return printf("pinned %d %d %d\n", large[7], small[5], near[63]), 1;
    CHECK(hipHostUnregister(near));
    CHECK(hipHostUnregister(large));
    printf("no more: %s\n", NAME(hipHostUnregister(large)));
    large[0]++, near[0]++;
    if (large[0] != 2 || large[8] != 9) return printf("kept %d\n", large[0]), 1;
    free(large), free(small), free(near);
    return 0;
}

static int mapped() {
    hipMemAllocationProp p = {hipMemAllocationTypePinned, {}, {hipMemLocationTypeDevice, 0}, NULL, {0}};
    hipMemAccessDesc all = {p.location, hipMemAccessFlagsProtReadWrite};
    size_t size;
    void *place;
    hipMemGenericAllocationHandle_t one, two, same;
    CHECK(hipMemGetAllocationGranularity(&size, &p, 0));
    CHECK(hipMemAddressReserve(&place, 8 * size, 0, NULL, 0));
    CHECK(hipMemCreate(&one, size, &p, 0));
    CHECK(hipMemCreate(&two, size, &p, 0));
    CHECK(hipMemMap(place, size, 0, one, 0));
    CHECK(hipMemMap((char *)place + size, size, 0, two, 0));
    printf("twice: %s\n", NAME(hipMemMap((char *)place + size, size, 0, one, 0)));
    CHECK(hipMemSetAccess(place, 2 * size, &all, 1));
    CHECK(hipMemset(place, 0, 2 * size));
    /* a copy across both mappings */
    int *data = (int *)((char *)place + size) - 32;
    add<<<1, 64>>>(data, 4);
    CHECK(hipDeviceSynchronize());
    if (data[0] != 4 || data[63] != 4) return printf("mapped %d %d\n", data[0], data[63]), 1;
    /* map the second allocation at another address; it keeps its content */
    CHECK(hipMemRetainAllocationHandle(&same, (char *)place + size));
    CHECK(hipMemUnmap(place, 2 * size));
    CHECK(hipMemRelease(two));
    CHECK(hipMemMap((char *)place + 4 * size, size, 0, same, 0));
    CHECK(hipMemSetAccess((char *)place + 4 * size, size, &all, 1));
    data = (int *)((char *)place + 4 * size);
    add<<<1, 64>>>(data, 1);
    CHECK(hipDeviceSynchronize());
    if (same != two || data[31] != 5 || data[32] != 1) return printf("moved %d\n", data[31]), 1;
    printf("in use: %s\n", NAME(hipMemAddressFree(place, 8 * size)));
    CHECK(hipMemUnmap(data, size));
    CHECK(hipMemRelease(same));
    CHECK(hipMemRelease(one));
    printf("gone: %s\n", NAME(hipMemRelease(one)));
    add<<<1, 64>>>(data, 1);
    printf("not mapped: %s\n", NAME(hipDeviceSynchronize()));
    return 0;
}

int main() { return pinned() || mapped(); }

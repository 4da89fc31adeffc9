// SPDX-License-Identifier: BSD-3-Clause
// A library with a race: there is no barrier between a store to shared memory and another wave's load.
#include "hip.h"

__global__ void exchange(int *out) {
    __shared__ int s[64];
    int t = (int)__builtin_amdgcn_workitem_id_x();
    s[t] = t;
    __builtin_amdgcn_wave_barrier();
    out[t] = ((volatile int *)s)[t ^ 32];
}

extern "C" int race() {
    int *out;
    CHECK(hipMalloc((void **)&out, 256));
    exchange<<<1, 64>>>(out);
    exchange<<<1, 64>>>(out);
    printf("%s\n", hipGetErrorName(hipDeviceSynchronize()));
    return 0;
}

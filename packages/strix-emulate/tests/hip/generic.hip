// SPDX-License-Identifier: BSD-3-Clause
// Pointers without an address space: of one instruction's lanes, some point to shared memory, some to
// the thread's own, some to global memory.
#include "hip.h"

__device__ __attribute__((noinline)) void fill(float *p, float x) {
    for (int i = 0; i < 4; i++) p[i] = x + (float)i;
    __hip_atomic_fetch_add((int *)p + 3, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

__device__ __attribute__((noinline)) float total(const volatile float *p) {
    return p[0] + p[1] + p[2] + p[3];
}

extern "C" __global__ void generic(const float *in, float *out) {
    __shared__ float shared[4 * 64];
    float own[4];
    int t = (int)__builtin_amdgcn_workitem_id_x();
    float *p = t % 3 == 0 ? shared + 4 * t : t % 3 == 1 ? own : out + 64 + 4 * t;
    fill(p, in[t]);
    out[t] = total(p);
}

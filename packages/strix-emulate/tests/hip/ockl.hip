// SPDX-License-Identifier: BSD-3-Clause
// Features that kernels get from the device libraries (ockl.bc): printf, assert, a barrier of the grid, and
// malloc.
#include "hip.h"

// Constants of the target. ROCm defines them in small libraries, which this program does not link.
#define CONSTANT extern "C" __device__ __attribute__((constant)) const
CONSTANT int __oclc_ABI_version = 500;
CONSTANT int __oclc_ISA_version = 11501;
CONSTANT bool __oclc_wavefrontsize64 = 0;
CONSTANT int __oclc_wavefrontsize_log2 = 5;
extern "C" {
__device__ int printf(const char *, ...);
__device__ void __ockl_grid_sync();
__device__ unsigned long __ockl_dm_alloc(unsigned long);
__device__ void __ockl_dm_dealloc(unsigned long);
__device__ unsigned long __ockl_fprintf_stderr_begin();
__device__ unsigned long __ockl_fprintf_append_string_n(unsigned long, const char *, unsigned long,
                                                        unsigned);
}

__global__ void say(const int *x) {
    int t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
    if (t % 50 == 0) printf("%d of %s: %6.2f, %c, %5lx, 100%%\n", t, "kernel", x[t] * 0.5, 'a' + t / 50,
                            (long)t << 4);
}
__global__ void check(const int *x) {
    if (x[__builtin_amdgcn_workitem_id_x()] == 5) {
        const char text[] = "ockl.hip: Assertion `x != 5' failed.\n";
        __ockl_fprintf_append_string_n(__ockl_fprintf_stderr_begin(), text, sizeof text, 1);
        __builtin_trap();
    }
}

/* Each workgroup reads words that the next workgroup wrote. This is done twice. */
__global__ void grid(int *data, int *out, int groups) {
    int i = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
    int next = (i + 64) % (groups * 64);
    for (int round = 0; round < 2; round++) {
        data[i] = i + 1000 * round;
        __ockl_grid_sync();
        out[i] = data[next];
        __ockl_grid_sync();
    }
}

/* One launch allocates pieces of one size; another one reads and frees them. */
__global__ void allocate(int **out, int size) {
    int t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
    int *here = (int *)__ockl_dm_alloc(size * 4);
    out[t] = here;
    for (int i = 0; here && i < size && size < 5000; i++) here[i] = t + i;
}
__global__ void sum(int **in, int *out, int size) {
    int t = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x(), total = 0;
    for (int i = 0; i < size; i++) total += in[t][i];
    out[t] = total;
    __ockl_dm_dealloc((unsigned long)in[t]);
}

static int heap(int *result) {
    int **places, host[128];
    CHECK(hipMalloc((void **)&places, 128 * sizeof *places));
    for (int round = 0; round < 2; round++)
        for (int size = 5; size < 1101; size += 1095) {
            allocate<<<2, 64>>>(places, size);
            sum<<<2, 64>>>(places, result, size);
            CHECK(hipMemcpy(host, result, sizeof host, TO_HOST));
            for (int t = 0; t < 128; t++)
                if (host[t] != size * t + size * (size - 1) / 2) return printf("sum %d\n", host[t]), 1;
        }
    /* Allocate more memory than the heap has. */
    int *all[64], none = 0;
    allocate<<<1, 64>>>(places, 200000);
    CHECK(hipMemcpy(all, places, sizeof all, TO_HOST));
    for (int t = 0; t < 64; t++) none += !all[t];
    printf("heap: %s\n", none && none < 64 ? "some are null" : "wrong");
    return 0;
}

int main() {
    int host[384], *data, *result, groups = 6;
    void *values[] = {&data, &result, &groups};
    CHECK(hipMalloc((void **)&result, sizeof host));
    for (int i = 0; i < 384; i++) host[i] = i;
    CHECK(hipMalloc((void **)&data, sizeof host));
    CHECK(hipMemcpy(data, host, sizeof host, TO_DEVICE));
    printf("before\n");
    say<<<2, 64>>>(data);
    CHECK(hipDeviceSynchronize());
    printf("after\n");
    int *other;
    CHECK(hipMalloc((void **)&other, sizeof host));
    values[0] = &other;
    CHECK(hipLaunchCooperativeKernel((void *)grid, groups, 64, values, 0, NULL));
    CHECK(hipMemcpy(host, result, sizeof host, TO_HOST));
    for (int i = 0; i < 384; i++)
        if (host[i] != 1000 + (i + 64) % 384) return printf("[%d] %d\n", i, host[i]), 1;
    if (heap(result)) return 1;
    check<<<1, 32>>>(data);
    printf("%s\n", hipGetErrorName(hipDeviceSynchronize()));
    return 0;
}

// SPDX-License-Identifier: BSD-3-Clause
// printf and a failed assertion in kernels, with the device libraries' own code (ockl.bc).
#include "hip.h"

// What ROCm's small libraries beside it say of the target.
#define CONSTANT extern "C" __device__ __attribute__((constant)) const
CONSTANT int __oclc_ABI_version = 500;
CONSTANT int __oclc_ISA_version = 11501;
CONSTANT bool __oclc_wavefrontsize64 = 0;
CONSTANT int __oclc_wavefrontsize_log2 = 5;
extern "C" {
__device__ int printf(const char *, ...);
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
        const char text[] = "print.hip: Assertion `x != 5' failed.\n";
        __ockl_fprintf_append_string_n(__ockl_fprintf_stderr_begin(), text, sizeof text, 1);
        __builtin_trap();
    }
}

int main() {
    int host[128], *data;
    for (int i = 0; i < 128; i++) host[i] = i;
    CHECK(hipMalloc((void **)&data, sizeof host));
    CHECK(hipMemcpy(data, host, sizeof host, TO_DEVICE));
    printf("before\n");
    say<<<2, 64>>>(data);
    CHECK(hipDeviceSynchronize());
    printf("after\n");
    check<<<1, 32>>>(data);
    printf("%s\n", hipGetErrorName(hipDeviceSynchronize()));
    return 0;
}

/* SPDX-License-Identifier: BSD-3-Clause */
/* The part of HIP that these programs need, for clang's HIP mode without ROCm's headers. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#ifdef __HIP__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
#define DEFAULT(value) = value
/* the dim3 of abi.h is for C, and has no constructor */
#define dim3 plain_dim3
extern "C" {
#else
#define DEFAULT(value)
#endif
#include "../../hip/abi.h"
#undef dim3
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t DEFAULT(0), hipStream_t DEFAULT(0));
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t hipMalloc(void **, size_t);
hipError_t hipFree(void *);
hipError_t hipMemcpy(void *, const void *, size_t, int);
hipError_t hipMemset(void *, int, size_t);
hipError_t hipMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
hipError_t hipMemcpyFromSymbol(void *, const void *, size_t, size_t, int);
hipError_t hipGetSymbolSize(size_t *, const void *);
hipError_t hipStreamCreate(hipStream_t *);
hipError_t hipStreamSynchronize(hipStream_t);
hipError_t hipStreamDestroy(hipStream_t);
hipError_t hipEventCreate(hipEvent_t *);
hipError_t hipEventElapsedTime(float *, hipEvent_t, hipEvent_t);
hipError_t hipDeviceSynchronize(void);
hipError_t hipGetLastError(void);
const char *hipGetErrorString(hipError_t);
const char *hipGetErrorName(hipError_t);
hipError_t hipModuleLoad(hipModule_t *, const char *);
hipError_t hipModuleUnload(hipModule_t);
hipError_t hipModuleGetFunction(hipFunction_t *, hipModule_t, const char *);
hipError_t hipModuleGetGlobal(void **, size_t *, hipModule_t, const char *);
hipError_t hipModuleLaunchKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, hipStream_t, void **, void **);
hipError_t hipFreeAsync(void *, hipStream_t);
hipError_t hipGraphCreate(hipGraph_t *, unsigned);
hipError_t hipGraphDestroy(hipGraph_t);
hipError_t hipGraphExecDestroy(hipGraphExec_t);
hipError_t hipGraphInstantiate(hipGraphExec_t *, hipGraph_t, hipGraphNode_t *, char *, size_t);
hipError_t hipGraphLaunch(hipGraphExec_t, hipStream_t);
hipError_t hipLaunchCooperativeKernel(const void *, dim3, dim3, void **, unsigned, hipStream_t);
hipError_t hipMallocAsync(void **, size_t, hipStream_t);
hipError_t hipMemsetAsync(void *, int, size_t, hipStream_t);
hipError_t hipStreamBeginCapture(hipStream_t, int);
hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t *);
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned);
#ifdef __HIP__
}
static inline __device__ void meet() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
#endif
#define TO_DEVICE hipMemcpyHostToDevice
#define TO_HOST hipMemcpyDeviceToHost
#define NAME(call) hipGetErrorName(call)
#define CHECK(call)                                                                  \
    do {                                                                             \
        hipError_t error_ = (call);                                                  \
        if (error_) {                                                                \
            printf("line %d: %s: %s\n", __LINE__, #call, hipGetErrorString(error_)); \
            return 1;                                                                \
        }                                                                            \
    } while (0)

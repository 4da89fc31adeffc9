/* SPDX-License-Identifier: BSD-3-Clause */
/* Launches, and queries of the attributes and the occupancy of kernels. */
#define _GNU_SOURCE
#include "device.h"
#include <string.h>

static hipError_t submit(hipFunction_t function, dim3 grid, dim3 block, size_t lds,
                         hipStream_t stream, void **values, void **extra, bool cooperative) {
    struct work work;
    hipError_t error = module_work(&work, function, grid, block, lds, values, extra, cooperative);
    return error ? error : work_submit(stream, &work);
}

static hipError_t launch(hipFunction_t function, dim3 grid, dim3 block, size_t lds,
                         hipStream_t stream, void **values, void **extra, bool cooperative) {
    CHECKED(module_knows(function) && stream_is_valid(stream), hipErrorInvalidHandle,
            submit(function, grid, block, lds, stream, values, extra, cooperative));
}

static hipError_t launch_host(const void *host, dim3 grid, dim3 block, size_t lds,
                              hipStream_t stream, void **values, bool cooperative) {
    hipFunction_t function;
    ENTER();
    hipError_t error = registered_function(&function, host);
    REQUIRE(!error, error);
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    LEAVE(submit(function, grid, block, lds, stream, values, NULL, cooperative));
}

API(hipModuleLaunchKernel)(hipFunction_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                           unsigned by, unsigned bz, unsigned lds, hipStream_t stream,
                           void **values, void **extra) {
    return launch(f, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, lds, stream, values, extra, false);
}
API(hipModuleLaunchCooperativeKernel)(hipFunction_t f, unsigned gx, unsigned gy, unsigned gz,
                                      unsigned bx, unsigned by, unsigned bz, unsigned lds,
                                      hipStream_t stream, void **values) {
    return launch(f, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, lds, stream, values, NULL, true);
}
/* Returns whether the attributes request a cooperative launch. All other attributes are hints. */
static bool is_cooperative(const hipLaunchAttribute *attributes, unsigned count) {
    for (unsigned i = 0; attributes && i < count; i++)
        if (attributes[i].id == hipLaunchAttributeCooperative && attributes[i].value.cooperative)
            return true;
    return false;
}

API(hipDrvLaunchKernelEx)(const HIP_LAUNCH_CONFIG *c, hipFunction_t f, void **values,
                          void **extra) {
    if (!c) return device_enter(), device_leave(hipErrorInvalidValue);
    return launch(f, (dim3){c->gridDimX, c->gridDimY, c->gridDimZ},
                  (dim3){c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, c->hStream,
                  values, extra, is_cooperative(c->attrs, c->numAttrs));
}
/* x, y and z are the size of the grid in threads, not in workgroups. */
API(hipExtModuleLaunchKernel)(hipFunction_t f, uint32_t x, uint32_t y, uint32_t z, uint32_t bx,
                              uint32_t by, uint32_t bz, size_t lds, hipStream_t stream,
                              void **values, void **extra, hipEvent_t start, hipEvent_t stop,
                              uint32_t flags) {
    if (!bx || !by || !bz) return device_enter(), device_leave(hipErrorInvalidConfiguration);
    if (x % bx || y % by || z % bz) {
        ENTER();
        LEAVE(device_lacks("a launch of %ux%ux%u threads in incomplete workgroups of %ux%ux%u", x,
                           y, z, bx, by, bz));
    }
    if (start) hipEventRecord(start, stream);
    hipError_t error = launch(f, (dim3){x / bx, y / by, z / bz}, (dim3){bx, by, bz}, lds, stream,
                              values, extra, false);
    if (stop && !error) hipEventRecord(stop, stream);
    return error;
}
API(hipLaunchKernel)(const void *host, dim3 grid, dim3 block, void **values, size_t lds,
                     hipStream_t stream) {
    return launch_host(host, grid, block, lds, stream, values, false);
}
API(hipLaunchCooperativeKernel)(const void *host, dim3 grid, dim3 block, void **values,
                                unsigned lds, hipStream_t stream) {
    return launch_host(host, grid, block, lds, stream, values, true);
}
API(hipExtLaunchKernel)(const void *host, dim3 grid, dim3 block, void **values, size_t lds,
                        hipStream_t stream, hipEvent_t start, hipEvent_t stop, int flags) {
    if (start) hipEventRecord(start, stream);
    hipError_t error = launch_host(host, grid, block, lds, stream, values, false);
    if (stop && !error) hipEventRecord(stop, stream);
    return error;
}
API(hipLaunchKernelExC)(const hipLaunchConfig_t *c, const void *host, void **values) {
    if (!c) return device_enter(), device_leave(hipErrorInvalidValue);
    return launch_host(host, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream, values,
                       is_cooperative(c->attrs, c->numAttrs));
}

static hipError_t attributes(hipFuncAttributes *to, hipFunction_t function) {
    const struct function_reply *facts = &function->facts;
    const struct target *t = device_target();
    *to = (hipFuncAttributes){.binaryVersion = t->major * 10 + t->minor,
                              .ptxVersion = t->major * 10 + t->minor,
                              .localSizeBytes = facts->scratch,
                              .sharedSizeBytes = facts->lds,
                              .maxThreadsPerBlock = (int)facts->max_threads,
                              .numRegs = (int)facts->vgprs,
                              .maxDynamicSharedSizeBytes = t->lds - (int)facts->lds};
    return hipSuccess;
}

API(hipFuncGetAttributes)(struct hipFuncAttributes *to, const void *host) {
    hipFunction_t function;
    ENTER();
    REQUIRE(to, hipErrorInvalidValue);
    hipError_t error = registered_function(&function, host);
    LEAVE(error ? error : attributes(to, function));
}

API(hipFuncGetAttribute)(int *value, hipFunction_attribute attribute, hipFunction_t function) {
    hipFuncAttributes all;
    ENTER();
    REQUIRE(value, hipErrorInvalidValue);
    REQUIRE(module_knows(function), hipErrorInvalidHandle);
    attributes(&all, function);
    switch ((int)attribute) {
    case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = all.maxThreadsPerBlock; break;
    case HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = (int)all.sharedSizeBytes; break;
    case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = (int)all.localSizeBytes; break;
    case HIP_FUNC_ATTRIBUTE_NUM_REGS: *value = all.numRegs; break;
    case HIP_FUNC_ATTRIBUTE_PTX_VERSION:
    case HIP_FUNC_ATTRIBUTE_BINARY_VERSION: *value = all.binaryVersion; break;
    case HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = all.maxDynamicSharedSizeBytes;
        break;
    case HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case HIP_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = 0; break;
    default: LEAVE(hipErrorInvalidValue);
    }
    LEAVE(hipSuccess);
}

/* Returns how many workgroups fit on a workgroup processor, limited by waves, registers and LDS. */
static int resident(hipFunction_t function, int threads, size_t lds) {
    const struct function_reply *facts = &function->facts;
    if (threads <= 0 || (uint32_t)threads > facts->max_threads) return 0;
    const struct target *t = device_target();
    int groups = (int)facts->waves * t->simds / ((threads + t->width - 1) / t->width);
    size_t each = facts->lds + lds;
    int by_lds = each ? (int)((size_t)t->lds_of_processor / each) : groups;
    return each > (size_t)t->lds ? 0 : groups < by_lds ? groups : by_lds;
}

API(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)(int *groups, hipFunction_t function,
                                                        int threads, size_t lds) {
    ENTER();
    REQUIRE(groups, hipErrorInvalidValue);
    REQUIRE(module_knows(function), hipErrorInvalidHandle);
    *groups = resident(function, threads, lds);
    LEAVE(hipSuccess);
}
API(hipModuleOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int *groups,
                                                                 hipFunction_t function,
                                                                 int threads, size_t lds,
                                                                 unsigned flags) {
    return hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(groups, function, threads, lds);
}
API(hipOccupancyMaxActiveBlocksPerMultiprocessor)(int *groups, const void *host, int threads,
                                                  size_t lds) {
    hipFunction_t function;
    ENTER();
    REQUIRE(groups, hipErrorInvalidValue);
    hipError_t error = registered_function(&function, host);
    REQUIRE(!error, error);
    *groups = resident(function, threads, lds);
    LEAVE(hipSuccess);
}
API(hipOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int *groups, const void *host,
                                                           int threads, size_t lds,
                                                           unsigned flags) {
    return hipOccupancyMaxActiveBlocksPerMultiprocessor(groups, host, threads, lds);
}

/* Returns the largest number of threads in a workgroup that can run, and the number of such
   workgroups that fit on the device at a time. */
static hipError_t potential(int *grid, int *block, hipFunction_t function, size_t lds, int limit) {
    int threads = (int)function->facts.max_threads;
    if (limit > 0 && limit < threads) threads = limit;
    while (threads > 32 && !resident(function, threads, lds)) threads -= 32;
    hipDeviceProp_t p;
    hipGetDeviceProperties(&p, 0);
    *block = threads;
    *grid = resident(function, threads, lds) * p.multiProcessorCount;
    return hipSuccess;
}
API(hipModuleOccupancyMaxPotentialBlockSize)(int *grid, int *block, hipFunction_t function,
                                             size_t lds, int limit) {
    ENTER();
    REQUIRE(grid && block, hipErrorInvalidValue);
    REQUIRE(module_knows(function), hipErrorInvalidHandle);
    LEAVE(potential(grid, block, function, lds, limit));
}
API(hipOccupancyMaxPotentialBlockSize)(int *grid, int *block, const void *host, size_t lds,
                                       int limit) {
    hipFunction_t function;
    ENTER();
    REQUIRE(grid && block, hipErrorInvalidValue);
    hipError_t error = registered_function(&function, host);
    LEAVE(error ? error : potential(grid, block, function, lds, limit));
}

API_OF(const char *, hipKernelNameRef)(const hipFunction_t function) {
    device_enter();
    const char *name = module_knows(function) ? function->name : NULL;
    device_leave(hipSuccess);
    return name;
}
API_OF(const char *, hipKernelNameRefByPtr)(const void *host, hipStream_t stream) {
    hipFunction_t function;
    device_enter();
    hipError_t error = registered_function(&function, host);
    device_leave(error);
    return error ? NULL : function->name;
}
API_OF(const char *, hipApiName)(uint32_t number) { return "unknown"; }

HINT(hipFuncSetAttribute)(const void *host, hipFuncAttribute attribute, int value) {
    return hipSuccess;
}
HINT(hipFuncSetCacheConfig)(const void *host, hipFuncCache_t config) { return hipSuccess; }
HINT(hipFuncSetSharedMemConfig)(const void *host, hipSharedMemConfig config) { return hipSuccess; }

/* SPDX-License-Identifier: BSD-3-Clause */
/* Queries of versions, of the device's properties and limits, and of the addresses of entry
   points. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The version of HIP as major * 10^7 + minor * 10^5 + patch: 7.2.0. */
#define VERSION 70200000
/* The PCI bus number of the first device. Each further device has the next number. */
#define BUS 0xc5

API(hipInit)(unsigned flags) {
    ANSWER(!flags, hipErrorInvalidValue);
    return hipSuccess;
}
API(hipDriverGetVersion)(int *version) {
    ANSWER(version, hipErrorInvalidValue);
    return *version = VERSION, hipSuccess;
}
API(hipRuntimeGetVersion)(int *version) { return hipDriverGetVersion(version); }

const struct target *device_target(void) {
    static const struct target *found;
    if (found) return found;
    const char *wanted = getenv("STRIX_EMULATE_TARGET");
    /* For an unknown name, this returns the first target. The server then refuses the name. */
    for (found = targets; found->name && wanted && strcmp(found->name, wanted); found++) {
    }
    return found = found->name ? found : targets;
}

/* LDS of a workgroup, L2, clock and limits have the values that KFD's topology and clr's
   hip_device.cpp report. On RDNA, clr counts workgroup processors, which have two compute units
   each. The size of the memory is that of the pool. */
API(hipGetDevicePropertiesR0600)(hipDeviceProp_t *p, int device) {
    ANSWER(p, hipErrorInvalidValue);
    ANSWER(device_exists(device), hipErrorInvalidDevice);
    const struct target *t = device_target();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s (emulated)", t->product);
    snprintf(p->gcnArchName, sizeof p->gcnArchName, "%s", t->name);
    memcpy(p->uuid.bytes, "strix-emulate\0\0", sizeof p->uuid.bytes);
    p->uuid.bytes[15] = (char)device;
    p->totalGlobalMem = pool_size();
    p->warpSize = t->width;
    p->sharedMemPerBlock = p->sharedMemPerMultiprocessor = t->lds;
    p->maxSharedMemoryPerMultiProcessor = p->sharedMemPerBlockOptin = t->lds;
    p->regsPerBlock = p->regsPerMultiprocessor = t->registers * t->simds * p->warpSize;
    p->memPitch = p->totalConstMem = 2147483647;
    p->maxThreadsPerBlock = t->threads;
    for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = t->threads;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65536;
    p->clockRate = t->clock;
    p->clockInstructionRate = 100000;
    p->memoryClockRate = t->memory_clock;
    p->memoryBusWidth = t->bus;
    p->major = t->major;
    p->minor = t->minor;
    p->multiProcessorCount = t->processors;
    p->maxThreadsPerMultiProcessor = t->waves * t->simds * p->warpSize;
    p->maxBlocksPerMultiProcessor = 2;
    p->l2CacheSize = p->persistingL2CacheMaxSize = t->l2;
    p->textureAlignment = p->texturePitchAlignment = p->surfaceAlignment = 256;
    p->integrated = t->integrated;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
    p->managedMemory = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
    p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->streamPrioritiesSupported = p->isLargeBar = 1;
    p->pciBusID = BUS + device;
    return hipSuccess;
}

API(hipDeviceGetAttribute)(int *value, hipDeviceAttribute_t attribute, int device) {
    hipDeviceProp_t p;
    ANSWER(value, hipErrorInvalidValue);
    hipError_t error = hipGetDeviceProperties(&p, device);
    if (error) return error;
    /* clang-format off */
    switch ((int)attribute) {
#define IS(name, field) case hipDeviceAttribute##name: *value = (int)p.field; break
        IS(EccEnabled, ECCEnabled); IS(AsyncEngineCount, asyncEngineCount);
        IS(CanMapHostMemory, canMapHostMemory); IS(ClockRate, clockRate);
        IS(ComputeMode, computeMode); IS(ConcurrentKernels, concurrentKernels);
        IS(CooperativeLaunch, cooperativeLaunch); IS(Integrated, integrated);
        IS(L2CacheSize, l2CacheSize); IS(ComputeCapabilityMajor, major);
        IS(ManagedMemory, managedMemory);
        IS(MaxBlocksPerMultiProcessor, maxBlocksPerMultiProcessor);
        IS(MaxBlockDimX, maxThreadsDim[0]); IS(MaxBlockDimY, maxThreadsDim[1]);
        IS(MaxBlockDimZ, maxThreadsDim[2]); IS(MaxGridDimX, maxGridSize[0]);
        IS(MaxGridDimY, maxGridSize[1]); IS(MaxGridDimZ, maxGridSize[2]);
        IS(MaxThreadsPerBlock, maxThreadsPerBlock);
        IS(MaxThreadsPerMultiProcessor, maxThreadsPerMultiProcessor); IS(MaxPitch, memPitch);
        IS(MemoryBusWidth, memoryBusWidth); IS(MemoryClockRate, memoryClockRate);
        IS(ComputeCapabilityMinor, minor); IS(MultiprocessorCount, multiProcessorCount);
        IS(PciBusId, pciBusID); IS(PciDeviceId, pciDeviceID); IS(PciDomainId, pciDomainID);
        IS(MaxRegistersPerBlock, regsPerBlock);
        IS(MaxRegistersPerMultiprocessor, regsPerMultiprocessor);
        IS(MaxSharedMemoryPerBlock, sharedMemPerBlock);
        IS(SharedMemPerMultiprocessor, sharedMemPerMultiprocessor);
        IS(TotalConstantMemory, totalConstMem); IS(TotalGlobalMem, totalGlobalMem);
        IS(UnifiedAddressing, unifiedAddressing);
        IS(WarpSize, warpSize); IS(MemoryPoolsSupported, memoryPoolsSupported);
        IS(MaxSharedMemoryPerMultiprocessor, maxSharedMemoryPerMultiProcessor);
        /* wall_clock64 counts units of 10 ns; this is its frequency in kHz. */
        IS(WallClockRate, clockInstructionRate);
    case hipDeviceAttributeVirtualMemoryManagementSupported: *value = 1; break;
    case hipDeviceAttributePhysicalMultiProcessorCount: *value = 2 * p.multiProcessorCount; break;
    default: *value = 0; /* limits of textures, and features that the device does not have */
    }
    /* clang-format on */
    return hipSuccess;
}

API(hipDeviceGetName)(char *name, int length, hipDevice_t device) {
    hipDeviceProp_t p;
    ANSWER(name && length > 0, hipErrorInvalidValue);
    hipError_t error = hipGetDeviceProperties(&p, device);
    if (!error) snprintf(name, (size_t)length, "%s", p.name);
    return error;
}
API(hipDeviceGetUuid)(hipUUID *uuid, hipDevice_t device) {
    hipDeviceProp_t p;
    ANSWER(uuid, hipErrorInvalidValue);
    hipError_t error = hipGetDeviceProperties(&p, device);
    if (!error) *uuid = p.uuid;
    return error;
}
API(hipDeviceTotalMem)(size_t *bytes, hipDevice_t device) {
    ANSWER(bytes && device_exists(device), hipErrorInvalidValue);
    return *bytes = pool_size(), hipSuccess;
}
API(hipDeviceComputeCapability)(int *major, int *minor, hipDevice_t device) {
    ANSWER(major && minor && device_exists(device), hipErrorInvalidValue);
    return *major = device_target()->major, *minor = device_target()->minor, hipSuccess;
}
API(hipDeviceGetPCIBusId)(char *text, int length, int device) {
    ANSWER(text && length > 0 && device_exists(device), hipErrorInvalidValue);
    snprintf(text, (size_t)length, "0000:%02x:00.0", BUS + device);
    return hipSuccess;
}
API(hipDeviceGetByPCIBusId)(int *device, const char *text) {
    unsigned domain, bus;
    ANSWER(device && text, hipErrorInvalidValue);
    int read = sscanf(text, "%x:%x:", &domain, &bus);
    ANSWER(read == 2 && !domain && device_exists((int)bus - BUS), hipErrorInvalidDevice);
    return *device = (int)bus - BUS, hipSuccess;
}
/* The initial limits are those of clr: 1024 bytes for a lane's stack, and 8 MiB for malloc's
   heap. */
static size_t stack = 1024, heap = 8 << 20;
size_t device_stack(void) { return stack; }
size_t device_heap(void) { return heap; }

API(hipDeviceGetLimit)(size_t *value, enum hipLimit_t limit) {
    ANSWER(value, hipErrorInvalidValue);
    ANSWER(limit == hipLimitStackSize || limit == hipLimitMallocHeapSize, hipErrorUnsupportedLimit);
    *value = limit == hipLimitStackSize ? stack : heap;
    return hipSuccess;
}
API(hipDeviceSetLimit)(enum hipLimit_t limit, size_t value) {
    ANSWER(limit == hipLimitStackSize || limit == hipLimitMallocHeapSize, hipErrorUnsupportedLimit);
    ANSWER(limit != hipLimitStackSize || value <= (size_t)device_target()->stack,
           hipErrorInvalidValue);
    if (limit == hipLimitStackSize) stack = (value + 15) / 16 * 16;
    else heap = value;
    return hipSuccess;
}
HINT(hipDeviceSetCacheConfig)(hipFuncCache_t config) { return hipSuccess; }
HINT(hipDeviceSetSharedMemConfig)(hipSharedMemConfig config) { return hipSuccess; }
HINT(hipDeviceGraphMemTrim)(int device) { return hipSuccess; }
HINT(hipProfilerStart)(void) { return hipSuccess; }
HINT(hipProfilerStop)(void) { return hipSuccess; }

API(hipGetProcAddress)(const char *name, void **address, int version, uint64_t flags,
                       hipDriverProcAddressQueryResult *result) {
    ANSWER(name && address, hipErrorInvalidValue);
    Dl_info self;
    void *library = NULL;
    if (dladdr((void *)(uintptr_t)device_say, &self))
        library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    /* HIP 6 changed the structure that hipGetDeviceProperties returns, and renamed the function. */
    if (!strcmp(name, "hipGetDeviceProperties")) name = "hipGetDevicePropertiesR0600";
    *address = library ? dlsym(library, name) : NULL;
    if (library) dlclose(library);
    if (result)
        *result = *address ? HIP_GET_PROC_ADDRESS_SUCCESS : HIP_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    ANSWER(*address, hipErrorNotFound);
    return hipSuccess;
}

/* build.py generates the entry points that this library does not implement. They call
   device_refuse, or device_without if AMD's runtime does not support them either. */
hipError_t device_refuse(const char *name);
hipError_t device_refuse(const char *name) {
    ENTER();
    LEAVE(device_lacks("%s", name));
}
hipError_t device_without(void);
hipError_t device_without(void) { return device_answer(hipErrorNotSupported); }

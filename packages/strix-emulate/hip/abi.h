/* SPDX-License-Identifier: BSD-3-Clause */
/* The part of HIP 7's binary interface that this library serves, with HIP's names. This header
   includes no header of ROCm, so the library can be built without ROCm. If STRIX_HIP_HEADERS is
   defined, this header includes AMD's own headers instead. The tests compile every source file both
   ways and compare all numbers (test_device_abi.py). */
#pragma once
/* clang-format is off in this file: it would put each constant on a line of its own. */
/* clang-format off */
#ifdef STRIX_HIP_HEADERS
#include <hip/hip_runtime_api.h>
#else
#include <stddef.h>
#include <stdint.h>

typedef enum {
    hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorNotInitialized = 3,
    hipErrorInvalidConfiguration = 9, hipErrorInvalidPitchValue = 12, hipErrorInvalidSymbol = 13, hipErrorInvalidDeviceFunction = 98,
    hipErrorNoDevice = 100, hipErrorInvalidDevice = 101, hipErrorInvalidImage = 200,
    hipErrorInvalidContext = 201, hipErrorNoBinaryForGpu = 209, hipErrorFileNotFound = 301, hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500, hipErrorNotReady = 600, hipErrorIllegalAddress = 700,
    hipErrorIllegalState = 401, hipErrorUnsupportedLimit = 215,
    hipErrorPeerAccessAlreadyEnabled = 704, hipErrorPeerAccessNotEnabled = 705,
    hipErrorAssert = 710, hipErrorHostMemoryAlreadyRegistered = 712,
    hipErrorHostMemoryNotRegistered = 713, hipErrorLaunchFailure = 719,
    hipErrorCooperativeLaunchTooLarge = 720, hipErrorNotSupported = 801,
    hipErrorStreamCaptureUnsupported = 900, hipErrorStreamCaptureInvalidated = 901,
    hipErrorStreamCaptureMerge = 902, hipErrorStreamCaptureUnmatched = 903,
    hipErrorStreamCaptureUnjoined = 904, hipErrorStreamCaptureImplicit = 906,
    hipErrorCapturedEvent = 907, hipErrorGraphExecUpdateFailure = 910, hipErrorUnknown = 999,
} hipError_t;

typedef enum {
    hipMemcpyHostToHost, hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice,
    hipMemcpyDefault, hipMemcpyDeviceToDeviceNoCU = 1024,
} hipMemcpyKind;

typedef enum hipMemoryType {
    hipMemoryTypeUnregistered, hipMemoryTypeHost, hipMemoryTypeDevice, hipMemoryTypeManaged,
    hipMemoryTypeArray = 10, hipMemoryTypeUnified = 11,
} hipMemoryType;

typedef enum {
    HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
    HIP_FUNC_ATTRIBUTE_NUM_REGS, HIP_FUNC_ATTRIBUTE_PTX_VERSION,
    HIP_FUNC_ATTRIBUTE_BINARY_VERSION, HIP_FUNC_ATTRIBUTE_CACHE_MODE_CA,
    HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
} hipFunction_attribute;

typedef enum {
    HIP_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, HIP_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
    HIP_POINTER_ATTRIBUTE_HOST_POINTER = 4, HIP_POINTER_ATTRIBUTE_IS_MANAGED = 8,
    HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9, HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    HIP_POINTER_ATTRIBUTE_RANGE_SIZE = 12, HIP_POINTER_ATTRIBUTE_MAPPED = 13,
} hipPointer_attribute;

/* In AMD's header, each attribute has the number of the previous attribute plus one. Only the
   attributes that this library supports are listed here. */
typedef enum {
    hipDeviceAttributeEccEnabled = 0, hipDeviceAttributeAsyncEngineCount = 2,
    hipDeviceAttributeCanMapHostMemory = 3, hipDeviceAttributeClockRate = 5,
    hipDeviceAttributeComputeMode = 6, hipDeviceAttributeConcurrentKernels = 8,
    hipDeviceAttributeCooperativeLaunch = 10, hipDeviceAttributeIntegrated = 16,
    hipDeviceAttributeL2CacheSize = 19, hipDeviceAttributeComputeCapabilityMajor = 23,
    hipDeviceAttributeManagedMemory = 24, hipDeviceAttributeMaxBlocksPerMultiProcessor = 25,
    hipDeviceAttributeMaxBlockDimX = 26, hipDeviceAttributeMaxBlockDimY = 27,
    hipDeviceAttributeMaxBlockDimZ = 28, hipDeviceAttributeMaxGridDimX = 29,
    hipDeviceAttributeMaxGridDimY = 30, hipDeviceAttributeMaxGridDimZ = 31,
    hipDeviceAttributeMaxThreadsPerBlock = 56, hipDeviceAttributeMaxThreadsPerMultiProcessor = 57,
    hipDeviceAttributeMaxPitch = 58, hipDeviceAttributeMemoryBusWidth = 59,
    hipDeviceAttributeMemoryClockRate = 60, hipDeviceAttributeComputeCapabilityMinor = 61,
    hipDeviceAttributeMultiprocessorCount = 63, hipDeviceAttributePciBusId = 67,
    hipDeviceAttributePciDeviceId = 68, hipDeviceAttributePciDomainId = 69,
    hipDeviceAttributeMaxRegistersPerBlock = 71,
    hipDeviceAttributeMaxRegistersPerMultiprocessor = 72,
    hipDeviceAttributeMaxSharedMemoryPerBlock = 74,
    hipDeviceAttributeSharedMemPerMultiprocessor = 76,
    hipDeviceAttributeTotalConstantMemory = 83, hipDeviceAttributeTotalGlobalMem = 84,
    hipDeviceAttributeUnifiedAddressing = 85, hipDeviceAttributeWarpSize = 87,
    hipDeviceAttributeMemoryPoolsSupported = 88,
    hipDeviceAttributeVirtualMemoryManagementSupported = 89,
    hipDeviceAttributeMaxSharedMemoryPerMultiprocessor = 10002,
    hipDeviceAttributePhysicalMultiProcessorCount = 10015,
    hipDeviceAttributeWallClockRate = 10017,
} hipDeviceAttribute_t;

typedef enum {
    hipStreamCaptureStatusNone, hipStreamCaptureStatusActive, hipStreamCaptureStatusInvalidated,
} hipStreamCaptureStatus;
typedef enum { hipStreamCaptureModeGlobal } hipStreamCaptureMode;
typedef enum hipGraphNodeType {
    hipGraphNodeTypeKernel, hipGraphNodeTypeMemcpy, hipGraphNodeTypeMemset, hipGraphNodeTypeHost,
    hipGraphNodeTypeGraph, hipGraphNodeTypeEmpty, hipGraphNodeTypeEventRecord = 7,
    hipGraphNodeTypeMemAlloc = 10, hipGraphNodeTypeMemFree = 11,
} hipGraphNodeType;
typedef enum {
    hipMemPoolReuseFollowEventDependencies = 1, hipMemPoolReuseAllowOpportunistic = 2,
    hipMemPoolReuseAllowInternalDependencies = 3, hipMemPoolAttrReleaseThreshold = 4,
    hipMemPoolAttrReservedMemCurrent = 5, hipMemPoolAttrReservedMemHigh = 6,
    hipMemPoolAttrUsedMemCurrent = 7, hipMemPoolAttrUsedMemHigh = 8,
} hipMemPoolAttr;
typedef enum hipGraphMemAttributeType {
    hipGraphMemAttrUsedMemCurrent, hipGraphMemAttrUsedMemHigh, hipGraphMemAttrReservedMemCurrent,
    hipGraphMemAttrReservedMemHigh,
} hipGraphMemAttributeType;
typedef enum hipGraphExecUpdateResult {
    hipGraphExecUpdateSuccess, hipGraphExecUpdateError, hipGraphExecUpdateErrorTopologyChanged,
    hipGraphExecUpdateErrorNodeTypeChanged, hipGraphExecUpdateErrorNotSupported = 6,
} hipGraphExecUpdateResult;
#define hipGraphInstantiateFlagAutoFreeOnLaunch 1
typedef enum hipDeviceP2PAttr {
    hipDevP2PAttrAccessSupported = 1, hipDevP2PAttrNativeAtomicSupported = 2,
} hipDeviceP2PAttr;
typedef enum { HIP_GET_PROC_ADDRESS_SUCCESS, HIP_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND }
    hipDriverProcAddressQueryResult;
typedef enum hipChannelFormatKind {
    hipChannelFormatKindSigned, hipChannelFormatKindUnsigned, hipChannelFormatKindFloat,
    hipChannelFormatKindNone,
} hipChannelFormatKind;
typedef struct hipChannelFormatDesc {
    int x, y, z, w;
    enum hipChannelFormatKind f;
} hipChannelFormatDesc;
typedef int hipJitOption, hipLibraryOption, hipMemoryAdvise, hipFuncCache_t, hipSharedMemConfig, hipFuncAttribute;
enum hipLimit_t { hipLimitStackSize, hipLimitMallocHeapSize = 2 };

#define HIP_LAUNCH_PARAM_BUFFER_POINTER ((void *)1)
#define HIP_LAUNCH_PARAM_BUFFER_SIZE ((void *)2)
#define HIP_LAUNCH_PARAM_END ((void *)3)
#define hipStreamLegacy ((hipStream_t)1)
#define hipStreamPerThread ((hipStream_t)2)
#define hipEventDisableTiming 2
#define hipEventInterprocess 4
#define hipExtHostRegisterUncached 0x80000000

typedef struct { unsigned x, y, z; } dim3;
typedef struct { char bytes[16]; } hipUUID;
typedef struct hipIpcMemHandle_st { char reserved[64]; } hipIpcMemHandle_t;
typedef struct hipIpcEventHandle_st { char reserved[64]; } hipIpcEventHandle_t;
typedef void *hipDeviceptr_t;
typedef int hipDevice_t;
typedef struct ihipCtx_t *hipCtx_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipModule_t *hipModule_t;
typedef struct ihipModuleSymbol_t *hipFunction_t;
typedef struct ihipMemPoolHandle_t *hipMemPool_t;
typedef struct ihipLibrary_t *hipLibrary_t;
typedef struct ihipKernel_t *hipKernel_t;
typedef struct ihipGraph *hipGraph_t;
typedef struct hipGraphNode *hipGraphNode_t;
typedef struct hipGraphExec *hipGraphExec_t;
typedef struct hipUserObject *hipUserObject_t;
typedef void (*hipHostFn_t)(void *);
typedef void (*hipStreamCallback_t)(hipStream_t, hipError_t, void *);

typedef struct {
    enum hipMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
} hipPointerAttribute_t;

typedef struct hipMemcpyAttributes hipMemcpyAttributes;

typedef struct hipFuncAttributes {
    int binaryVersion, cacheModeCA;
    size_t constSizeBytes, localSizeBytes;
    int maxDynamicSharedSizeBytes, maxThreadsPerBlock, numRegs, preferredShmemCarveout, ptxVersion;
    size_t sharedSizeBytes;
} hipFuncAttributes;

typedef enum hipMemAllocationType { hipMemAllocationTypePinned = 1 } hipMemAllocationType;
typedef enum hipMemAllocationHandleType {
    hipMemHandleTypePosixFileDescriptor = 1,
} hipMemAllocationHandleType;
typedef enum hipMemAllocationGranularity_flags {
    hipMemAllocationGranularityMinimum,
} hipMemAllocationGranularity_flags;
typedef enum hipMemLocationType { hipMemLocationTypeDevice = 1 } hipMemLocationType;
typedef enum hipMemAccessFlags { hipMemAccessFlagsProtReadWrite = 3 } hipMemAccessFlags;
typedef struct ihipMemGenericAllocationHandle *hipMemGenericAllocationHandle_t;
typedef struct hipMemLocation {
    hipMemLocationType type;
    int id;
} hipMemLocation;
typedef struct hipMemAccessDesc {
    hipMemLocation location;
    hipMemAccessFlags flags;
} hipMemAccessDesc;
typedef struct hipMemPoolProps {
    hipMemAllocationType allocType;
    hipMemAllocationHandleType handleTypes;
    hipMemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} hipMemPoolProps;
typedef struct hipMemAllocationProp {
    hipMemAllocationType type;
    hipMemAllocationHandleType requestedHandleType;
    hipMemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[4];
} hipMemAllocationProp;

typedef struct hipMemAllocNodeParams {
    hipMemPoolProps poolProps;
    const hipMemAccessDesc *accessDescs;
    size_t accessDescCount, bytesize;
    void *dptr;
} hipMemAllocNodeParams;

typedef struct hipPitchedPtr {
    void *ptr;
    size_t pitch, xsize, ysize;
} hipPitchedPtr;
typedef struct hipExtent { size_t width, height, depth; } hipExtent;
typedef struct hipPos { size_t x, y, z; } hipPos;
typedef struct hipArray *hipArray_t;
typedef struct hipMemcpy3DParms {
    hipArray_t srcArray;
    hipPos srcPos;
    hipPitchedPtr srcPtr;
    hipArray_t dstArray;
    hipPos dstPos;
    hipPitchedPtr dstPtr;
    hipExtent extent;
    hipMemcpyKind kind;
} hipMemcpy3DParms;
typedef struct hip_Memcpy2D {
    size_t srcXInBytes, srcY;
    hipMemoryType srcMemoryType;
    const void *srcHost;
    hipDeviceptr_t srcDevice;
    hipArray_t srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    hipMemoryType dstMemoryType;
    void *dstHost;
    hipDeviceptr_t dstDevice;
    hipArray_t dstArray;
    size_t dstPitch, WidthInBytes, Height;
} hip_Memcpy2D;
typedef struct HIP_MEMCPY3D {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    hipMemoryType srcMemoryType;
    const void *srcHost;
    hipDeviceptr_t srcDevice;
    hipArray_t srcArray;
    size_t srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
    hipMemoryType dstMemoryType;
    void *dstHost;
    hipDeviceptr_t dstDevice;
    hipArray_t dstArray;
    size_t dstPitch, dstHeight, WidthInBytes, Height, Depth;
} HIP_MEMCPY3D;

typedef struct hipHostNodeParams {
    hipHostFn_t fn;
    void *userData;
} hipHostNodeParams;

typedef struct hipKernelNodeParams {
    dim3 blockDim;
    void **extra;
    void *func;
    dim3 gridDim;
    void **kernelParams;
    unsigned sharedMemBytes;
} hipKernelNodeParams;

typedef struct hipMemsetParams {
    void *dst;
    unsigned elementSize;
    size_t height, pitch;
    unsigned value;
    size_t width;
} hipMemsetParams;

typedef enum hipLaunchAttributeID { hipLaunchAttributeCooperative = 2 } hipLaunchAttributeID;
typedef union hipLaunchAttributeValue {
    char pad[64];
    int cooperative;
} hipLaunchAttributeValue;
typedef struct hipLaunchAttribute_st {
    hipLaunchAttributeID id;
    char pad[4];
    hipLaunchAttributeValue value;
} hipLaunchAttribute;

typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    hipStream_t hStream;
    hipLaunchAttribute *attrs;
    unsigned numAttrs;
} HIP_LAUNCH_CONFIG;

typedef struct {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    hipStream_t stream;
    hipLaunchAttribute *attrs;
    unsigned numAttrs;
} hipLaunchConfig_t;

typedef struct {
    char name[256];
    hipUUID uuid;
    char luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory;
    int computeMode, textures[40];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver;
    int asyncEngineCount, unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize;
    int persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported;
    int globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID;
    int hostNativeAtomicSupported, singleToDoublePrecisionPerfRatio, pageableMemoryAccess;
    int concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
    int cooperativeLaunch, cooperativeMultiDeviceLaunch;
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost;
    int maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported, sparseHipArraySupported, hostRegisterReadOnlySupported;
    int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMA[4];
    int deferredMappingHipArraySupported, ipcEventSupported, clusterLaunch;
    int unifiedFunctionPointers, reserved[63], hipReserved[32];
    char gcnArchName[256];
    size_t maxSharedMemoryPerMultiProcessor;
    int clockInstructionRate;
    unsigned arch;
    unsigned *hdpMemFlushCntl, *hdpRegFlushCntl;
    int cooperativeMultiDeviceUnmatched[4], isLargeBar, asicRevision;
} hipDeviceProp_t;
#define hipGetDeviceProperties hipGetDevicePropertiesR0600

/* Entry points that are called by another source file than the one that defines them. */
hipError_t hipGetDeviceProperties(hipDeviceProp_t *, int);
hipError_t hipEventCreateWithFlags(hipEvent_t *, unsigned);
hipError_t hipEventRecord(hipEvent_t, hipStream_t);
hipError_t hipSetDevice(int);
hipError_t hipMemcpyAsync(void *, const void *, size_t, hipMemcpyKind, hipStream_t);
#endif

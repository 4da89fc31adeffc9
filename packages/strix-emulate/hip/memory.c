/* SPDX-License-Identifier: BSD-3-Clause */
/* Allocation, copies, fills, and queries of pointers. Host and device share all memory, and each
   operation is complete when its call returns. */
#include "device.h"
#include <string.h>

static hipError_t allocate(void **address, size_t size, enum pool_kind kind) {
    CHECKED(address, hipErrorInvalidValue, pool_allocate(address, size, kind));
}

API(hipMalloc)(void **p, size_t size) { return allocate(p, size, KIND_DEVICE); }
API(hipExtMallocWithFlags)(void **p, size_t size, unsigned flags) {
    return allocate(p, size, KIND_DEVICE);
}
API(hipMallocManaged)(void **p, size_t size, unsigned flags) {
    return allocate(p, size, KIND_MANAGED);
}
API(hipHostMalloc)(void **p, size_t size, unsigned flags) {
    ENTER();
    REQUIRE(p, hipErrorInvalidValue);
    hipError_t error = pool_allocate(p, size, KIND_HOST);
    if (!error) pool_set_flags(*p, flags);
    LEAVE(error);
}
API(hipHostAlloc)(void **p, size_t size, unsigned flags) { return hipHostMalloc(p, size, flags); }
API(hipMallocHost)(void **p, size_t size) { return hipHostMalloc(p, size, 0); }
API(hipMemAllocHost)(void **p, size_t size) { return hipHostMalloc(p, size, 0); }
API(hipMallocPitch)(void **p, size_t *pitch, size_t width, size_t height) {
    if (!pitch) return device_enter(), device_leave(hipErrorInvalidValue);
    *pitch = (width + 255) / 256 * 256;
    if (*pitch < width || (height && *pitch > SIZE_MAX / height))
        return device_enter(), device_leave(hipErrorOutOfMemory);
    return allocate(p, *pitch * height, KIND_DEVICE);
}

API(hipMemAllocPitch)(hipDeviceptr_t *p, size_t *pitch, size_t width, size_t height,
                      unsigned element) {
    return hipMallocPitch(p, pitch, width, height);
}

static hipError_t release(void *p, unsigned kinds) {
    ENTER();
    LEAVE(p ? pool_free(p, kinds) : hipSuccess);
}

API(hipFree)(void *p) { return release(p, KIND_DEVICE | KIND_MANAGED); }
API(hipHostFree)(void *p) { return release(p, KIND_HOST); }
API(hipFreeHost)(void *p) { return release(p, KIND_HOST); }

/* Copies `height` rows of `width` bytes. A copy without rows has the height 1. */
static hipError_t copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                       size_t height, hipMemcpyKind kind, hipStream_t stream) {
    ENTER();
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    if (!width || !height) LEAVE(hipSuccess);
    REQUIRE(to && from, hipErrorInvalidValue);
    struct work work = {.kind = WORK_COPY,
                        .copy = {to, to_pitch, from, from_pitch, width, height, kind, 0, 0, 1}};
    LEAVE(work_submit(stream, &work));
}

API(hipMemcpyAsync)(void *to, const void *from, size_t size, hipMemcpyKind kind, hipStream_t s) {
    return copy(to, 0, from, 0, size, 1, kind, s);
}
API(hipMemcpy)(void *to, const void *from, size_t size, hipMemcpyKind kind) {
    return hipMemcpyAsync(to, from, size, kind, NULL);
}
API(hipMemcpyWithStream)(void *to, const void *from, size_t size, hipMemcpyKind kind,
                         hipStream_t s) {
    return hipMemcpyAsync(to, from, size, kind, s);
}
API(hipMemcpyHtoDAsync)(hipDeviceptr_t to, const void *from, size_t size, hipStream_t s) {
    return hipMemcpyAsync(to, from, size, hipMemcpyHostToDevice, s);
}
API(hipMemcpyDtoHAsync)(void *to, hipDeviceptr_t from, size_t size, hipStream_t s) {
    return hipMemcpyAsync(to, from, size, hipMemcpyDeviceToHost, s);
}
API(hipMemcpyDtoDAsync)(hipDeviceptr_t to, hipDeviceptr_t from, size_t size, hipStream_t s) {
    return hipMemcpyAsync(to, from, size, hipMemcpyDeviceToDevice, s);
}
API(hipMemcpyHtoD)(hipDeviceptr_t to, const void *from, size_t size) {
    return hipMemcpyHtoDAsync(to, from, size, NULL);
}
API(hipMemcpyDtoH)(void *to, hipDeviceptr_t from, size_t size) {
    return hipMemcpyDtoHAsync(to, from, size, NULL);
}
API(hipMemcpyDtoD)(hipDeviceptr_t to, hipDeviceptr_t from, size_t size) {
    return hipMemcpyDtoDAsync(to, from, size, NULL);
}
API(hipMemcpyPeerAsync)(void *to, int to_device, const void *from, int from_device, size_t size,
                        hipStream_t s) {
    bool right = device_exists(to_device) && device_exists(from_device);
    if (!right) return device_enter(), device_leave(hipErrorInvalidDevice);
    return hipMemcpyDtoDAsync(to, (void *)from, size, s);
}
API(hipMemcpyPeer)(void *to, int to_device, const void *from, int from_device, size_t size) {
    return hipMemcpyPeerAsync(to, to_device, from, from_device, size, NULL);
}
API(hipMemcpy2DAsync)(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                      size_t height, hipMemcpyKind kind, hipStream_t s) {
    if (height && (width > to_pitch || width > from_pitch))
        return device_enter(), device_leave(hipErrorInvalidPitchValue);
    return copy(to, to_pitch, from, from_pitch, width, height, kind, s);
}
API(hipMemcpy2D)(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                 size_t height, hipMemcpyKind kind) {
    return hipMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}

/* The runtime of HIP 7.2 does not support attributes of the copies either. */
API(hipMemcpyBatchAsync)(void **to, void **from, size_t *sizes, size_t count,
                         hipMemcpyAttributes *attributes, size_t *first_copies,
                         size_t attribute_count, size_t *failed, hipStream_t s) {
    ANSWER(!attribute_count, hipErrorNotSupported);
    ANSWER(to && from && sizes && count, hipErrorInvalidValue);
    for (size_t i = 0; i < count; i++) {
        hipError_t error = hipMemcpyAsync(to[i], from[i], sizes[i], hipMemcpyDefault, s);
        if (!error) continue;
        if (failed) *failed = i;
        return error;
    }
    return hipSuccess;
}

static hipError_t fill(void *to, size_t pitch, unsigned value, size_t element, size_t count,
                       size_t height, hipStream_t stream) {
    ENTER();
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    if (!count || !height) LEAVE(hipSuccess);
    REQUIRE(count <= SIZE_MAX / element, hipErrorInvalidValue);
    struct work work = {.kind = WORK_FILL,
                        .fill = {to, pitch, value, element, count, height, 0, 1}};
    LEAVE(work_submit(stream, &work));
}

API(hipMemsetAsync)(void *to, int value, size_t size, hipStream_t s) {
    return fill(to, 0, (unsigned char)value, 1, size, 1, s);
}
API(hipMemset)(void *to, int value, size_t size) { return hipMemsetAsync(to, value, size, NULL); }
API(hipMemsetD8Async)(hipDeviceptr_t to, unsigned char value, size_t count, hipStream_t s) {
    return fill(to, 0, value, 1, count, 1, s);
}
API(hipMemsetD8)(hipDeviceptr_t to, unsigned char value, size_t count) {
    return hipMemsetD8Async(to, value, count, NULL);
}
API(hipMemsetD16Async)(hipDeviceptr_t to, unsigned short value, size_t count, hipStream_t s) {
    return fill(to, 0, value, 2, count, 1, s);
}
API(hipMemsetD16)(hipDeviceptr_t to, unsigned short value, size_t count) {
    return hipMemsetD16Async(to, value, count, NULL);
}
API(hipMemsetD32Async)(hipDeviceptr_t to, int value, size_t count, hipStream_t s) {
    return fill(to, 0, (unsigned)value, 4, count, 1, s);
}
API(hipMemsetD32)(hipDeviceptr_t to, int value, size_t count) {
    return hipMemsetD32Async(to, value, count, NULL);
}
API(hipMemset2DAsync)(void *to, size_t pitch, int value, size_t width, size_t height,
                      hipStream_t s) {
    if (height && width > pitch) return device_enter(), device_leave(hipErrorInvalidValue);
    return fill(to, pitch, (unsigned char)value, 1, width, height, s);
}
API(hipMemset2D)(void *to, size_t pitch, int value, size_t width, size_t height) {
    return hipMemset2DAsync(to, pitch, value, width, height, NULL);
}

/* Removes the streams and frees the memory of the current device. Loaded code, its variables, and
   the memory that pool_clear leaves out stay. */
API(hipDeviceReset)(void) {
    ENTER();
    for (hipStream_t next, s = stream_first(); s; s = next) {
        next = s->next;
        if (s->device == device_current()) stream_drop(s);
    }
    pool_clear(device_current());
    LEAVE(hipSuccess);
}
API(hipDevicePrimaryCtxReset)(hipDevice_t device) {
    ANSWER(device_exists(device), hipErrorInvalidDevice);
    int before = device_current();
    hipSetDevice(device);
    hipError_t error = hipDeviceReset();
    hipSetDevice(before);
    return error;
}

API(hipMemGetInfo)(size_t *available, size_t *all) {
    ENTER();
    REQUIRE(available && all, hipErrorInvalidValue);
    *all = pool_size();
    *available = *all - pool_used();
    LEAVE(hipSuccess);
}

static hipMemoryType type_of(const struct pool_entry *entry) {
    if (!entry) return hipMemoryTypeUnregistered;
    return entry->kind & (KIND_HOST | KIND_REGISTERED) ? hipMemoryTypeHost
           : entry->kind & KIND_MANAGED                ? hipMemoryTypeManaged
                                                       : hipMemoryTypeDevice;
}

API(hipPointerGetAttributes)(hipPointerAttribute_t *attributes, const void *p) {
    ENTER();
    REQUIRE(attributes && p, hipErrorInvalidValue);
    const struct pool_entry *entry = pool_find(p);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = type_of(entry);
    attributes->device = entry ? (int)entry->device : 0;
    if (entry) {
        attributes->devicePointer = (void *)p;
        attributes->hostPointer = type_of(entry) != hipMemoryTypeDevice ? (void *)p : NULL;
        attributes->isManaged = (entry->kind & KIND_MANAGED) != 0;
        attributes->allocationFlags = host_flags(p);
    } else {
        attributes->device = -2; /* HIP's device number for memory that it does not know */
    }
    LEAVE(hipSuccess);
}

API(hipPointerGetAttribute)(void *data, hipPointer_attribute attribute, hipDeviceptr_t p) {
    ENTER();
    const struct pool_entry *entry = pool_find(p);
    REQUIRE(data && entry, hipErrorInvalidValue);
    switch ((int)attribute) {
    case HIP_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = type_of(entry); break;
    case HIP_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case HIP_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)data = p; break;
    case HIP_POINTER_ATTRIBUTE_IS_MANAGED: *(bool *)data = entry->kind & KIND_MANAGED; break;
    case HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = (int)entry->device; break;
    case HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR: pool_range(p, data, NULL); break;
    case HIP_POINTER_ATTRIBUTE_RANGE_SIZE: pool_range(p, NULL, data); break;
    case HIP_POINTER_ATTRIBUTE_MAPPED: *(bool *)data = true; break;
    default: LEAVE(device_lacks("attribute %d of pointers", (int)attribute));
    }
    LEAVE(hipSuccess);
}

API(hipMemGetAddressRange)(hipDeviceptr_t *start, size_t *size, hipDeviceptr_t p) {
    CHECKED(pool_find(p), hipErrorNotFound, (pool_range(p, start, size), hipSuccess));
}

API(hipMemPtrGetInfo)(void *p, size_t *size) {
    CHECKED(pool_find(p) && size, hipErrorInvalidValue, (pool_range(p, NULL, size), hipSuccess));
}

HINT(hipMemAdvise)(const void *p, size_t size, hipMemoryAdvise advice, int device) {
    return hipSuccess;
}
HINT(hipMemAdvise_v2)(const void *p, size_t size, hipMemoryAdvise advice, hipMemLocation place) {
    return hipSuccess;
}
HINT(hipMemPrefetchAsync_v2)(const void *p, size_t size, hipMemLocation place, unsigned flags,
                             hipStream_t s) {
    return hipSuccess;
}
HINT(hipMemPrefetchAsync)(const void *p, size_t size, int device, hipStream_t s) {
    return hipSuccess;
}
HINT(hipStreamAttachMemAsync)(hipStream_t s, void *p, size_t size, unsigned flags) {
    return hipSuccess;
}

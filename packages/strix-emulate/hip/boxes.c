/* SPDX-License-Identifier: BSD-3-Clause */
/* Allocation, copies and fills of two-dimensional and three-dimensional boxes in linear memory.
   Copies of HIP arrays, which textures use, are refused. */
#include "device.h"
#include <string.h>

struct side {
    void *start;
    size_t pitch, height; /* pitch: bytes of a row; height: rows of a slice */
    size_t x, y, z;
};

static char *corner(const struct side *s) {
    return (char *)s->start + s->x + s->pitch * (s->y + s->height * s->z);
}

static hipError_t describe(struct work *work, struct side to, struct side from, hipExtent e,
                           hipMemcpyKind kind) {
    *work = (struct work){.kind = WORK_NOTHING};
    if (!e.width || !e.height || !e.depth) return hipSuccess;
    if (!to.start || !from.start) return hipErrorInvalidValue;
    if (e.width > to.pitch || e.width > from.pitch) return hipErrorInvalidPitchValue;
    if (e.width > to.pitch - to.x || e.width > from.pitch - from.x || to.x > to.pitch ||
        from.x > from.pitch)
        return hipErrorInvalidValue;
    *work =
        (struct work){.kind = WORK_COPY,
                      .copy = {corner(&to), to.pitch, corner(&from), from.pitch, e.width, e.height,
                               kind, to.pitch * to.height, from.pitch * from.height, e.depth}};
    return hipSuccess;
}

hipError_t box_work(struct work *work, const hipMemcpy3DParms *p) {
    if (!p) return hipErrorInvalidValue;
    if (p->srcArray || p->dstArray) return device_lacks("a copy of an array");
    struct side to = {p->dstPtr.ptr, p->dstPtr.pitch, p->dstPtr.ysize,
                      p->dstPos.x,   p->dstPos.y,     p->dstPos.z};
    struct side from = {p->srcPtr.ptr, p->srcPtr.pitch, p->srcPtr.ysize,
                        p->srcPos.x,   p->srcPos.y,     p->srcPos.z};
    return describe(work, to, from, p->extent, p->kind);
}

API(hipMemcpy3DAsync)(const hipMemcpy3DParms *p, hipStream_t stream) {
    struct work work;
    ENTER();
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    hipError_t error = box_work(&work, p);
    LEAVE(error || work.kind == WORK_NOTHING ? error : work_submit(stream, &work));
}
API(hipMemcpy3D)(const hipMemcpy3DParms *p) { return hipMemcpy3DAsync(p, NULL); }

/* Describes the source or the destination of a copy of the driver interface. The memory type
   decides whether the host pointer or the device pointer is used. */
static hipError_t side_of(struct side *s, hipMemoryType type, const void *host,
                          hipDeviceptr_t device, size_t pitch, size_t height) {
    if (type == hipMemoryTypeArray) return device_lacks("a copy of an array");
    *s = (struct side){type == hipMemoryTypeHost ? (void *)host : device, pitch, height, 0, 0, 0};
    return hipSuccess;
}

API(hipDrvMemcpy3DAsync)(const HIP_MEMCPY3D *p, hipStream_t stream) {
    struct side to, from;
    struct work work;
    ENTER();
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    REQUIRE(p, hipErrorInvalidValue);
    hipError_t error =
        side_of(&from, p->srcMemoryType, p->srcHost, p->srcDevice, p->srcPitch, p->srcHeight);
    if (!error)
        error = side_of(&to, p->dstMemoryType, p->dstHost, p->dstDevice, p->dstPitch, p->dstHeight);
    REQUIRE(!error, error);
    from.x = p->srcXInBytes, from.y = p->srcY, from.z = p->srcZ;
    to.x = p->dstXInBytes, to.y = p->dstY, to.z = p->dstZ;
    hipExtent extent = {p->WidthInBytes, p->Height, p->Depth};
    error = describe(&work, to, from, extent, hipMemcpyDefault);
    LEAVE(error || work.kind == WORK_NOTHING ? error : work_submit(stream, &work));
}
API(hipDrvMemcpy3D)(const HIP_MEMCPY3D *p) { return hipDrvMemcpy3DAsync(p, NULL); }

API(hipMemcpyParam2DAsync)(const hip_Memcpy2D *p, hipStream_t stream) {
    if (!p) return device_enter(), device_leave(hipErrorInvalidValue);
    HIP_MEMCPY3D box = {.srcXInBytes = p->srcXInBytes,
                        .srcY = p->srcY,
                        .srcMemoryType = p->srcMemoryType,
                        .srcHost = p->srcHost,
                        .srcDevice = p->srcDevice,
                        .srcPitch = p->srcPitch,
                        .dstXInBytes = p->dstXInBytes,
                        .dstY = p->dstY,
                        .dstMemoryType = p->dstMemoryType,
                        .dstHost = p->dstHost,
                        .dstDevice = p->dstDevice,
                        .dstPitch = p->dstPitch,
                        .WidthInBytes = p->WidthInBytes,
                        .Height = p->Height,
                        .Depth = 1};
    return hipDrvMemcpy3DAsync(&box, stream);
}
API(hipMemcpyParam2D)(const hip_Memcpy2D *p) { return hipMemcpyParam2DAsync(p, NULL); }

API(hipMemset3DAsync)(hipPitchedPtr p, int value, hipExtent e, hipStream_t stream) {
    ENTER();
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    if (!e.width || !e.height || !e.depth) LEAVE(hipSuccess);
    REQUIRE(p.ptr && e.width <= p.pitch, hipErrorInvalidValue);
    struct work work = {.kind = WORK_FILL,
                        .fill = {p.ptr, p.pitch, (unsigned char)value, 1, e.width, e.height,
                                 p.pitch * p.ysize, e.depth}};
    LEAVE(work_submit(stream, &work));
}
API(hipMemset3D)(hipPitchedPtr p, int value, hipExtent e) {
    return hipMemset3DAsync(p, value, e, NULL);
}
API(hipMalloc3D)(hipPitchedPtr *p, hipExtent e) {
    ENTER();
    REQUIRE(p, hipErrorInvalidValue);
    size_t size, pitch = (e.width + 255) / 256 * 256;
    bool fits = pitch >= e.width && !__builtin_mul_overflow(pitch, e.height, &size) &&
                !__builtin_mul_overflow(size, e.depth, &size);
    REQUIRE(fits, hipErrorOutOfMemory);
    *p = (hipPitchedPtr){NULL, pitch, e.width, e.height};
    LEAVE(pool_allocate(&p->ptr, size, KIND_DEVICE));
}

/* SPDX-License-Identifier: BSD-3-Clause */
/* The work of streams: kernels, copies, fills, and callbacks on the host. Work is done at once, or
   becomes a node of a graph if the stream is captured. */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hipError_t copy_rows(const struct work *w) {
    hipMemcpyKind kind = w->copy.kind;
    bool to_device = kind == hipMemcpyHostToDevice || kind == hipMemcpyDeviceToDevice ||
                     kind == hipMemcpyDeviceToDeviceNoCU;
    bool from_device = kind == hipMemcpyDeviceToHost || kind == hipMemcpyDeviceToDevice ||
                       kind == hipMemcpyDeviceToDeviceNoCU;
    if ((to_device && !pool_is_device(w->copy.to)) ||
        (from_device && !pool_is_device(w->copy.from)))
        return hipErrorInvalidValue;
    for (size_t i = 0; i < w->copy.height * w->copy.depth; i++) {
        size_t row = i % w->copy.height, slice = i / w->copy.height;
        char *target = (char *)w->copy.to + row * w->copy.to_pitch + slice * w->copy.to_slice;
        const char *source =
            (const char *)w->copy.from + row * w->copy.from_pitch + slice * w->copy.from_slice;
        if (!pool_holds(target, w->copy.width) || !pool_holds(source, w->copy.width))
            return hipErrorInvalidValue;
        memmove(target, source, w->copy.width);
    }
    return hipSuccess;
}

static hipError_t fill_rows(const struct work *w) {
    size_t element = w->fill.element, count = w->fill.count;
    for (size_t row = 0; row < w->fill.height * w->fill.depth; row++) {
        char *target = (char *)w->fill.to + row % w->fill.height * w->fill.pitch +
                       row / w->fill.height * w->fill.slice;
        if (!pool_is_device(target) || !pool_holds(target, count * element))
            return hipErrorInvalidValue;
        if (element == 1) memset(target, (int)w->fill.value, count);
        else
            for (size_t i = 0; i < count; i++)
                memcpy(target + i * element, &w->fill.value, element);
    }
    return hipSuccess;
}

static hipError_t launch(const struct work *w) {
    if (!module_knows(w->kernel.function)) return hipErrorInvalidHandle;
    struct part parts[] = {{&w->kernel.request, sizeof w->kernel.request},
                           {w->kernel.arguments, w->kernel.function->facts.kernarg}};
    char *text;
    size_t size;
    hipError_t error = link_request(OP_LAUNCH, parts, 2, (void **)&text, &size);
    if (error) return error;
    if (size) {
        /* The text is the output of printf in the kernel. */
        fwrite(text, 1, size, stdout);
        fflush(stdout);
    }
    free(text);
    return hipSuccess;
}

hipError_t work_do(const struct work *w) {
    switch (w->kind) {
    case WORK_KERNEL: return launch(w);
    case WORK_COPY: return copy_rows(w);
    case WORK_FILL: return fill_rows(w);
    case WORK_CALL:
        /* Release the lock: the callback may wait for another thread that calls HIP. */
        device_leave(hipSuccess);
        w->call.function(w->call.data);
        return device_enter();
    case WORK_RECORD: return event_record(w->event);
    case WORK_GRAPH:
        for (size_t i = 0; i < w->graph->count; i++) {
            hipError_t error = work_do(&w->graph->nodes[i]->work);
            if (error) return error;
        }
        break;
    case WORK_ALLOCATE: return region_occupy(w->memory.address);
    case WORK_FREE: return pool_free(w->memory.address, KIND_DEVICE);
    case WORK_NOTHING: break;
    }
    return hipSuccess;
}

hipError_t work_submit(hipStream_t stream, struct work *w) {
    struct capture *capture = capture_of(stream);
    hipError_t error = capture ? capture_add(capture, stream, w) : work_do(w);
    if (!capture) work_free(w);
    return error;
}

API(hipLaunchHostFunc)(hipStream_t stream, hipHostFn_t call, void *data) {
    ENTER();
    REQUIRE(stream_is_valid(stream) && call, hipErrorInvalidValue);
    struct work work = {.kind = WORK_CALL, .call = {call, data}};
    LEAVE(work_submit(stream, &work));
}

/* With flags 1, a captured stream records the event in a node, as an event outside of the graph. */
API(hipEventRecordWithFlags)(hipEvent_t event, hipStream_t stream, unsigned flags) {
    ENTER();
    REQUIRE(event_is_valid(event) && stream_is_valid(stream), hipErrorInvalidHandle);
    if (capture_of(stream) && !(flags & 1)) LEAVE(capture_record(event, stream));
    struct work work = {.kind = WORK_RECORD, .event = event};
    LEAVE(work_submit(stream, &work));
}
API(hipEventRecord)(hipEvent_t event, hipStream_t stream) {
    return hipEventRecordWithFlags(event, stream, 0);
}

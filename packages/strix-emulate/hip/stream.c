/* SPDX-License-Identifier: BSD-3-Clause */
/* Streams and events. All work is complete when its call returns. So work is always in order, a
   stream is always idle, and a recorded event has always happened. */
#define _GNU_SOURCE
#include "device.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The lowest and the highest priority of a stream. */
#define LEAST 1
#define GREATEST (-1)

static hipStream_t streams;
static hipEvent_t events;
static unsigned long long numbers = 2;

hipStream_t stream_first(void) { return streams; }

bool stream_is_valid(hipStream_t stream) {
    if (!stream || stream == hipStreamLegacy || stream == hipStreamPerThread) return true;
    return FIND(streams, it == stream);
}

static bool is_ours(hipStream_t stream) { return (uintptr_t)stream > 2; }

static int device_of(hipStream_t stream) {
    return is_ours(stream) ? stream->device : device_current();
}

bool event_is_valid(hipEvent_t event) { return event && FIND(events, it == event); }

struct capture *capture_of(hipStream_t stream) {
    return (uintptr_t)stream > 2 ? stream->capture : NULL;
}

hipError_t capture_spoil(struct capture *capture) {
    if (!capture) return hipSuccess;
    capture->invalid = true;
    return hipErrorStreamCaptureUnsupported;
}

API(hipStreamCreateWithPriority)(hipStream_t *stream, unsigned flags, int priority) {
    ENTER();
    REQUIRE(stream && flags <= 1, hipErrorInvalidValue);
    hipStream_t made = malloc(sizeof *made);
    REQUIRE(made, hipErrorOutOfMemory);
    /* Limit the priority to the supported range, as clr's hip_stream.cpp does. */
    priority = priority < GREATEST ? GREATEST : priority > LEAST ? LEAST : priority;
    *made = (struct ihipStream_t){flags, priority,  numbers++,       streams,
                                  NULL,  {NULL, 0}, device_current()};
    *stream = streams = made;
    LEAVE(hipSuccess);
}
API(hipStreamCreateWithFlags)(hipStream_t *stream, unsigned flags) {
    return hipStreamCreateWithPriority(stream, flags, 0);
}
API(hipStreamCreate)(hipStream_t *stream) { return hipStreamCreateWithPriority(stream, 0, 0); }
/* The mask of compute units has no effect, because the emulator does not model their load. */
API(hipExtStreamCreateWithCUMask)(hipStream_t *stream, uint32_t count, const uint32_t *mask) {
    if (!count || !mask) return device_answer(hipErrorInvalidValue);
    return hipStreamCreateWithPriority(stream, 0, 0);
}
void stream_drop(hipStream_t stream) {
    hipStream_t *at = PLACE(streams, it == stream);
    /* As in clr, only the stream in which a capture began invalidates the capture when it is
       destroyed. RCCL destroys streams that have joined a capture. */
    if (stream->capture && stream->capture->origin == stream) capture_spoil(stream->capture);
    *at = stream->next;
    free(stream->tail.nodes), free(stream);
}
API(hipStreamDestroy)(hipStream_t stream) {
    CHECKED(is_ours(stream) && stream_is_valid(stream), hipErrorInvalidHandle,
            (stream_drop(stream), hipSuccess));
}
API(hipStreamSynchronize)(hipStream_t stream) {
    CHECKED(stream_is_valid(stream), hipErrorInvalidHandle, capture_spoil(capture_of(stream)));
}
API(hipStreamQuery)(hipStream_t stream) { return hipStreamSynchronize(stream); }
API(hipStreamGetFlags)(hipStream_t stream, unsigned *flags) {
    CHECKED(flags && stream_is_valid(stream), hipErrorInvalidValue,
            (*flags = is_ours(stream) ? stream->flags : 0, hipSuccess));
}
API(hipStreamGetPriority)(hipStream_t stream, int *priority) {
    CHECKED(priority && stream_is_valid(stream), hipErrorInvalidValue,
            (*priority = is_ours(stream) ? stream->priority : 0, hipSuccess));
}
API(hipStreamGetDevice)(hipStream_t stream, hipDevice_t *device) {
    CHECKED(device && stream_is_valid(stream), hipErrorInvalidValue,
            (*device = device_of(stream), hipSuccess));
}
API_OF(int, hipGetStreamDeviceId)(hipStream_t stream) {
    device_enter();
    int device = stream_is_valid(stream) ? device_of(stream) : -1;
    device_leave(hipSuccess);
    return device;
}
API(hipStreamGetId)(hipStream_t stream, unsigned long long *number) {
    CHECKED(number && stream_is_valid(stream), hipErrorInvalidValue,
            (*number = is_ours(stream) ? stream->number : (uintptr_t)stream, hipSuccess));
}
API(hipStreamAddCallback)(hipStream_t stream, hipStreamCallback_t call, void *data,
                          unsigned flags) {
    ENTER();
    REQUIRE(stream_is_valid(stream) && call && !flags, hipErrorInvalidValue);
    /* As in HIP, this call cannot be captured. A program can capture hipLaunchHostFunc instead. */
    hipError_t error = capture_spoil(capture_of(stream));
    REQUIRE(!error, error);
    device_leave(hipSuccess);
    call(stream, hipSuccess, data);
    return hipSuccess;
}
API(hipDeviceGetStreamPriorityRange)(int *least, int *greatest) {
    if (least) *least = LEAST;
    if (greatest) *greatest = GREATEST;
    return hipSuccess;
}

API(hipEventCreateWithFlags)(hipEvent_t *event, unsigned flags) {
    ENTER();
    REQUIRE(event, hipErrorInvalidValue);
    hipEvent_t made = calloc(1, sizeof *made);
    REQUIRE(made, hipErrorOutOfMemory);
    made->flags = flags;
    made->next = events;
    *event = events = made;
    LEAVE(hipSuccess);
}
API(hipEventCreate)(hipEvent_t *event) { return hipEventCreateWithFlags(event, 0); }
API(hipEventDestroy)(hipEvent_t event) {
    ENTER();
    hipEvent_t *at = PLACE(events, it == event);
    REQUIRE(event && *at, hipErrorInvalidHandle);
    *at = event->next;
    free(event->tail.nodes), free(event);
    LEAVE(hipSuccess);
}
hipError_t event_record(hipEvent_t event) {
    if (!event_is_valid(event)) return hipErrorInvalidHandle;
    event->recorded = true;
    event->capture = NULL;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return hipSuccess;
}

void event_forget(struct capture *capture) {
    for (hipEvent_t e = events; e; e = e->next)
        if (e->capture == capture) e->capture = NULL;
}

API(hipEventSynchronize)(hipEvent_t event) {
    CHECKED(event_is_valid(event), hipErrorInvalidHandle,
            capture_spoil(event->capture) ? hipErrorCapturedEvent : hipSuccess);
}
API(hipEventQuery)(hipEvent_t event) { return hipEventSynchronize(event); }
API(hipEventElapsedTime)(float *milliseconds, hipEvent_t start, hipEvent_t stop) {
    ENTER();
    REQUIRE(milliseconds, hipErrorInvalidValue);
    REQUIRE(event_is_valid(start) && event_is_valid(stop) && start->recorded && stop->recorded &&
                !((start->flags | stop->flags) & hipEventDisableTiming),
            hipErrorInvalidHandle);
    *milliseconds = (float)((double)(stop->time.tv_sec - start->time.tv_sec) * 1e3 +
                            (double)(stop->time.tv_nsec - start->time.tv_nsec) * 1e-6);
    LEAVE(hipSuccess);
}

/* Writes a value for hipStreamWriteValue32 or hipStreamWriteValue64. */
static hipError_t write_value(hipStream_t stream, void *p, uint64_t value, size_t size) {
    ENTER();
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    REQUIRE(pool_is_device(p) && pool_holds(p, size), hipErrorInvalidValue);
    if (capture_of(stream)) LEAVE(device_lacks("a value that a captured stream writes"));
    memcpy(p, &value, size);
    LEAVE(hipSuccess);
}
API(hipStreamWriteValue32)(hipStream_t stream, void *p, uint32_t value, unsigned flags) {
    return write_value(stream, p, value, 4);
}
API(hipStreamWriteValue64)(hipStream_t stream, void *p, uint64_t value, unsigned flags) {
    return write_value(stream, p, value, 8);
}

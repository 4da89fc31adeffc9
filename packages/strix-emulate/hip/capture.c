/* SPDX-License-Identifier: BSD-3-Clause */
/* Stream capture: the work of a captured stream becomes nodes of a graph. If a captured stream
   records an event and another stream waits for the event, the other stream joins the capture. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

static unsigned long long numbers = 1;

/* Sets the nodes on which the next node of a stream depends. If `add` is true, the nodes are added
   to the nodes that were set before. */
static bool follow(struct tail *tail, const hipGraphNode_t *nodes, size_t count, bool add) {
    size_t kept = add ? tail->count : 0;
    hipGraphNode_t *more = malloc((kept + count + 1) * sizeof *more);
    if (!more) return false;
    if (kept) memcpy(more, tail->nodes, kept * sizeof *more);
    for (size_t i = 0; i < count; i++) {
        size_t k = 0;
        while (k < kept && more[k] != nodes[i]) k++;
        if (k == kept) more[kept++] = nodes[i];
    }
    free(tail->nodes);
    *tail = (struct tail){more, kept};
    return true;
}

hipError_t capture_add(struct capture *capture, hipStream_t stream, struct work *work) {
    hipGraphNode_t node;
    if (capture->invalid) return work_free(work), hipErrorStreamCaptureInvalidated;
    hipError_t error =
        graph_add(&node, capture->graph, stream->tail.nodes, stream->tail.count, work);
    if (error) return error;
    return follow(&stream->tail, &node, 1, false) ? hipSuccess : hipErrorOutOfMemory;
}

hipError_t capture_record(hipEvent_t event, hipStream_t stream) {
    if (stream->capture->invalid) return hipErrorStreamCaptureInvalidated;
    event->capture = stream->capture;
    bool right = follow(&event->tail, stream->tail.nodes, stream->tail.count, false);
    return right ? hipSuccess : hipErrorOutOfMemory;
}

static hipError_t capture_wait(hipStream_t stream, hipEvent_t event) {
    if ((uintptr_t)stream <= 2) return hipErrorStreamCaptureImplicit;
    if (stream->capture && stream->capture != event->capture) {
        stream->capture->invalid = event->capture->invalid = true;
        return hipErrorStreamCaptureMerge;
    }
    stream->capture = event->capture;
    bool right = follow(&stream->tail, event->tail.nodes, event->tail.count, true);
    return right ? hipSuccess : hipErrorOutOfMemory;
}

API(hipStreamWaitEvent)(hipStream_t stream, hipEvent_t event, unsigned flags) {
    ENTER();
    REQUIRE(stream_is_valid(stream) && event_is_valid(event), hipErrorInvalidHandle);
    LEAVE(event->capture ? capture_wait(stream, event) : hipSuccess);
}

API(hipStreamBeginCapture)(hipStream_t stream, hipStreamCaptureMode mode) {
    ENTER();
    REQUIRE(stream_is_valid(stream) && (unsigned)mode <= 2, hipErrorInvalidValue);
    REQUIRE((uintptr_t)stream > 2, hipErrorStreamCaptureUnsupported);
    REQUIRE(!stream->capture, hipErrorIllegalState);
    struct capture *capture = calloc(1, sizeof *capture);
    hipGraph_t graph = capture ? graph_create() : NULL;
    if (!graph) {
        free(capture);
        LEAVE(hipErrorOutOfMemory);
    }
    *capture = (struct capture){graph, stream, numbers++, false};
    stream->capture = capture;
    LEAVE(hipSuccess);
}

/* Marks nodes of a graph, and all nodes on which they depend directly or indirectly. */
static void mark(hipGraph_t graph, bool *marked, const hipGraphNode_t *nodes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t at = graph_index(graph, nodes[i]);
        if (marked[at]) continue;
        marked[at] = true;
        mark(graph, marked, nodes[i]->dependencies, nodes[i]->dependency_count);
    }
}

API(hipStreamEndCapture)(hipStream_t stream, hipGraph_t *graph) {
    ENTER();
    REQUIRE(graph && stream_is_valid(stream), hipErrorInvalidValue);
    struct capture *capture = capture_of(stream);
    REQUIRE(capture, hipErrorIllegalState);
    REQUIRE(capture->origin == stream, hipErrorStreamCaptureUnmatched);
    /* The nodes on which the origin's next node would depend, directly or indirectly. */
    bool *joined = calloc(capture->graph->count + 1, 1);
    REQUIRE(joined, hipErrorOutOfMemory);
    mark(capture->graph, joined, stream->tail.nodes, stream->tail.count);
    hipError_t error = capture->invalid ? hipErrorStreamCaptureInvalidated : hipSuccess;
    for (hipStream_t s = stream_first(); s; s = s->next)
        for (size_t i = 0; !error && s->capture == capture && i < s->tail.count; i++)
            if (!joined[graph_index(capture->graph, s->tail.nodes[i])])
                error = hipErrorStreamCaptureUnjoined;
    free(joined);
    for (hipStream_t s = stream_first(); s; s = s->next)
        if (s->capture == capture) s->capture = NULL, s->tail.count = 0;
    event_forget(capture);
    *graph = error ? NULL : capture->graph;
    if (error) graph_destroy(capture->graph);
    free(capture);
    LEAVE(error);
}

API(hipStreamGetCaptureInfo_v2)(hipStream_t stream, hipStreamCaptureStatus *status,
                                unsigned long long *number, hipGraph_t *graph,
                                const hipGraphNode_t **nodes, size_t *count) {
    ENTER();
    REQUIRE(status && stream_is_valid(stream), hipErrorInvalidValue);
    struct capture *capture = capture_of(stream);
    *status = !capture           ? hipStreamCaptureStatusNone
              : capture->invalid ? hipStreamCaptureStatusInvalidated
                                 : hipStreamCaptureStatusActive;
    if (number) *number = capture ? capture->number : 0;
    if (graph) *graph = capture ? capture->graph : NULL;
    if (nodes) *nodes = capture ? stream->tail.nodes : NULL;
    if (count) *count = capture ? stream->tail.count : 0;
    LEAVE(hipSuccess);
}
API(hipStreamGetCaptureInfo)(hipStream_t stream, hipStreamCaptureStatus *status,
                             unsigned long long *number) {
    return hipStreamGetCaptureInfo_v2(stream, status, number, NULL, NULL, NULL);
}
API(hipStreamIsCapturing)(hipStream_t stream, hipStreamCaptureStatus *status) {
    return hipStreamGetCaptureInfo_v2(stream, status, NULL, NULL, NULL, NULL);
}
/* With flags 0, the nodes are added to the dependencies of the stream's next node. With flags 1,
   they replace the dependencies. */
API(hipStreamUpdateCaptureDependencies)(hipStream_t stream, hipGraphNode_t *nodes, size_t count,
                                        unsigned flags) {
    ENTER();
    REQUIRE(stream_is_valid(stream) && flags <= 1 && (nodes || !count), hipErrorInvalidValue);
    struct capture *capture = capture_of(stream);
    REQUIRE(capture, hipErrorIllegalState);
    for (size_t i = 0; i < count; i++)
        REQUIRE(graph_of(nodes[i]) == capture->graph, hipErrorInvalidValue);
    LEAVE(follow(&stream->tail, nodes, count, !flags) ? hipSuccess : hipErrorOutOfMemory);
}

/* The mode has no effect here: during a capture, other threads may call every function. */
API(hipThreadExchangeStreamCaptureMode)(hipStreamCaptureMode *mode) {
    static _Thread_local hipStreamCaptureMode held = hipStreamCaptureModeGlobal;
    ENTER();
    REQUIRE(mode && (unsigned)*mode <= 2, hipErrorInvalidValue);
    hipStreamCaptureMode old = held;
    held = *mode;
    *mode = old;
    LEAVE(hipSuccess);
}

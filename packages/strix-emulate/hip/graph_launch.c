/* SPDX-License-Identifier: BSD-3-Clause */
/* Graphs that can be launched. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

/* work in order, and the nodes that it is of */
struct hipGraphExec {
    hipGraph_t graph;
    hipGraphNode_t *origins;
    hipGraphExec_t next;
};
static hipGraphExec_t executables;

static bool is_executable(hipGraphExec_t graph) {
    hipGraphExec_t g = executables;
    while (g && g != graph) g = g->next;
    return graph && g;
}

API(hipGraphInstantiateWithFlags)(hipGraphExec_t *made, hipGraph_t graph,
                                  unsigned long long flags) {
    (void)flags;
    ENTER();
    REQUIRE(made && graph_is_valid(graph) && graph_sort(graph), hipErrorInvalidValue);
    hipGraphExec_t e = calloc(1, sizeof *e);
    hipGraph_t copy = e ? graph_clone(graph) : NULL;
    size_t size = graph->count * sizeof *graph->nodes;
    hipGraphNode_t *origins = copy ? malloc(size + 1) : NULL;
    if (!origins) {
        if (copy) graph_destroy(copy);
        free(e);
        LEAVE(hipErrorOutOfMemory);
    }
    if (size) memcpy(origins, graph->nodes, size);
    for (size_t i = 0; i < graph->reference_count; i++)
        if (graph_retain(copy, graph->references[i].object, graph->references[i].count))
            graph->references[i].object->count += graph->references[i].count;
    *e = (struct hipGraphExec){copy, origins, executables};
    *made = executables = e;
    LEAVE(hipSuccess);
}
API(hipGraphInstantiate)(hipGraphExec_t *made, hipGraph_t graph, hipGraphNode_t *wrong, char *log,
                         size_t size) {
    if (wrong) *wrong = NULL;
    if (log && size) *log = 0;
    return hipGraphInstantiateWithFlags(made, graph, 0);
}
API(hipGraphExecDestroy)(hipGraphExec_t graph) {
    ENTER();
    hipGraphExec_t *at = &executables;
    while (*at && *at != graph) at = &(*at)->next;
    REQUIRE(graph && *at, hipErrorInvalidValue);
    *at = graph->next;
    graph_destroy(graph->graph);
    free(graph->origins), free(graph);
    LEAVE(hipSuccess);
}
API(hipGraphUpload)(hipGraphExec_t graph, hipStream_t stream) {
    ENTER();
    LEAVE(is_executable(graph) && stream_is_valid(stream) ? hipSuccess : hipErrorInvalidValue);
}
API(hipGraphLaunch)(hipGraphExec_t graph, hipStream_t stream) {
    ENTER();
    REQUIRE(is_executable(graph), hipErrorInvalidValue);
    REQUIRE(stream_is_valid(stream), hipErrorInvalidHandle);
    struct work work = {.kind = WORK_GRAPH, .graph = graph->graph};
    if (!capture_of(stream)) LEAVE(work_do(&work));
    work.graph = graph_clone(graph->graph);
    REQUIRE(work.graph, hipErrorOutOfMemory);
    LEAVE(work_submit(stream, &work));
}

API(hipGraphExecKernelNodeSetParams)(hipGraphExec_t graph, hipGraphNode_t node,
                                     const hipKernelNodeParams *p) {
    ENTER();
    REQUIRE(is_executable(graph), hipErrorInvalidValue);
    for (size_t i = 0; i < graph->graph->count; i++)
        if (graph->origins[i] == node) LEAVE(graph_set_kernel(graph->graph->nodes[i], p));
    LEAVE(hipErrorInvalidValue);
}

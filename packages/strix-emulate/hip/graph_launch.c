/* SPDX-License-Identifier: BSD-3-Clause */
/* Executable graphs: instantiation, launch and update. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

/* graph: a copy of the instantiated graph, with the nodes in the order of execution.
   origins: for each node of the copy, the node of the instantiated graph. */
struct hipGraphExec {
    hipGraph_t graph;
    hipGraphNode_t *origins;
    bool frees; /* whether a launch first frees the memory that an earlier launch allocated */
    hipGraphExec_t next;
};
static hipGraphExec_t executables;

static bool is_executable(hipGraphExec_t graph) { return graph && FIND(executables, it == graph); }

API(hipGraphInstantiateWithFlags)(hipGraphExec_t *made, hipGraph_t graph,
                                  unsigned long long flags) {
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
    bool frees = flags & hipGraphInstantiateFlagAutoFreeOnLaunch;
    *e = (struct hipGraphExec){copy, origins, frees, executables};
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
    hipGraphExec_t *at = PLACE(executables, it == graph);
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
    for (size_t i = 0; graph->frees && i < graph->graph->count; i++)
        if (graph->graph->nodes[i]->work.kind == WORK_ALLOCATE)
            pool_free(graph->graph->nodes[i]->work.memory.address, KIND_DEVICE);
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

/* Returns whether node number `place` has the same dependencies, by number, in both graphs. */
static bool are_alike(hipGraph_t a, hipGraph_t b, size_t place) {
    hipGraphNode_t one = a->nodes[place], other = b->nodes[place];
    if (one->dependency_count != other->dependency_count) return false;
    for (size_t i = 0; i < one->dependency_count; i++)
        if (!graph_depends(other, b->nodes[graph_index(a, one->dependencies[i])])) return false;
    return true;
}

/* Returns the reason why a graph's work cannot replace that of another graph, or success. *wrong
   becomes the first node that differs, or NULL on success. It is unchanged if the numbers of nodes
   differ. */
static hipGraphExecUpdateResult compare(hipGraph_t now, hipGraph_t wanted, hipGraphNode_t *wrong) {
    if (now->count != wanted->count) return hipGraphExecUpdateErrorTopologyChanged;
    for (size_t i = 0; i < now->count; i++) {
        const struct work *w = &(*wrong = wanted->nodes[i])->work;
        if (w->kind != now->nodes[i]->work.kind) return hipGraphExecUpdateErrorNodeTypeChanged;
        if (!are_alike(now, wanted, i)) return hipGraphExecUpdateErrorTopologyChanged;
        if ((w->kind == WORK_ALLOCATE || w->kind == WORK_FREE) &&
            w->memory.address != now->nodes[i]->work.memory.address)
            return hipGraphExecUpdateErrorNotSupported;
    }
    *wrong = NULL;
    return hipGraphExecUpdateSuccess;
}

API(hipGraphExecUpdate)(hipGraphExec_t graph, hipGraph_t wanted, hipGraphNode_t *wrong,
                        hipGraphExecUpdateResult *result) {
    ENTER();
    REQUIRE(is_executable(graph) && graph_is_valid(wanted) && wrong && result && graph_sort(wanted),
            hipErrorInvalidValue);
    *wrong = NULL;
    *result = compare(graph->graph, wanted, wrong);
    REQUIRE(*result == hipGraphExecUpdateSuccess, hipErrorGraphExecUpdateFailure);
    hipGraph_t copy = graph_clone(wanted);
    REQUIRE(copy, hipErrorOutOfMemory);
    for (size_t i = 0; i < copy->count; i++) {
        struct work old = graph->graph->nodes[i]->work;
        graph->graph->nodes[i]->work = copy->nodes[i]->work;
        copy->nodes[i]->work = old;
    }
    graph_destroy(copy);
    LEAVE(hipSuccess);
}

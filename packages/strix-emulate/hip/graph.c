/* SPDX-License-Identifier: BSD-3-Clause */
/* Graphs: nodes of work, in an order that their dependencies allow. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

/* A graph that can be launched: work in order, and the nodes that it is of. */
struct hipGraphExec {
    hipGraph_t graph;
    hipGraphNode_t *origins;
    hipGraphExec_t next;
};
static hipGraph_t graphs;
static hipGraphExec_t executables;

bool graph_is_valid(hipGraph_t graph) {
    hipGraph_t g = graphs;
    while (g && g != graph) g = g->next;
    return graph && g;
}

hipGraph_t graph_of(hipGraphNode_t node) {
    for (hipGraph_t g = graphs; node && g; g = g->next)
        for (size_t i = 0; i < g->count; i++)
            if (g->nodes[i] == node) return g;
    return NULL;
}

static bool is_executable(hipGraphExec_t graph) {
    hipGraphExec_t g = executables;
    while (g && g != graph) g = g->next;
    return graph && g;
}

hipGraph_t graph_create(void) {
    hipGraph_t made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->next = graphs;
    return graphs = made;
}

bool graph_depends(hipGraphNode_t node, hipGraphNode_t on) {
    for (size_t i = 0; i < node->dependency_count; i++)
        if (node->dependencies[i] == on) return true;
    return false;
}

static bool add_dependency(hipGraphNode_t node, hipGraphNode_t on) {
    if (graph_depends(node, on)) return true;
    size_t size = (node->dependency_count + 1) * sizeof *node->dependencies;
    hipGraphNode_t *more = realloc(node->dependencies, size);
    if (!more) return false;
    node->dependencies = more;
    more[node->dependency_count++] = on;
    return true;
}

hipError_t graph_add(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *dependencies,
                     size_t count, struct work *work) {
    hipGraphNode_t made = calloc(1, sizeof *made);
    hipGraphNode_t *more = realloc(graph->nodes, (graph->count + 1) * sizeof *more);
    if (more) graph->nodes = more;
    bool right = made && more;
    for (size_t i = 0; right && i < count; i++) right = add_dependency(made, dependencies[i]);
    if (!right) {
        if (made) free(made->dependencies);
        work_free(work);
        return free(made), hipErrorOutOfMemory;
    }
    made->work = *work;
    graph->nodes[graph->count++] = made;
    if (node) *node = made;
    return hipSuccess;
}

void graph_drop_node(hipGraphNode_t node) {
    work_free(&node->work);
    free(node->values), free(node->dependencies), free(node);
}

void graph_destroy(hipGraph_t graph) {
    hipGraph_t *at = &graphs;
    while (*at && *at != graph) at = &(*at)->next;
    if (*at) *at = graph->next;
    for (size_t i = 0; i < graph->count; i++) graph_drop_node(graph->nodes[i]);
    for (size_t i = 0; i < graph->reference_count; i++)
        graph_release(graph->references[i].object, graph->references[i].count);
    free(graph->nodes), free(graph->references), free(graph);
}

static size_t index_of(hipGraph_t graph, hipGraphNode_t node) {
    size_t i = 0;
    while (i < graph->count && graph->nodes[i] != node) i++;
    return i;
}

/* Puts nodes behind those that they depend on, and else leaves them as they were; false: a circle. */
static bool sort(hipGraph_t graph) {
    hipGraphNode_t *sorted = calloc(graph->count + 1, sizeof *sorted);
    bool *done = calloc(graph->count + 1, 1);
    size_t count = 0;
    for (bool found = sorted && done; found && count < graph->count;) {
        found = false;
        for (size_t i = 0; i < graph->count; i++) {
            hipGraphNode_t node = graph->nodes[i];
            bool ready = !done[i];
            for (size_t k = 0; ready && k < node->dependency_count; k++)
                ready = done[index_of(graph, node->dependencies[k])];
            if (!ready) continue;
            sorted[count++] = node;
            found = done[i] = true;
        }
    }
    bool right = count == graph->count;
    if (right && count) memcpy(graph->nodes, sorted, count * sizeof *sorted);
    return free(sorted), free(done), right;
}

hipGraph_t graph_clone(hipGraph_t graph) {
    hipGraph_t made = graph_create();
    for (size_t i = 0; made && i < graph->count; i++) {
        struct work work;
        bool right = work_copy(&work, &graph->nodes[i]->work);
        if (right && !graph_add(NULL, made, NULL, 0, &work)) continue;
        graph_destroy(made);
        return NULL;
    }
    for (size_t i = 0; made && i < graph->count; i++)
        for (size_t k = 0; k < graph->nodes[i]->dependency_count; k++)
            add_dependency(made->nodes[i],
                           made->nodes[index_of(graph, graph->nodes[i]->dependencies[k])]);
    return made;
}

hipError_t graph_do(hipGraph_t graph) {
    hipError_t error = hipSuccess;
    for (size_t i = 0; !error && i < graph->count; i++) error = work_do(&graph->nodes[i]->work);
    return error;
}

API(hipGraphCreate)(hipGraph_t *graph, unsigned flags) {
    ENTER();
    REQUIRE(graph && !flags, hipErrorInvalidValue);
    LEAVE((*graph = graph_create()) ? hipSuccess : hipErrorOutOfMemory);
}
API(hipGraphDestroy)(hipGraph_t graph) {
    ENTER();
    REQUIRE(graph_is_valid(graph), hipErrorInvalidValue);
    graph_destroy(graph);
    LEAVE(hipSuccess);
}
API(hipGraphClone)(hipGraph_t *made, hipGraph_t graph) {
    ENTER();
    REQUIRE(made && graph_is_valid(graph), hipErrorInvalidValue);
    LEAVE((*made = graph_clone(graph)) ? hipSuccess : hipErrorOutOfMemory);
}

API(hipGraphInstantiateWithFlags)(hipGraphExec_t *made, hipGraph_t graph, unsigned long long flags) {
    (void)flags;
    ENTER();
    REQUIRE(made && graph_is_valid(graph) && sort(graph), hipErrorInvalidValue);
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
        hipGraphRetainUserObject(copy, graph->references[i].object, graph->references[i].count, 0);
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
    if (!capture_of(stream)) LEAVE(graph_do(graph->graph));
    struct work work = {.kind = WORK_GRAPH, .graph = graph_clone(graph->graph)};
    REQUIRE(work.graph, hipErrorOutOfMemory);
    LEAVE(work_submit(stream, &work));
}

/* Nodes of explicit graphs. */
static hipError_t add(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *dependencies,
                      size_t count, struct work work) {
    bool right = node && graph_is_valid(graph) && (dependencies || !count);
    for (size_t i = 0; right && i < count; i++) right = graph_of(dependencies[i]);
    if (!right) return work_free(&work), hipErrorInvalidValue;
    return graph_add(node, graph, dependencies, count, &work);
}
static hipError_t kernel_work(struct work *work, const hipKernelNodeParams *p) {
    hipFunction_t function;
    if (!p) return hipErrorInvalidValue;
    hipError_t error = registered_function(&function, p->func);
    return error ? error
                 : module_work(work, function, p->gridDim, p->blockDim, p->sharedMemBytes,
                               p->kernelParams, p->extra, false);
}
API(hipGraphAddKernelNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                           size_t count, const hipKernelNodeParams *p) {
    ENTER();
    struct work work;
    hipError_t error = kernel_work(&work, p);
    LEAVE(error ? error : add(node, graph, after, count, work));
}
API(hipGraphAddMemcpyNode1D)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                             size_t count, void *to, const void *from, size_t size,
                             hipMemcpyKind kind) {
    ENTER();
    struct work work = {.kind = WORK_COPY, .copy = {to, 0, from, 0, size, 1, kind}};
    LEAVE(add(node, graph, after, count, work));
}
API(hipGraphAddMemsetNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                           size_t count, const hipMemsetParams *p) {
    ENTER();
    REQUIRE(p, hipErrorInvalidValue);
    struct work work = {.kind = WORK_FILL, .fill = {p->dst, p->pitch, p->value, p->elementSize,
                                                    p->width, p->height}};
    LEAVE(add(node, graph, after, count, work));
}
API(hipGraphAddHostNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                         size_t count, const hipHostNodeParams *p) {
    ENTER();
    REQUIRE(p && p->fn, hipErrorInvalidValue);
    struct work work = {.kind = WORK_CALL, .call = {p->fn, p->userData}};
    LEAVE(add(node, graph, after, count, work));
}
API(hipGraphAddEmptyNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                          size_t count) {
    ENTER();
    LEAVE(add(node, graph, after, count, (struct work){.kind = WORK_NOTHING}));
}
API(hipGraphAddEventRecordNode)(hipGraphNode_t *node, hipGraph_t graph,
                                const hipGraphNode_t *after, size_t count, hipEvent_t event) {
    ENTER();
    LEAVE(add(node, graph, after, count, (struct work){.kind = WORK_RECORD, .event = event}));
}
API(hipGraphAddEventWaitNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                              size_t count, hipEvent_t event) {
    (void)event; /* what is recorded has happened */
    return hipGraphAddEmptyNode(node, graph, after, count);
}
API(hipGraphAddChildGraphNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                               size_t count, hipGraph_t child) {
    ENTER();
    REQUIRE(graph_is_valid(child) && sort(child), hipErrorInvalidValue);
    hipGraph_t copy = graph_clone(child);
    REQUIRE(copy, hipErrorOutOfMemory);
    LEAVE(add(node, graph, after, count, (struct work){.kind = WORK_GRAPH, .graph = copy}));
}
API(hipGraphAddDependencies)(hipGraph_t graph, const hipGraphNode_t *from, const hipGraphNode_t *to,
                             size_t count) {
    ENTER();
    REQUIRE(graph_is_valid(graph) && (!count || (from && to)), hipErrorInvalidValue);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(index_of(graph, from[i]) < graph->count && index_of(graph, to[i]) < graph->count,
                hipErrorInvalidValue);
        REQUIRE(add_dependency(to[i], from[i]), hipErrorOutOfMemory);
    }
    LEAVE(hipSuccess);
}

API(hipGraphKernelNodeGetParams)(hipGraphNode_t node, hipKernelNodeParams *p) {
    ENTER();
    REQUIRE(p && graph_of(node) && node->work.kind == WORK_KERNEL, hipErrorInvalidValue);
    const struct launch_request *r = &node->work.kernel.request;
    hipFunction_t function = node->work.kernel.function;
    if (!node->values) node->values = calloc(function->facts.arguments + 1u, sizeof(void *));
    REQUIRE(node->values, hipErrorOutOfMemory);
    for (uint32_t i = 0; i < function->facts.arguments; i++)
        node->values[i] = node->work.kernel.arguments + function->arguments[i].offset;
    *p = (hipKernelNodeParams){
        .func = function, .gridDim = {r->grid[0], r->grid[1], r->grid[2]},
        .blockDim = {r->block[0], r->block[1], r->block[2]}, .sharedMemBytes = r->lds,
        .kernelParams = node->values};
    LEAVE(hipSuccess);
}
static hipError_t set_kernel(hipGraphNode_t node, const hipKernelNodeParams *p) {
    struct work work;
    if (node->work.kind != WORK_KERNEL) return hipErrorInvalidValue;
    hipError_t error = kernel_work(&work, p);
    if (error) return error;
    work_free(&node->work);
    node->work = work;
    return hipSuccess;
}
API(hipGraphKernelNodeSetParams)(hipGraphNode_t node, const hipKernelNodeParams *p) {
    ENTER();
    LEAVE(graph_of(node) ? set_kernel(node, p) : hipErrorInvalidValue);
}
API(hipGraphExecKernelNodeSetParams)(hipGraphExec_t graph, hipGraphNode_t node,
                                     const hipKernelNodeParams *p) {
    ENTER();
    REQUIRE(is_executable(graph), hipErrorInvalidValue);
    for (size_t i = 0; i < graph->graph->count; i++)
        if (graph->origins[i] == node) LEAVE(set_kernel(graph->graph->nodes[i], p));
    LEAVE(hipErrorInvalidValue);
}

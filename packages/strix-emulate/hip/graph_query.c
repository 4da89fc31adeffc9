/* SPDX-License-Identifier: BSD-3-Clause */
/* Queries of graphs, changes of their edges, and user objects. */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Returns an array as HIP does. If `to` is NULL, only the number of elements is returned. */
static hipError_t give(hipGraphNode_t *to, size_t *room, hipGraphNode_t *found, size_t count) {
    if (to)
        for (size_t i = 0; i < *room; i++) to[i] = i < count ? found[i] : NULL;
    if (!to || *room > count) *room = count;
    return hipSuccess;
}

API(hipGraphGetNodes)(hipGraph_t graph, hipGraphNode_t *nodes, size_t *count) {
    CHECKED(count && graph_is_valid(graph), hipErrorInvalidValue,
            give(nodes, count, graph->nodes, graph->count));
}

enum question { ROOTS, AFTER };
static hipError_t select_nodes(hipGraph_t graph, hipGraphNode_t *to, size_t *room,
                               enum question question, hipGraphNode_t node) {
    hipGraphNode_t *found = malloc((graph->count + 1) * sizeof *found);
    if (!found) return hipErrorOutOfMemory;
    size_t count = 0;
    for (size_t i = 0; i < graph->count; i++) {
        hipGraphNode_t one = graph->nodes[i];
        if (question == ROOTS ? !one->dependency_count : graph_depends(one, node))
            found[count++] = one;
    }
    hipError_t error = give(to, room, found, count);
    return free(found), error;
}

API(hipGraphGetRootNodes)(hipGraph_t graph, hipGraphNode_t *nodes, size_t *count) {
    CHECKED(count && graph_is_valid(graph), hipErrorInvalidValue,
            select_nodes(graph, nodes, count, ROOTS, NULL));
}
API(hipGraphNodeGetDependencies)(hipGraphNode_t node, hipGraphNode_t *nodes, size_t *count) {
    CHECKED(count && graph_of(node), hipErrorInvalidValue,
            give(nodes, count, node->dependencies, node->dependency_count));
}
API(hipGraphNodeGetDependentNodes)(hipGraphNode_t node, hipGraphNode_t *nodes, size_t *count) {
    CHECKED(count && graph_of(node), hipErrorInvalidValue,
            select_nodes(graph_of(node), nodes, count, AFTER, node));
}
API(hipGraphGetEdges)(hipGraph_t graph, hipGraphNode_t *from, hipGraphNode_t *to, size_t *count) {
    ENTER();
    REQUIRE(count && graph_is_valid(graph) && !from == !to, hipErrorInvalidValue);
    size_t found = 0;
    for (size_t i = 0; i < graph->count; i++)
        for (size_t k = 0; k < graph->nodes[i]->dependency_count; k++, found++)
            if (from && found < *count)
                from[found] = graph->nodes[i]->dependencies[k], to[found] = graph->nodes[i];
    if (!from || *count > found) *count = found;
    LEAVE(hipSuccess);
}

static void remove_dependency(hipGraphNode_t node, hipGraphNode_t on) {
    size_t left = 0;
    for (size_t i = 0; i < node->dependency_count; i++)
        if (node->dependencies[i] != on) node->dependencies[left++] = node->dependencies[i];
    node->dependency_count = left;
}
API(hipGraphRemoveDependencies)(hipGraph_t graph, const hipGraphNode_t *from,
                                const hipGraphNode_t *to, size_t count) {
    ENTER();
    REQUIRE(graph_is_valid(graph) && (!count || (from && to)), hipErrorInvalidValue);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(graph_of(to[i]) == graph && graph_depends(to[i], from[i]), hipErrorInvalidValue);
        remove_dependency(to[i], from[i]);
    }
    LEAVE(hipSuccess);
}
API(hipGraphDestroyNode)(hipGraphNode_t node) {
    ENTER();
    hipGraph_t graph = graph_of(node);
    REQUIRE(graph, hipErrorInvalidValue);
    size_t left = 0;
    for (size_t i = 0; i < graph->count; i++) {
        remove_dependency(graph->nodes[i], node);
        if (graph->nodes[i] != node) graph->nodes[left++] = graph->nodes[i];
    }
    graph->count = left;
    graph_drop_node(node);
    LEAVE(hipSuccess);
}

API(hipGraphNodeGetType)(hipGraphNode_t node, hipGraphNodeType *type) {
    static const hipGraphNodeType types[] = {
        [WORK_NOTHING] = hipGraphNodeTypeEmpty, [WORK_KERNEL] = hipGraphNodeTypeKernel,
        [WORK_COPY] = hipGraphNodeTypeMemcpy,   [WORK_FILL] = hipGraphNodeTypeMemset,
        [WORK_CALL] = hipGraphNodeTypeHost,     [WORK_RECORD] = hipGraphNodeTypeEventRecord,
        [WORK_GRAPH] = hipGraphNodeTypeGraph,   [WORK_ALLOCATE] = hipGraphNodeTypeMemAlloc,
        [WORK_FREE] = hipGraphNodeTypeMemFree};
    ENTER();
    REQUIRE(type && graph_of(node), hipErrorInvalidValue);
    *type = types[node->work.kind];
    LEAVE(hipSuccess);
}
API(hipGraphMemsetNodeGetParams)(hipGraphNode_t node, hipMemsetParams *p) {
    ENTER();
    REQUIRE(p && graph_of(node) && node->work.kind == WORK_FILL, hipErrorInvalidValue);
    const struct work *w = &node->work;
    *p = (hipMemsetParams){.dst = w->fill.to,
                           .pitch = w->fill.pitch,
                           .value = w->fill.value,
                           .elementSize = (unsigned)w->fill.element,
                           .width = w->fill.count,
                           .height = w->fill.height};
    LEAVE(hipSuccess);
}
API(hipGraphHostNodeGetParams)(hipGraphNode_t node, hipHostNodeParams *p) {
    CHECKED(p && graph_of(node) && node->work.kind == WORK_CALL, hipErrorInvalidValue,
            (*p = (hipHostNodeParams){node->work.call.function, node->work.call.data}, hipSuccess));
}
API(hipGraphMemAllocNodeGetParams)(hipGraphNode_t node, hipMemAllocNodeParams *p) {
    ENTER();
    REQUIRE(p && graph_of(node) && node->work.kind == WORK_ALLOCATE, hipErrorInvalidValue);
    *p = (hipMemAllocNodeParams){.poolProps = {.allocType = hipMemAllocationTypePinned,
                                               .location = {hipMemLocationTypeDevice, 0}},
                                 .bytesize = node->work.memory.size,
                                 .dptr = node->work.memory.address};
    LEAVE(hipSuccess);
}
API(hipGraphMemFreeNodeGetParams)(hipGraphNode_t node, void *p) {
    CHECKED(p && graph_of(node) && node->work.kind == WORK_FREE, hipErrorInvalidValue,
            (*(void **)p = node->work.memory.address, hipSuccess));
}
API(hipGraphChildGraphNodeGetGraph)(hipGraphNode_t node, hipGraph_t *graph) {
    CHECKED(graph && graph_of(node) && node->work.kind == WORK_GRAPH, hipErrorInvalidValue,
            (*graph = node->work.graph, hipSuccess));
}

/* Writes the graph as a file for Graphviz. */
API(hipGraphDebugDotPrint)(hipGraph_t graph, const char *path, unsigned flags) {
    static const char *const names[] = {"nothing", "",      "copy",       "fill", "call",
                                        "event",   "graph", "allocation", "free"};
    ENTER();
    REQUIRE(path && graph_is_valid(graph), hipErrorInvalidValue);
    FILE *file = fopen(path, "w");
    REQUIRE(file, hipErrorFileNotFound);
    fprintf(file, "digraph {\n");
    for (size_t i = 0; i < graph->count; i++) {
        hipGraphNode_t node = graph->nodes[i];
        bool kernel = node->work.kind == WORK_KERNEL;
        fprintf(file, "\"%p\" [label=\"%s\"]\n", (void *)node,
                kernel ? module_name(node->work.kernel.function) : names[node->work.kind]);
        for (size_t k = 0; k < node->dependency_count; k++)
            fprintf(file, "\"%p\" -> \"%p\"\n", (void *)node->dependencies[k], (void *)node);
    }
    fprintf(file, "}\n");
    LEAVE(fclose(file) ? hipErrorUnknown : hipSuccess);
}

/* Creates an object of the user, which exists as long as the caller or a graph has references to
   it. */
API(hipUserObjectCreate)(hipUserObject_t *made, void *data, hipHostFn_t destroy, unsigned count,
                         unsigned flags) {
    ENTER();
    REQUIRE(made && destroy && count, hipErrorInvalidValue);
    hipUserObject_t object = malloc(sizeof *object);
    REQUIRE(object, hipErrorOutOfMemory);
    *object = (struct hipUserObject){data, destroy, count};
    *made = object;
    LEAVE(hipSuccess);
}
API(hipUserObjectRetain)(hipUserObject_t object, unsigned count) {
    CHECKED(object && count, hipErrorInvalidValue, (object->count += count, hipSuccess));
}
API(hipUserObjectRelease)(hipUserObject_t object, unsigned count) {
    CHECKED(object && count, hipErrorInvalidValue, (graph_release(object, count), hipSuccess));
}
/* With flags 1, references of the caller move to the graph. Otherwise the graph gets new ones. */
API(hipGraphRetainUserObject)(hipGraph_t graph, hipUserObject_t object, unsigned count,
                              unsigned flags) {
    ENTER();
    REQUIRE(object && count && graph_is_valid(graph), hipErrorInvalidValue);
    REQUIRE(graph_retain(graph, object, count), hipErrorOutOfMemory);
    if (!(flags & 1)) object->count += count;
    LEAVE(hipSuccess);
}
API(hipGraphReleaseUserObject)(hipGraph_t graph, hipUserObject_t object, unsigned count) {
    ENTER();
    REQUIRE(object && count && graph_is_valid(graph), hipErrorInvalidValue);
    for (size_t i = 0; i < graph->reference_count; i++) {
        struct reference *r = graph->references + i;
        if (r->object != object || r->count < count) continue;
        r->count -= count;
        if (!r->count) *r = graph->references[--graph->reference_count];
        graph_release(object, count);
        LEAVE(hipSuccess);
    }
    LEAVE(hipErrorInvalidValue);
}

/* SPDX-License-Identifier: BSD-3-Clause */
/* Entry points with which a program builds a graph node by node. */
#include "device.h"
#include <stdlib.h>

API(hipGraphCreate)(hipGraph_t *graph, unsigned flags) {
    CHECKED(graph && !flags, hipErrorInvalidValue,
            (*graph = graph_create()) ? hipSuccess : hipErrorOutOfMemory);
}
API(hipGraphDestroy)(hipGraph_t graph) {
    CHECKED(graph_is_valid(graph), hipErrorInvalidValue, (graph_destroy(graph), hipSuccess));
}
API(hipGraphClone)(hipGraph_t *made, hipGraph_t graph) {
    CHECKED(made && graph_is_valid(graph), hipErrorInvalidValue,
            (*made = graph_clone(graph)) ? hipSuccess : hipErrorOutOfMemory);
}

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
    struct work work = {.kind = WORK_COPY, .copy = {to, 0, from, 0, size, 1, kind, 0, 0, 1}};
    LEAVE(add(node, graph, after, count, work));
}
API(hipGraphAddMemcpyNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                           size_t count, const hipMemcpy3DParms *p) {
    ENTER();
    struct work work;
    hipError_t error = box_work(&work, p);
    LEAVE(error ? error : add(node, graph, after, count, work));
}
API(hipGraphAddMemsetNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                           size_t count, const hipMemsetParams *p) {
    ENTER();
    REQUIRE(p && (p->elementSize == 1 || p->elementSize == 2 || p->elementSize == 4),
            hipErrorInvalidValue);
    REQUIRE(p->height <= 1 || p->width <= p->pitch / p->elementSize, hipErrorInvalidValue);
    struct work work = {
        .kind = WORK_FILL,
        .fill = {p->dst, p->pitch, p->value, p->elementSize, p->width, p->height, 0, 1}};
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
API(hipGraphAddEventRecordNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                                size_t count, hipEvent_t event) {
    ENTER();
    LEAVE(add(node, graph, after, count, (struct work){.kind = WORK_RECORD, .event = event}));
}
API(hipGraphAddEventWaitNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                              size_t count, hipEvent_t event) {
    /* A recorded event has always happened, so the wait is an empty node. */
    return hipGraphAddEmptyNode(node, graph, after, count);
}
API(hipGraphAddChildGraphNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                               size_t count, hipGraph_t child) {
    ENTER();
    REQUIRE(graph_is_valid(child) && graph_sort(child), hipErrorInvalidValue);
    hipGraph_t copy = graph_clone(child);
    REQUIRE(copy, hipErrorOutOfMemory);
    LEAVE(add(node, graph, after, count, (struct work){.kind = WORK_GRAPH, .graph = copy}));
}
/* The address is reserved when the node is added. Memory is allocated at the address each time that
   a launch of the graph executes the node. */
API(hipGraphAddMemAllocNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                             size_t count, hipMemAllocNodeParams *p) {
    ENTER();
    REQUIRE(p && p->bytesize && device_exists(p->poolProps.location.id), hipErrorInvalidValue);
    hipError_t error = region_make(&p->dptr, p->bytesize);
    REQUIRE(!error, error);
    struct work work = {.kind = WORK_ALLOCATE, .memory = {p->dptr, p->bytesize}};
    LEAVE(add(node, graph, after, count, work));
}
API(hipGraphAddMemFreeNode)(hipGraphNode_t *node, hipGraph_t graph, const hipGraphNode_t *after,
                            size_t count, void *p) {
    CHECKED(pool_find(p), hipErrorInvalidValue,
            add(node, graph, after, count, (struct work){.kind = WORK_FREE, .memory = {p, 0}}));
}
API(hipGraphAddDependencies)(hipGraph_t graph, const hipGraphNode_t *from, const hipGraphNode_t *to,
                             size_t count) {
    ENTER();
    REQUIRE(graph_is_valid(graph) && (!count || (from && to)), hipErrorInvalidValue);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(graph_index(graph, from[i]) < graph->count &&
                    graph_index(graph, to[i]) < graph->count,
                hipErrorInvalidValue);
        REQUIRE(graph_depend(to[i], from[i]), hipErrorOutOfMemory);
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
    *p = (hipKernelNodeParams){.func = function,
                               .gridDim = {r->grid[0], r->grid[1], r->grid[2]},
                               .blockDim = {r->block[0], r->block[1], r->block[2]},
                               .sharedMemBytes = r->lds,
                               .kernelParams = node->values};
    LEAVE(hipSuccess);
}
hipError_t graph_set_kernel(hipGraphNode_t node, const hipKernelNodeParams *p) {
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
    LEAVE(graph_of(node) ? graph_set_kernel(node, p) : hipErrorInvalidValue);
}

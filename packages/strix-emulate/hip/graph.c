/* SPDX-License-Identifier: BSD-3-Clause */
/* The data structure of graphs: nodes with their work and their dependencies, and the user objects
   that a graph keeps alive. The work of a node may itself be a graph, so the functions that copy
   and free work are in this file too. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

static hipGraph_t graphs;

bool graph_is_valid(hipGraph_t graph) { return graph && FIND(graphs, it == graph); }

hipGraph_t graph_of(hipGraphNode_t node) {
    for (hipGraph_t g = graphs; node && g; g = g->next)
        for (size_t i = 0; i < g->count; i++)
            if (g->nodes[i] == node) return g;
    return NULL;
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

bool graph_depend(hipGraphNode_t node, hipGraphNode_t on) {
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
    for (size_t i = 0; right && i < count; i++) right = graph_depend(made, dependencies[i]);
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

bool work_copy(struct work *to, const struct work *from) {
    *to = *from;
    if (from->kind == WORK_GRAPH) return (to->graph = graph_clone(from->graph)) != NULL;
    if (from->kind == WORK_ALLOCATE) return region_use(from->memory.address);
    if (from->kind != WORK_KERNEL) return true;
    size_t size = from->kernel.function->facts.kernarg + 1u;
    to->kernel.arguments = malloc(size);
    return to->kernel.arguments && memcpy(to->kernel.arguments, from->kernel.arguments, size);
}

void work_free(struct work *w) {
    if (w->kind == WORK_KERNEL) free(w->kernel.arguments);
    if (w->kind == WORK_GRAPH) graph_destroy(w->graph);
    if (w->kind == WORK_ALLOCATE) region_drop(w->memory.address);
    w->kind = WORK_NOTHING;
}

void graph_drop_node(hipGraphNode_t node) {
    work_free(&node->work);
    free(node->values), free(node->dependencies), free(node);
}

void graph_release(hipUserObject_t object, unsigned count) {
    object->count -= count < object->count ? count : object->count;
    if (object->count) return;
    object->destroy(object->data);
    free(object);
}

bool graph_retain(hipGraph_t graph, hipUserObject_t object, unsigned count) {
    size_t size = (graph->reference_count + 1) * sizeof *graph->references;
    struct reference *more = realloc(graph->references, size);
    if (!more) return false;
    graph->references = more;
    more[graph->reference_count++] = (struct reference){object, count};
    return true;
}

void graph_destroy(hipGraph_t graph) {
    hipGraph_t *at = PLACE(graphs, it == graph);
    if (*at) *at = graph->next;
    for (size_t i = 0; i < graph->count; i++) graph_drop_node(graph->nodes[i]);
    for (size_t i = 0; i < graph->reference_count; i++)
        graph_release(graph->references[i].object, graph->references[i].count);
    free(graph->nodes), free(graph->references), free(graph);
}

size_t graph_index(hipGraph_t graph, hipGraphNode_t node) {
    size_t i = 0;
    while (i < graph->count && graph->nodes[i] != node) i++;
    return i;
}

bool graph_sort(hipGraph_t graph) {
    hipGraphNode_t *sorted = calloc(graph->count + 1, sizeof *sorted);
    bool *done = calloc(graph->count + 1, 1);
    size_t count = 0;
    for (bool found = sorted && done; found && count < graph->count;) {
        found = false;
        for (size_t i = 0; i < graph->count; i++) {
            hipGraphNode_t node = graph->nodes[i];
            bool ready = !done[i];
            for (size_t k = 0; ready && k < node->dependency_count; k++)
                ready = done[graph_index(graph, node->dependencies[k])];
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
            graph_depend(made->nodes[i],
                         made->nodes[graph_index(graph, graph->nodes[i]->dependencies[k])]);
    return made;
}

// SPDX-License-Identifier: BSD-3-Clause
// Graphs that are updated from other graphs, and that allocate and free memory. Exits with 0 if all numbers
// are right.
#include "hip.h"

extern "C" {
hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t *, hipGraph_t, unsigned long long);
hipError_t hipGraphExecUpdate(hipGraphExec_t, hipGraph_t, hipGraphNode_t *, int *);
hipError_t hipGraphAddMemAllocNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t,
                                   hipMemAllocNodeParams *);
hipError_t hipGraphAddMemFreeNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t, void *);
hipError_t hipGraphMemFreeNodeGetParams(hipGraphNode_t, void *);
hipError_t hipDeviceGetGraphMemAttribute(int, int, void *);
}
enum { N = 40, BYTES = 4 * N };

__global__ void add(int *data, int more) { data[__builtin_amdgcn_workitem_id_x()] += more; }
__global__ void move(int *to, const int *from) {
    to[__builtin_amdgcn_workitem_id_x()] = from[__builtin_amdgcn_workitem_id_x()];
}

/* Capture `kernels` launches of `add`, after a fill. If `kernels` is negative, the fill is left out. */
static hipGraph_t captured(hipStream_t stream, int *data, int more, int kernels) {
    hipGraph_t graph = NULL;
    if (hipStreamBeginCapture(stream, 0)) return NULL;
    if (kernels >= 0) hipMemsetAsync(data, 0, BYTES, stream);
    for (int i = 0; i < kernels || i < -kernels; i++) add<<<1, N, 0, stream>>>(data, more);
    return hipStreamEndCapture(stream, &graph) ? NULL : graph;
}

static int updated(hipStream_t stream, int *data) {
    hipGraphNode_t wrong;
    hipGraphExec_t ready;
    int host[N], reason;
    hipGraph_t one = captured(stream, data, 3, 1), two = captured(stream, data, 50, 1);
    CHECK(hipGraphInstantiate(&ready, one, NULL, NULL, 0));
    CHECK(hipGraphExecUpdate(ready, two, &wrong, &reason));
    CHECK(hipGraphDestroy(two));
    CHECK(hipGraphLaunch(ready, stream));
    CHECK(hipMemcpy(host, data, BYTES, TO_HOST));
    if (host[5] != 50 || reason || wrong) return printf("updated %d\n", host[5]), 1;
    hipGraph_t more = captured(stream, data, 1, 2), other = captured(stream, data, 1, -2);
    const char *name = NAME(hipGraphExecUpdate(ready, more, &wrong, &reason));
    printf("more nodes: %s %d\n", name, reason);
    name = NAME(hipGraphExecUpdate(ready, other, &wrong, &reason));
    printf("another kind: %s %d\n", name, reason);
    CHECK(hipGraphLaunch(ready, stream));
    CHECK(hipMemcpy(host, data, BYTES, TO_HOST));
    return host[5] != 50 || !wrong;
}

static size_t used(int attribute) {
    size_t value = 0;
    return hipDeviceGetGraphMemAttribute(0, attribute, &value) ? (size_t)-1 : value;
}

static int allocated(hipStream_t stream, int *data) {
    hipMemPoolProps pool = {hipMemAllocationTypePinned, {}, {hipMemLocationTypeDevice, 0}, NULL, 0, {0}};
    hipMemAllocNodeParams p = {pool, NULL, 0, BYTES, NULL};
    hipGraphNode_t take, give;
    hipGraphExec_t ready;
    hipGraph_t graph;
    int *inside, host[N];
    void *freed;
    /* This graph is captured from a stream. Its memory exists while the graph runs. */
    CHECK(hipStreamBeginCapture(stream, 0));
    CHECK(hipMallocAsync((void **)&inside, BYTES, stream));
    CHECK(hipMemsetAsync(inside, 0, BYTES, stream));
    add<<<1, N, 0, stream>>>(inside, 9);
    move<<<1, N, 0, stream>>>(data, inside);
    CHECK(hipFreeAsync(inside, stream));
    CHECK(hipStreamEndCapture(stream, &graph));
    printf("before the launch: %s\n", NAME(hipMemset(inside, 0, BYTES)));
    CHECK(hipGraphInstantiate(&ready, graph, NULL, NULL, 0));
    CHECK(hipGraphDestroy(graph));
    for (int i = 0; i < 2; i++) CHECK(hipGraphLaunch(ready, stream));
    CHECK(hipMemcpy(host, data, BYTES, TO_HOST));
    if (host[7] != 9 || used(0) != 0 || used(1) != BYTES) return printf("inside %d, %zu\n", host[7], used(1)), 1;
    CHECK(hipGraphExecDestroy(ready));
    if (used(2)) return printf("kept %zu\n", used(2)), 1;

    /* This graph is built node by node. Its memory is freed outside the graph. */
    CHECK(hipGraphCreate(&graph, 0));
    CHECK(hipGraphAddMemAllocNode(&take, graph, NULL, 0, &p));
    CHECK(hipGraphInstantiate(&ready, graph, NULL, NULL, 0));
    CHECK(hipGraphLaunch(ready, stream));
    CHECK(hipMemset(p.dptr, 1, BYTES));
    printf("not freed: %s\n", NAME(hipGraphLaunch(ready, stream)));
    CHECK(hipFree(p.dptr));
    CHECK(hipGraphLaunch(ready, stream));
    CHECK(hipGraphExecDestroy(ready));
    /* 1 is AutoFreeOnLaunch: a launch frees the memory of the previous launch */
    CHECK(hipGraphInstantiateWithFlags(&ready, graph, 1));
    for (int i = 0; i < 2; i++) CHECK(hipGraphLaunch(ready, stream));
    CHECK(hipGraphExecDestroy(ready));
    CHECK(hipGraphAddMemFreeNode(&give, graph, &take, 1, p.dptr));
    CHECK(hipGraphMemFreeNodeGetParams(give, &freed));
    CHECK(hipGraphInstantiateWithFlags(&ready, graph, 1));
    CHECK(hipGraphLaunch(ready, stream));
    if (freed != p.dptr || used(0)) return printf("freed %zu\n", used(0)), 1;
    add<<<1, N>>>((int *)p.dptr, 1);
    printf("behind its free: %s\n", NAME(hipDeviceSynchronize()));
    return 0;
}

int main() {
    hipStream_t stream;
    int *data;
    CHECK(hipStreamCreate(&stream));
    CHECK(hipMalloc((void **)&data, BYTES));
    return updated(stream, data) || allocated(stream, data);
}

// SPDX-License-Identifier: BSD-3-Clause
// Capture two streams as one graph (kernels, a copy, a fill, a host call) and launch it three times; build a
// graph node by node; make calls that a capture forbids. Exits with 0 if all numbers are right.
#include "hip.h"

extern "C" {
hipError_t hipStreamIsCapturing(hipStream_t, int *);
hipError_t hipLaunchHostFunc(hipStream_t, void (*)(void *), void *);
hipError_t hipGraphGetNodes(hipGraph_t, hipGraphNode_t *, size_t *);
hipError_t hipGraphNodeGetDependencies(hipGraphNode_t, hipGraphNode_t *, size_t *);
hipError_t hipGraphAddKernelNode(hipGraphNode_t *, hipGraph_t, const hipGraphNode_t *, size_t,
                                 const hipKernelNodeParams *);
hipError_t hipGraphAddDependencies(hipGraph_t, const hipGraphNode_t *, const hipGraphNode_t *, size_t);
hipError_t hipGraphExecKernelNodeSetParams(hipGraphExec_t, hipGraphNode_t, const hipKernelNodeParams *);
hipError_t hipUserObjectCreate(hipUserObject_t *, void *, void (*)(void *), unsigned, unsigned);
hipError_t hipGraphRetainUserObject(hipGraph_t, hipUserObject_t, unsigned, unsigned);
}

__global__ void add(int *data, int more) { data[__builtin_amdgcn_workitem_id_x()] += more; }
__global__ void twice(int *data) { data[__builtin_amdgcn_workitem_id_x()] *= 2; }

static int calls, ended;
static void count(void *) { calls++; }
static void end(void *data) { ended += *(int *)data; }

int main() {
    enum { N = 40 };
    int *a, *b, host[N], status, seven = 7;
    hipStream_t first, second;
    hipEvent_t fork, join;
    hipGraph_t graph, built;
    hipGraphExec_t ready;
    CHECK(hipMalloc((void **)&a, sizeof host));
    CHECK(hipMalloc((void **)&b, sizeof host));
    CHECK(hipMemset(a, 0, sizeof host));
    CHECK(hipStreamCreate(&first));
    CHECK(hipStreamCreate(&second));
    CHECK(hipEventCreate(&fork));
    CHECK(hipEventCreate(&join));

    CHECK(hipStreamBeginCapture(first, 0));
    add<<<1, N, 0, first>>>(a, 1);
    CHECK(hipEventRecord(fork, first));
    CHECK(hipStreamWaitEvent(second, fork, 0));
    CHECK(hipMemsetAsync(b, 0, sizeof host, second));
    add<<<1, N, 0, second>>>(b, 10);
    CHECK(hipStreamIsCapturing(second, &status));
    CHECK(hipEventRecord(join, second));
    CHECK(hipLaunchHostFunc(first, count, NULL));
    CHECK(hipStreamWaitEvent(first, join, 0));
    twice<<<1, N, 0, first>>>(b);
    CHECK(hipMemcpyAsync(host, b, sizeof host, TO_HOST, first));
    CHECK(hipStreamEndCapture(first, &graph));
    size_t nodes = 0, before = 0;
    CHECK(hipGraphGetNodes(graph, NULL, &nodes));
    hipGraphNode_t list[6];
    CHECK(hipGraphGetNodes(graph, list, &nodes));
    CHECK(hipGraphNodeGetDependencies(list[4], NULL, &before));
    if (status != 1 || nodes != 6 || before != 2 || calls) return printf("capture %d\n", status), 1;
    CHECK(hipMemcpy(host, a, sizeof host, TO_HOST));
    if (host[3]) return printf("done during the capture: %d\n", host[3]), 1;

    hipUserObject_t object;
    CHECK(hipUserObjectCreate(&object, &seven, end, 1, 0));
    CHECK(hipGraphRetainUserObject(graph, object, 1, 1));
    CHECK(hipGraphInstantiate(&ready, graph, NULL, NULL, 0));
    CHECK(hipGraphDestroy(graph));
    for (int i = 0; i < 3; i++) CHECK(hipGraphLaunch(ready, second));
    CHECK(hipStreamSynchronize(second));
    if (host[N - 1] != 20 || calls != 3 || ended) return printf("launched %d\n", host[N - 1]), 1;
    CHECK(hipMemcpy(host, a, sizeof host, TO_HOST));
    if (host[0] != 3 || host[N - 1] != 3) return printf("three times: %d\n", host[0]), 1;
    CHECK(hipGraphExecDestroy(ready));
    if (ended != 7) return printf("kept alive: %d\n", ended), 1;

    /* The result is (3 + 5) * 2, although the nodes were added in reverse order. */
    int more = 5;
    void *one[] = {&a}, *two[] = {&a, &more};
    hipKernelNodeParams last = {{N, 1, 1}, NULL, (void *)twice, {1, 1, 1}, one, 0};
    hipKernelNodeParams begin = {{N, 1, 1}, NULL, (void *)add, {1, 1, 1}, two, 0};
    hipGraphNode_t from, to;
    CHECK(hipGraphCreate(&built, 0));
    CHECK(hipGraphAddKernelNode(&to, built, NULL, 0, &last));
    CHECK(hipGraphAddKernelNode(&from, built, NULL, 0, &begin));
    CHECK(hipGraphAddDependencies(built, &from, &to, 1));
    CHECK(hipGraphInstantiate(&ready, built, NULL, NULL, 0));
    CHECK(hipGraphLaunch(ready, NULL));
    more = 100;
    CHECK(hipGraphExecKernelNodeSetParams(ready, from, &begin));
    CHECK(hipGraphLaunch(ready, NULL));
    CHECK(hipMemcpy(host, a, sizeof host, TO_HOST));
    if (host[1] != ((3 + 5) * 2 + 100) * 2) return printf("in order: %d\n", host[1]), 1;
    CHECK(hipGraphAddDependencies(built, &to, &from, 1));
    printf("circle: %s\n", hipGetErrorName(hipGraphInstantiate(&ready, built, NULL, NULL, 0)));

    hipStream_t lost;
    CHECK(hipStreamCreate(&lost));
    CHECK(hipStreamBeginCapture(first, 0));
    CHECK(hipEventRecord(fork, first));
    CHECK(hipStreamWaitEvent(lost, fork, 0));
    add<<<1, N, 0, lost>>>(a, 1);
    CHECK(hipEventRecord(join, lost));
    CHECK(hipStreamWaitEvent(first, join, 0));
    CHECK(hipStreamDestroy(lost));
    printf("destroyed: %s\n", hipGetErrorName(hipStreamEndCapture(first, &graph)));
    CHECK(hipGraphGetNodes(graph, NULL, &nodes));
    if (nodes != 1) return printf("%zu nodes of the destroyed stream\n", nodes), 1;

    CHECK(hipStreamBeginCapture(first, 0));
    add<<<1, N, 0, first>>>(a, 1);
    printf("synchronised: %s\n", hipGetErrorName(hipStreamSynchronize(first)));
    printf("then: %s\n", hipGetErrorName(hipStreamEndCapture(first, &graph)));
    CHECK(hipStreamBeginCapture(first, 0));
    CHECK(hipEventRecord(fork, first));
    CHECK(hipStreamWaitEvent(second, fork, 0));
    add<<<1, N, 0, second>>>(a, 1);
    printf("other stream: %s\n", hipGetErrorName(hipStreamEndCapture(second, &graph)));
    printf("not joined: %s\n", hipGetErrorName(hipStreamEndCapture(first, &graph)));
    printf("no capture: %s\n", hipGetErrorName(hipStreamEndCapture(first, &graph)));
    CHECK(hipDeviceSynchronize());
    return 0;
}

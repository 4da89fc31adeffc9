// SPDX-License-Identifier: BSD-3-Clause
// A typical HIP program: kernels in the same file, launches by <<<>>>, shared memory, atomics, device
// variables, streams and events. Exits with 0 if all numbers are right.
#include "hip.h"

__device__ int table[4] = {1, 10, 100, 1000};
__device__ int launches;

__device__ int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }
__device__ int group_index() { return (int)__builtin_amdgcn_workgroup_id_x(); }

__global__ void add(const float *a, const float *b, float *c, int n) {
    int i = group_index() * 256 + thread_index();
    if (i < n) c[i] = a[i] + b[i];
    if (i == 0) launches++;
}

template <int T> __global__ void sum(const float *a, float *out, int n) {
    __shared__ float part[T];
    int t = thread_index(), i = group_index() * T + t;
    part[t] = i < n ? a[i] : 0.0f;
    for (int k = T / 2; k; k >>= 1) {
        meet();
        if (t < k) part[t] += part[t + k];
    }
    if (t == 0) __hip_atomic_fetch_add(out, part[0], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

__global__ void look_up(int *out) { out[thread_index()] = table[thread_index() & 3]; }

int main() {
    enum { N = 5000 };
    static float a[N], b[N], c[N];
    double expected = 0;
    for (int i = 0; i < N; i++) a[i] = (float)i, b[i] = (float)(2 * i), expected += 3.0 * i;
    float *da, *db, *dc, *total;
    int *results;
    CHECK(hipMalloc((void **)&da, sizeof a));
    CHECK(hipMalloc((void **)&db, sizeof a));
    CHECK(hipMalloc((void **)&dc, sizeof a));
    CHECK(hipMalloc((void **)&total, 4));
    CHECK(hipMalloc((void **)&results, 16));
    hipStream_t stream;
    hipEvent_t start, stop;
    CHECK(hipStreamCreate(&stream));
    CHECK(hipEventCreate(&start));
    CHECK(hipEventCreate(&stop));
    CHECK(hipMemcpyAsync(da, a, sizeof a, TO_DEVICE, stream));
    CHECK(hipMemcpy(db, b, sizeof b, TO_DEVICE));
    CHECK(hipMemset(total, 0, 4));
    CHECK(hipEventRecord(start, stream));
    add<<<(N + 255) / 256, 256, 0, stream>>>(da, db, dc, N);
    CHECK(hipGetLastError());
    sum<128><<<(N + 127) / 128, 128, 0, stream>>>(dc, total, N);
    CHECK(hipEventRecord(stop, stream));
    CHECK(hipStreamSynchronize(stream));
    int replaced = 7, words[4], times;
    float total_sum, milliseconds;
    size_t size;
    CHECK(hipGetSymbolSize(&size, table));
    CHECK(hipMemcpyToSymbol(table, &replaced, 4, 8, TO_DEVICE));
    look_up<<<1, 4>>>(results);
    CHECK(hipMemcpy(c, dc, sizeof c, TO_HOST));
    CHECK(hipMemcpy(&total_sum, total, 4, TO_HOST));
    CHECK(hipMemcpy(words, results, 16, TO_HOST));
    CHECK(hipMemcpyFromSymbol(&times, &launches, 4, 0, TO_HOST));
    CHECK(hipEventElapsedTime(&milliseconds, start, stop));
    for (int i = 0; i < N; i++)
        if (c[i] != 3.0f * (float)i) return printf("c[%d] is %g\n", i, c[i]), 1;
    double error = total_sum / expected - 1;
    printf("sum %g, table %d %d %d %d of %zu bytes, launches %d\n", total_sum, words[0], words[1],
           words[2], words[3], size, times);
    if (error > 1e-5 || error < -1e-5 || words[0] != 1 || words[2] != 7 || words[3] != 1000) return 1;
    if (size != 16 || times != 1 || !(milliseconds > 0)) return 1;
    CHECK(hipFree(da));
    CHECK(hipStreamDestroy(stream));
    return 0;
}

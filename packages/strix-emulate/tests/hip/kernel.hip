// SPDX-License-Identifier: BSD-3-Clause
// Features that kernels need of a device: a stack for recursion and function pointers, clocks, a grid barrier
// in a launch that is not cooperative, managed variables, abort(), freed memory, padding of LDS, and a heap that
// does not fit. The argument names the feature. Exits with 0 if the result is right.
#include "hip.h"
#include <string.h>

extern "C" {
hipError_t hipDeviceSetLimit(int, size_t);
hipError_t hipDeviceGetLimit(size_t *, int);
}
__device__ int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }

/* Returns 1 + 2 + ... + n. The numbers are on the stack. */
__device__ __attribute__((noinline)) int sum(int n) {
    volatile int here[12];
    here[n % 12] = n;
    return n ? sum(n - 1) + here[n % 12] : 0;
}
__device__ __attribute__((noinline)) int twice(int x) { return 2 * x; }
__device__ __attribute__((noinline)) int square(int x) { return x * x; }
__device__ int (*volatile functions[])(int) = {sum, twice, square};

__global__ void recursion(int *out, int n) { out[thread_index()] = sum(n + thread_index()); }
__global__ void pointers(int *out) { out[thread_index()] = functions[thread_index() % 3](thread_index()); }

__global__ void clocks(long *out) {
    long start = __builtin_readsteadycounter(), cycles = __builtin_readcyclecounter();
    while (__builtin_readsteadycounter() - start < 1000) {}
    out[0] = __builtin_readsteadycounter() - start;
    out[1] = __builtin_readcyclecounter() - cycles;
}

__global__ void grid() { __builtin_amdgcn_ds_gws_barrier(0, 0); }

/* A variable of both host and device. */
__attribute__((managed)) int shared_by_both[4] = {1, 2, 3, 4};
__global__ void add_one() { shared_by_both[thread_index()] += 1; }

__global__ void check(const int *in) {
    if (in[thread_index()] == 5) __builtin_trap();
}

/* Finds the heap of malloc as the device libraries do (code object V5). */
__global__ void heap(int *out) {
    char *implicit = (char *)__builtin_amdgcn_implicitarg_ptr();
    long *heap_fields = *(long **)(implicit + 96);
    out[0] = (int)heap_fields[5];
}

// As in a scan over padded LDS, the last lane reads a word that nothing wrote, but does not use the word.
__global__ void padding(int *out) {
    __shared__ volatile int room[33];
    int t = __builtin_amdgcn_workitem_id_x();
    room[t] = t;
    int own = room[t], next = room[t + 1];
    out[t] = t < 31 ? own + next : own;
}

int main(int, char **names) {
    int out[512];
    long times[2], *when;
    int *data, *result;
    size_t limit;
    const char *feature = names[1];
    CHECK(hipMalloc((void **)&data, sizeof out));
    CHECK(hipMalloc((void **)&result, sizeof out));
    if (!strcmp(feature, "stack")) {
        CHECK(hipDeviceGetLimit(&limit, 0));
        printf("stack %zu\n", limit);
        CHECK(hipDeviceSetLimit(0, 8192));
        recursion<<<1, 32>>>(result, 20);
        CHECK(hipMemcpy(out, result, 128, TO_HOST));
        for (int i = 0; i < 32; i++)
            if (out[i] != (20 + i) * (21 + i) / 2) return printf("sum %d\n", out[i]), 1;
        pointers<<<1, 32>>>(result);
        CHECK(hipMemcpy(out, result, 128, TO_HOST));
        if (out[6] != 21 || out[7] != 14 || out[8] != 64) return printf("called %d\n", out[6]), 1;
        CHECK(hipDeviceSetLimit(0, 1024));
        recursion<<<1, 32>>>(result, 20);
        printf("too small: %s\n", hipGetErrorName(hipDeviceSynchronize()));
    } else if (!strcmp(feature, "clocks")) {
        CHECK(hipMalloc((void **)&when, 16));
        clocks<<<1, 1>>>(when);
        CHECK(hipMemcpy(times, when, 16, TO_HOST));
        return times[0] < 1000 || times[1] <= 0;
    } else if (!strcmp(feature, "grid")) {
        grid<<<6, 64>>>();
        printf("not cooperative: %s\n", hipGetErrorName(hipDeviceSynchronize()));
    } else if (!strcmp(feature, "freed")) {
        CHECK(hipFree(result));
        CHECK(hipMalloc((void **)&data, sizeof out));
        check<<<1, 32>>>(result);
        printf("freed: %s\n", hipGetErrorName(hipDeviceSynchronize()));
    } else if (!strcmp(feature, "padding")) {
        padding<<<1, 32>>>(result);
        hipError_t error = hipMemcpy(out, result, 128, TO_HOST);
        if (error) return printf("padding: %s\n", hipGetErrorName(error)), 0;
        return out[0] != 1 || out[30] != 61 || out[31] != 31;
    } else if (!strcmp(feature, "managed")) {
        shared_by_both[1] = 20;
        add_one<<<1, 4>>>();
        CHECK(hipDeviceSynchronize());
        return shared_by_both[1] != 21 || shared_by_both[3] != 5;
    } else if (!strcmp(feature, "abort")) {
        CHECK(hipMemset(data, 0, 128));
        check<<<1, 32>>>(data);
        CHECK(hipDeviceSynchronize());
        CHECK(hipMemset(data + 3, 5, 1));
        check<<<1, 32>>>(data);
        printf("aborted: %s\n", hipGetErrorName(hipDeviceSynchronize()));
    } else {
        CHECK(hipDeviceSetLimit(2, (size_t)1 << 40));
        heap<<<1, 1>>>(result);
        printf("heap: %s\n", hipGetErrorName(hipDeviceSynchronize()));
    }
    return 0;
}

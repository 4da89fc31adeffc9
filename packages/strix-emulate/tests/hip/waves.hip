// SPDX-License-Identifier: BSD-3-Clause
// What waves may do: end before a barrier that others reach, address shared memory downwards, sign-
// extend a scalar of 64 bits. Exits 0 if all numbers are right.
#include "hip.h"

__device__ int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }

// One wave after the other ends, as in a forward substitution; those that live go on together.
__global__ void staircase(int *out) {
    __shared__ int sum;
    int t = thread_index();
    if (t == 0) sum = 0;
    meet();
    for (int i = 0; i < 4; i++) {
        if (t / 32 == i) {
            int next = sum + i + 1;
            if (t % 32 == 0) sum = next;
            out[t] = next;
            return;
        }
        meet();
    }
}

__global__ void reverse(const int *in, int *out) {
    __shared__ int s[64];
    int t = thread_index();
    s[t] = in[t];
    meet();
    out[t] = s[63 - t];
}

__global__ void extend(long a, long b, long c, long *out) {
    out[0] = (signed char)a;
    out[1] = (short)b;
    out[2] = (short)c + a;
}

int main() {
    int *numbers, *sums, *reversed;
    long *wide;
    CHECK(hipMalloc((void **)&numbers, 64 * 4));
    CHECK(hipMalloc((void **)&sums, 128 * 4));
    CHECK(hipMalloc((void **)&reversed, 64 * 4));
    CHECK(hipMalloc((void **)&wide, 3 * 8));
    int host[64], found[128], back[64];
    long got[3], wanted[3] = {-112, 0x5678, 0x1234567890 - 1};
    for (int i = 0; i < 64; i++) host[i] = 3 * i;
    CHECK(hipMemcpy(numbers, host, sizeof host, TO_DEVICE));
    staircase<<<1, 128>>>(sums);
    reverse<<<1, 64>>>(numbers, reversed);
    extend<<<1, 1>>>(0x1234567890, 0x12345678, 0xFFFF, wide);
    CHECK(hipDeviceSynchronize());
    CHECK(hipMemcpy(found, sums, sizeof found, TO_HOST));
    CHECK(hipMemcpy(back, reversed, sizeof back, TO_HOST));
    CHECK(hipMemcpy(got, wide, sizeof got, TO_HOST));
    int sum = 0;
    for (int i = 0; i < 128; i++) {
        if (i % 32 == 0) sum += i / 32 + 1;
        if (found[i] != sum) return printf("sum of %d: %d\n", i, found[i]), 1;
    }
    for (int i = 0; i < 64; i++)
        if (back[i] != 3 * (63 - i)) return printf("reversed %d: %d\n", i, back[i]), 1;
    for (int i = 0; i < 3; i++)
        if (got[i] != wanted[i]) return printf("extended %d: %ld\n", i, got[i]), 1;
    printf("right\n");
    return 0;
}

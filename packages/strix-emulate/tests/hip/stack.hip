// SPDX-License-Identifier: BSD-3-Clause
// Lanes that leave their stack by an index, by recursion, by a pointer, or by an array of variable length.
#include "hip.h"
#define KERNEL extern "C" __global__ void
#define LANE __builtin_amdgcn_workitem_id_x()

// data[1] is the index, the length or the depth of recursion. Word 32 + lane gets the result.
KERNEL by_index(int *data) {
    volatile int values[16];
    for (int i = 0; i < 16; i++) values[i] = i;
    values[data[1]] = 7;
    data[32 + LANE] = values[data[1]];
}
KERNEL by_negative_index(int *data) {
    volatile int values[16];
    for (int i = 0; i < 16; i++) values[i] = i;
    data[32 + LANE] = values[15 - data[1]];
}
static __device__ __attribute__((noinline)) int chain(int n) {
    volatile int values[4] = {n, 0, 0, 0};
    const int below = n ? chain(n - 1) : 0;
    return below + (values[0] != 0);
}
KERNEL by_recursion(int *data) { data[32 + LANE] = chain(data[1]); }
KERNEL by_pointer(int *data) {
    volatile int values[16];
    for (int i = 0; i < 16; i++) values[i] = i;
    volatile int *at = data[2] ? (volatile int *)data : values;
    at[data[1]] = 9;
    data[32 + LANE] = values[data[1] & 15];
}
KERNEL by_length(int *data) {
    const int length = data[1];
    volatile int *values = (volatile int *)__builtin_alloca(4 * (length + 1));
    for (int i = 0; i <= length; i++) values[i] = i;
    data[32 + LANE] = values[length];
}

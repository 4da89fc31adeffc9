// SPDX-License-Identifier: BSD-3-Clause
// Lanes that leave their stack: by an index, by recursion, by a pointer, by an array of any length.
#include "hip.h"
#define KERNEL extern "C" __global__ void
#define LANE __builtin_amdgcn_workitem_id_x()

// data[1] says how far they go; word 32 + lane gets what they computed.
KERNEL by_index(int *data) {
    volatile int kept[16];
    for (int i = 0; i < 16; i++) kept[i] = i;
    kept[data[1]] = 7;
    data[32 + LANE] = kept[data[1]];
}
KERNEL by_negative_index(int *data) {
    volatile int kept[16];
    for (int i = 0; i < 16; i++) kept[i] = i;
    data[32 + LANE] = kept[15 - data[1]];
}
static __device__ __attribute__((noinline)) int chain(int n) {
    volatile int kept[4] = {n, 0, 0, 0};
    const int below = n ? chain(n - 1) : 0;
    return below + (kept[0] != 0);
}
KERNEL by_recursion(int *data) { data[32 + LANE] = chain(data[1]); }
KERNEL by_pointer(int *data) {
    volatile int kept[16];
    for (int i = 0; i < 16; i++) kept[i] = i;
    volatile int *at = data[2] ? (volatile int *)data : kept;
    at[data[1]] = 9;
    data[32 + LANE] = kept[data[1] & 15];
}
KERNEL by_length(int *data) {
    const int length = data[1];
    volatile int *kept = (volatile int *)__builtin_alloca(4 * (length + 1));
    for (int i = 0; i <= length; i++) kept[i] = i;
    data[32 + LANE] = kept[length];
}

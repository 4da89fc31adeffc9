// SPDX-License-Identifier: BSD-3-Clause
// Compare-and-swap loops that begin with a plain load, and loads that only look like the start of such a loop.
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define KERNEL extern "C" __global__ void
#define LANE __builtin_amdgcn_workitem_id_x()
#define BLOCK __builtin_amdgcn_workgroup_id_x()

template <class T> static __device__ bool swap(T *at, T &old, T next, int scope) {
    return scope == AGENT ? __hip_atomic_compare_exchange_strong(at, &old, next, __ATOMIC_RELAXED,
                                                                 __ATOMIC_RELAXED, AGENT)
                          : __hip_atomic_compare_exchange_strong(at, &old, next, __ATOMIC_RELAXED,
                                                                 __ATOMIC_RELAXED, GROUP);
}
// A loop as programs write it: a plain load, then swaps until one succeeds.
template <class T> static __device__ void add(T *at, T more, int scope = AGENT) {
    T old = *at;
    while (!swap(at, old, (T)(old + more), scope)) {}
}

// Each of these kernels adds 1 per wave to word 32.
KERNEL uniform_word(int *data) { if (!(LANE & 31)) add(data + 32, 1); }
KERNEL uniform_pair(int *data) { if (!(LANE & 31)) add((int64_t *)(data + 32), (int64_t)1); }
KERNEL uniform_float(int *data) {
    if (LANE & 31) return;
    float old = ((float *)data)[33], mine = (float)BLOCK;
    while (old < mine && !swap((float *)data + 33, old, mine, AGENT)) {}
    add(data + 32, 1);
}
KERNEL builtin_double(int *data) {
    if (LANE & 31) return;
    __hip_atomic_fetch_add((double *)(data + 34), 1.0, __ATOMIC_RELAXED, AGENT);
    __hip_atomic_fetch_max((double *)(data + 36), (double)BLOCK, __ATOMIC_RELAXED, AGENT);
    add(data + 32, 1);
}
// The load of the swapped word also reads other words, which another loop swaps or which are constant.
KERNEL two_cells(int *data) {
    if (LANE & 31) return;
    int a = data[32], b = data[33];
    while (!swap(data + 32, a, a + 1, AGENT)) {}
    while (!swap(data + 33, b, b + a, AGENT)) {}
}
KERNEL beside_constant(int *data) {
    if (LANE & 31) return;
    int a = data[32], b = data[33], c = data[34], d = data[35];
    while (!swap(data + 32, a, a + 1 + b + c + d, AGENT)) {}
}
KERNEL folded_offsets(int *data) {
    if (LANE & 31) return;
#pragma unroll
    for (int i = 0; i < 4; i++) add(data + 32 + 4 * i, 1);
}
KERNEL chosen_cell(int *data) {
    if (LANE & 31) return;
    int *at = BLOCK & 1 ? data + 40 : data + 48, old = *at;
    if (BLOCK & 2) old = at[1];
    while (!swap(at, old, old + 1, AGENT)) {}
    add(data + 32, 1);
}
KERNEL each_lane(int *data) {
    add(data + 64 + LANE, 1);
    if (!(LANE & 31)) add(data + 32, 1);
}
KERNEL each_lane_wide(int *data) {
    add((int64_t *)(data + 64) + (LANE & 31), (int64_t)1);
    if (!(LANE & 31)) add(data + 32, 1);
}
// This swap changes 16 bits, in a word of two halves.
KERNEL half_of_a_word(int *data) {
    if (LANE & 31) return;
    __hip_atomic_fetch_add((_Float16 *)data + 67, (_Float16)1, __ATOMIC_RELAXED, AGENT);
    __hip_atomic_fetch_add((unsigned short *)data + 80, 1, __ATOMIC_RELAXED, AGENT);
    add(data + 32, 1);
}
KERNEL in_lds(int *data) {
    __shared__ double sum;
    __shared__ int count[2];
    if (!LANE) sum = 0, count[0] = count[1] = 0;
    meet();
    if (!(LANE & 31)) {
        __hip_atomic_fetch_add(&sum, 1.0, __ATOMIC_RELAXED, GROUP);
        int a = count[0], b = count[1];
        while (!swap(count, a, a + 1, GROUP)) {}
        while (!swap(count + 1, b, b + 1, GROUP)) {}
    }
    meet();
    if (!LANE) add(data + 32, (int)sum == count[0] && count[0] == count[1] ? count[0] : 1000);
}

// Faulty: the loaded value is not the compared one, or another store changes a loaded word.
KERNEL not_compared(int *data) {
    if (LANE & 31) return;
    int loaded = data[32], old = 0;
    while (!swap(data + 32, old, old + 1, AGENT)) {}
    data[64 + 2 * BLOCK + LANE / 32] = loaded;
}
KERNEL other_store(int *data) {
    if (LANE & 31) return;
    add(data + 32, 1);
    data[32] = 5;
}
KERNEL other_word_stored(int *data) {
    if (LANE & 31) return;
    int a = data[32], b = data[33];
    while (!swap(data + 32, a, a + b, AGENT)) {}
    if (BLOCK == 7) data[33] = 1;
}

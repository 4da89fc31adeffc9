// SPDX-License-Identifier: BSD-3-Clause
// Kernels whose waves wait for other waves, of the same or of another workgroup. They use locks, barriers and
// flags. Some of them wait forever.
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define KERNEL extern "C" __global__ void
#define LANE __builtin_amdgcn_workitem_id_x()
#define BLOCK __builtin_amdgcn_workgroup_id_x()
#define BLOCKS ((int)(data[1]))
#define FIRST if (LANE & 31) return
#define LOAD(at) __hip_atomic_load(at, __ATOMIC_ACQUIRE, AGENT)
#define STORE(at, value) __hip_atomic_store(at, value, __ATOMIC_RELEASE, AGENT)
#define ADD(at, value) __hip_atomic_fetch_add(at, value, __ATOMIC_ACQ_REL, AGENT)
#define SWAP(at, value) __hip_atomic_exchange(at, value, __ATOMIC_ACQUIRE, AGENT)
static __device__ bool compare(int *at, int old, int next) {
    return __hip_atomic_compare_exchange_strong(at, &old, next, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED,
                                                AGENT);
}

// Word 0 is the lock. Word 32 counts the waves that held it.
KERNEL compared_lock(int *data) {
    FIRST;
    while (!compare(data, 0, 1)) {}
    data[32]++;
    STORE(data, 0);
}
KERNEL swapped_lock(int *data) {
    FIRST;
    while (SWAP(data, 1)) {}
    data[32]++;
    STORE(data, 0);
}
// Each wave loads the lock before it swaps.
KERNEL polite_lock(int *data) {
    FIRST;
    do {
        while (LOAD(data)) {}
    } while (SWAP(data, 1));
    data[32]++;
    STORE(data, 0);
}
KERNEL ticket_lock(int *data) {
    FIRST;
    const int ticket = ADD(data + 2, 1);
    while (LOAD(data) != ticket) {}
    data[32]++;
    STORE(data, ticket + 1);
}
// A lock for one writer or several readers. Every fourth workgroup is a writer, and the others are readers.
KERNEL reader_lock(int *data) {
    FIRST;
    if ((BLOCK & 3) == 0) {
        while (!compare(data, 0, -1)) {}
        data[33]++;
        STORE(data, 0);
    } else {
        for (;;) {
            const int readers = LOAD(data);
            if (readers >= 0 && compare(data, readers, readers + 1)) break;
        }
        const int written = LOAD(data + 33);
        ADD(data, -1);
        if (written < 0) return;
    }
    ADD(data + 32, 1);
}
// All workgroups meet at a barrier four times.
KERNEL grid_barrier(int *data) {
    FIRST;
    for (int turn = 1; turn <= 4; turn++) {
        data[64 + 64 * (turn & 1) + BLOCK] = turn;
        ADD(data, 1);
        while (LOAD(data) < turn * BLOCKS) {}
        const int other = BLOCK + 1 == BLOCKS ? 0 : BLOCK + 1;
        if (data[64 + 64 * (turn & 1) + other] != turn) return;
    }
    ADD(data + 32, 1);
}
// Each workgroup waits for the previous one. Each has a flag of its own.
KERNEL in_turn(int *data) {
    FIRST;
    while (BLOCK && !LOAD(data + 64 + BLOCK)) {}
    data[32]++;
    STORE(data + 65 + BLOCK, 1);
}
KERNEL by_volatile(int *data) {
    FIRST;
    volatile int *flag = data + 64;
    while (BLOCK && !flag[BLOCK]) {}
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    data[32]++;
    STORE(data + 65 + BLOCK, 1);
}
// The loop has a barrier, so that the whole workgroup repeats it.
KERNEL with_barriers(int *data) {
    __shared__ int has_lock;
    for (;;) {
        if (!LANE) has_lock = compare(data, 0, 1);
        meet();
        const int mine = has_lock;
        meet();
        if (mine) break;
    }
    if (!LANE) data[32]++;
    meet();
    if (!LANE) STORE(data, 0);
}
// Each wave adds 1 while it holds a lock in LDS.
KERNEL lock_of_lds(int *data) {
    __shared__ int own[2];
    if (LANE < 2) own[LANE] = 0;
    meet();
    if (!(LANE & 31)) {
        while (__hip_atomic_exchange(own, 1, __ATOMIC_ACQUIRE, GROUP)) {}
        own[1]++;
        __hip_atomic_store(own, 0, __ATOMIC_RELEASE, GROUP);
    }
    meet();
    if (!LANE) ADD(data + 32, own[1]);
}
// No wave sets the flag. The waves count their iterations in a register, in memory or in LDS, and give up.
KERNEL gives_up(int *data) {
    FIRST;
    for (int i = 0; i < 3000 && !LOAD(data); i++) {}
    ADD(data + 32, 1);
}
KERNEL gives_up_by_memory(int *data) {
    FIRST;
    volatile int *turns = data + 64 + BLOCK;
    while (*turns < 500 && !LOAD(data)) *turns = *turns + 1;
    ADD(data + 32, 1);
}
KERNEL gives_up_by_lds(int *data) {
    __shared__ volatile int turns;
    FIRST;
    turns = 0;
    while (turns < 500 && !LOAD(data)) turns = turns + 1;
    ADD(data + 32, 1);
}

// The following kernels wait forever.
KERNEL no_one_writes(int *data) {
    FIRST;
    while (!LOAD(data)) {}
    data[32]++;
}
KERNEL not_given_back(int *data) {
    FIRST;
    while (SWAP(data, 1)) {}
    ADD(data + 32, 1);
}
KERNEL two_locks(int *data) {
    FIRST;
    int *first = data + (BLOCK & 1), *second = data + !(BLOCK & 1);
    while (SWAP(first, 1)) {}
    ADD(data + 33, 1);
    while (LOAD(data + 33) < 2) {}
    while (SWAP(second, 1)) {}
    STORE(second, 0);
    STORE(first, 0);
}
KERNEL waits_at_a_barrier(int *data) {
    if (!LANE)
        while (!LOAD(data)) {}
    meet();
}
KERNEL for_a_later_one(int *data) {
    FIRST;
    while (!LOAD(data + BLOCKS - 1)) {}
    STORE(data + BLOCK, 1);
}

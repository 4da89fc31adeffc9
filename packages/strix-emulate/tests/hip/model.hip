// SPDX-License-Identifier: BSD-3-Clause
// Correct and faulty kernels with locks that a store releases, and with messages from one wave to another.
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define KERNEL extern "C" __global__ void
#define LANE __builtin_amdgcn_workitem_id_x()
#define BLOCK __builtin_amdgcn_workgroup_id_x()
// a barrier for the compiler, which must not move loads across it; it emits no instruction
#define KEEP asm volatile("" ::: "memory")

// Each wave's first lane adds 1 to *sum under the lock.
#define LOCKED(name, scope, take)                                  \
    static __device__ void name(int *lock, int *sum) {             \
        if (LANE & 31) return;                                     \
        take;                                                      \
        *sum += 1;                                                 \
        __hip_atomic_store(lock, 0, __ATOMIC_RELEASE, scope);      \
    }
#define EXCHANGED(scope) \
    while (__hip_atomic_exchange(lock, 1, __ATOMIC_ACQUIRE, scope)) {}
#define COMPARED(scope)                                                                        \
    for (int free = 0; !__hip_atomic_compare_exchange_strong(lock, &free, 1, __ATOMIC_ACQUIRE, \
                                                             __ATOMIC_RELAXED, scope);         \
         free = 0) {}
LOCKED(exchange_far, AGENT, EXCHANGED(AGENT))
LOCKED(exchange_near, GROUP, EXCHANGED(GROUP))
LOCKED(compare_far, AGENT, COMPARED(AGENT))
LOCKED(compare_near, GROUP, COMPARED(GROUP))
LOCKED(nothing_far, AGENT, )

KERNEL exchange_agent(int *data) { exchange_far(data, data + 32); }
KERNEL exchange_workgroup(int *data) { exchange_near(data, data + 32); }
KERNEL compare_agent(int *data) { compare_far(data, data + 32); }
KERNEL compare_workgroup(int *data) { compare_near(data, data + 32); }
KERNEL no_lock(int *data) { nothing_far(data, data + 32); }

template <void take(int *, int *)> static __device__ void in_lds(int *data) {
    __shared__ int own[2];
    if (LANE < 2) own[LANE] = 0;
    meet();
    take(own, own + 1);
    meet();
    if (!LANE) data[32] = own[1];
}
KERNEL exchange_lds(int *data) { in_lds<exchange_near>(data); }
KERNEL compare_lds(int *data) { in_lds<compare_near>(data); }

// Workgroup 0 stores 7, then a flag. Workgroup 1 waits for the flag, loads 7, and stores it in word 32.
#define MESSAGE(name, ...) SENT(name, data[64] = 7, __VA_ARGS__)
#define SENT(name, put, stores, loads, scope, before)                      \
    KERNEL name(int *data) {                                               \
        if (LANE) return;                                                  \
        if (!BLOCK) {                                                      \
            put;                                                           \
            __hip_atomic_store(data, 1, stores, scope);                    \
            return;                                                        \
        }                                                                  \
        before;                                                            \
        while (!__hip_atomic_load(data, loads, scope)) {}                  \
        KEEP;                                                              \
        data[32] = data[64];                                               \
    }
MESSAGE(right, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE, AGENT, )
MESSAGE(no_acquire, __ATOMIC_RELEASE, __ATOMIC_RELAXED, AGENT, )
MESSAGE(relaxed, __ATOMIC_RELAXED, __ATOMIC_RELAXED, AGENT, )
MESSAGE(small_scope, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE, GROUP, )
SENT(an_atomic, __hip_atomic_fetch_add(data + 64, 7, __ATOMIC_RELAXED, AGENT), __ATOMIC_RELEASE,
     __ATOMIC_RELAXED, AGENT, )
// Before workgroup 1 waits, it loads another word of the message's cache line. Its cache may then keep old data.
MESSAGE(old_line, __ATOMIC_RELEASE, __ATOMIC_RELAXED, AGENT, data[33] = data[65]; KEEP)

KERNEL lds_beside_atomics(int *data) {
    __shared__ int count;
    if (!LANE) count = 0;
    meet();
    __hip_atomic_fetch_add(&count, 1, __ATOMIC_RELAXED, GROUP);
    KEEP;
    data[64 + LANE] = count;
}

// A radix top-k: for each digit, two block reductions use the same temporary storage. hipCUB requires a
// barrier between them ("can be reused after __syncthreads()").
static __device__ int block_sum(int *room, int mine) {
    for (int far = 16; far; far /= 2) mine += __builtin_amdgcn_ds_bpermute(4 * (LANE ^ far), mine);
    if (!(LANE & 31)) room[LANE / 32] = mine;
    meet();
    int sum = 0;
    for (unsigned wave = 0; wave < 4; wave++) sum += room[wave];
    return sum;
}
template <bool between> static __device__ void two_sums(int *data) {
    __shared__ int room[4];
    const int first = block_sum(room, 1);
    if (between) meet();
    const int second = block_sum(room, 2);
    if (!LANE) data[32] = 1000 * first + second;
}
KERNEL storage_reused(int *data) { two_sums<false>(data); }
KERNEL storage_reused_behind_a_barrier(int *data) { two_sums<true>(data); }

// Search in the second half of data[64...], as HeCBench's merge does. Without the bound, a thread whose number
// exceeds the whole half reads past the half's end, which is the end of data.
template <bool bounded> static __device__ void merged(int *data) {
    const int length = 96, own = (int)LANE;
    int below = 0;
    while ((!bounded || below < length) && data[64 + length + below] < data[64 + own]) below++;
    data[32] = below;
}
KERNEL search_unbounded(int *data) { merged<false>(data); }
KERNEL search_bounded(int *data) { merged<true>(data); }

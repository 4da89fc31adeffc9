# SPDX-License-Identifier: BSD-3-Clause
"""Measure how much faster C is than numpy, and how much faster all cores are than one core.

usage: python benchmark.py [KEYS]
       python benchmark.py programs

The kernel is the fixtures' attention: causal, head dimension 64, in blocks of 64 queries and 32
keys, with KEYS keys (default: 1024). It has one head for the comparison of C with numpy, and eight
heads for the comparison of all cores with one core. With the argument `programs`, eight small
programs and an empty launch are measured in C alone. Both benchmarks need Triton, and `programs`
also needs clang-22 and lld-22.
"""

import os
import subprocess
import sys
import time

import fixtures
import numpy as np
from strix_emulate import Buffer, Options, launch
from strix_emulate.code import loader
from strix_emulate.code.kernel import Kernel
from strix_emulate.native import library as native

WORDS = 1 << 18
THREADS = 256
GROUPS = 64
#: Each kernel except `empty` reads `in` and writes `out`, two arrays of WORDS floats.
PROGRAMS = """
#define KERNEL(name) extern "C" __attribute__((global)) void name(float *out, const float *in)
#define SHARED static __attribute__((shared)) float
#define MEET __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier(); \\
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")
#define LANE __builtin_amdgcn_workitem_id_x()
#define GROUP __builtin_amdgcn_workgroup_id_x()
#define I (256 * GROUP + LANE)
typedef _Float16 half16 __attribute__((ext_vector_type(16)));
typedef float float8 __attribute__((ext_vector_type(8)));
KERNEL(empty) {}
KERNEL(saxpy) {
    for (unsigned k = I; k < 262144; k += 16384) out[k] += 1.5f * in[k];
}
KERNEL(matmul) {
    SHARED a[16][17], b[16][17];
    unsigned x = LANE % 16, y = LANE / 16, column = GROUP % 8 * 16 + x, row = GROUP / 8 * 16 + y;
    float sum = 0;
    for (unsigned k = 0; k < 128; k += 16) {
        a[y][x] = in[row * 128 + k + x];
        b[y][x] = in[(k + y) * 128 + column];
        MEET;
        for (unsigned i = 0; i < 16; i++) sum += a[y][i] * b[i][x];
        MEET;
    }
    out[row * 128 + column] = sum;
}
KERNEL(reduce) {
    SHARED part[256];
    float sum = 0;
    for (unsigned k = I; k < 262144; k += 16384) sum += in[k];
    part[LANE] = sum;
    for (unsigned n = 128; n; n /= 2) {
        MEET;
        if (LANE < n) part[LANE] += part[LANE + n];
    }
    if (!LANE) out[GROUP] = part[0];
}
KERNEL(histogram) {
    for (unsigned k = I; k < 65536; k += 16384)
        __hip_atomic_fetch_add((unsigned *)out + (unsigned)in[k] % 256, 1u, __ATOMIC_RELAXED,
                               __HIP_MEMORY_SCOPE_AGENT);
}
KERNEL(transcendental) {
    float x = in[I];
    for (unsigned k = 0; k < 32; k++)
        x = __builtin_amdgcn_exp2f(__builtin_amdgcn_sinf(x)) + __builtin_amdgcn_rcpf(x + 2.0f)
            + __builtin_amdgcn_sqrtf(x);
    out[I] = x;
}
KERNEL(wmma) {
    half16 a, b;
    for (unsigned k = 0; k < 16; k++) a[k] = in[LANE % 16 * 16 + k], b[k] = in[LANE % 16 + 16 * k];
    float8 c = {};
    for (unsigned k = 0; k < 64; k++) c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
    for (unsigned k = 0; k < 8; k++) out[8 * I + k] = c[k];
}
KERNEL(branches) {
    unsigned n = (unsigned)in[I] + 1, steps = 0;
    for (; n != 1 && steps < 64; steps++) n = n % 2 ? 3 * n + 1 : n / 2;
    out[I] = steps;
}
KERNEL(scratch) {
    volatile float kept[32];
    for (unsigned k = 0; k < 32; k++) kept[k] = in[I + k];
    float sum = 0;
    for (unsigned k = 0; k < 32; k++) sum += kept[(k * 7 + (unsigned)in[I]) % 32];
    out[I] = sum;
}
"""


def programs() -> None:
    """Print the speed of each kernel in million wave-instructions per CPU second, best of ten.

    For the empty kernel, print the CPU time of a launch in milliseconds.
    """
    command = [
        "clang-22",
        "-xhip",
        "-nogpuinc",
        "-nogpulib",
        "--offload-arch=gfx1151",
        "-O2",
        "-w",
        "--cuda-device-only",
        "--no-gpu-bundle-output",
        "-",
        "-o",
        "-",
    ]
    code_object = subprocess.run(
        command, input=PROGRAMS.encode(), capture_output=True, check=True
    ).stdout
    numbers = np.random.default_rng(0).integers(0, 256, WORDS).astype(np.float32)
    print("program         instructions   without checks   with all")
    for name, kernel in loader.parse_module(code_object, "programs").kernels.items():
        groups, words = (1, 16) if name == "empty" else (GROUPS, WORDS)
        measurements = []
        for checks in (False, True):
            best = (0.0, 0, 0.0)
            for _ in range(10):
                arguments = [Buffer(np.zeros(words, np.float32)), Buffer(numbers[:words], "in")]
                started = time.process_time()
                done = launch(
                    kernel, (groups,), arguments, threads=THREADS, options=Options(checks=checks)
                )
                seconds = time.process_time() - started
                best = max(best, (done.executed / done.seconds / 1e6, done.executed, -seconds))
            measurements.append(best)
        (without, count, took), (with_all, _, took_all) = measurements
        if name == "empty":
            print(f"{name:15} {count:12} {-took * 1e3:11.2f} ms {-took_all * 1e3:9.2f} ms a launch")
        else:
            print(f"{name:15} {count:12} {without:14.2f} {with_all:12.2f}")


def attention_kernel() -> Kernel:
    constants = {"CAUSAL": True, "D": 64, "BM": 64, "BN": 32}
    elf, lds = fixtures.compile_kernel(
        fixtures.attention, fixtures._ATTENTION, constants, num_warps=4
    )
    return loader.parse_elf(elf, "attention", lds)[0]


def main(size: int) -> None:
    kernel = attention_kernel()

    def best(heads: int, **options) -> tuple[float, float, int]:
        """Return the highest speeds of five launches.

        Returns:
            Million wave-instructions per CPU second, million wave-instructions per second of
            wall-clock time, and the number of cores.
        """
        q, k, v = np.random.default_rng(0).standard_normal((3, heads, size, 64)).astype(np.float16)
        speeds = []
        for _ in range(5):
            out = np.zeros_like(q)
            lse = np.zeros(q.shape[:2], np.float32)
            arrays = [Buffer(q), Buffer(k), Buffer(v), Buffer(out, "out"), Buffer(lse, "out")]
            started = time.perf_counter()
            done = launch(
                kernel,
                (-(-size // 64), heads),
                [*arrays, size, 64**-0.5],
                threads=128,
                options=Options(**options),
            )
            seconds = time.perf_counter() - started
            count = done.executed / 1e6
            speeds.append((count / done.seconds, count / seconds, done.cores))
        return max(x[0] for x in speeds), max(x[1] for x in speeds), max(x[2] for x in speeds)

    print(f"{kernel.name}, {size} keys; {native.describe()}")
    print("checks   numpy       C   ratio   (million wave-instructions per CPU second)")
    for checks in (False, True):
        slow, fast = (best(1, checks=checks, native=in_c)[0] for in_c in (False, True))
        print(f"{'all' if checks else 'none':6} {slow:7.2f} {fast:7.2f} {fast / slow:7.1f}")
    print("checks  1 core     all   ratio   (million wave-instructions per second)")
    for checks in (False, True):
        one_core = best(8, checks=checks)[1]
        _, several, cores = best(8, checks=checks, cores=len(os.sched_getaffinity(0)))
        print(
            f"{'all' if checks else 'none':6} {one_core:7.2f} {several:7.2f} "
            f"{several / one_core:7.1f}   on {cores} cores"
        )


if __name__ == "__main__" and sys.argv[1:] == ["programs"]:
    programs()
elif __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)

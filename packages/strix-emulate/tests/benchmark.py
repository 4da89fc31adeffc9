# SPDX-License-Identifier: BSD-3-Clause
"""How fast C is, as a ratio to numpy in one run, and all cores to one: python benchmark.py [KEYS].

Attention of the fixtures, one head of 64 dimensions, causal, in blocks of 64 queries and 32 keys;
on several cores, eight heads.
"""

import os
import sys
import time

import fixtures
import numpy as np
from strix_emulate import Buffer, Options, launch
from strix_emulate.code import loader
from strix_emulate.code.kernel import Kernel
from strix_emulate.native import library as native


def attention_kernel() -> Kernel:
    constants = {"CAUSAL": True, "D": 64, "BM": 64, "BN": 32}
    elf, lds = fixtures.compile_kernel(
        fixtures.attention, fixtures._ATTENTION, constants, num_warps=4
    )
    return loader.parse_elf(elf, "attention", lds)[0]


def main(size: int) -> None:
    kernel = attention_kernel()

    def best(heads: int, **options) -> tuple[float, float, int]:
        """Of five launches: million wave-instructions per CPU second, and per second; cores."""
        q, k, v = np.random.default_rng(0).standard_normal((3, heads, size, 64)).astype(np.float16)
        found = []
        for _ in range(5):
            out, lse = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
            arrays = [Buffer(q), Buffer(k), Buffer(v), Buffer(out, "out"), Buffer(lse, "out")]
            started = time.perf_counter()
            done = launch(
                kernel, (-(-size // 64), heads), [*arrays, size, 64**-0.5], threads=128,
                options=Options(**options),
            )  # fmt: skip
            seconds = time.perf_counter() - started
            count = done.executed / 1e6
            found.append((count / done.seconds, count / seconds, done.cores))
        return max(x[0] for x in found), max(x[1] for x in found), max(x[2] for x in found)

    print(f"{kernel.name}, {size} keys; {native.describe()}")
    print("checks   numpy       C   ratio   (million wave-instructions per CPU second)")
    for checks in (False, True):
        slow, fast = (best(1, checks=checks, native=by_c)[0] for by_c in (False, True))
        print(f"{'all' if checks else 'none':6} {slow:7.2f} {fast:7.2f} {fast / slow:7.1f}")
    print("checks  1 core     all   ratio   (million wave-instructions per second)")
    for checks in (False, True):
        one = best(8, checks=checks)[1]
        _, several, cores = best(8, checks=checks, cores=len(os.sched_getaffinity(0)))
        print(f"{'all' if checks else 'none':6} {one:7.2f} {several:7.2f} {several / one:7.1f}"
              f"   on {cores} cores")  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)

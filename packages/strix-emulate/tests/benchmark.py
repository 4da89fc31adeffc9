# SPDX-License-Identifier: BSD-3-Clause
"""How fast C is, as a ratio to numpy in one run: python benchmark.py [KEYS].

Attention of the fixtures, one head of 64 dimensions, causal, in blocks of 64 queries and 32 keys.
"""

import sys

import fixtures
import numpy as np
from strix_emulate import loader, native
from strix_emulate.api import Buffer, Options, launch
from strix_emulate.program import decode_kernel


def attention_kernel() -> loader.Kernel:
    constants = {"CAUSAL": True, "D": 64, "BM": 64, "BN": 32}
    elf, lds = fixtures.compile_kernel(
        fixtures.attention, fixtures._ATTENTION, constants, num_warps=4
    )
    return loader.parse_elf(elf, "attention", lds)[0]


def main(size: int) -> None:
    kernel = attention_kernel()
    instructions = decode_kernel(kernel)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, size, 64)).astype(np.float16)

    def rate(checks: bool, by_c: bool) -> float:
        """Million wave-instructions per CPU second: the best of five launches."""
        best = 0.0
        for _ in range(5):
            out, lse = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
            arrays = [Buffer(q), Buffer(k), Buffer(v), Buffer(out, "out"), Buffer(lse, "out")]
            done = launch(
                kernel, (-(-size // 64), 1), [*arrays, size, 64**-0.5], threads=128,
                instructions=instructions, options=Options(checks=checks, native=by_c),
            )  # fmt: skip
            best = max(best, done.executed / done.seconds / 1e6)
        return best

    print(f"{kernel.name}, {size} keys; {native.describe()}")
    print("checks   numpy       C   ratio   (million wave-instructions per CPU second)")
    for checks in (False, True):
        slow, fast = rate(checks, False), rate(checks, True)
        print(f"{'all' if checks else 'none':6} {slow:7.2f} {fast:7.2f} {fast / slow:7.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)

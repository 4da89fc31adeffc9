# SPDX-License-Identifier: BSD-3-Clause
"""Compare the whole state of a wave with the oracle's, instruction by instruction."""

import random

import numpy as np
import oracle_waves
import selftest
from operands import random_bits
from strix_emulate.code.decode import EXEC
from strix_emulate.errors import Trap
from strix_emulate.memory.waves import LANES, SCALARS

REGISTERS = 32


def run(rounds: int = 3, seed: int = 1) -> selftest.Report:
    """Run each case of CASES `rounds` times, and each case of MATRICES once."""
    rng = random.Random(seed)
    report = selftest.Report()
    for name, make in oracle_waves.CASES.items():
        for i in range(rounds):
            V = [[random_bits(rng) for _ in range(LANES)] for _ in range(REGISTERS)]
            S = [random_bits(rng) for _ in range(SCALARS)]
            # In turn, all lanes are active, lane 0 is inactive, and no lane is active. In the last
            # case, V_READFIRSTLANE reads lane 0.
            S[EXEC] = (0xFFFFFFFF, rng.getrandbits(31) << 1 | 1 << 31, 0)[i % 3] & 0xFFFFFFFF
            _compare(name, make(rng), V, S, report)
    for name, make in oracle_waves.MATRICES.items():
        V = _matrices(name, np.random.default_rng(rng.getrandbits(32)))
        S = [0] * SCALARS
        S[EXEC] = 0xFFFFFFFF
        _compare(name, make(rng), V, S, report)
    return report


def _matrices(name: str, draw) -> list[list[int]]:
    """Return registers for a matrix product.

    The addend is in registers below v16. A and B are in v16 and above, where lanes 16 to 31 have
    the same values as lanes 0 to 15.
    """
    _, _, result, _, source = name.split("_")
    shape = (REGISTERS, LANES)
    bits = draw.integers(1 << 32, size=shape, dtype=np.uint32)
    for kind, rows in ((result, slice(0, 16)), (source, slice(16, 32))):
        numbers = draw.normal(size=(*shape, 2)).astype(np.float32)
        if kind == "f32":
            bits[rows] = numbers[rows, :, 0].view(np.uint32)
        elif kind == "f16":
            bits[rows] = numbers[rows].astype(np.float16).view(np.uint32)[..., 0]
        elif kind == "bf16":
            bits[rows] = (
                numbers[rows, :, 0].view(np.uint32) >> 16
                | numbers[rows, :, 1].view(np.uint32) & 0xFFFF0000
            )
    bits[16:, 16:] = bits[16:, :16]
    return bits.tolist()


def _compare(name: str, case: oracle_waves.Case, V, S, report: selftest.Report) -> None:
    text, change = case
    before = selftest.waves(np.array(V, np.uint32)[:, None], np.array(S, np.uint32)[:, None, None])
    report.compared += 1
    report.covered.add(name)
    if "::" in text:
        report.covered |= {part.split()[0] for part in text.split("::")}
    try:
        after = selftest.execute(text, before)
    except Trap as trap:
        report.disagreements.append(str(trap))
        return
    change(V, S)
    for register, lanes in enumerate(V):
        for lane, expected in enumerate(lanes):
            got = int(after.V[register, 0, lane])
            # If the expected value is a Between, it defines the comparison.
            if expected != got:
                expected_text = hex(expected) if isinstance(expected, int) else expected
                report.disagreements.append(
                    f"{text}: v{register} lane {lane}: {got:#x}, expected {expected_text}"
                )
                return
    for register, expected in enumerate(S):
        got = int(after.S[register, 0, 0])
        if got != expected:
            report.disagreements.append(f"{text}: s{register}: {got:#x}, expected {expected:#x}")
            return

# SPDX-License-Identifier: BSD-3-Clause
"""The MODE register, and what CLAMP does (RDNA3.5 ISA, "Mode Register" and "Output modifiers").

The mode is known when a kernel is compiled to functions: compilers set it to constants.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from strix_emulate.code.decode import Instruction, Operand, Unknown
from strix_emulate.code.kernel import Kernel

#: bits of MODE
_ROUND, _DENORMALS_32, _DENORMALS_16_64, _CLAMP_NAN, _IEEE, _FP16_OVFL = 0, 4, 6, 8, 9, 23
#: numbers of hardware registers
MODE, HW_ID1, SHADER_CYCLES = 1, 23, 29


def hardware_register(op: Operand) -> tuple[int, int, int]:
    """Return the number, the first bit and how many bits an immediate of S_GETREG names."""
    bits = int(op.value)
    return bits & 63, bits >> 6 & 31, (bits >> 11 & 31) + 1


@dataclass(frozen=True)
class Mode:
    """What changes results. finite_16, FP16_OVFL: float16 overflows to the largest number.

    start: what the kernel began with, as bits.
    """

    denormals_32: bool
    denormals_16_64: bool
    ieee: bool
    clamp_nan: bool
    finite_16: bool
    start: int = 0

    def keeps(self, kind: str) -> bool:
        """Return whether numbers of a kind ("f16", "f32", "f64") keep their denormals."""
        return self.denormals_32 if kind == "f32" else self.denormals_16_64

    @property
    def bits(self) -> int:
        """The mode as S_GETREG reads it."""
        return (
            (3 << _DENORMALS_32) * self.denormals_32
            | (3 << _DENORMALS_16_64) * self.denormals_16_64 | self.clamp_nan << _CLAMP_NAN
            | self.ieee << _IEEE | self.finite_16 << _FP16_OVFL
        )  # fmt: skip


def initial(kernel: Kernel) -> Mode:
    """Return the mode that the kernel descriptor asks for."""
    mode = Mode(kernel.denormals_32, kernel.denormals_16_64, kernel.ieee, kernel.clamp_nan,
                kernel.finite_16)  # fmt: skip
    return replace(mode, start=mode.bits)


def after(ins: Instruction, mode: Mode) -> Mode:
    """Return the mode behind an instruction. Raise Unknown for modes that are not supported.

    S_SETREG_B32 is taken to give back what the kernel began with; where it is executed, it traps if
    its register holds something else.
    """
    if ins.name in ("s_denorm_mode", "s_round_mode"):
        first, size, value = (4 if "denorm" in ins.name else 0), 4, int(ins.operands[0].value) & 0xF
    elif ins.name == "s_setreg_imm32_b32":
        register, first, size = hardware_register(ins.operands[0])
        if register != MODE:
            raise Unknown("a hardware register other than MODE")
        value = int(ins.operands[1].value)
    elif ins.name == "s_setreg_b32":
        register, first, size = hardware_register(ins.operands[1])
        if register != MODE:
            raise Unknown("a hardware register other than MODE")
        value = mode.start >> first
    else:
        return mode
    mask = ((1 << size) - 1) << first
    bits = (mode.bits & ~mask) | (value << first & mask)
    kept = Mode(bits >> 4 & 3 == 3, bits >> 6 & 3 == 3, bool(bits >> _IEEE & 1),
                bool(bits >> _CLAMP_NAN & 1), bool(bits >> _FP16_OVFL & 1),
                mode.start)  # fmt: skip
    if (kept.bits != bits and bits >> 4 & 3 not in (0, 3)) or bits & 0xF:
        raise Unknown("a mode that rounds other than to nearest even, or flushes on one side only")
    return kept


def clamped(x):
    """Limit numbers to 0 .. 1; NaN and -0 become +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(np.isnan(x), zero, np.clip(x, zero, one) + zero)


def saturated(function: Callable, kind: str) -> Callable:
    """Return an integer operation that limits its exact result to the range of the kind."""
    dtype = np.dtype({"u": "u", "i": "i"}[kind[0]] + str(int(kind[1:]) // 8))
    limits = np.iinfo(dtype)

    def run(*sources):
        exact = function(*(np.asanyarray(x).astype(np.int64) for x in sources))
        return np.clip(exact, limits.min, limits.max).astype(dtype)

    return run

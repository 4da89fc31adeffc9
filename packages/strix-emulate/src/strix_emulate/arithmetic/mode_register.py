# SPDX-License-Identifier: BSD-3-Clause
"""The MODE register and output modifiers (RDNA3.5 ISA, "Mode Register", "Output modifiers").

Kernels set the mode to constants, or restore the mode with which they began. So the mode of an
instruction is known when the instruction is compiled, unless it depends on the path through the
code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from strix_emulate.arithmetic import floats
from strix_emulate.code.decode import Instruction, Operand, Unknown
from strix_emulate.code.kernel import Kernel

#: Bits of MODE.
_DENORMALS_32 = 4
_DENORMALS_16_64 = 6
_CLAMP_NAN = 8
_IEEE = 9
_FP16_OVFL = 23
#: Numbers of hardware registers.
MODE = 1
HW_ID1 = 23
SHADER_CYCLES = 29


def hardware_register(op: Operand) -> tuple[int, int, int]:
    """Decode an S_GETREG or S_SETREG operand to register number, first bit and number of bits."""
    bits = int(op.value)
    return bits & 63, bits >> 6 & 31, (bits >> 11 & 31) + 1


#: Instructions that ignore the CLAMP bit. According to the ISA, the bit limits results to [0, 1].
#: But hardware ignores it: ROCm's __ockl_fdot2 always sets the bit, and bitsandbytes' float16
#: product, which calls __ockl_fdot2, was correct on gfx1151 (bitsandbytes#1979) and on gfx1100
#: (bitsandbytes#2089).
_CLAMP_IGNORED = {"v_dot2_f32_f16"}


@dataclass(frozen=True)
class Mode:
    """The fields of MODE that change results.

    Attributes:
        denormals_32: Whether float32 operations keep denormal numbers.
        denormals_16_64: Whether float16 and float64 operations keep denormal numbers.
        ieee: Whether the mode is IEEE mode.
        clamp_nan: Whether CLAMP turns NaN into 0 (DX10_CLAMP).
        finite_16: Whether float16 overflows to the largest finite number (FP16_OVFL).
        start: Bits of the mode at the start of the kernel.
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
    def is_usual(self) -> bool:
        """Whether floats keep denormals, and overflow and handle NaN as IEEE 754 says."""
        keeps_all = self.denormals_32 and self.denormals_16_64
        return keeps_all and self.ieee and not self.finite_16

    @property
    def bits(self) -> int:
        """The bits of the mode, as S_GETREG returns them."""
        bits = self.clamp_nan << _CLAMP_NAN | self.ieee << _IEEE | self.finite_16 << _FP16_OVFL
        if self.denormals_32:
            bits |= 3 << _DENORMALS_32
        if self.denormals_16_64:
            bits |= 3 << _DENORMALS_16_64
        return bits


def initial(kernel: Kernel) -> Mode:
    """Return the mode that the kernel descriptor sets."""
    mode = Mode(
        kernel.denormals_32,
        kernel.denormals_16_64,
        kernel.ieee,
        kernel.clamp_nan,
        kernel.finite_16,
    )
    return replace(mode, start=mode.bits)


def _require_mode(register: int) -> None:
    if register != MODE:
        raise Unknown("a hardware register other than MODE")


def after(ins: Instruction, mode: Mode) -> Mode:
    """Return the mode after an instruction.

    Raise Unknown if the new mode, or the register that S_SETREG writes, is not supported.

    S_SETREG_B32 is assumed to restore the mode with which the kernel began. When it is executed, it
    traps if its source register has another mode.
    """
    if ins.name in ("s_denorm_mode", "s_round_mode"):
        first = _DENORMALS_32 if ins.name == "s_denorm_mode" else 0
        size = 4
        value = int(ins.operands[0].value) & 0xF
    elif ins.name == "s_setreg_imm32_b32":
        register, first, size = hardware_register(ins.operands[0])
        _require_mode(register)
        value = int(ins.operands[1].value)
    elif ins.name == "s_setreg_b32":
        register, first, size = hardware_register(ins.operands[1])
        _require_mode(register)
        value = mode.start >> first
    else:
        return mode
    mask = ((1 << size) - 1) << first
    bits = (mode.bits & ~mask) | (value << first & mask)
    new_mode = Mode(
        denormals_32=bits >> _DENORMALS_32 & 3 == 3,
        denormals_16_64=bits >> _DENORMALS_16_64 & 3 == 3,
        ieee=bool(bits >> _IEEE & 1),
        clamp_nan=bool(bits >> _CLAMP_NAN & 1),
        finite_16=bool(bits >> _FP16_OVFL & 1),
        start=mode.start,
    )
    rounds_otherwise = bits & 0xF
    denormals = (bits >> _DENORMALS_32 & 3, bits >> _DENORMALS_16_64 & 3)
    if rounds_otherwise or not {0, 3}.issuperset(denormals):
        raise Unknown(
            "a mode that does not round to nearest even, or that flushes denormals only in inputs "
            "or only in results"
        )
    return new_mode


def clamped(x):
    """Limit numbers to 0 .. 1. NaN and -0 become +0."""
    zero = x.dtype.type(0)
    one = x.dtype.type(1)
    return np.where(np.isnan(x), zero, np.clip(x, zero, one) + zero)


def output_modifiers(ins: Instruction, kind: str, mode: Mode) -> dict:
    """Return output modifiers in the ISA's order: omod, then clamp, then denormals.

    Raise Unknown for CLAMP without DX10_CLAMP.

    Omod has no effect in IEEE mode, or if results keep denormals. Where it has an effect, it turns
    -0 into +0 (RDNA3 ISA, 7.2.3.1).
    """
    after: dict = {}
    factor = ins.modifiers.get("mul", 1) / ins.modifiers.get("div", 1)
    if factor != 1 and not mode.ieee and not mode.keeps(kind):
        after["factor"] = factor
    if ins.modifiers.get("clamp") and ins.name not in _CLAMP_IGNORED:
        if not mode.clamp_nan:
            raise Unknown("CLAMP is not supported without DX10_CLAMP")
        after["clamp"] = True
    if kind in ("f32", "f16", "f64") and not mode.keeps(kind):
        after["flush"] = True
    return after


def finisher(after: dict) -> Callable:
    """Return a function that applies output modifiers to a result."""
    steps: list[Callable] = []
    if "factor" in after:
        factor = after["factor"]
        steps.append(lambda x: floats.flush(x * x.dtype.type(factor)) + x.dtype.type(0))
    if "clamp" in after:
        steps.append(clamped)
    if "flush" in after:
        steps.append(lambda x: floats.flush(np.asarray(x)))
    if not steps:
        return lambda x: x

    def finish(x):
        for step in steps:
            x = step(x)
        return x

    return finish


def saturated(function: Callable, kind: str) -> Callable:
    """Return an integer operation that limits its exact result to the range of the kind."""
    dtype = np.dtype(f"{kind[0]}{int(kind[1:]) // 8}")
    limits = np.iinfo(dtype)

    def run(*sources):
        exact = function(*(np.asanyarray(x).astype(np.int64) for x in sources))
        return np.clip(exact, limits.min, limits.max).astype(dtype)

    return run

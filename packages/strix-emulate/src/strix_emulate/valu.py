# SPDX-License-Identifier: BSD-3-Clause
"""Vector instructions: VOP1, VOP2, VOP3, VOPC, VOPD, with DPP, as functions on Waves."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from strix_emulate import floats
from strix_emulate.crosslane import dpp_source
from strix_emulate.decode import EXEC, Instruction, Operand, Unknown
from strix_emulate.operations import (
    ACCUMULATING,
    CARRIES,
    COMPARISONS,
    EXTREMES,
    NAMES,
    SATURATING,
    SPECIAL,
    TABLE,
)
from strix_emulate.waves import (
    VCC_OPERAND,
    mask_reader,
    pack,
    reader,
    scalar_writer,
    vector_writer,
)

U32 = np.uint32


class Mode:
    """What the kernel descriptor sets for floating point: see :class:`loader.Kernel`."""

    def __init__(self, denormals_32=True, denormals_16_64=True, ieee=True, clamp_nan=True):
        self.denormals_32, self.denormals_16_64 = denormals_32, denormals_16_64
        self.ieee, self.clamp_nan = ieee, clamp_nan

    def keeps(self, kind: str) -> bool:
        return self.denormals_32 if kind == "f32" else self.denormals_16_64


def compile_vector(ins: Instruction, mode: Mode) -> Callable:
    """A function that executes the instruction on Waves. Raises Unknown."""
    compute, write = compile_halves(ins, mode)
    return lambda g: write(g, *compute(g))


def compile_pair(ins: Instruction, mode: Mode) -> Callable:
    """A VOPD pair: both halves read before either writes."""
    (compute_x, write_x), (compute_y, write_y) = (
        compile_halves(_undual(half), mode) for half in ins.pair
    )

    def run(g):
        x, y = compute_x(g), compute_y(g)
        # a plain move hands out the register itself
        y = tuple(np.array(value) for value in y[:1]) + y[1:]
        write_x(g, *x)
        write_y(g, *y)

    return run


def _undual(ins: Instruction) -> Instruction:
    name = ins.name.replace("v_dual_", "v_")
    return Instruction(
        ins.address, ins.size, ins.text, name, "e32", ins.operands, ins.modifiers, ins.raw
    )


def _resolve_halves(ins: Instruction) -> Instruction:
    """op_sel of 16-bit operands: LLVM prints it beside the halves that it already named (v1.h)."""
    picks = ins.modifiers.get("op_sel")
    if picks is None:
        return ins
    # sources first, the destination, which V_CMPX has not, last
    places = range(len(picks)) if "cmpx" in ins.name else [*range(1, len(picks)), 0]
    ops = list(ins.operands)
    for place, high in zip(places, picks, strict=True):
        op = ops[place]
        if op.half and (op.half == "h") != bool(high):
            raise Unknown("op_sel against the named half")
        if high and not op.half:
            if op.kind == "const":
                raise Unknown("the high half of a constant")
            ops[place] = replace(op, half="h")
    rest = {key: value for key, value in ins.modifiers.items() if key != "op_sel"}
    return replace(ins, operands=tuple(ops), modifiers=rest)


def compile_halves(ins: Instruction, mode: Mode) -> tuple[Callable, Callable]:
    """(compute, write): compute(waves) gives the arguments of write(waves, ...)."""
    ins = _resolve_halves(ins)
    name, ops = ins.name, ins.operands
    if ins.suffix == "sdwa" or name not in NAMES:
        raise Unknown("mnemonic")
    saturates = name in SATURATING and "clamp" in ins.modifiers
    _allow(ins, {"clamp", "mul", "div"} if _is_float(name) else {"clamp"} if saturates else set())
    if name in COMPARISONS:
        return _comparison(ins, mode)
    if name in CARRIES:
        return _carry(ins)
    if name in SPECIAL:
        return _special(ins, mode)
    if name in EXTREMES:
        kind, steps = EXTREMES[name]
        function, kinds = (
            _extreme(steps, mode.ieee),
            (kind,) * max(2, len(steps) + 1 if steps != "med" else 3),
        )
    else:
        kind, kinds, function = TABLE[name]
        if saturates:
            function = _saturated(function, kind)
    sources = list(ops[1:])
    if name in ACCUMULATING and len(sources) == 2:
        sources.append(ops[0])
    if len(sources) != len(kinds):
        raise Unknown(f"{len(sources)} sources, expected {len(kinds)}")
    reads = [reader(op, k, mode.keeps(k)) for op, k in zip(sources, kinds, strict=True)]
    reads[0], lanes = dpp_source(ins, reads[0])
    finish = (lambda x: x) if saturates else _output(ins, kind, mode)
    write = vector_writer(ops[0], kind)
    if len(reads) == 1:
        (first,) = reads
        return lambda g: (finish(function(first(g))), lanes(g)), write
    if len(reads) == 2:
        first, second = reads
        return lambda g: (finish(function(first(g), second(g))), lanes(g)), write
    first, second, third = reads
    return lambda g: (finish(function(first(g), second(g), third(g))), lanes(g)), write


def _is_float(name: str) -> bool:
    return name.endswith(("f32", "f16", "f64")) and "cmp" not in name


def _allow(ins: Instruction, allowed: set[str]) -> None:
    dpp = {"row_mask", "bank_mask", "bound_ctrl", "fi", "quad_perm", "dpp8", "row_shl",
           "row_shr", "row_ror",
           "row_share", "row_xmask", "row_mirror", "row_half_mirror"}  # fmt: skip
    allowed = allowed | (dpp if "dpp" in ins.suffix else set())
    for key in ins.modifiers.keys() - allowed:
        raise Unknown(f"modifier {key}")


def _output(ins: Instruction, kind: str, mode: Mode) -> Callable:
    """Output modifiers in the ISA's order: omod, then clamp, then denormals.

    In IEEE mode, and where the results keep denormals, omod has no effect; where it has one, it
    gives no -0 (RDNA3 ISA, 7.2.3.1).
    """
    steps = []
    factor = ins.modifiers.get("mul", 1) / ins.modifiers.get("div", 1)
    if factor != 1 and not mode.ieee and not mode.keeps(kind):
        steps.append(lambda x: floats.flush(x * x.dtype.type(factor)) + x.dtype.type(0))
    if ins.modifiers.get("clamp"):
        if not mode.clamp_nan:
            raise Unknown("clamp without DX10_CLAMP")
        steps.append(_clamped)
    if kind in ("f32", "f16", "f64") and not mode.keeps(kind):
        steps.append(lambda x: floats.flush(np.asarray(x)))
    if not steps:
        return lambda x: x

    def finish(x):
        for step in steps:
            x = step(x)
        return x

    return finish


def _clamped(x):
    """To 0 .. 1; NaN and -0 become +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(np.isnan(x), zero, np.clip(x, zero, one) + zero)


def _saturated(function: Callable, kind: str) -> Callable:
    dtype = np.dtype({"u": "u", "i": "i"}[kind[0]] + str(int(kind[1:]) // 8))
    limits = np.iinfo(dtype)

    def run(a, b):
        exact = function(np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64))
        return np.clip(exact, limits.min, limits.max).astype(dtype)

    return run


def _extreme(steps: str, ieee: bool) -> Callable:
    pick = {"M": floats.larger, "m": floats.smaller}
    if steps == "med":
        # with a NaN the smallest of the three, in the document's words
        def median(a, b, c):
            low = floats.smaller(floats.smaller(a, b, ieee), c, ieee)
            high = floats.larger(
                floats.smaller(a, b, ieee), floats.smaller(floats.larger(a, b, ieee), c, ieee), ieee
            )
            return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), low, high)

        return median
    if len(steps) == 1:
        return lambda a, b: pick[steps](a, b, ieee)
    return lambda a, b, c: pick[steps[1]](pick[steps[0]](a, b, ieee), c, ieee)


def _comparison(ins: Instruction, mode: Mode) -> tuple[Callable, Callable]:
    kind, function = COMPARISONS[ins.name]
    if "dpp" in ins.suffix:
        raise Unknown("DPP comparison")
    writes_exec = "cmpx" in ins.name
    target, sources = (Operand("s", EXEC), ins.operands[-2:])
    if not writes_exec:
        target = ins.operands[0]
    first, second = (reader(op, kind, mode.keeps(kind)) for op in sources)
    write = scalar_writer(target)
    return (
        lambda g: (np.broadcast_to(function(first(g), second(g)), g.mask.shape) & g.mask,),
        lambda g, flags: write(g, pack(flags)),
    )


def _carry(ins: Instruction) -> tuple[Callable, Callable]:
    sign, swapped, takes = CARRIES[ins.name]
    if "dpp" in ins.suffix:
        raise Unknown("DPP carry")
    ops = list(ins.operands)
    target, carry_out, a, b = ops[:4]
    carry_in = mask_reader(ops[4] if len(ops) > 4 else VCC_OPERAND) if takes else None
    if swapped:
        a, b = b, a
    first, second = reader(a, "u32"), reader(b, "u32")
    write, write_carry = vector_writer(target, "u32"), scalar_writer(carry_out)

    def compute(g):
        x, y = np.asarray(first(g)).astype(np.int64), np.asarray(second(g)).astype(np.int64)
        total = x + sign * y
        if carry_in:
            total = total + sign * carry_in(g)
        # a carry or a borrow, in either case a result outside of 32 bits
        return total.astype(U32), np.broadcast_to((total >> 32) != 0, g.mask.shape) & g.mask

    def store(g, total, flags):
        write(g, total)
        write_carry(g, pack(flags))

    return compute, store


def _special(ins: Instruction, mode: Mode) -> tuple[Callable, Callable]:
    name, ops = ins.name, ins.operands
    if name == "v_nop":
        return lambda _g: (), lambda _g: None
    if name.startswith("v_cndmask"):
        kind = "b" + name[-2:]
        first, second = reader(ops[1], kind), reader(ops[2], kind)
        first, lanes = dpp_source(ins, first)
        choose = mask_reader(ops[3] if len(ops) > 3 else VCC_OPERAND)
        return (
            lambda g: (np.where(choose(g), second(g), first(g)), lanes(g)),
            vector_writer(ops[0], kind),
        )
    if "dpp" in ins.suffix:
        raise Unknown("DPP form")
    if name in ("v_mad_u64_u32", "v_mad_i64_i32"):
        kind = name[6]
        first, second, third = (
            reader(ops[2], f"{kind}32"),
            reader(ops[3], f"{kind}32"),
            reader(ops[4], f"{kind}64"),
        )
        if ops[1].text != "null":
            raise Unknown("carry of a 64-bit multiply-add")
        wide = np.uint64 if kind == "u" else np.int64
        write = vector_writer(ops[0], f"{kind}64")
        return lambda g: (np.multiply(first(g), second(g), dtype=wide) + third(g),), write
    if name == "v_swap_b32":
        write, write_back = vector_writer(ops[0], "b32"), vector_writer(ops[1], "b32")
        first, second = reader(ops[0], "b32"), reader(ops[1], "b32")
        return lambda g: (second(g).copy(), first(g).copy()), lambda g, x, y: (
            write(g, x),
            write_back(g, y),
        )
    if name == "v_cmp_class_f32":
        first, second, write = reader(ops[1], "f32"), reader(ops[2], "u32"), scalar_writer(ops[0])
        return (
            lambda g: (np.broadcast_to(_in_class(first(g), second(g)), g.mask.shape) & g.mask,),
            lambda g, flags: write(g, pack(flags)),
        )
    write = vector_writer(ops[0], "f32")
    if name == "v_div_fmas_f32":
        reads, flag = (
            [reader(op, "f32", mode.denormals_32) for op in ops[1:]],
            mask_reader(VCC_OPERAND),
        )
        return lambda g: (floats.div_fmas(*(read(g) for read in reads), flag(g)),), write
    reads = [reader(op, "f32", mode.denormals_32) for op in ops[2:]]
    write_flag = scalar_writer(ops[1])

    def compute(g):
        value, flag = floats.div_scale(*(np.asarray(read(g)) for read in reads))
        return value, np.broadcast_to(flag, g.mask.shape) & g.mask

    def store(g, value, flag):
        write(g, value)
        write_flag(g, pack(flag))

    return compute, store


def _in_class(x, wanted):
    """V_CMP_CLASS: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    bits = np.asarray(x).view(U32)
    negative, quiet = bits >> U32(31) != 0, bits >> U32(22) & U32(1) != 0
    denormal = (np.abs(x) < np.float32(2.0**-126)) & (x != 0)
    kinds = [
        np.isnan(x) & ~quiet, np.isnan(x) & quiet, np.isinf(x) & negative,
        np.isfinite(x) & (x != 0) & ~denormal & negative, denormal & negative, (x == 0) & negative,
        (x == 0) & ~negative, denormal & ~negative,
        np.isfinite(x) & (x != 0) & ~denormal & ~negative,
        np.isinf(x) & ~negative,
    ]  # fmt: skip
    return np.any(
        [kind & (wanted >> U32(bit) & U32(1) != 0) for bit, kind in enumerate(kinds)], axis=0
    )

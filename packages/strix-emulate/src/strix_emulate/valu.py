# SPDX-License-Identifier: BSD-3-Clause
"""Vector instructions: VOP1, VOP2, VOP3, VOPC, VOPD, with DPP, as functions on Waves."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from strix_emulate import doubles, floats
from strix_emulate.crosslane import dpp_source
from strix_emulate.decode import EXEC, Instruction, Operand, Unknown
from strix_emulate.modes import Mode, clamped, saturated
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
#: Infinities of these are no overflow: FP16_OVFL leaves them. And what it was not worked out for.
_NO_OVERFLOW = {"v_rcp_f16", "v_rsq_f16", "v_log_f16", "v_div_fixup_f16"}
_HALVES_INSIDE = {"v_dot2_f16_f16"}


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
    if name not in NAMES:
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
            function = saturated(function, kind)
    if mode.finite_16 and kind == "f16" and name not in _NO_OVERFLOW:
        function = floats.finite(function)
    elif mode.finite_16 and name in _HALVES_INSIDE:
        raise Unknown("with FP16_OVFL")
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
           "row_shr", "row_ror", "row_share", "row_xmask",
           "row_mirror", "row_half_mirror"}  # fmt: skip
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
        steps.append(clamped)
    if kind in ("f32", "f16", "f64") and not mode.keeps(kind):
        steps.append(lambda x: floats.flush(np.asarray(x)))
    if not steps:
        return lambda x: x

    def finish(x):
        for step in steps:
            x = step(x)
        return x

    return finish


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
    writes_exec = "cmpx" in ins.name
    target, sources = (Operand("s", EXEC), ins.operands[-2:])
    if not writes_exec:
        target = ins.operands[0]
    first, second = (reader(op, kind, mode.keeps(kind)) for op in sources)
    first, lanes = dpp_source(ins, first)
    return _flags(scalar_writer(target), lambda g: function(first(g), second(g)), lanes)


def _flags(write: Callable, test: Callable, lanes: Callable) -> tuple[Callable, Callable]:
    """A mask of the lanes, of those that are written, for which the test holds."""

    def compute(g):
        written = lanes(g)
        written = g.mask if written is None else written
        return (np.broadcast_to(test(g), g.mask.shape) & written,)

    return compute, lambda g, flags: write(g, pack(flags))


def _carry(ins: Instruction) -> tuple[Callable, Callable]:
    sign, swapped, takes = CARRIES[ins.name]
    ops = list(ins.operands)
    target, carry_out, a, b = ops[:4]
    carry_in = mask_reader(ops[4] if len(ops) > 4 else VCC_OPERAND) if takes else None
    first, lanes = dpp_source(ins, reader(a, "u32"))
    second = reader(b, "u32")
    if swapped:
        first, second = second, first
    write, write_carry = vector_writer(target, "u32"), scalar_writer(carry_out)

    def compute(g):
        x, y = np.asarray(first(g)).astype(np.int64), np.asarray(second(g)).astype(np.int64)
        total = x + sign * y
        if carry_in:
            total = total + sign * carry_in(g)
        written = lanes(g)
        carried = np.broadcast_to((total >> 32) != 0, g.mask.shape)
        # a carry or a borrow, in either case a result outside of 32 bits
        return total.astype(U32), carried & (g.mask if written is None else written), written

    def store(g, total, flags, written):
        write(g, total, written)
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
        return _wide_mad(ins)
    if name.startswith("v_swap"):
        kind = name[-3:]
        write, write_back = vector_writer(ops[0], kind), vector_writer(ops[1], kind)
        first, second = reader(ops[0], kind), reader(ops[1], kind)
        return lambda g: (second(g).copy(), first(g).copy()), lambda g, x, y: (
            write(g, x),
            write_back(g, y),
        )
    if "_class_" in name:
        kind = name[-3:]
        sources = ops[-2:]
        target = Operand("s", EXEC) if "cmpx" in name else ops[0]
        first, second = reader(sources[0], kind), reader(sources[1], "u16")
        return _flags(
            scalar_writer(target), lambda g: _in_class(first(g), second(g)), lambda _g: None
        )
    kind = name[-3:]
    write = vector_writer(ops[0], kind)
    own = doubles if kind == "f64" else floats
    if "fmas" in name:
        flag = mask_reader(VCC_OPERAND)
        reads = [reader(op, kind, mode.keeps(kind)) for op in ops[1:]]
        return lambda g: (own.div_fmas(*(np.asarray(read(g)) for read in reads), flag(g)),), write
    reads = [reader(op, kind, mode.keeps(kind)) for op in ops[2:]]
    write_flag = scalar_writer(ops[1])

    def compute(g):
        value, flag = own.div_scale(*(np.asarray(read(g)) for read in reads))
        return np.broadcast_to(value, g.mask.shape), np.broadcast_to(flag, g.mask.shape) & g.mask

    def store(g, value, flag):
        write(g, value)
        write_flag(g, pack(flag))

    return compute, store


def _wide_mad(ins: Instruction) -> tuple[Callable, Callable]:
    """V_MAD_U64_U32, V_MAD_I64_I32: the carry is bit 64 of the sum."""
    target, carry_out, a, b, c = ins.operands
    kind = ins.name[6]
    first, second = reader(a, f"{kind}32"), reader(b, f"{kind}32")
    third, write = reader(c, f"{kind}64"), vector_writer(target, f"{kind}64")
    write_carry = scalar_writer(carry_out)
    wide = np.uint64 if kind == "u" else np.int64

    def compute(g):
        product, addend = np.multiply(first(g), second(g), dtype=wide), np.asarray(third(g))
        total = product + addend
        over = ((product ^ total) & (addend ^ total)) < 0 if kind == "i" else total < addend
        carry = over ^ (total < 0) if kind == "i" else over
        return total, np.broadcast_to(carry, g.mask.shape) & g.mask

    def store(g, total, carry):
        write(g, total)
        write_carry(g, pack(carry))

    return compute, store


def _in_class(x, wanted):
    """V_CMP_CLASS: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    x = np.asarray(x)
    negative, quiet = np.signbit(x), floats.is_quiet(x)
    denormal = (np.abs(x) < np.finfo(x.dtype).smallest_normal) & (x != 0)
    wanted = np.asarray(wanted).astype(U32)
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

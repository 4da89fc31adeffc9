# SPDX-License-Identifier: BSD-3-Clause
"""Vector instructions: VOP1, VOP2, VOP3, VOPC, VOPD, with DPP, as functions on Waves."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np

from strix_emulate.arithmetic import floats, subdword
from strix_emulate.arithmetic.mode_register import Mode, clamped, saturated
from strix_emulate.arithmetic.operations import (
    ACCUMULATING,
    EXTREMES,
    MASKED,
    NAMES,
    SATURATING,
    TABLE,
    extreme,
)
from strix_emulate.code.decode import EXEC, Instruction, Operand, Unknown
from strix_emulate.instructions.crosslane import dpp_source
from strix_emulate.instructions.microops import MicroOp, executes
from strix_emulate.memory.waves import VCC_OPERAND, mask_reader, mask_writer, reader, vector_writer

#: Infinities of these are no overflow: FP16_OVFL leaves them.
_NO_OVERFLOW = {"v_rcp_f16", "v_rsq_f16", "v_log_f16", "v_div_fixup_f16"}
#: What FP16_OVFL does to these was not worked out.
_HALVES_INSIDE = {"v_dot2_f16_f16"}
#: By the ISA the bit cuts to [0, 1]. ROCm's __ockl_fdot2 always sets it, and bitsandbytes' product
#: in float16, made of those, was correct on gfx1151 (bitsandbytes#1979) and on gfx1100 (#2089).
_CLAMP_IGNORED = {"v_dot2_f32_f16"}


def compile_vector(ins: Instruction, mode: Mode) -> Callable:
    """Return a function that executes the instruction on Waves. Raise Unknown."""
    if ins.name == "v_nop":
        return lambda _g: None
    if ins.name.startswith("v_swap"):
        return _swap(ins)
    if ins.name == "v_mqsad_u32_u8":
        return _four_sums(ins)
    micro = vector_micro_op(ins, mode)
    compute, write = _compute_and_write(micro)

    def run(g):
        write(g, *compute(g))

    return executes(run, micro)


def compile_pair(ins: Instruction, mode: Mode) -> Callable:
    """Compile a VOPD pair: both halves read before either writes."""
    micros = tuple(vector_micro_op(_undual(part), mode) for part in ins.pair)
    (compute_x, write_x), (compute_y, write_y) = (_compute_and_write(micro) for micro in micros)

    def run(g):
        x, y = compute_x(g), compute_y(g)
        # a plain move hands out the register itself
        y = tuple(np.array(value) for value in y[:1]) + y[1:]
        write_x(g, *x)
        write_y(g, *y)

    return executes(run, *micros)


def _undual(ins: Instruction) -> Instruction:
    name = ins.name.replace("v_dual_", "v_")
    return Instruction(
        ins.address, ins.size, ins.text, name, "e32", ins.operands, ins.modifiers, ins.code
    )


def _resolve_halves(ins: Instruction) -> Instruction:
    """Apply op_sel to operands of 16 bits that are no halves of vector registers."""
    picks = ins.modifiers.get("op_sel")
    if picks is None:
        return ins
    ops = list(ins.operands)
    # the destination, which V_CMPX has not, has the last bit
    places = range(len(ops)) if "cmpx" in ins.name else [3, *range(len(ops) - 1)]
    for place, bit in enumerate(places):
        op = ops[place]
        if picks[bit] and not op.half:
            if op.kind == "const":
                raise Unknown("the high half of a constant")
            ops[place] = replace(op, half="h")
    rest = {key: value for key, value in ins.modifiers.items() if key != "op_sel"}
    return replace(ins, operands=tuple(ops), modifiers=rest)


def _function(name: str, mode: Mode, saturates: bool) -> tuple:
    """Return C's name of what it computes in that mode, and the tables' entry. Raise Unknown."""
    if name in EXTREMES:
        key, entry = name if mode.ieee else f"{name}.ieee0", extreme(name, mode.ieee)
    else:
        key, entry = name, TABLE[name]
    kind, kinds, function = entry
    if saturates:
        return f"{name}.clamp", kind, kinds, saturated(function, kind)
    if mode.finite_16 and kind == "f16" and name not in _NO_OVERFLOW:
        return "", kind, kinds, floats.finite(function)
    if mode.finite_16 and name in _HALVES_INSIDE:
        raise Unknown("with FP16_OVFL")
    return key, kind, kinds, function


def _pair(op: Operand, name: str) -> Operand:
    """Return an inline fraction as bits: in the low half's own type, above it zeros (LLVM's
    getInlineEncodingV2F16 and V2BF16)."""
    if not isinstance(op.value, float):
        return op
    if "bf16" in name:
        return replace(op, value=int(np.float32(op.value).view(np.uint32)) >> 16)
    return replace(op, value=int(np.float16(op.value).view(np.uint16)))


def vector_micro_op(ins: Instruction, mode: Mode) -> MicroOp:
    """Return what the instruction computes, from what, and where that goes. Raise Unknown."""
    ins = _resolve_halves(ins)
    name, ops = ins.name, list(ins.operands)
    if name not in NAMES:
        raise Unknown("mnemonic")
    saturates = name in SATURATING and "clamp" in ins.modifiers
    _allow(ins, {"clamp", "mul", "div"} if _is_float(name) else {"clamp"} if saturates else set())
    flag = None
    if name in MASKED:
        key, (kind, kinds, function, flags) = name, MASKED[name]
        target = ops.pop(0) if kind else None
        if flags:
            flag = Operand("s", EXEC) if "cmpx" in name else ops.pop(0)
            # V_CMPX_E32 may name what it writes
            ops = ops[-len(kinds) :] if not kind else ops
        if len(ops) < len(kinds) and kinds[-1] == "mask":
            ops.append(VCC_OPERAND)
    else:
        key, kind, kinds, function = _function(name, mode, saturates)
        target = ops.pop(0)
        if name in ACCUMULATING and len(ops) == len(kinds) - 1:
            ops.append(target)
        if kinds[-1] == "lane":
            ops.append(Operand("lane"))
    if len(ops) != len(kinds):
        raise Unknown(f"{len(ops)} sources, expected {len(kinds)}")
    if name.startswith("v_dot2"):
        ops = [_pair(op, name) for op in ops[:2]] + ops[2:]
    # integers have no signs to change, whatever the bits say; LLVM prints none
    ops = [
        op if k[0] == "f" or k == "bf16" or "cndmask" in name
        else replace(op, neg=False, abs=False)
        for op, k in zip(ops, kinds, strict=True)
    ]  # fmt: skip
    return MicroOp(
        key, function, kind, target, tuple(zip(ops, kinds, strict=True)),
        tuple(mode.keeps(k) for k in kinds), flag, ins.modifiers if "dpp" in ins.suffix else None,
        {} if saturates or name in MASKED else _after(ins, kind, mode),
    )  # fmt: skip


def _compute_and_write(micro: MicroOp) -> tuple[Callable, Callable]:
    """Return (compute, write): compute(waves) gives the arguments of write(waves, ...)."""
    reads = [
        _source(op, kind, keeps)
        for (op, kind), keeps in zip(micro.sources, micro.keeps, strict=True)
    ]
    reads[0], lanes = dpp_source(micro.dpp, reads[0])
    function, finish = micro.function, _finisher(micro.after)
    if micro.flag is not None:
        return _flagged(micro, reads, lanes)
    write = vector_writer(cast(Operand, micro.target), micro.kind)
    if len(reads) == 1:
        (first,) = reads
        return lambda g: (finish(function(first(g))), lanes(g)), write
    if len(reads) == 2:
        first, second = reads
        return lambda g: (finish(function(first(g), second(g))), lanes(g)), write
    return lambda g: (finish(function(*(np.asanyarray(r(g)) for r in reads))), lanes(g)), write


def _source(op: Operand, kind: str, keeps: bool) -> Callable:
    if kind == "lane":
        return lambda g: np.arange(g.width, dtype=np.uint32)
    return mask_reader(op) if kind == "mask" else reader(op, kind, keeps)


def _flagged(micro: MicroOp, reads, lanes) -> tuple[Callable, Callable]:
    """Return (compute, write) with a mask of the written lanes for which the test holds."""
    write_flags = mask_writer(cast(Operand, micro.flag))
    write = vector_writer(micro.target, micro.kind) if micro.target else None
    function = micro.function

    def compute(g):
        written = lanes(g)
        result = function(*(np.asanyarray(read(g)) for read in reads))
        value, flags = result if write else (None, result)
        flags = np.broadcast_to(flags, g.mask.shape) & (g.mask if written is None else written)
        return value, flags, written

    def store(g, value, flags, written):
        if write:
            write(g, value, written)
        write_flags(g, flags)

    return compute, store


def _swap(ins: Instruction) -> Callable:
    kind, ops = ins.name[-3:], _resolve_halves(ins).operands
    _allow(ins, set())
    write, write_back = vector_writer(ops[0], kind), vector_writer(ops[1], kind)
    first, second = reader(ops[0], kind), reader(ops[1], kind)

    def run(g):
        x, y = second(g).copy(), first(g).copy()
        write(g, x)
        write_back(g, y)

    return run


def _four_sums(ins: Instruction) -> Callable:
    """Compile V_MQSAD_U32_U8, whose addends and results are in four registers each."""
    _allow(ins, set())
    target, first, second, old = ins.operands
    if old.kind != "v":
        raise Unknown(f"operand {old} in 128 bits")
    sources = [reader(first, "u64"), reader(second, "u32")]
    sources += [reader(replace(old, index=old.index + i), "u32") for i in range(4)]
    writes = [
        vector_writer(replace(target, index=target.index + i, count=1), "u32") for i in range(4)
    ]

    def run(g):
        results = subdword.quad_sad32(*(read(g) for read in sources))
        for write, result in zip(writes, results, strict=True):
            write(g, result)

    return run


def _is_float(name: str) -> bool:
    return name.endswith(("f32", "f16", "f64")) and "cmp" not in name


def _allow(ins: Instruction, allowed: set[str]) -> None:
    dpp = {"row_mask", "bank_mask", "bound_ctrl", "fi", "quad_perm", "dpp8", "row_shl",
           "row_shr", "row_ror", "row_share", "row_xmask",
           "row_mirror", "row_half_mirror"}  # fmt: skip
    allowed = allowed | (dpp if "dpp" in ins.suffix else set())
    for key in ins.modifiers.keys() - allowed:
        raise Unknown(f"modifier {key}")


def _after(ins: Instruction, kind: str, mode: Mode) -> dict:
    """Return output modifiers in the ISA's order: omod, then clamp, then denormals.

    In IEEE mode, and where the results keep denormals, omod has no effect; where it has one, it
    gives no -0 (RDNA3 ISA, 7.2.3.1).
    """
    after: dict = {}
    factor = ins.modifiers.get("mul", 1) / ins.modifiers.get("div", 1)
    if factor != 1 and not mode.ieee and not mode.keeps(kind):
        after["factor"] = factor
    if ins.modifiers.get("clamp") and ins.name not in _CLAMP_IGNORED:
        if not mode.clamp_nan:
            raise Unknown("clamp without DX10_CLAMP")
        after["clamp"] = True
    if kind in ("f32", "f16", "f64") and not mode.keeps(kind):
        after["flush"] = True
    return after


def _finisher(after: dict) -> Callable:
    steps = []
    if factor := after.get("factor"):
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

# SPDX-License-Identifier: BSD-3-Clause
"""Vector instructions: VOP1, VOP2, VOP3, VOPC, VOPD, with DPP, as functions on Waves."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np

from strix_emulate.arithmetic import floats, subdword
from strix_emulate.arithmetic.mode_register import Mode, finisher, output_modifiers, saturated
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
from strix_emulate.instructions.microops import Compiled, MicroOp, compiled_for_c
from strix_emulate.memory.waves import VCC_OPERAND, mask_reader, mask_writer, reader, vector_writer

#: Instructions whose results FP16_OVFL does not change, because their infinite results are exact.
_NO_OVERFLOW = {"v_rsq_f16", "v_log_f16", "v_div_fixup_f16"}
#: Instructions for which the effect of FP16_OVFL is not known.
_HALVES_INSIDE = {"v_dot2_f16_f16"}
_DPP_MODIFIERS = {
    "row_mask",
    "bank_mask",
    "bound_ctrl",
    "fi",
    "quad_perm",
    "dpp8",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_share",
    "row_xmask",
    "row_mirror",
    "row_half_mirror",
}


def compile_vector(ins: Instruction, mode: Mode) -> Compiled:
    """Compile a vector instruction. Raise Unknown if it is not supported."""
    if ins.name == "v_nop":
        return Compiled(lambda _g: None)
    if ins.name in ("v_swap_b16", "v_swap_b32"):
        return Compiled(_compile_swap(ins))
    if ins.name == "v_mqsad_u32_u8":
        return Compiled(_compile_quad_sad(ins))
    micro = vector_micro_op(ins, mode)
    compute, write = _compute_and_write(micro)

    def run(g):
        write(g, *compute(g))

    return compiled_for_c(run, micro)


def compile_pair(ins: Instruction, mode: Mode) -> Compiled:
    """Compile a VOPD pair. Both halves read their sources before either writes."""
    micro_x, micro_y = (vector_micro_op(_undual(part), mode) for part in ins.pair)
    compute_x, write_x = _compute_and_write(micro_x)
    compute_y, write_y = _compute_and_write(micro_y)

    def run(g):
        x = compute_x(g)
        value, *others = compute_y(g)
        # If Y is a move, its value is a view of a register, which write_x may change. So copy it.
        value = np.array(value)
        write_x(g, *x)
        write_y(g, value, *others)

    return compiled_for_c(run, micro_x, micro_y)


def _undual(ins: Instruction) -> Instruction:
    """Return one half of a VOPD pair as an instruction of its own."""
    return replace(ins, name=ins.name.replace("v_dual_", "v_"))


def _resolve_halves(ins: Instruction) -> Instruction:
    """Apply op_sel to operands of 16 bits that are not halves of vector registers."""
    picks = ins.modifiers.get("op_sel")
    if picks is None:
        return ins
    if len(picks) < 4:
        # The op_sel of VOP3P has no bit for the destination. It selects halves of packed sources.
        raise Unknown("unsupported modifier op_sel")
    operands = list(ins.operands)
    # The last bit of op_sel is the destination's. V_CMPX has no destination.
    bit_numbers = [3, *range(len(operands) - 1)]
    if "cmpx" in ins.name:
        bit_numbers = list(range(len(operands)))
    for place, bit in enumerate(bit_numbers):
        op = operands[place]
        if picks[bit] and not op.half:
            if op.kind == "const":
                raise Unknown("op_sel selects the high half of a constant")
            operands[place] = replace(op, half="h")
    modifiers = {key: value for key, value in ins.modifiers.items() if key != "op_sel"}
    return replace(ins, operands=tuple(operands), modifiers=modifiers)


def _function(name: str, mode: Mode, saturates: bool) -> tuple:
    """Return the function of an instruction in a mode. Raise Unknown if it is not supported.

    Returns:
        Name of the function in C ("" if C has none), kind of the result, kinds of the sources, and
        function.
    """
    key = name
    if name in EXTREMES:
        if not mode.ieee:
            key = f"{name}.ieee0"
        kind, kinds, function = extreme(name, mode.ieee)
    else:
        kind, kinds, function = TABLE[name]
    if saturates:
        return f"{name}.clamp", kind, kinds, saturated(function, kind)
    if mode.finite_16 and name in _HALVES_INSIDE:
        raise Unknown("not supported with FP16_OVFL")
    if mode.finite_16 and name == "v_rcp_f16":
        return "", kind, kinds, _finite_reciprocal
    if mode.finite_16 and kind == "f16" and name not in _NO_OVERFLOW:
        return "", kind, kinds, floats.finite(function)
    return key, kind, kinds, function


def _finite_reciprocal(x):
    """Return V_RCP_F16 with FP16_OVFL. The reciprocals of denormals up to 2**-16 overflow.

    A division by zero still "may result in infinity" (RDNA3 ISA, "Mode register").
    """
    reciprocal = np.float16(1) / np.asanyarray(x)
    return np.where(x == 0, reciprocal, floats.finite(lambda _: reciprocal)(x))


def _half_source(op: Operand, name: str) -> Operand:
    """Return an operand of V_DOT2 or V_PACK, with an inline fraction replaced by its bits.

    The low half of the bits is a number of the instruction's own type, and the high half is 0
    (LLVM's getInlineEncodingV2F16 and V2BF16).
    """
    if not isinstance(op.value, float):
        return op
    if "bf16" in name:
        return replace(op, value=int(np.float32(op.value).view(np.uint32)) >> 16)
    return replace(op, value=int(np.float16(op.value).view(np.uint16)))


def vector_micro_op(ins: Instruction, mode: Mode) -> MicroOp:
    """Return the operation of a vector instruction. Raise Unknown if it is not supported."""
    ins = _resolve_halves(ins)
    name = ins.name
    if name not in NAMES:
        raise Unknown("unsupported mnemonic")
    dpp = ins.modifiers if "dpp" in ins.suffix else None
    if name in MASKED:
        return _masked_micro_op(ins, mode, dpp)
    saturates = name in SATURATING and "clamp" in ins.modifiers
    key, kind, kinds, function = _function(name, mode, saturates)
    allowed = set()
    if kind[0] == "f":
        allowed = {"clamp", "mul", "div"}
    elif saturates:
        allowed = {"clamp"}
    _require_modifiers(ins, allowed)
    target, *operands = ins.operands
    if name in ACCUMULATING and len(operands) == len(kinds) - 1:
        operands.append(target)
    if kinds[-1] == "lane":
        operands.append(Operand("lane"))
    sources = _typed_sources(name, operands, kinds)
    keeps = tuple(mode.keeps(k) for k in kinds)
    after = {} if saturates else output_modifiers(ins, kind, mode)
    return MicroOp(key, function, kind, target, sources, keeps, None, dpp, after)


def _masked_micro_op(ins: Instruction, mode: Mode, dpp: dict | None) -> MicroOp:
    """Return the operation of an instruction that reads or writes a lane mask."""
    name = ins.name
    kind, kinds, function, has_flag = MASKED[name]
    # Of these instructions, output modifiers apply only to V_DIV_FMAS.
    allowed = {"clamp", "mul", "div"} if kind[:1] == "f" and not has_flag else set()
    _require_modifiers(ins, allowed)
    operands = list(ins.operands)
    target = operands.pop(0) if kind else None
    flag = None
    if has_flag:
        flag = Operand("s", EXEC) if "cmpx" in name else operands.pop(0)
        if not kind:
            # The operands of V_CMPX_E32 may include its target, EXEC. Keep only the sources.
            operands = operands[-len(kinds) :]
    if len(operands) < len(kinds) and kinds[-1] == "mask":
        operands.append(VCC_OPERAND)
    sources = _typed_sources(name, operands, kinds)
    # V_CMP_CLASS sees denormals in every mode. LLVM compiles llvm.is.fpclass to it, whose result
    # does not depend on the mode.
    keeps = tuple("_class_" in name or mode.keeps(k) for k in kinds)
    after = output_modifiers(ins, kind, mode) if allowed else {}
    return MicroOp(name, function, kind, target, sources, keeps, flag, dpp, after)


def _typed_sources(
    name: str, operands: list[Operand], kinds: tuple[str, ...]
) -> tuple[tuple[Operand, str], ...]:
    """Return the sources with their kinds. Raise Unknown if they are not supported."""
    if len(operands) != len(kinds):
        raise Unknown(f"{len(operands)} sources, expected {len(kinds)}")
    sources = []
    for i, (op, kind) in enumerate(zip(operands, kinds, strict=True)):
        is_pack = name == "v_pack_b32_f16"
        if is_pack or (name.startswith("v_dot2") and i < 2):
            op = _half_source(op, name)
        if name.startswith("v_dot2") and i < 2 and (op.neg or op.abs):
            raise Unknown("a negative or absolute source of two numbers")
        has_sign = kind[0] == "f" or kind == "bf16" or "cndmask" in name or is_pack
        if not has_sign:
            # NEG and ABS have no effect on integers: LLVM does not print them.
            op = replace(op, neg=False, abs=False)
        sources.append((op, kind))
    return tuple(sources)


def _compute_and_write(micro: MicroOp) -> tuple[Callable, Callable]:
    """Return (compute, write). The result of compute(waves) is passed to write(waves, ...)."""
    reads = []
    for (op, kind), keeps in zip(micro.sources, micro.keeps_denormals, strict=True):
        reads.append(_source_reader(op, kind, keeps))
    reads[0], lanes = dpp_source(micro.dpp, reads[0], micro.sources[0][0])
    if micro.flag is not None:
        return _compute_and_write_flags(micro, reads, lanes)
    function = micro.function
    finish = finisher(micro.after)
    write = vector_writer(cast(Operand, micro.target), micro.kind)
    if len(reads) == 1:
        (first,) = reads
        return lambda g: (finish(function(first(g))), lanes(g)), write
    if len(reads) == 2:
        first, second = reads
        return lambda g: (finish(function(first(g), second(g))), lanes(g)), write
    return lambda g: (finish(function(*(np.asanyarray(r(g)) for r in reads))), lanes(g)), write


def _source_reader(op: Operand, kind: str, keeps: bool) -> Callable:
    if kind == "lane":
        return lambda g: np.arange(g.width, dtype=np.uint32)
    if kind == "mask":
        return mask_reader(op)
    return reader(op, kind, keeps)


def _compute_and_write_flags(micro: MicroOp, reads, lanes) -> tuple[Callable, Callable]:
    """Return (compute, write) for an operation with flags.

    In the mask of flags, the bit of a lane is set if the lane is written and its flag is set.
    """
    function = micro.function
    write_flags = mask_writer(cast(Operand, micro.flag))
    write = vector_writer(micro.target, micro.kind) if micro.target else None

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


def _compile_swap(ins: Instruction) -> Callable:
    kind = ins.name[-3:]
    first, second = _resolve_halves(ins).operands
    _require_modifiers(ins, set())
    read_first = reader(first, kind)
    read_second = reader(second, kind)
    write_first = vector_writer(first, kind)
    write_second = vector_writer(second, kind)

    def run(g):
        old_first = read_first(g).copy()
        old_second = read_second(g).copy()
        write_first(g, old_second)
        write_second(g, old_first)

    return run


def _compile_quad_sad(ins: Instruction) -> Callable:
    """Compile V_MQSAD_U32_U8, which has four registers of addends and four of results."""
    _require_modifiers(ins, set())
    target, first, second, old = ins.operands
    if old.kind != "v":
        raise Unknown(f"unsupported operand {old} of 128 bits")
    reads = [reader(first, "u64"), reader(second, "u32")]
    writes = []
    for i in range(4):
        reads.append(reader(replace(old, index=old.index + i), "u32"))
        writes.append(vector_writer(replace(target, index=target.index + i, count=1), "u32"))

    def run(g):
        results = subdword.quad_sad32(*(read(g) for read in reads))
        for write, result in zip(writes, results, strict=True):
            write(g, result)

    return run


def _require_modifiers(ins: Instruction, allowed: set[str]) -> None:
    """Raise Unknown if an instruction has modifiers that are neither allowed nor of DPP."""
    if "dpp" in ins.suffix:
        allowed = allowed | _DPP_MODIFIERS
    for key in ins.modifiers.keys() - allowed:
        raise Unknown(f"unsupported modifier {key}")

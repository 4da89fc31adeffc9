# SPDX-License-Identifier: BSD-3-Clause
"""Instructions that move data between lanes (DPP, permlane, readlane), packed maths, and WMMA."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np

from strix_emulate.arithmetic import floats, subdword
from strix_emulate.arithmetic.mode_register import Mode, finisher, output_modifiers
from strix_emulate.arithmetic.subdword import (
    MIXED,
    PACKED,
    clamped_half,
    mixed_name,
    packed,
    packed_name,
)
from strix_emulate.code.decode import M0, Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions.microops import Compiled, MicroOp, compiled_for_c
from strix_emulate.memory.waves import (
    LANES,
    Waves,
    constant_value,
    reader,
    scalar_writer,
    vector_writer,
)

#: Lane numbers of a wave64. A wave32 uses the first half of arrays that are computed from them.
_LANE = np.arange(2 * LANES)
_U32 = np.uint32


def dpp_source(mods: dict | None, read: Callable, op: Operand) -> tuple[Callable, Callable]:
    """Return a reader of source 0 through DPP, and a function that returns the lanes to write.

    Without DPP, the second function returns None, which means the active lanes. With DPP, a source
    lane is invalid if it is outside the row, or if it is inactive and FI is not set. If a lane's
    source lane is invalid, the lane reads 0 with BOUND_CTRL or DPP8, and is not written otherwise
    (RDNA3.5 ISA, "DPP"). NEG turns this 0 into -0.

    Args:
        mods: The modifiers of DPP. None without DPP.
        read: Reader of source 0 of all lanes, with NEG and ABS applied.
        op: Source 0.
    """
    if mods is None:
        return read, lambda _g: None
    source, valid, written = dpp_lanes(mods)
    zero_bound = reads_zero(mods)
    fetch_inactive = bool(mods.get("fi"))

    def is_fetched(g: Waves):
        w = g.width
        if g.full or fetch_inactive:
            return valid[None, :w]
        return valid[:w] & g.mask[:, source[:w]]

    def read_permuted(g: Waves):
        values = _read_lanes(g, read)[:, source[: g.width]]
        if not zero_bound:
            return values
        zero = np.array(-0.0 if op.neg else 0.0, f"f{values.itemsize}").view(values.dtype)
        return np.where(is_fetched(g), values, zero)

    def lanes(g: Waves):
        mask = g.mask & written[: g.width]
        return mask if zero_bound else mask & is_fetched(g)

    return read_permuted, lanes


def reads_zero(mods: dict) -> bool:
    """Return whether a lane without a valid source lane reads 0."""
    return bool(mods.get("bound_ctrl")) or "dpp8" in mods


def dpp_lanes(mods: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return by lane: the source lane, whether it is valid, and whether the masks allow a write."""
    row_mask = mods.get("row_mask", 0xF)
    bank_mask = mods.get("bank_mask", 0xF)
    row_written = row_mask >> (_LANE // 16) & 1
    bank_written = bank_mask >> (_LANE % 16 // 4) & 1
    source, valid = _permutation(mods)
    return source, valid, (row_written & bank_written).astype(bool)


def _permutation(mods: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays for 64 lanes: the source lane, and whether the source lane is valid.

    Raises:
        Unknown: The modifiers have no supported DPP control.
    """
    row = _LANE // 16 * 16
    place = _LANE % 16
    if "row_shl" in mods:
        moved = place + mods["row_shl"]
        return row + np.minimum(moved, 15), moved < 16
    if "row_shr" in mods:
        moved = place - mods["row_shr"]
        return row + np.maximum(moved, 0), moved >= 0
    if "quad_perm" in mods:
        source = _LANE // 4 * 4 + np.array(mods["quad_perm"])[_LANE % 4]
    elif "dpp8" in mods:
        source = _LANE // 8 * 8 + np.array(mods["dpp8"])[_LANE % 8]
    elif "row_ror" in mods:
        source = row + (place - mods["row_ror"]) % 16
    elif "row_share" in mods:
        source = row + mods["row_share"]
    elif "row_xmask" in mods:
        source = row + (place ^ mods["row_xmask"])
    elif "row_mirror" in mods:
        source = row + 15 - place
    elif "row_half_mirror" in mods:
        source = row + place // 8 * 8 + 7 - place % 8
    else:
        raise Unknown("unsupported DPP control")
    return source, np.ones(len(_LANE), bool)


def _read_lanes(g: Waves, read: Callable) -> np.ndarray:
    """Read an operand as (waves, lanes), even if it is the same for all lanes."""
    return np.broadcast_to(read(g), g.mask.shape)


def _read_scalars(g: Waves, read: Callable) -> np.ndarray:
    """Read a scalar operand or a constant as (waves, 1)."""
    return np.broadcast_to(read(g), (g.n, 1))


def _compile_permlane(ins: Instruction, across: bool) -> Compiled:
    """Compile V_PERMLANE16_B32, or V_PERMLANEX16_B32 if `across` is true.

    Each nibble of {source 2, source 1} selects the source lane of one lane in a row of 16. The
    source lane is in the same row, or with `across` in the other row of the same 32 lanes.
    """
    target, source, source_low, source_high = ins.operands
    read = reader(source, "b32")
    read_low = reader(source_low, "b32")
    read_high = reader(source_high, "b32")
    fetch_inactive, bound_ctrl = ins.modifiers.get("op_sel", (0, 0))[:2]
    write = vector_writer(target, "b32")

    def run(g: Waves):
        low = _read_scalars(g, read_low).astype(np.uint64)
        high = _read_scalars(g, read_high).astype(np.uint64)
        nibbles = low | high << np.uint64(32)
        lane = _LANE[: g.width]
        pick = nibbles >> (lane % 16 * 4).astype(np.uint64) & np.uint64(15)
        row = lane // 16 * 16 ^ (16 if across else 0)
        lanes = row + pick.astype(np.int64)
        values = np.take_along_axis(_read_lanes(g, read), lanes, axis=1)
        if fetch_inactive or g.full:
            write(g, values)
            return
        fetched = np.take_along_axis(g.mask, lanes, axis=1)
        if bound_ctrl:
            write(g, np.where(fetched, values, _U32(0)))
        else:
            write(g, values, g.mask & fetched)

    return compiled_for_c(run, _micro_for(ins, "permlanex16" if across else "permlane16"))


def _compile_permlane64(ins: Instruction, _mode: Mode) -> Compiled:
    """Compile V_PERMLANE64_B32, which swaps the halves of a wave64. It reads inactive lanes too.

    In a wave32 it has no effect.
    """
    read = reader(ins.operands[1], "b32")
    write = vector_writer(ins.operands[0], "b32")

    def run(g: Waves):
        if g.width > LANES:
            write(g, np.roll(_read_lanes(g, read), LANES, axis=1))

    return compiled_for_c(run, _micro_for(ins, "permlane64"))


def _micro_for(ins: Instruction, handler: str) -> MicroOp:
    """Return the operation for a handler in C that moves 32 bits."""
    target, *operands = ins.operands
    sources = tuple((op, "b32") for op in operands)
    return MicroOp("", None, "b32", target, sources, handler=handler)


def _compile_readlane(ins: Instruction, _mode: Mode) -> Compiled:
    target, source, lane = ins.operands
    read = reader(source, "b32")
    read_lane = reader(lane, "b32")
    write = scalar_writer(target)

    def run(g: Waves):
        lanes = _read_scalars(g, read_lane).astype(np.int64) & (g.width - 1)
        write(g, np.take_along_axis(_read_lanes(g, read), lanes, axis=1))

    return compiled_for_c(run, _micro_for(ins, "readlane"))


def _compile_readfirstlane(ins: Instruction, _mode: Mode) -> Compiled:
    read = reader(ins.operands[1], "b32")
    write = scalar_writer(ins.operands[0])

    def run(g: Waves):
        # If no lane is active, numpy.argmax returns 0, and the instruction reads lane 0.
        first = np.argmax(g.mask, axis=1)[:, None]
        write(g, np.take_along_axis(_read_lanes(g, read), first, axis=1))

    return compiled_for_c(run, _micro_for(ins, "readfirstlane"))


def _compile_writelane(ins: Instruction, _mode: Mode) -> Compiled:
    """Compile V_WRITELANE_B32, which writes regardless of EXEC."""
    target, source, lane = ins.operands
    read = reader(source, "b32")
    read_lane = reader(lane, "b32")

    def run(g: Waves):
        lanes = _read_scalars(g, read_lane).astype(np.int64) & (g.width - 1)
        values = _read_scalars(g, read)
        np.put_along_axis(g.V[target.index], lanes, values, axis=1)

    return compiled_for_c(run, _micro_for(ins, "writelane"))


def _compile_fma_mix(ins: Instruction, mode: Mode) -> Compiled:
    """Compile V_FMA_MIX*. Op_sel_hi marks float16 sources, and op_sel selects their halves."""
    high_halves = ins.modifiers.get("op_sel", (0, 0, 0))
    are_half = ins.modifiers.get("op_sel_hi", (0, 0, 0))
    source_list = []
    for op, high, is_half in zip(ins.operands[1:4], high_halves, are_half, strict=True):
        if is_half:
            source_list.append((replace(op, count=1, half="h" if high else "l"), "f16"))
        else:
            source_list.append((op, "f32"))
    sources = tuple(source_list)
    kind = "f32"
    target = ins.operands[0]
    if ins.name != "v_fma_mix_f32":
        kind = "f16"
        target = Operand("v", target.index, 1, "h" if "mixhi" in ins.name else "l")
    kinds = tuple(source_kind for _, source_kind in sources)
    plain_function = MIXED[kind, kinds]
    function = plain_function
    if kind == "f16" and mode.finite_16:
        function = floats.finite(plain_function)
    keeps = tuple(mode.keeps(source_kind) for source_kind in kinds)
    after = output_modifiers(ins, kind, mode)
    dpp = ins.modifiers if "dpp" in ins.suffix else None
    reads = []
    for (op, source_kind), keeps_denormals in zip(sources, keeps, strict=True):
        reads.append(reader(op, source_kind, keeps_denormals))
    reads[0], lanes = dpp_source(dpp, reads[0], sources[0][0])
    finish = finisher(after)
    write = vector_writer(target, kind)

    def run(g: Waves):
        value = finish(function(*(np.asarray(read(g)) for read in reads)))
        write(g, value, lanes(g))

    if function is not plain_function:
        return Compiled(run)
    name = mixed_name(kind, kinds)
    micro = MicroOp(name, plain_function, kind, target, sources, keeps, None, dpp, after)
    return compiled_for_c(run, micro)


def _compile_packed(ins: Instruction, mode: Mode) -> Compiled:
    """Compile a packed operation (VOP3P), which computes both halves of its target.

    Op_sel selects the halves of the sources for the low half of the target, and op_sel_hi those for
    the high half. CLAMP saturates integers, and limits floats to the range 0 .. 1.
    """
    clamp = bool(ins.modifiers.get("clamp"))
    kind, _, plain_function = packed(ins.name, clamp)
    function = plain_function
    if kind == "f16" and mode.finite_16:
        # FP16_OVFL acts before the clamp.
        function = floats.finite(packed(ins.name, False)[2])
        if clamp:
            function = clamped_half(function)
    if ins.modifiers.keys() - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"}:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers)}")
    micros = _packed_micros(ins, mode, plain_function)
    finish = finisher(micros[0].after)
    reads_of_halves = []
    for micro in micros:
        reads_of_halves.append([reader(op, kind, mode.keeps(kind)) for op, _ in micro.sources])
    writes = [vector_writer(cast(Operand, micro.target), kind) for micro in micros]

    def run(g: Waves):
        results = []
        for reads in reads_of_halves:
            results.append(finish(function(*(np.asarray(read(g)) for read in reads))))
        for write, result in zip(writes, results, strict=True):
            write(g, result)

    if function is not plain_function:
        return Compiled(run)
    return compiled_for_c(run, *micros)


def _packed_micros(ins: Instruction, mode: Mode, function: Callable) -> list[MicroOp]:
    """Return the operations of a packed instruction on the low and the high half.

    `function` is the one from `packed`. If the instruction has CLAMP, `function` applies it.
    """
    clamp = bool(ins.modifiers.get("clamp"))
    kind, kinds, _ = packed(ins.name, clamp)
    after = output_modifiers(ins, kind, mode) if kind == "f16" else {}
    after.pop("clamp", None)
    keeps = (mode.keeps(kind),) * len(kinds)
    target, *operands = ins.operands
    if ins.name == "v_pk_fmac_f16":
        operands.append(target)
    micros = []
    for half, picks_name, default, signs_name in (
        ("l", "op_sel", 0, "neg_lo"),
        ("h", "op_sel_hi", 1, "neg_hi"),
    ):
        picks = ins.modifiers.get(picks_name, (default,) * len(kinds))
        signs = ins.modifiers.get(signs_name, (0,) * len(kinds))
        sources = tuple((op, kind) for op in _select_halves(operands, picks, signs))
        half_target = Operand("v", target.index, 1, half)
        name = packed_name(ins.name, clamp)
        micros.append(MicroOp(name, function, kind, half_target, sources, keeps, after=after))
    return micros


def _select_halves(operands: list[Operand], picks: tuple, signs: tuple) -> list[Operand]:
    """Return the selected half of each operand, negated if its sign is set."""
    halves = []
    for op, high, negate in zip(operands, picks, signs, strict=True):
        halves.append(replace(op, count=1, half="h" if high else "l", neg=bool(negate)))
    return halves


#: Bits of a field of V_DOT4 and V_DOT8, and whether NEG_LO can make factors signed.
_DOTS = {
    "v_dot4_i32_iu8": (8, True),
    "v_dot4_u32_u8": (8, False),
    "v_dot8_i32_iu4": (4, True),
    "v_dot8_u32_u4": (4, False),
}


def _compile_dot(ins: Instruction, _mode: Mode) -> Compiled:
    """Compile V_DOT4 or V_DOT8. CLAMP saturates the sum.

    In the instructions whose names end in iu8 or iu4, neg_lo marks signed factors.
    """
    bits, is_signed = _DOTS[ins.name]
    if ins.modifiers.keys() - {"neg_lo", "clamp"}:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers)}")
    signs = ins.modifiers.get("neg_lo", (0, 0, 0)) if is_signed else (0, 0, 0)
    function = subdword.dot(bits, bool(signs[0]), bool(signs[1]))
    kind = "i32" if is_signed else "u32"
    target, first, second, addend = ins.operands
    read_first = reader(first, "u32")
    read_second = reader(second, "u32")
    read_addend = reader(addend, kind)
    write = vector_writer(target, kind)
    limits = np.iinfo(np.int32 if is_signed else np.uint32)
    clamp = bool(ins.modifiers.get("clamp"))

    def run(g: Waves):
        total = function(read_first(g), read_second(g), read_addend(g))
        if clamp:
            total = np.clip(total, limits.min, limits.max)
        write(g, total.astype(limits.dtype))

    return Compiled(run)


def _compile_move_relative(ins: Instruction, _mode: Mode) -> Compiled:
    """Compile V_MOVREL*, which adds M0 to the register number of source, destination, or both.

    V_MOVRELSD_2 adds bits 0 to 9 of M0 to the source, and bits 16 to 25 to the destination.
    """
    if ins.modifiers:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers)}")
    target, source = ins.operands
    by_source = "rels" in ins.name
    by_target = "reld" in ins.name or "sd" in ins.name
    has_two_offsets = "_2_" in ins.name
    read = reader(source, "b32")

    def offsets(g: Waves, shift: int):
        m0 = g.S[M0, :, 0]
        if has_two_offsets:
            m0 = m0 >> _U32(shift) & _U32(0x3FF)
        return m0.astype(np.int64)

    def require_registers(g: Waves, numbers):
        if numbers.max() >= len(g.V):
            raise Trap("bounds", f"register v{numbers.max()}, but there are only {len(g.V)}")

    def run(g: Waves):
        wave = np.arange(g.n)
        if by_source:
            rows = source.index + offsets(g, 0)
            require_registers(g, rows)
            value = g.V[rows, wave]
        else:
            value = read(g)
        rows = np.full(g.n, target.index, np.int64)
        if by_target:
            rows += offsets(g, 16)
        require_registers(g, rows)
        old = g.V[rows, wave]
        g.V[rows, wave] = np.where(g.mask, value, old)

    return Compiled(run)


#: Types of the matrices of WMMA instructions: type of A and B, type of C and D.
_WMMA = {
    "v_wmma_f32_16x16x16_f16": ("f16", "f32"),
    "v_wmma_f32_16x16x16_bf16": ("bf16", "f32"),
    "v_wmma_f16_16x16x16_f16": ("f16", "f16"),
    "v_wmma_bf16_16x16x16_bf16": ("bf16", "bf16"),
    "v_wmma_i32_16x16x16_iu8": ("iu8", "i32"),
    "v_wmma_i32_16x16x16_iu4": ("iu4", "i32"),
}
#: Names of the handlers in C, by the types of the matrices A and D. Instructions without a handler
#: are computed with numpy.
_WMMA_HANDLERS = {
    ("f16", "f32"): "wmma_f16",
    ("bf16", "f32"): "wmma_bf16",
    ("f16", "f16"): "wmma_half",
    ("iu8", "i32"): "wmma_iu8",
}


def _read_matrix(g: Waves, first: int, kind: str, signed: bool) -> np.ndarray:
    """Return rows of A or columns of B as (n, 16, 16). A lane has one row or column: 16 numbers.

    Raises:
        Trap: Lanes from 16 on do not repeat lanes 0 to 15, as the instruction requires.
    """
    registers = {"iu8": 4, "iu4": 2}.get(kind, 8)
    bits = g.V[first : first + registers]
    if not (bits.reshape(registers, g.n, -1, 16) == bits[:, :, None, :16]).all():
        others = f"lanes 16-{g.width - 1} of v[{first}:{first + registers - 1}]"
        raise Trap("wmma", f"{others} do not repeat lanes 0-15")
    rows = np.ascontiguousarray(bits[:, :, :16].transpose(1, 2, 0))
    if kind == "f16":
        return rows.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return floats.bfloat(rows.view(np.uint16))
    if kind == "iu4":
        # Of the two numbers in a byte, the first is in the low half.
        raw = rows.view(np.uint8)
        nibbles = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1)
        rows = nibbles.reshape(len(nibbles), 16, 16)
        return ((rows ^ 8).astype(np.float64) - 8) if signed else rows.astype(np.float64)
    return rows.view(np.int8 if signed else np.uint8).astype(np.float64)


def _product(rows, columns):
    """Return matrix products (n, 16, 16) of rows and columns. Terms are added one by one."""
    total = rows[:, :, None, 0] * columns[:, None, :, 0]
    for k in range(1, 16):
        total += rows[:, :, None, k] * columns[:, None, :, k]
    return total


def _compile_wmma(ins: Instruction, mode: Mode) -> Compiled:
    """Compile D = A B + C.

    Each register of C and D has 2 rows (in wave64, 4 rows). A row is in sixteen successive lanes,
    one lane for each column.

    The ISA document does not specify the order of the sixteen additions. Here they are float32
    sums, one after the other, and C is added last. Integer products are exact.
    """
    source, result = _WMMA[ins.name]
    target, a, b, c = ins.operands
    mods = ins.modifiers
    if mode.finite_16 and result == "f16":
        raise Unknown("not supported with FP16_OVFL")
    allowed = {"i32": {"neg_lo", "clamp"}, "f32": set()}.get(result, {"op_sel"})
    if mods.keys() - allowed:
        raise Unknown(f"unsupported modifiers {sorted(mods)}")
    # For integers, NEG_LO marks signed factors.
    signed_a, signed_b, _ = mods.get("neg_lo", (0, 0, 0))
    start = int(bool(mods.get("op_sel", (0, 0, 0))[2]))
    add = _make_matrix_adder(ins, result, start)

    def run(g: Waves):
        if not g.full:
            raise Trap("wmma", "EXEC is not all ones")
        rows = _read_matrix(g, a.index, source, signed_a)
        columns = _read_matrix(g, b.index, source, signed_b)
        # From (n, row, column) to (register, n, lane)
        product = _product(rows, columns).reshape(g.n, -1, g.width).transpose(1, 0, 2)
        add(g, product)

    handler = _WMMA_HANDLERS.get((source, result))
    if handler is None or "clamp" in mods:
        return Compiled(run)
    sources = ((a, "b32"), (b, "b32"), (c, result))
    access = {"half": start, "extended": int(bool(signed_a)) + 2 * int(bool(signed_b))}
    micro = MicroOp("", None, result, target, sources, handler=handler, access=access)
    return compiled_for_c(run, micro)


def _make_matrix_adder(ins: Instruction, result: str, start: int) -> Callable:
    """Return a function (waves, product) that adds C to the product and writes D.

    Args:
        ins: A WMMA instruction.
        result: Type of C and D.
        start: Which half of each register holds C and D of 16 bits: 0 for the lower half, 1 for
            the upper half.
    """
    target, _, _, c = ins.operands
    value = constant_value(c, result) if c.kind == "const" else None
    clamp = "clamp" in ins.modifiers

    def places(product) -> tuple[slice, slice]:
        count = len(product)
        return slice(target.index, target.index + count), slice(c.index, c.index + count)

    def add_f32(g: Waves, product):
        into, old = places(product)
        g.F[into] = product + (g.F[old] if value is None else value)

    def add_i32(g: Waves, product):
        into, old = places(product)
        total = product.astype(np.int64) + (g.I[old] if value is None else value)
        if clamp:
            total = np.clip(total, -(2**31), 2**31 - 1)
        g.I[into] = total.astype(np.int32)

    def add_f16(g: Waves, product):
        into, old = places(product)
        addend = g.H[old][:, :, start::2] if value is None else value
        g.H[into][:, :, start::2] = (product + addend).astype(np.float16)

    def add_bf16(g: Waves, product):
        into, old = places(product)
        addend = floats.bfloat(g.U16[old][:, :, start::2]) if value is None else value
        g.U16[into][:, :, start::2] = floats.to_bfloat(product + addend)

    return {"f32": add_f32, "i32": add_i32, "f16": add_f16, "bf16": add_bf16}[result]


COMPILERS: dict[str, Callable[[Instruction, Mode], Compiled]] = {
    "v_permlane16_b32": lambda ins, _mode: _compile_permlane(ins, across=False),
    "v_permlanex16_b32": lambda ins, _mode: _compile_permlane(ins, across=True),
    "v_permlane64_b32": _compile_permlane64,
    "v_readlane_b32": _compile_readlane,
    "v_readfirstlane_b32": _compile_readfirstlane,
    "v_writelane_b32": _compile_writelane,
    "v_fma_mix_f32": _compile_fma_mix,
    "v_fma_mixlo_f16": _compile_fma_mix,
    "v_fma_mixhi_f16": _compile_fma_mix,
    "v_movrels_b32": _compile_move_relative,
    "v_movreld_b32": _compile_move_relative,
    "v_movrelsd_b32": _compile_move_relative,
    "v_movrelsd_2_b32": _compile_move_relative,
    **dict.fromkeys(_DOTS, _compile_dot),
    **dict.fromkeys(PACKED, _compile_packed),
    **dict.fromkeys(_WMMA, _compile_wmma),
}

# SPDX-License-Identifier: BSD-3-Clause
"""Instructions that move data between lanes: DPP, permlane, readlane; packed maths; WMMA."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from strix_emulate.arithmetic import floats, subdword
from strix_emulate.arithmetic.mode_register import Mode, clamped
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
from strix_emulate.instructions.microops import MicroOp, executes
from strix_emulate.memory.waves import LANES, Waves, constant, reader, scalar_writer, vector_writer

#: of a wave64; none of what follows takes the first half's lanes out of it
_LANE = np.arange(2 * LANES)
_U32 = np.uint32


def dpp_source(mods: dict | None, read: Callable) -> tuple[Callable, Callable]:
    """Return source 0 seen through DPP, and a function of the lanes to write (None: EXEC).

    A source lane that is out of its row, or not active without FI, gives 0 with BOUND_CTRL or DPP8
    and otherwise leaves the destination lane alone (RDNA3.5 ISA, "DPP").
    """
    if mods is None:
        return read, lambda _g: None
    source, valid, written = dpp_lanes(mods)
    zero_bound, fetch_inactive = gives_zero(mods), bool(mods.get("fi"))

    def fetched(g: Waves):
        w = g.width
        return valid[None, :w] if g.full or fetch_inactive else valid[:w] & g.mask[:, source[:w]]

    def permuted(g: Waves):
        values = np.broadcast_to(read(g), g.mask.shape)[:, source[: g.width]]
        return np.where(fetched(g), values, values.dtype.type(0)) if zero_bound else values

    def lanes(g: Waves):
        mask = g.mask & written[: g.width]
        return mask if zero_bound else mask & fetched(g)

    return permuted, lanes


def gives_zero(mods: dict) -> bool:
    """Return whether a lane without a source gets 0 for one."""
    return bool(mods.get("bound_ctrl")) or "dpp8" in mods


def dpp_lanes(mods: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each lane: where its source is, whether there is one, whether it is written."""
    rows, banks = mods.get("row_mask", 0xF), mods.get("bank_mask", 0xF)
    written = (rows >> (_LANE // 16) & 1) & (banks >> (_LANE % 16 // 4) & 1)
    return *_permutation(mods), written.astype(bool)


def _permutation(mods: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return (source lane of each lane, whether there is one)."""
    row, place = _LANE // 16 * 16, _LANE % 16
    every = np.ones(len(_LANE), bool)
    if "quad_perm" in mods:
        return _LANE // 4 * 4 + np.array(mods["quad_perm"])[_LANE % 4], every
    if "dpp8" in mods:
        return _LANE // 8 * 8 + np.array(mods["dpp8"])[_LANE % 8], every
    if "row_shl" in mods:
        moved = place + mods["row_shl"]
        return row + np.minimum(moved, 15), moved < 16
    if "row_shr" in mods:
        moved = place - mods["row_shr"]
        return row + np.maximum(moved, 0), moved >= 0
    for name, moved in (
        ("row_ror", lambda n: (place - n) % 16),
        ("row_share", lambda n: np.full(len(_LANE), n)),
        ("row_xmask", lambda n: place ^ n),
        ("row_mirror", lambda _n: 15 - place),
        ("row_half_mirror", lambda _n: place // 8 * 8 + 7 - place % 8),
    ):
        if name in mods:
            return row + moved(mods[name]), every
    raise Unknown("DPP control")


def _permlane(ins: Instruction, across: bool) -> Callable:
    """Compile V_PERMLANE(X)16_B32: nibbles of {src2, src1} pick lanes, in the own or other row."""
    value, low, high = (reader(op, "b32") for op in ins.operands[1:])
    inactive, bound = ins.modifiers.get("op_sel", (0, 0))[:2]
    write = vector_writer(ins.operands[0], "b32")

    def run(g: Waves):
        table = np.broadcast_to(low(g), (g.n, 1)).astype(np.uint64)
        table = table | np.broadcast_to(high(g), (g.n, 1)).astype(np.uint64) << np.uint64(32)
        lane = _LANE[: g.width]
        pick = (table >> (lane % 16 * 4).astype(np.uint64) & np.uint64(15)).astype(np.int64)
        source = (lane // 16 * 16 ^ (16 if across else 0)) + pick
        values = np.take_along_axis(np.broadcast_to(value(g), g.mask.shape), source, axis=1)
        if inactive or g.full:
            write(g, values)
            return
        fetched = np.take_along_axis(g.mask, source, axis=1)
        if bound:
            write(g, np.where(fetched, values, _U32(0)))
        else:
            write(g, values, g.mask & fetched)

    return executes(run, _moved(ins, "permlanex16" if across else "permlane16"))


def _permlane64(ins: Instruction, _mode: Mode) -> Callable:
    """Compile V_PERMLANE64_B32: swap the halves of a wave64, of active and inactive lanes alike.

    To a wave32 it does nothing.
    """
    read, write = reader(ins.operands[1], "b32"), vector_writer(ins.operands[0], "b32")

    def run(g: Waves):
        if g.width > LANES:
            write(g, np.roll(np.broadcast_to(read(g), g.mask.shape), LANES, axis=1))

    return executes(run, _moved(ins, "permlane64"))


def _moved(ins: Instruction, handler: str) -> MicroOp:
    target, *sources = ins.operands
    return MicroOp("", None, "b32", target, tuple((op, "b32") for op in sources), handler=handler)


def _readlane(ins: Instruction, _mode: Mode) -> Callable:
    read, lane = reader(ins.operands[1], "b32"), reader(ins.operands[2], "b32")
    write = scalar_writer(ins.operands[0])

    def run(g: Waves):
        picked = np.broadcast_to(lane(g) & _U32(g.width - 1), (g.n, 1)).astype(np.int64)
        write(g, np.take_along_axis(np.broadcast_to(read(g), g.mask.shape), picked, axis=1))

    return executes(run, _moved(ins, "readlane"))


def _readfirstlane(ins: Instruction, _mode: Mode) -> Callable:
    read, write = reader(ins.operands[1], "b32"), scalar_writer(ins.operands[0])

    def run(g: Waves):
        # with no lane active, lane 0
        first = np.argmax(g.mask, axis=1)[:, None]
        write(g, np.take_along_axis(np.broadcast_to(read(g), g.mask.shape), first, axis=1))

    return executes(run, _moved(ins, "readfirstlane"))


def _writelane(ins: Instruction, _mode: Mode) -> Callable:
    value, lane = reader(ins.operands[1], "b32"), reader(ins.operands[2], "b32")
    target = ins.operands[0].index

    def run(g: Waves):
        # regardless of EXEC
        picked = np.broadcast_to(lane(g) & _U32(g.width - 1), (g.n, 1)).astype(np.int64)
        np.put_along_axis(g.V[target], picked, np.broadcast_to(value(g), (g.n, 1)), axis=1)

    return executes(run, _moved(ins, "writelane"))


def _fma_mix(ins: Instruction, mode: Mode) -> Callable:
    """Compile V_FMA_MIX*: op_sel_hi says which sources are float16, op_sel which register half."""
    half = ins.modifiers.get("op_sel", (0, 0, 0))
    is_half = ins.modifiers.get("op_sel_hi", (0, 0, 0))
    sources = tuple(
        (replace(op, count=1, half="h" if high else "l"), "f16") if narrow_ else (op, "f32")
        for op, high, narrow_ in zip(ins.operands[1:4], half, is_half, strict=True)
    )
    kind, target = "f32", ins.operands[0]
    if ins.name != "v_fma_mix_f32":
        kind = "f16"
        target = Operand("v", target.index, 1, "h" if "mixhi" in ins.name else "l")
    kinds = tuple(k for _, k in sources)
    function = MIXED[kind, kinds]
    if kind == "f16" and mode.finite_16:
        function = floats.finite(function)
    reads = [reader(op, k) for op, k in sources]
    write, clamp = vector_writer(target, kind), "clamp" in ins.modifiers

    def run(g: Waves):
        value = function(*(np.asarray(read(g)) for read in reads))
        write(g, clamped(value) if clamp else value)

    if clamp or function is not MIXED[kind, kinds]:
        return run
    return executes(run, MicroOp(mixed_name(kind, kinds), function, kind, target, sources))


def _packed(ins: Instruction, mode: Mode) -> Callable:
    """Compile VOP3P: the operation on both halves; op_sel, op_sel_hi pick the source half for each.

    CLAMP saturates integers, and brings numbers into 0 to 1.
    """
    clamp = bool(ins.modifiers.get("clamp"))
    kind, kinds, function = packed(ins.name, clamp)
    plain = function
    if kind == "f16" and mode.finite_16:
        # before it is brought into 0 to 1
        function = floats.finite(packed(ins.name, False)[2])
        function = clamped_half(function) if clamp else function
    if ins.modifiers.keys() - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"}:
        raise Unknown(f"modifiers {sorted(ins.modifiers)}")
    sources, count = ins.operands[1:], len(kinds)
    if ins.name == "v_pk_fmac_f16":
        sources = (*sources, ins.operands[0])
    choices = (
        (ins.modifiers.get("op_sel", (0,) * count), ins.modifiers.get("neg_lo", (0,) * count)),
        (ins.modifiers.get("op_sel_hi", (1,) * count), ins.modifiers.get("neg_hi", (0,) * count)),
    )
    targets = [Operand("v", ins.operands[0].index, 1, half) for half in "lh"]
    micros = [
        MicroOp(packed_name(ins.name, clamp), plain, kind, target,
                tuple((replace(op, count=1, half="h" if high else "l", neg=bool(negate)), kind)
                      for op, high, negate in zip(sources, picks, negations, strict=True)))
        for target, (picks, negations) in zip(targets, choices, strict=True)
    ]  # fmt: skip
    halves = [[reader(op, kind) for op, _ in micro.sources] for micro in micros]
    writes = [vector_writer(target, kind) for target in targets]

    def run(g: Waves):
        results = [function(*(np.asarray(read(g)) for read in reads)) for reads in halves]
        for write, result in zip(writes, results, strict=True):
            write(g, result)

    return run if function is not plain else executes(run, *micros)


def _dot(ins: Instruction, _mode: Mode) -> Callable:
    """Compile V_DOT4, V_DOT8: neg_lo says which factors are signed; CLAMP saturates the sum."""
    bits, signed = _DOTS[ins.name]
    if ins.modifiers.keys() - {"neg_lo", "clamp"}:
        raise Unknown(f"modifiers {sorted(ins.modifiers)}")
    signs = ins.modifiers.get("neg_lo", (0, 0, 0)) if signed else (0, 0, 0)
    function = subdword.dot(bits, bool(signs[0]), bool(signs[1]))
    kind = "i32" if signed else "u32"
    first, second = (reader(op, "u32") for op in ins.operands[1:3])
    third, write = reader(ins.operands[3], kind), vector_writer(ins.operands[0], kind)
    limits = np.iinfo(np.int32 if signed else np.uint32)
    clamp = bool(ins.modifiers.get("clamp"))

    def run(g: Waves):
        total = function(first(g), second(g), third(g))
        total = np.clip(total, limits.min, limits.max) if clamp else total
        write(g, total.astype(limits.dtype))

    return run


_DOTS = {"v_dot4_i32_iu8": (8, True), "v_dot4_u32_u8": (8, False), "v_dot8_i32_iu4": (4, True),
         "v_dot8_u32_u4": (4, False)}  # fmt: skip


def _move_relative(ins: Instruction, _mode: Mode) -> Callable:
    """Compile V_MOVREL*: M0 is added to the number of the source, of the destination, or of both.

    In V_MOVRELSD_2 the destination has the high half of M0 for its own.
    """
    target, source = ins.operands
    by_source, by_target = "rels" in ins.name, "reld" in ins.name or "sd" in ins.name
    two = "_2_" in ins.name

    def rows(g: Waves, first: int, moved: bool, high: bool):
        by = g.S[M0, :, 0] >> _U32(16 if high else 0) & _U32(0x3FF) if two else g.S[M0, :, 0]
        numbers = first + (by.astype(np.int64) if moved else np.zeros(g.n, np.int64))
        if numbers.max() >= len(g.V):
            raise Trap("bounds", f"v{numbers.max()} of {len(g.V)} vector registers")
        return numbers

    read = reader(source, "b32")

    def run(g: Waves):
        wave = np.arange(g.n)
        value = g.V[rows(g, source.index, True, False), wave] if by_source else read(g)
        place = rows(g, target.index, by_target, True)
        old = g.V[place, wave]
        g.V[place, wave] = np.where(g.mask, value, old)

    return run


_WMMA = {
    "v_wmma_f32_16x16x16_f16": ("f16", "f32"), "v_wmma_f32_16x16x16_bf16": ("bf16", "f32"),
    "v_wmma_f16_16x16x16_f16": ("f16", "f16"), "v_wmma_bf16_16x16x16_bf16": ("bf16", "bf16"),
    "v_wmma_i32_16x16x16_iu8": ("iu8", "i32"), "v_wmma_i32_16x16x16_iu4": ("iu4", "i32"),
}  # fmt: skip


def _matrix(g: Waves, first: int, kind: str, signed: bool) -> np.ndarray:
    """Read rows of A or columns of B as (n, 16, 16): a lane's registers hold a row's 16 numbers.

    Raises:
        Trap: the other lanes do not repeat lanes 0 to 15, as the instruction needs.
    """
    registers = {"iu8": 4, "iu4": 2}.get(kind, 8)
    bits = g.V[first : first + registers]
    if not (bits.reshape(registers, g.n, -1, 16) == bits[:, :, None, :16]).all():
        others = f"lanes 16-{g.width - 1} of v[{first}:{first + registers - 1}]"
        raise Trap("wmma", f"{others} do not repeat 0-15")
    rows = np.ascontiguousarray(bits[:, :, :16].transpose(1, 2, 0))
    if kind == "f16":
        return rows.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return floats.bfloat(rows.view(np.uint16))
    if kind == "iu4":
        # the first of two numbers is in the low half of a byte
        raw = rows.view(np.uint8)
        rows = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1).reshape(
            len(rows), 16, 16
        )
        return ((rows ^ 8).astype(np.float64) - 8) if signed else rows.astype(np.float64)
    return rows.view(np.int8 if signed else np.uint8).astype(np.float64)


def _product(rows, columns):
    """Compute matrix products (n, 16, 16) of rows and columns, each number added in its turn."""
    total = rows[:, :, None, 0] * columns[:, None, :, 0]
    for k in range(1, 16):
        total += rows[:, :, None, k] * columns[:, None, :, k]
    return total


def _wmma(ins: Instruction, mode: Mode) -> Callable:
    """Compile D = A B + C. The first register of C holds rows 0 and 1, of wave64 0 to 3, and so on.

    A row is in sixteen lanes, a column in one lane of each row.

    The document leaves the order of the sixteen additions open; here they are float32 sums, one
    after the other, with C added last. Integer products are exact.
    """
    source, result = _WMMA[ins.name]
    target, a, b, c = ins.operands
    mods = ins.modifiers
    if mode.finite_16 and result == "f16":
        raise Unknown("with FP16_OVFL")
    allowed = {"i32": {"neg_lo", "clamp"}, "f32": set()}.get(result, {"op_sel"})
    if mods.keys() - allowed:
        raise Unknown(f"modifiers {sorted(mods)}")
    # for integers neg_lo says which factors are signed
    signed = mods.get("neg_lo", (0, 0, 0))
    start = int(bool(mods.get("op_sel", (0, 0, 0))[2]))
    value = constant(c, result) if c.kind == "const" else None

    def run(g: Waves):
        if not g.full:
            raise Trap("wmma", "EXEC is not all ones")
        product = _product(
            _matrix(g, a.index, source, signed[0]), _matrix(g, b.index, source, signed[1])
        )
        # (n, row, column) to (register, n, lane)
        product = product.reshape(g.n, -1, g.width).transpose(1, 0, 2)
        into, old = (slice(x.index, x.index + len(product)) for x in (target, c))
        if result == "f32":
            g.F[into] = product + (g.F[old] if value is None else value)
        elif result == "i32":
            total = product.astype(np.int64) + (g.I[old] if value is None else value)
            total = np.clip(total, -(2**31), 2**31 - 1) if "clamp" in mods else total
            g.I[into] = total.astype(np.int32)
        elif result == "f16":
            before = g.H[old][:, :, start::2] if value is None else value
            g.H[into][:, :, start::2] = (product + before).astype(np.float16)
        else:
            before = floats.bfloat(g.U16[old][:, :, start::2]) if value is None else value
            g.U16[into][:, :, start::2] = floats.to_bfloat(product + before)

    handler = {"f32": f"wmma_{source}", "f16": "wmma_half", "i32": f"wmma_{source}"}.get(result)
    if handler not in ("wmma_f16", "wmma_bf16", "wmma_half", "wmma_iu8") or "clamp" in mods:
        return run
    sources = ((a, "b32"), (b, "b32"), (c, result))
    access = {"half": start, "extended": int(bool(signed[0])) + 2 * int(bool(signed[1]))}
    return executes(run, MicroOp("", None, result, target, sources, handler=handler, access=access))


COMPILERS: dict[str, Callable[[Instruction, Mode], Callable]] = {
    "v_permlane16_b32": lambda ins, _mode: _permlane(ins, across=False),
    "v_permlanex16_b32": lambda ins, _mode: _permlane(ins, across=True),
    "v_permlane64_b32": _permlane64,
    "v_readlane_b32": _readlane, "v_readfirstlane_b32": _readfirstlane,
    "v_writelane_b32": _writelane,
    **dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), _fma_mix),
    **dict.fromkeys(_DOTS, _dot),
    **dict.fromkeys(
        ("v_movrels_b32", "v_movreld_b32", "v_movrelsd_b32", "v_movrelsd_2_b32"), _move_relative),
    **dict.fromkeys(PACKED, _packed), **dict.fromkeys(_WMMA, _wmma),
}  # fmt: skip

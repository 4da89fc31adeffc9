# SPDX-License-Identifier: BSD-3-Clause
"""Registers of waves that stand at the same instruction, and typed access to them.

n waves are one numpy operation: vector registers have the shape (n, width), 32 or 64 lanes, scalar
ones (n, 1), so that they broadcast. Lane masks of wave64 are pairs of scalar registers. Waves that
branch apart become two `Waves`; they are joined when they meet again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from strix_emulate.arithmetic.floats import bfloat, flush
from strix_emulate.code.decode import APERTURES, EXEC, NULL, VCC, Operand, Unknown

#: Lanes of a wave32, of half a wave64, and of a scalar register that is a mask.
LANES = 32
#: Scalar registers; those in front are general ones, behind them are VCC, EXEC and other special
#: ones.
SCALARS, GENERAL_SCALARS = 128, 104
_SPANS = {16: "u2", 32: "u4", 64: "u8"}
ZERO = Operand("const")
_FLOATS = {"f32": np.float32, "f16": np.float16, "f64": np.float64}


class Waves:
    """State of n waves: V (vector registers), S (scalar registers), scc, EXEC and identity.

    workgroup, wave: number of the workgroup in the grid, and of the wave in it. slot: row of the
    wave in scratch; lds_slot: that of its workgroup in LDS. epoch: barriers passed
    and atomics since (:mod:`memory.happens_before`). stored: numbers of the stores that it
    executed, as bits (:mod:`memory.doubts`). turn: how often others were let by; polls and
    asks: what that is decided by. look, seen: what they see in memory that others change in this
    turn of a loop, and saw in an earlier one, as numbers; watch: the same as
    :class:`memory.polls.Seen`; records: whether that is noted; skips, pause: for how many turns
    not; woken: the waves with which they slept last. scalars: how many of the general scalar
    registers their kernel may use. I, F, U16, I16, H: V as other types; VF: V
    without its axes of waves and lanes; SI, SF: S as other types. queues: what the wait counters
    still count (see :mod:`strix_emulate.memory.waits`).
    """

    __slots__ = (
        "F",
        "H",
        "I",
        "I16",
        "S",
        "SF",
        "SI",
        "U16",
        "V",
        "VF",
        "_active",
        "asks",
        "epoch",
        "identity",
        "lds_slot",
        "look",
        "n",
        "pause",
        "pc",
        "polls",
        "queues",
        "records",
        "scalars",
        "scc",
        "seen",
        "skips",
        "slot",
        "stored",
        "tags",
        "turn",
        "watch",
        "wave",
        "width",
        "woken",
        "workgroup",
    )  # fmt: skip
    identity: np.ndarray  #: (8, n): the following, in this order
    workgroup: np.ndarray
    wave: np.ndarray
    slot: np.ndarray
    lds_slot: np.ndarray
    epoch: np.ndarray
    stored: np.ndarray
    look: np.ndarray
    seen: np.ndarray
    tags: Any  #: None until they are needed

    def __init__(self, V, S, scc, pc, identity, queues):
        # V and S in C's order: of another one a flat view would be a copy
        self.n, self.width = V.shape[1:]
        self.V, self.S, self.scc, self.pc, self.queues = V, S, scc, pc, queues
        self.I, self.F = V.view(np.int32), V.view(np.float32)
        self.U16, self.I16, self.H = V.view(np.uint16), V.view(np.int16), V.view(np.float16)
        self.VF = V.reshape(V.shape[0], -1)
        self.SI, self.SF = S.view(np.int32), S.view(np.float32)
        self.identity = identity
        self.workgroup, self.wave, self.slot, self.lds_slot, self.epoch, self.stored = identity[:6]
        self.look, self.seen = identity[6:]
        self.tags = None
        self.turn, self.polls, self.asks = 0, 0, False
        self.records, self.watch = False, []
        self.pause, self.skips = 1, 0
        self.woken: Any = None
        self.scalars = GENERAL_SCALARS
        self.exec_changed()

    def exec_changed(self):
        """Forget what follows from EXEC, to derive it anew."""
        self._active = None

    def _derived(self) -> list:
        if self._active is None:
            bits = self.masks(EXEC)
            full, mask = bool((bits == 0xFFFFFFFF).all()), unpack(bits)
            self._active = [full, mask, slice(None) if full else np.flatnonzero(mask)]
        return self._active

    @property
    def full(self) -> bool:
        """Whether all lanes of all waves are active."""
        return self._derived()[0]

    @property
    def mask(self) -> np.ndarray:
        """Which lanes are active, (n, width)."""
        return self._derived()[1]

    @property
    def lanes(self) -> Any:
        """Flat numbers of the active lanes, or a slice."""
        return self._derived()[2]

    @lanes.setter
    def lanes(self, chosen) -> None:
        self._derived()[2] = chosen

    def masks(self, register: int):
        """Return the lane masks in that scalar register, (n, width / 32) uint32."""
        if self.width == LANES:
            return self.S[register]
        return self.S[register : register + 2, :, 0].T

    def either(self, register: int):
        """Return for each wave whether any lane is in the mask in that scalar register: not 0."""
        low = self.S[register, :, 0]
        return low if self.width == LANES else low | self.S[register + 1, :, 0]

    def lane_array(self, values):
        """Repeat per-wave values for the active lanes, flat."""
        return np.repeat(values, self.width)[self.lanes]

    def active(self, values):
        """Pick the active lanes of (n, width) or broadcastable values, flat."""
        return np.broadcast_to(values, (self.n, self.width)).reshape(-1)[self.lanes]


def take_scalars(sets: list[Waves], index) -> np.ndarray:
    """Copy the scalar registers of waves, numbered through all sets: those that may be in use."""
    used = max(g.scalars for g in sets)
    taken = np.zeros((SCALARS, len(index), 1), np.uint32)
    for rows in (slice(used), slice(GENERAL_SCALARS, SCALARS)):
        registers = [g.S[rows] for g in sets]
        together = np.concatenate(registers, axis=1) if len(sets) > 1 else registers[0]
        np.take(together, index, 1, out=taken[rows], mode="clip")
    return taken


def unpack(bits):
    """Unpack masks (n, words) uint32 to booleans (n, 32 words)."""
    raw = np.ascontiguousarray(bits).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little").view(bool)


def pack(flags):
    """Pack booleans (n, 32 words) to masks (n, words) uint32."""
    return np.packbits(flags, axis=1, bitorder="little").view(np.uint32)


def constant(op: Operand, kind: str):
    """Return a constant as a number of the kind (f32, u16, b64 ...).

    Integers are bit patterns, inline fractions are values in the operand's own type, but those of
    16-bit integers the low half of a float32 (LLVM's getInlineEncodingV216).
    """
    span = int(kind[-2:])
    if kind == "bf16":
        return bfloat(np.uint16(_bits(op, "bf16", 16)))
    bits = _bits(op, kind, span)
    view = {"f": f"f{span // 8}", "i": f"i{span // 8}"}.get(kind[0], f"u{span // 8}")
    return np.array(bits, _SPANS[span]).view(view)[()]


def constant_half(op: Operand, kind: str, high: bool):
    """Return the half of a constant that op_sel picks for a packed operation on this 16-bit kind.

    All 32 bits of a literal; an inline integer, sign-extended; an inline fraction as float16 below
    zeros, but for integer operations as float32 (LLVM's getInlineEncodingV216: the ISA document is
    misleading there).
    """
    half = kind == "f16" and isinstance(op.value, float)
    whole = _bits(op, "f16", 16) if half else _bits(op, "u32", 32)
    return np.uint16(whole >> 16 * high & 0xFFFF).view(f"{kind[0]}2")


def _bits(op: Operand, kind: str, span: int) -> int:
    value = op.value
    if isinstance(value, float):
        if kind == "bf16":
            return int(np.float32(value).view(np.uint32)) >> 16
        if kind in ("u16", "i16"):
            return _bits(op, "u32", 32) & 0xFFFF
        # b32 and u32 operands take the bits of a float32
        number = {16: np.float16, 32: np.float32, 64: np.float64}[span](value)
        return int(number.view(_SPANS[span]))
    if value in APERTURES.values() and span != 64:
        # LLVM: read as 32 bits, the hardware gives something else
        raise Unknown(f"an aperture in {span} bits")
    if kind == "f64" and op.literal:
        # a literal is the high half of a 64-bit float
        return (value & 0xFFFFFFFF) << 32
    return value & ((1 << span) - 1)


def _raw_reader(op: Operand, kind: str) -> Callable:
    i, span = op.index, int(kind[-2:])
    letter = "b" if kind == "bf16" else kind[0]
    if op.kind == "v" and span == 32:
        field = {"f": "F", "i": "I"}.get(letter, "V")
        return lambda g: getattr(g, field)[i]
    if op.kind == "v" and span == 16:
        field = "H" if letter == "f" else {"i": "I16"}.get(letter, "U16")
        start = int(op.half == "h")
        return lambda g: getattr(g, field)[i][:, start::2]
    if op.kind == "s" and span == 32:
        if i == NULL:
            zero = constant(ZERO, kind)
            return lambda _g: zero
        field = {"f": "SF", "i": "SI"}.get(letter, "S")
        return lambda g: getattr(g, field)[i]
    if op.kind == "s" and span == 16:
        view = {"f": "f2", "i": "i2"}.get(letter, "u2")
        shift = np.uint32(16 if op.half == "h" else 0)
        return lambda g: (g.S[i] >> shift).astype(np.uint16).view(view)
    if op.kind in "vs" and span == 64:
        field, view = op.kind.upper(), {"f": "f8", "i": "i8"}.get(letter, "u8")

        def read(g):
            file = getattr(g, field)
            return (
                file[i].astype(np.uint64) | file[i + 1].astype(np.uint64) << np.uint64(32)
            ).view(view)

        return read
    raise Unknown(f"operand {op} as {kind}")


def reader(op: Operand, kind: str, denormals: bool = True) -> Callable:
    """Return a function from Waves to the operand's values, with abs and neg; may share memory."""
    if op.kind == "const":
        value = constant_half(op, kind, op.half == "h") if op.half else constant(op, kind)
        read = lambda _g: value  # noqa: E731
    else:
        read = _raw_reader(op, kind)
        if kind == "bf16":
            raw = read
            read = lambda g: bfloat(raw(g))  # noqa: E731
    plain = read
    if not denormals and kind in _FLOATS:
        plain = lambda g: flush(np.asarray(read(g)))  # noqa: E731
    if not (op.neg or op.abs):
        return plain
    kind_of_float = _FLOATS.get(f"f{kind[-2:]}") if kind != "bf16" else np.float32

    def modified(g):
        bits = np.asarray(plain(g))
        value = np.abs(bits.view(kind_of_float)) if op.abs else bits.view(kind_of_float)
        return (np.negative(value) if op.neg else value).view(bits.dtype)

    return modified


def vector_writer(op: Operand, kind: str) -> Callable:
    """Return a function (waves, values, mask or None) that writes active lanes, or the mask's."""
    i, span = op.index, int(kind[-2:])
    if op.kind != "v":
        raise Unknown(f"destination {op}")
    if span == 64:

        def write_pair(g, value, mask=None):
            bits = np.asarray(value).view(np.uint64)
            _store(g, g.V[i], bits.astype(np.uint32), mask)
            _store(g, g.V[i + 1], (bits >> np.uint64(32)).astype(np.uint32), mask)

        return write_pair
    if span == 16:
        field, start = {"f": "H", "i": "I16"}.get(kind[0], "U16"), int(op.half == "h")
        return lambda g, value, mask=None: _store(g, getattr(g, field)[i][:, start::2], value, mask)
    field = {"f": "F", "i": "I"}.get(kind[0], "V")
    return lambda g, value, mask=None: _store(g, getattr(g, field)[i], value, mask)


def _store(g, target, value, mask):
    if mask is not None:
        np.copyto(target, value, where=mask)
    elif g.full:
        target[...] = value
    else:
        np.copyto(target, value, where=g.mask)


def scalar_writer(op: Operand, kind: str = "b32") -> Callable:
    """Return a function (waves, values (n, 1)) that writes scalar registers."""
    i = op.index
    if op.kind != "s":
        raise Unknown(f"destination {op}")
    if i == NULL:
        return lambda _g, _value: None
    if kind[-2:] == "64":

        def write_pair(g, value):
            bits = np.asarray(value).view(np.uint64)
            g.S[i] = bits.astype(np.uint32)
            g.S[i + 1] = (bits >> np.uint64(32)).astype(np.uint32)
            if i <= EXEC <= i + 1:
                g.exec_changed()

        return write_pair
    field = {"f": "SF", "i": "SI"}.get(kind[0], "S")

    def write(g, value):
        getattr(g, field)[i] = value
        if i in (EXEC, EXEC + 1):
            g.exec_changed()

    return write


def mask_reader(op: Operand) -> Callable:
    """Return a reader of a lane mask (VCC, an SGPR or a pair of them) as booleans (n, width)."""
    i = op.index
    return lambda g: unpack(g.masks(i))


def mask_writer(op: Operand) -> Callable:
    """Return a function (waves, booleans (n, width)) that writes a lane mask."""
    i = op.index
    if op.kind != "s":
        raise Unknown(f"destination {op}")
    if i == NULL:
        return lambda _g, _flags: None

    def write(g, flags):
        bits = pack(flags)
        g.S[i : i + bits.shape[1], :, 0] = bits.T
        if i == EXEC:
            g.exec_changed()

    return write


VCC_OPERAND = Operand("s", VCC)

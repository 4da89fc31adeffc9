# SPDX-License-Identifier: BSD-3-Clause
"""Registers of waves at the same instruction, and typed access to the registers.

One numpy operation executes an instruction for n waves. A vector register has the shape (n, width),
with 32 or 64 lanes. A scalar register has the shape (n, 1), so that it broadcasts. Lane masks of
wave64 are pairs of scalar registers. Waves that diverge become two `Waves`, which are joined when
they reach the same instruction again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from strix_emulate.arithmetic.floats import bfloat, flush
from strix_emulate.code.decode import APERTURES, EXEC, NULL, VCC, Operand, Unknown

#: Number of lanes of a wave32, of half a wave64, and of the mask in a scalar register.
LANES = 32
#: Number of scalar registers: general ones first, then VCC, EXEC and other special ones.
SCALARS = 128
GENERAL_SCALARS = 104
#: numpy's unsigned types by bits.
_UNSIGNED = {16: "u2", 32: "u4", 64: "u8"}
_FLOATS = {"f32": np.float32, "f16": np.float16, "f64": np.float64}
ZERO = Operand("const")
VCC_OPERAND = Operand("s", VCC)


class Waves:
    """Registers and other state of n waves at the same instruction.

    Attributes:
        n: Number of waves.
        width: Lanes of a wave: 32 or 64.
        pc: Address of their next instruction.
        V: Vector registers, (registers, n, width) uint32.
        I, F, U16, I16, H: V as int32, float32, uint16, int16, float16.
        VF: V with the shape (registers, n * width).
        S: Scalar registers, (SCALARS, n, 1) uint32.
        SI, SF: S as int32, float32.
        scc: The SCC bits, (n, 1) bool.
        scalars: Number of general scalar registers that the kernel may use.
        queues: Entries of the wait counters (:mod:`strix_emulate.memory.waits`).
        identity: The following eight arrays as one, (8, n) int64.
        workgroup: Number of each wave's workgroup in the grid.
        wave: Number of each wave in its workgroup.
        slot: Row of each wave in scratch.
        lds_slot: Row of each wave's workgroup in LDS.
        epoch: Number of barriers that each wave has passed, and of its releases since the last
            barrier (:mod:`strix_emulate.memory.tags`).
        stored: Bit masks of the numbers of the stores that each wave executed
            (:mod:`strix_emulate.run.doubts`).
        poll_hash: Hash of the values that each wave polled in this iteration of a loop
            (:mod:`strix_emulate.memory.polls`).
        last_poll_hash: The same hash for an earlier iteration.
        tags: Tags of the waves' accesses, or None until they are needed.
        yields: Number of times that the waves yielded to other waves.
        iterations: Loop iterations since the last yield. Iterations that poll memory count more.
        has_polled: Whether the waves polled memory in this iteration.
        records_polls: Whether polls of this iteration are recorded.
        polled: The polls of this iteration.
        pause: Length of the last pause in the recording of polls, in iterations; 1 at first, and
            again after the waves slept. The next pause is twice as long, up to a limit.
        skips: Iterations that remain until polls are recorded again.
        slept_with: The group (run.sleep) in which the waves slept until they were last woken by a
            change, or None.
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
        "epoch",
        "has_polled",
        "identity",
        "iterations",
        "last_poll_hash",
        "lds_slot",
        "n",
        "pause",
        "pc",
        "poll_hash",
        "polled",
        "queues",
        "records_polls",
        "scalars",
        "scc",
        "skips",
        "slept_with",
        "slot",
        "stored",
        "tags",
        "wave",
        "width",
        "workgroup",
        "yields",
    )

    def __init__(self, V, S, scc, pc, identity, queues):
        # V and S must be in C order, because C accesses them by address. In any other order, a flat
        # view of V would also be a copy.
        self.n, self.width = V.shape[1:]
        self.pc = pc
        self.queues = queues
        self.V = V
        self.I = V.view(np.int32)
        self.F = V.view(np.float32)
        self.U16 = V.view(np.uint16)
        self.I16 = V.view(np.int16)
        self.H = V.view(np.float16)
        self.VF = V.reshape(V.shape[0], -1)
        self.S = S
        self.SI = S.view(np.int32)
        self.SF = S.view(np.float32)
        self.scc = scc
        self.scalars = GENERAL_SCALARS
        self.identity = identity
        self.workgroup = identity[0]
        self.wave = identity[1]
        self.slot = identity[2]
        self.lds_slot = identity[3]
        self.epoch = identity[4]
        self.stored = identity[5]
        self.poll_hash = identity[6]
        self.last_poll_hash = identity[7]
        self.tags: Any = None
        self.yields = 0
        self.iterations = 0
        self.has_polled = False
        self.records_polls = False
        self.polled: list[Any] = []
        self.pause = 1
        self.skips = 0
        self.slept_with: Any = None
        self.exec_changed()

    def exec_changed(self):
        """Discard the values that were derived from EXEC."""
        self._active = None

    def _derived(self) -> list:
        """Return the values that follow from EXEC: those of `full`, `mask` and `lanes`."""
        if self._active is None:
            bits = self.masks(EXEC)
            full = bool((bits == 0xFFFFFFFF).all())
            mask = unpack(bits)
            lanes = slice(None) if full else np.flatnonzero(mask)
            self._active = [full, mask, lanes]
        return self._active

    @property
    def full(self) -> bool:
        """Whether all lanes of all waves are active."""
        return self._derived()[0]

    @property
    def mask(self) -> np.ndarray:
        """Which lanes are active, (n, width) bool."""
        return self._derived()[1]

    @property
    def lanes(self) -> Any:
        """Flat numbers of the active lanes, or a slice of all lanes."""
        return self._derived()[2]

    @lanes.setter
    def lanes(self, selected) -> None:
        self._derived()[2] = selected

    def masks(self, register: int):
        """Return the lane masks in a scalar register, (n, width / 32) uint32."""
        if self.width == LANES:
            return self.S[register]
        return self.S[register : register + 2, :, 0].T

    def either(self, register: int):
        """Return for each wave a number that is 0 if the mask in a scalar register is empty."""
        low = self.S[register, :, 0]
        if self.width == LANES:
            return low
        return low | self.S[register + 1, :, 0]

    def lane_array(self, values):
        """Repeat per-wave values for the active lanes, flat."""
        return np.repeat(values, self.width)[self.lanes]

    def active(self, values):
        """Pick the active lanes of (n, width) or broadcastable values, flat."""
        return np.broadcast_to(values, (self.n, self.width)).reshape(-1)[self.lanes]


def take_scalars(sets: list[Waves], index) -> np.ndarray:
    """Return a copy of the scalar registers of some waves.

    `index` has the numbers of these waves, counted through all sets.

    Returns:
        (SCALARS, len(index), 1) uint32. General registers that the kernel does not use are 0.
    """
    used = max(g.scalars for g in sets)
    result = np.zeros((SCALARS, len(index), 1), np.uint32)
    for rows in (slice(used), slice(GENERAL_SCALARS, SCALARS)):
        registers = [g.S[rows] for g in sets]
        joined = registers[0]
        if len(sets) > 1:
            joined = np.concatenate(registers, axis=1)
        np.take(joined, index, 1, out=result[rows], mode="clip")
    return result


def unpack(bits):
    """Unpack masks (n, words) uint32 to booleans (n, 32 words)."""
    raw = np.ascontiguousarray(bits).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little").view(bool)


def pack(flags):
    """Pack booleans (n, 32 words) to masks (n, words) uint32."""
    return np.packbits(flags, axis=1, bitorder="little").view(np.uint32)


def constant_value(op: Operand, kind: str):
    """Return a constant as a number of the kind (f32, u16, b64 ...).

    Integers are bit patterns. An inline fraction is a float of the operand's size. For a 16-bit
    integer, the value is the low half of the fraction as float32 (LLVM's getInlineEncodingV216).
    """
    span = int(kind[-2:])
    if kind == "bf16":
        return bfloat(np.uint16(_bits(op, "bf16", 16)))
    bits = _bits(op, kind, span)
    return np.array(bits, _UNSIGNED[span]).view(_dtype(kind, span))[()]


def _dtype(kind: str, span: int) -> str:
    """Return numpy's type for a kind of operand with `span` bits. Bit patterns are unsigned."""
    letter = kind[0] if kind[0] in "fi" else "u"
    return f"{letter}{span // 8}"


def constant_half(op: Operand, kind: str, high: bool):
    """Return the half of a constant that op_sel selects for a packed operation on a 16-bit kind.

    A literal has 32 bits, and an inline integer is sign-extended to 32 bits. For float16
    operations, an inline fraction is a float16 in the low half, and the high half is 0. For integer
    operations, an inline fraction is a float32. Source: LLVM's getInlineEncodingV216. The ISA
    document describes these cases differently.
    """
    if kind == "f16" and isinstance(op.value, float):
        bits = _bits(op, "f16", 16)
    else:
        bits = _bits(op, "u32", 32)
    return np.uint16(bits >> 16 * high & 0xFFFF).view(f"{kind[0]}2")


def _bits(op: Operand, kind: str, span: int) -> int:
    value = op.value
    if isinstance(value, float):
        return _fraction_bits(value, kind, span)
    if value in APERTURES.values() and span != 64:
        # An aperture can be read only as 64 bits. According to LLVM, the hardware returns another
        # value for 32 bits.
        raise Unknown(f"an aperture in {span} bits")
    if kind == "f64" and op.literal:
        # A literal is the high half of a 64-bit float.
        return (value & 0xFFFFFFFF) << 32
    if kind == "i64" and op.literal:
        # Hardware sign-extends the literal of a signed operand, and zero-extends that of other
        # operands (llvm-project#70274).
        value = (value ^ 1 << 31) - (1 << 31)
    return value & ((1 << span) - 1)


def _fraction_bits(value: float, kind: str, span: int) -> int:
    if kind == "bf16":
        return int(np.float32(value).view(np.uint32)) >> 16
    if kind in ("u16", "i16"):
        return int(np.float32(value).view(np.uint32)) & 0xFFFF
    # Operands that are not floats take the bits of a float of their size.
    number = _FLOATS[f"f{span}"](value)
    return int(number.view(_UNSIGNED[span]))


def _raw_reader(op: Operand, kind: str) -> Callable:
    """Return a function from waves to an operand's values without its modifiers."""
    span = int(kind[-2:])
    letter = "b" if kind == "bf16" else kind[0]
    if op.kind not in ("v", "s") or span not in _UNSIGNED:
        raise Unknown(f"unsupported operand {op} of kind {kind}")
    if span == 64:
        return _pair_reader(op, letter)
    if op.kind == "v":
        return _vector_reader(op, letter, span)
    return _scalar_reader(op, kind, letter, span)


def _vector_reader(op: Operand, letter: str, span: int) -> Callable:
    i = op.index
    if span == 32:
        view = {"f": "F", "i": "I"}.get(letter, "V")
        return lambda g: getattr(g, view)[i]
    view = {"f": "H", "i": "I16"}.get(letter, "U16")
    start = int(op.half == "h")
    return lambda g: getattr(g, view)[i][:, start::2]


def _scalar_reader(
    op: Operand,
    kind: str,
    letter: str,
    span: int,
) -> Callable:
    i = op.index
    if span == 16:
        dtype = _dtype(letter, 16)
        shift = np.uint32(16 if op.half == "h" else 0)
        return lambda g: (g.S[i] >> shift).astype(np.uint16).view(dtype)
    view = {"f": "SF", "i": "SI"}.get(letter, "S")
    return lambda g: getattr(g, view)[i]


def _pair_reader(op: Operand, letter: str) -> Callable:
    """Return a reader of two consecutive registers as a number of 64 bits."""
    i = op.index
    file_name = op.kind.upper()
    dtype = _dtype(letter, 64)

    def read(g):
        file = getattr(g, file_name)
        low = file[i].astype(np.uint64)
        high = file[i + 1].astype(np.uint64)
        return (low | high << np.uint64(32)).view(dtype)

    return read


def reader(op: Operand, kind: str, denormals: bool = True) -> Callable:
    """Return a function from waves to the operand's values, with abs and neg applied.

    Args:
        op: The operand.
        kind: Type of the values: f32, u16, b64 ...
        denormals: Whether denormal floats are kept. Otherwise they are read as 0.

    Returns:
        A function on waves. Its result may share memory with a register.
    """
    if op.kind == "s" and op.index == NULL:
        op = replace(op, kind="const", value=0, half="")
    read = _constant_reader(op, kind) if op.kind == "const" else _raw_reader(op, kind)
    if kind == "bf16" and op.kind != "const":
        read = _bfloat_reader(read)
    if not denormals and kind in _FLOATS:
        read = _flushing_reader(read)
    if not (op.neg or op.abs):
        return read
    dtype = np.float32 if kind == "bf16" else _FLOATS.get(f"f{kind[-2:]}")

    def read_modified(g):
        bits = np.asarray(read(g))
        value = bits.view(dtype)
        if op.abs:
            value = np.abs(value)
        if op.neg:
            value = np.negative(value)
        return value.view(bits.dtype)

    return read_modified


def _constant_reader(op: Operand, kind: str) -> Callable:
    value = constant_half(op, kind, op.half == "h") if op.half else constant_value(op, kind)
    return lambda _g: value


def _bfloat_reader(read: Callable) -> Callable:
    return lambda g: bfloat(read(g))


def _flushing_reader(read: Callable) -> Callable:
    return lambda g: flush(np.asarray(read(g)))


def vector_writer(op: Operand, kind: str) -> Callable:
    """Return a function (waves, values, mask) that writes a vector register or a pair of them.

    It writes the lanes of the mask. If the mask is None, it writes the active lanes.
    """
    i = op.index
    span = int(kind[-2:])
    if op.kind != "v":
        raise Unknown(f"unsupported destination {op}")
    if span == 64:

        def write_pair(g, value, mask=None):
            bits = np.asarray(value).view(np.uint64)
            _store(g, g.V[i], bits.astype(np.uint32), mask)
            _store(
                g,
                g.V[i + 1],
                (bits >> np.uint64(32)).astype(np.uint32),
                mask,
            )

        return write_pair
    if span == 16:
        view = {"f": "H", "i": "I16"}.get(kind[0], "U16")
        start = int(op.half == "h")

        def write_half(g, value, mask=None):
            _store(g, getattr(g, view)[i][:, start::2], value, mask)

        return write_half
    view = {"f": "F", "i": "I"}.get(kind[0], "V")

    def write(g, value, mask=None):
        _store(g, getattr(g, view)[i], value, mask)

    return write


def _store(g, target, value, mask):
    if mask is not None:
        np.copyto(target, value, where=mask)
    elif g.full:
        target[...] = value
    else:
        np.copyto(target, value, where=g.mask)


def scalar_writer(op: Operand, kind: str = "b32") -> Callable:
    """Return a function (waves, values (n, 1)) that writes a scalar register or a pair of them."""
    i = op.index
    if op.kind != "s":
        raise Unknown(f"unsupported destination {op}")
    if i == NULL:
        return _write_nothing
    if kind[-2:] == "64":

        def write_pair(g, value):
            bits = np.asarray(value).view(np.uint64)
            g.S[i] = bits.astype(np.uint32)
            g.S[i + 1] = (bits >> np.uint64(32)).astype(np.uint32)
            if i <= EXEC <= i + 1:
                g.exec_changed()

        return write_pair
    view = {"f": "SF", "i": "SI"}.get(kind[0], "S")

    def write(g, value):
        getattr(g, view)[i] = value
        if i in (EXEC, EXEC + 1):
            g.exec_changed()

    return write


def mask_reader(op: Operand) -> Callable:
    """Return a reader of a lane mask (VCC, an SGPR or a pair of them) as booleans (n, width)."""
    i = op.index
    if i == NULL:
        return lambda g: np.zeros((g.n, g.width), bool)
    return lambda g: unpack(g.masks(i))


def mask_writer(op: Operand) -> Callable:
    """Return a function (waves, booleans (n, width)) that writes a lane mask."""
    i = op.index
    if op.kind != "s":
        raise Unknown(f"unsupported destination {op}")
    if i == NULL:
        return _write_nothing

    def write(g, flags):
        bits = pack(flags)
        g.S[i : i + bits.shape[1], :, 0] = bits.T
        if i == EXEC:
            g.exec_changed()

    return write


def _write_nothing(_g, _value) -> None:
    """Discard a value that an instruction writes to the null register."""

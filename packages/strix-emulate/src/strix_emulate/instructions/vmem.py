# SPDX-License-Identifier: BSD-3-Clause
"""Loads and stores: SMEM, MUBUF, global, flat and scratch, LDS; lane exchange through LDS."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from strix_emulate.code.decode import Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions import atomics
from strix_emulate.instructions.flow import operand_bits
from strix_emulate.instructions.microops import MicroOp, executes
from strix_emulate.memory import addressing
from strix_emulate.memory.addressing import Spaces, in_apertures, located
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.polls import note_active
from strix_emulate.memory.waits import LGKM, STORE, VM, Outstanding, issue, issue_all, registers
from strix_emulate.memory.waves import ZERO, Waves, reader


def _type(name: str) -> tuple[int, bool, str]:
    letter, bits = re.findall(r"(?:^|_)([bui])(\d+)", name)[0]
    return int(bits) // 8, letter == "i", "h" if "hi" in name else "l" if "d16" in name else ""


#: by the end of a mnemonic: bytes, whether their sign is extended, the register's half or ""
TYPES = {
    name: _type(name) for name in (
        "b8", "b16", "b32", "b64", "b96", "b128", "u8", "i8", "u16", "i16", "d16_b16",
        "d16_hi_b16", "d16_u8", "d16_hi_u8", "d16_i8", "d16_hi_i8", "d16_hi_b8", "u8_d16",
        "u8_d16_hi", "i8_d16", "i8_d16_hi", "u16_d16", "u16_d16_hi", "b16_d16_hi", "b8_d16_hi")
}  # fmt: skip
_PATTERN = re.compile(
    r"(?P<space>global|flat|scratch|buffer|ds)_(?P<what>load|store)(?P<two>_2addr)?(?P<stride>_stride64)?_(?P<type>\w+)$"
)
_SCALAR = re.compile(r"s_(buffer_)?load_b(\d+)$")
_EXCHANGES = {"ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"}
NO_EFFECT = {"buffer_gl0_inv", "buffer_gl1_inv", "s_dcache_inv", "s_gl1_inv", "s_icache_inv"}


def names() -> set[str]:
    """List mnemonics of memory instructions that are executed; some of another generation, too."""
    spaces = ("global", "flat", "scratch", "buffer", "ds")
    plain = {f"{s}_{what}_{kind}" for s in spaces for what in ("load", "store") for kind in TYPES}
    pairs = {f"ds_{what}_2addr{stride}_b{n}" for what in ("load", "store")
             for stride in ("", "_stride64") for n in (32, 64)}  # fmt: skip
    scalar = {f"s_{b}load_b{n}" for b in ("", "buffer_") for n in (32, 64, 128, 256, 512)}
    return plain | pairs | scalar | set(atomics.NAMES) | atomics.COUNTED | NO_EFFECT | _EXCHANGES


def is_memory(name: str) -> bool:
    """Return whether an instruction accesses memory or the LDS."""
    return bool(_PATTERN.match(name) or _SCALAR.match(name) or name in NO_EFFECT
                or name in atomics.NAMES or name in atomics.COUNTED
                or name in _EXCHANGES)  # fmt: skip


def access_size(ins: Instruction) -> int:
    """Return the bytes of the shadow's cells that a load or store touches; 0 for anything else."""
    match = _PATTERN.match(ins.name)
    if match and match["type"] in TYPES:
        return min(4, TYPES[match["type"]][0])
    return 0


def stored_half(ins: Instruction) -> tuple[int, str]:
    """Return the register of which a store of 8 or 16 bits reads a half, and which; or (0, "")."""
    match = _PATTERN.match(ins.name)
    if not match or match["what"] != "store" or match["type"] not in TYPES:
        return 0, ""
    size, _, half = TYPES[match["type"]]
    data = ins.operands[0 if match["space"] == "buffer" else 1]
    others = [op for op in ins.operands if op is not data]
    bits = operand_bits(data)
    if size > 2 or bits & operand_bits(*others):
        return 0, ""
    return bits, half or "l"


def polls(ins: Instruction) -> bool:
    """Return whether it asks for memory that other waves change.

    By GLC, by a cache that it empties, or by an LDS atomic's result. Scratch is a lane's own.
    """
    if ins.name.startswith("scratch_"):
        return False
    returns = "_rtn_" in ins.name or ins.name in atomics.COUNTED or "gl1_inv" in ins.name
    return ("glc" in ins.modifiers or returns) and is_memory(ins.name)


def communicates(ins: Instruction) -> bool:
    """Return whether workgroups may wait for each other by it: global-memory atomic, GLC, GL1."""
    if ins.name.startswith("ds_"):
        return False
    return ins.name in atomics.NAMES or polls(ins) or "gl1_inv" in ins.name


def compile_memory(ins: Instruction, spaces: Spaces) -> Callable:
    """Return a function that executes the instruction on Waves. Raise Unknown."""
    if ins.name in NO_EFFECT:
        empties = "_gl" in ins.name and ins.name.startswith("buffer") and spaces.shares
        return _empties(ins, spaces) if empties else executes(lambda _g: None)
    if _SCALAR.match(ins.name):
        return _scalar_load(ins, spaces)
    if _PATTERN.match(ins.name):
        return _load_or_store(ins, spaces)
    if ins.name in atomics.NAMES or ins.name in atomics.COUNTED:
        return atomics.compile_atomic(ins, spaces)
    if ins.name in _EXCHANGES:
        return _lane_exchange(ins)
    raise Unknown("mnemonic")


def _empties(ins: Instruction, spaces: Spaces) -> Callable:
    """Compile BUFFER_GL0_INV and BUFFER_GL1_INV: they let loads see what others wrote."""
    order, gl1 = spaces.arena.order, "gl1" in ins.name

    def run(g: Waves):
        if order is not None:
            order.emptied(g.tags, gl1)

    return run


def _scalar_load(ins: Instruction, spaces: Spaces) -> Callable:
    known = _SCALAR.match(ins.name)
    if known is None:
        raise Unknown("mnemonic")
    words = int(known[2]) // 32
    arena: Arena = spaces.arena
    if ins.modifiers.keys() - spaces.target.cache - {"offset"}:
        raise Unknown(f"form {ins.text}")
    buffer = "buffer" in ins.name
    target, base, offset = ins.operands
    address, extra = reader(replace(base, count=2), "u64"), reader(offset, "u32")
    constant = ins.modifiers.get("offset", 0)
    if offset.kind == "const":
        constant, extra = int(offset.value), lambda _g: np.uint64(0)
    entry = Outstanding(registers("s", target.index, words), False, ins.text)

    def run(g: Waves):
        start = (address(g) + extra(g)).ravel() + np.int64(constant).astype(np.uint64)
        if buffer:
            start = _scalar_buffer(g, base.index, start, 4 * words)
        at, changing = arena.find(start & ~np.uint64(3), 4 * words, False)
        if changing:
            spaces.note_load(at)
            arena.track(at, 4 * words, g.tags, ins.swap_words)
        g.S[target.index : target.index + words, :, 0] = np.stack(
            [arena.views[4][(at >> 2) + i] for i in range(words)]
        )
        issue(g, LGKM, entry)

    if buffer:
        return run
    added = ZERO if offset.kind == "const" else offset
    sources = ((replace(base, count=2), "u64"), (added, "u32"))
    access = {"size": 4 * words, "words": words, "offset": constant}
    micro = MicroOp("", None, "b32", target, sources, handler="load_scalar", access=access)
    return executes(run, micro, issues=((LGKM,), entry))


def _scalar_buffer(g: Waves, resource: int, start, size: int):
    """Find addresses for S_BUFFER_LOAD: base and range are the resource's, the stride must be 0."""
    words = g.S[resource : resource + 4, :, 0]
    high = words[1].astype(np.uint64) << np.uint64(32)
    stride = words[1] >> np.uint32(16) & np.uint32(0x3FFF)
    start = start - high + (high & np.uint64(0xFFFF_0000_0000))
    base = words[0] | high & np.uint64(0xFFFF_0000_0000)
    if stride.any() or (start - base + np.uint64(size) > words[2]).any():
        raise Trap("unknown", "a scalar buffer load with a stride, or out of the buffer's range")
    return start


class _Access(NamedTuple):
    """A load or store, or the two of LDS's two-address forms.

    half: of a register that is loaded or stored, "l" or "h", or "" for all of it. data: the first
    register of each; address: the operands; offsets: what is added to it, for each.
    """

    space: str
    write: bool
    size: int
    signed: bool
    half: str
    data: list[int]
    address: list[Operand]
    offsets: list[int]

    @property
    def words(self) -> int:
        """Registers that each takes."""
        return max(1, self.size // 4)

    def issued(self, text: str) -> Outstanding:
        """Return what counters count: with the bits of the registers that it loads."""
        bits = 0
        for first in () if self.write else self.data:
            bits |= registers("v", first, self.words)
        return Outstanding(bits, True, text, half="" if self.write else self.half)


def _access(ins: Instruction, cache: frozenset[str]) -> _Access:
    """Read a load or store. cache: modifiers that change nothing here. Raise Unknown."""
    match = _PATTERN.match(ins.name)
    if not match or match["type"] not in TYPES:
        raise Unknown("mnemonic")
    space, write = match["space"], match["what"] == "store"
    size, signed, half = TYPES[match["type"]]
    allowed = cache | {"offset"} | ({"offen", "idxen"} if space == "buffer" else set())
    if space == "ds":
        allowed = frozenset({"offset0", "offset1"} if match["two"] else {"offset"})
    if ins.modifiers.keys() - allowed:
        raise Unknown(f"modifiers {sorted(ins.modifiers.keys() - allowed)}")
    offsets = [ins.modifiers.get("offset", 0)]
    if match["two"]:
        unit = size * (64 if match["stride"] else 1)
        offsets = [ins.modifiers.get(f"offset{i}", 0) * unit for i in (0, 1)]
    ops = [*ins.operands, Operand("off")] if space == "flat" else list(ins.operands)
    # the address is in front of what is stored, but for buffers
    if write and space != "buffer":
        count = len(offsets)
        data, address = ops[1 : 1 + count], [ops[0], *ops[1 + count :]]
    else:
        data, address = ops[:1], ops[1:]
    first = [op.index for op in data]
    if not write:
        first = [first[0] + i * max(1, size // 4) for i in range(len(offsets))]
    return _Access(space, write, size, signed, data[0].half or half, first, address, offsets)


def _load_or_store(ins: Instruction, spaces: Spaces) -> Callable:
    """Compile loads and stores of every space."""
    a = _access(ins, spaces.target.cache)
    counter = LGKM if a.space == "ds" else STORE if a.write else VM
    counters: tuple[int, ...] = (counter,)
    compile_ = _store if a.write else _load
    if a.space == "flat":
        # its aperture says which of two counters guarantees a lane's result
        counters = counter, LGKM

        def part(space: str) -> Callable:
            order = counters[::-1] if space == "ds" else counters
            return compile_(ins, a, spaces, space, order)

        run = in_apertures(ins, a.address[0], part)
    else:
        run = compile_(ins, a, spaces, a.space, counters)
    acquires = not a.write and polls(ins)
    if {"offen", "idxen"} <= ins.modifiers.keys():
        return run  # C adds one of them
    access = addressing.access(ins, a.address) | {
        "size": a.size, "words": a.words, "acquires": int(acquires), "polls": int(acquires),
        "half": ("", "l", "h").index(a.half), "extended": int(a.signed)}  # fmt: skip
    sources, handler = addressing.sources(ins, a.address), "store" if a.write else "load"
    micros = [
        MicroOp("", None, "b32", Operand("v", register, a.words), sources, handler=handler,
                access=access | {"offset": offset})
        for register, offset in zip(a.data, a.offsets, strict=True)
    ]  # fmt: skip
    issues, orders = (counters, a.issued(ins.text)), acquired if acquires else None
    return executes(run, *micros, issues=issues, orders=orders)


def acquired(_g: Waves, memory, at, size: int, marks) -> None:
    """Note for the race checks what a load with GLC at these offsets orders."""
    memory.track_acquire(at, size, marks)


def _load(ins, a: _Access, spaces: Spaces, space: str, counters: tuple) -> Callable:
    """Compile a load. counters: the one that guarantees the result first."""
    memory, locates = located(space, ins, a.address, a.size, False, spaces, a.offsets)
    # a load that goes past the wave's own cache: of a flag, or of what other workgroups change
    polls_here = polls(ins) and memory.name != "scratch"
    acquires = polls_here and memory.name != "LDS"
    issued = a.issued(ins.text)
    compared = [ins.swap_words >> i * a.words & (1 << a.words) - 1 for i in range(len(a.data))]

    def run(g: Waves):
        found = [locate(g) for locate in locates]
        touches = []
        for first, words, (at, inside, marks) in zip(a.data, compared, found, strict=True):
            touch = None
            if marks is not None and acquires:
                memory.track_acquire(at, a.size, marks)
            elif marks is not None:
                if memory is spaces.arena:
                    spaces.note_load(at)
                touch = memory.track(at, a.size, marks, words)
            data = memory.load(at, a.size) if len(at) else np.zeros((a.words, 0), np.uint32)
            if inside is not None:
                # out of the buffer's range: zero
                whole = np.zeros((a.words, len(inside)), np.uint32)
                whole[:, inside] = data
                data = whole
            if a.signed:
                kind = np.int8 if a.size == 1 else np.int16
                data = data.astype(kind).astype(np.int32).view(np.uint32)
            _put(g, first, data, a.half)
            if polls_here:
                note_active(g, memory, at, a.size, inside, range(first, first + a.words))
            touches += [touch] if touch is not None else []
        issue_all(g, counters, issued, tuple(touches))

    return run


def _put(g: Waves, first: int, data: np.ndarray, half: str) -> None:
    """Write what active lanes loaded into registers from the first on, or into half of one."""
    if half:
        into = g.VF[first].view(np.uint16)[int(half == "h") :: 2]
        into[g.lanes] = data[0].astype(np.uint16)
        return
    for i, words in enumerate(data):
        g.VF[first + i][g.lanes] = words


def _store(ins, a: _Access, spaces: Spaces, space: str, counters: tuple) -> Callable:
    memory, locates = located(space, ins, a.address, a.size, True, spaces, a.offsets)
    issued = a.issued(ins.text)

    def run(g: Waves):
        touches = []
        for locate, first in zip(locates, a.data, strict=True):
            at, inside, marks = locate(g)
            data = g.VF[first : first + a.words][:, g.lanes]
            if a.half == "h":
                data = data >> np.uint32(16)
            spaces.note_store(g, inside)
            if inside is not None:
                data = data[:, inside]
            touch = memory.track_store(at, data, a.size, marks) if marks is not None else None
            if touch is not None:
                touches.append(touch)
        issue_all(g, counters, issued, tuple(touches))

    return run


def _lane_exchange(ins: Instruction) -> Callable:
    """Compile DS_BPERMUTE, DS_PERMUTE, DS_SWIZZLE: they move data across lanes, touch no memory."""
    target, offset = ins.operands[0].index, ins.modifiers.get("offset", 0)
    entry = Outstanding(registers("v", target), True, ins.text)
    # of a wave64, each half by itself: the permutes execute "as if [they] were two independent
    # wave32's" (RDNA3.5 ISA, DS_BPERMUTE_B32)
    lane = np.arange(64)
    if ins.name == "ds_swizzle_b32":
        if offset >> 8 > 0x80:
            raise Unknown("swizzle mode")
        source = (lane & (offset & 31 | 32) | offset >> 5 & 31) ^ (offset >> 10 & 31)
        if offset & 0x8000:
            source = lane & 60 | offset >> lane % 4 * 2 & 3
        read = reader(ins.operands[1], "b32")

        def run_swizzle(g: Waves):
            taken = source[: g.width]
            got = np.where(g.mask[:, taken], read(g)[:, taken], np.uint32(0))
            np.copyto(g.V[target], got, where=g.mask)
            issue(g, LGKM, entry)

        micro = MicroOp("", None, "b32", ins.operands[0], ((ins.operands[1], "b32"),),
                        handler="swizzle",
                        access={"lanes": tuple(source[:32].tolist())})  # fmt: skip
        return executes(run_swizzle, micro, issues=((LGKM,), entry))
    index, value = reader(ins.operands[1], "u32"), reader(ins.operands[2], "b32")

    def run(g: Waves):
        where = (np.broadcast_to(index(g), g.mask.shape).astype(np.int64) + offset) // 4 % 32
        where = where + (lane[: g.width] & 32)
        values = np.broadcast_to(value(g), g.mask.shape)
        if ins.name == "ds_bpermute_b32":
            got = np.take_along_axis(np.where(g.mask, values, np.uint32(0)), where, axis=1)
        else:
            got = np.zeros(g.mask.shape, np.uint32)
            rows, lanes = np.nonzero(g.mask)
            got[rows, where[rows, lanes]] = values[rows, lanes]
        np.copyto(g.V[target], got, where=g.mask)
        issue(g, LGKM, entry)

    micro = MicroOp("", None, "b32", ins.operands[0],
                    ((ins.operands[2], "b32"), (ins.operands[1], "u32")),
                    handler=ins.name.split("_")[1], access={"offset": offset})  # fmt: skip
    return executes(run, micro, issues=((LGKM,), entry))

# SPDX-License-Identifier: BSD-3-Clause
"""Loads and stores (SMEM, MUBUF, global, flat, scratch, LDS), and lane exchange through LDS."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from strix_emulate.code.decode import Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions import atomics
from strix_emulate.instructions.microops import NO_OPERATION, Compiled, MicroOp, compiled_for_c
from strix_emulate.instructions.mnemonics import MEMORY, MemoryKind, has_action
from strix_emulate.memory import addressing
from strix_emulate.memory.addressing import Spaces, compile_flat, make_locators
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.polls import record_active
from strix_emulate.memory.waits import (
    LGKM,
    STORE,
    VM,
    Outstanding,
    issue,
    issue_all,
    operand_bits,
    registers,
)
from strix_emulate.memory.waves import ZERO, Waves, reader

#: Numbers of the halves of a register in emulate.c.
_HALF_NUMBERS = {"": 0, "l": 1, "h": 2}


def names() -> set[str]:
    """Return the mnemonics of the supported memory instructions. Some are not of GFX11."""
    return set(MEMORY)


def is_memory(name: str) -> bool:
    """Return whether a mnemonic is that of a memory instruction (:data:`mnemonics.MEMORY`)."""
    return name in MEMORY


def access_size(ins: Instruction) -> int:
    """Return the size in bytes of the shadow cells that a load or store needs, or 0 for others."""
    if not has_action(ins.name, "load", "store"):
        return 0
    return min(4, MEMORY[ins.name].size)


def stored_half(ins: Instruction) -> tuple[int, str]:
    """Return the data register of a store of 8 or 16 bits, and the half of it that is stored.

    Returns:
        (bit mask of the register, "l" or "h"), or (0, "") if the instruction is not such a store,
        or also has the register in its address.
    """
    if not has_action(ins.name, "store"):
        return 0, ""
    kind = MEMORY[ins.name]
    data = ins.operands[0 if kind.space == "buffer" else 1]
    others = [op for op in ins.operands if op is not data]
    bits = operand_bits(data)
    if kind.size > 2 or bits & operand_bits(*others):
        return 0, ""
    return bits, kind.half or "l"


def reads_shared_memory(ins: Instruction) -> bool:
    """Return whether an instruction lets a wave see memory that other waves change.

    These are instructions with GLC, LDS atomics that return a value, DS_APPEND and DS_CONSUME, and
    the invalidation of GL1. Scratch is private to a lane.
    """
    kind = MEMORY.get(ins.name)
    if kind is None or kind.space == "scratch":
        return False
    if "glc" in ins.modifiers or kind.returns:
        return True
    return kind.action == "count" or kind.empties_gl1


def communicates(ins: Instruction) -> bool:
    """Return whether an instruction may let one workgroup wait for another one.

    That is an atomic of another memory than the LDS, an access with GLC, or an invalidation of the
    GL1 cache.
    """
    kind = MEMORY.get(ins.name)
    if kind is None or kind.space == "ds":
        return False
    return kind.action == "atomic" or reads_shared_memory(ins)


def compile_memory(ins: Instruction, spaces: Spaces) -> Compiled:
    """Compile a memory instruction. Raise Unknown if it is not supported."""
    kind = MEMORY.get(ins.name)
    if kind is None:
        raise Unknown("unsupported mnemonic")
    if kind.action == "invalidate":
        return _compile_invalidation(kind, spaces)
    if kind.action == "scalar_load":
        return _compile_scalar_load(ins, kind, spaces)
    if kind.action in ("load", "store"):
        return _compile_load_or_store(ins, kind, spaces)
    if kind.action == "exchange":
        return _compile_lane_exchange(ins)
    return atomics.compile_atomic(ins, spaces)


def _compile_invalidation(kind: MemoryKind, spaces: Spaces) -> Compiled:
    """Compile an invalidation of a cache.

    In a kernel that polls memory, BUFFER_GL0_INV and BUFFER_GL1_INV let loads see the stores of
    other waves. Other invalidations have no effect here.
    """
    if kind.space != "buffer" or not spaces.polls:
        return NO_OPERATION
    order = spaces.arena.order

    def run(g: Waves):
        if order is not None:
            order.invalidate(g.tags, kind.empties_gl1)

    return Compiled(run)


def _compile_scalar_load(ins: Instruction, kind: MemoryKind, spaces: Spaces) -> Compiled:
    words = kind.size // 4
    arena: Arena = spaces.arena
    if ins.modifiers.keys() - spaces.target.cache - {"offset"}:
        raise Unknown("unsupported modifiers")
    is_buffer = kind.space == "s_buffer"
    target, base, offset = ins.operands
    base_pair = replace(base, count=2)
    constant = ins.modifiers.get("offset", 0)
    if offset.kind == "const":
        constant = int(offset.value)
        offset = ZERO
    read_base = reader(base_pair, "u64")
    read_offset = reader(offset, "u32")
    entry = Outstanding(registers("s", target.index, words), False, ins.text)

    def run(g: Waves):
        start = (read_base(g) + read_offset(g)).ravel() + np.int64(constant).astype(np.uint64)
        if is_buffer:
            start = _scalar_buffer_address(g, base.index, start, 4 * words)
        at, changing = arena.find(start & ~np.uint64(3), 4 * words, False)
        if changing:
            spaces.note_load(at)
            arena.track(at, 4 * words, g.tags, ins.swap_words)
        loaded = [arena.views[4][(at >> 2) + i] for i in range(words)]
        g.S[target.index : target.index + words, :, 0] = np.stack(loaded)
        issue(g, LGKM, entry)

    if is_buffer:
        return Compiled(run)
    micro = MicroOp(
        "",
        None,
        "b32",
        target,
        ((base_pair, "u64"), (offset, "u32")),
        handler="load_scalar",
        access={"size": 4 * words, "words": words, "offset": constant},
    )
    return compiled_for_c(run, micro, issues=((LGKM,), entry))


def _scalar_buffer_address(g: Waves, resource: int, start, size: int):
    """Return the addresses of an S_BUFFER_LOAD.

    Args:
        g: The waves.
        resource: The first of the scalar registers with the buffer resource.
        start: For each wave, the first two words of the resource as an address, plus the offset.
        size: Bytes to load.

    Raises:
        Trap: The resource has a stride, or the load lies outside of its range.
    """
    words = g.S[resource : resource + 4, :, 0]
    high = words[1].astype(np.uint64) << np.uint64(32)
    high_of_base = high & np.uint64(0xFFFF_0000_0000)
    stride = words[1] >> np.uint32(16) & np.uint32(0x3FFF)
    start = start - high + high_of_base
    base = words[0] | high_of_base
    if stride.any() or (start - base + np.uint64(size) > words[2]).any():
        message = (
            "a scalar buffer load whose buffer has a stride, or that exceeds the buffer's range"
        )
        raise Trap("unknown", message)
    return start


@dataclass(frozen=True)
class _Access:
    """A load or store, or both accesses of the LDS's two-address forms.

    Attributes:
        kind: Properties that follow from the mnemonic.
        half: Half of the register that is loaded or stored, "l" or "h"; "" for all of it.
        data: First data register of each access.
        address: Operands of the address.
        offsets: Constant that is added to the address, for each access.
        words: Number of data registers of each access.
    """

    kind: MemoryKind
    half: str
    data: list[int]
    address: list[Operand]
    offsets: list[int]
    words: int

    def by_word(self) -> "_Access":
        """Return an access of each word in place of one access of several words."""
        numbers = range(self.words)
        return replace(
            self,
            kind=replace(self.kind, size=4),
            data=[self.data[0] + i for i in numbers],
            offsets=[self.offsets[0] + 4 * i for i in numbers],
            words=1,
        )

    @property
    def is_store(self) -> bool:
        """Whether the instruction is a store."""
        return self.kind.action == "store"

    def outstanding(self, text: str) -> Outstanding:
        """Return the entry that the wait counters get. It has the registers that are loaded."""
        if self.is_store:
            return Outstanding(0, True, text)
        bits = 0
        for first in self.data:
            bits |= registers("v", first, self.words)
        return Outstanding(bits, True, text, half=self.half)


def _read_access(ins: Instruction, kind: MemoryKind, cache: frozenset[str]) -> _Access:
    """Return the accesses of a load or store.

    Args:
        ins: The instruction.
        kind: Properties that follow from its mnemonic.
        cache: Modifiers for caches, which have no effect on results.

    Raises:
        Unknown: The instruction has a modifier that is not supported.
    """
    _require_modifiers(ins, kind, cache)
    offsets = [ins.modifiers.get("offset", 0)]
    if kind.addresses == 2:
        first_offset = ins.modifiers.get("offset0", 0)
        second_offset = ins.modifiers.get("offset1", 0)
        offsets = [first_offset * kind.offset_unit, second_offset * kind.offset_unit]
    operands = list(ins.operands)
    if kind.space == "flat":
        operands.append(Operand("off"))
    words = max(1, kind.size // 4)
    if kind.action == "load":
        data = operands[0]
        address = operands[1:]
        registers_of_data = [data.index + i * words for i in range(kind.addresses)]
    elif kind.space == "buffer":
        # Only buffer stores have the data in front of the address.
        data = operands[0]
        address = operands[1:]
        registers_of_data = [data.index]
    else:
        stored = operands[1 : 1 + kind.addresses]
        data = stored[0]
        address = [operands[0], *operands[1 + kind.addresses :]]
        registers_of_data = [op.index for op in stored]
    half = data.half or kind.half
    return _Access(kind, half, registers_of_data, address, offsets, words)


def _require_modifiers(ins: Instruction, kind: MemoryKind, cache: frozenset[str]) -> None:
    """Raise Unknown if an instruction has a modifier that is not supported."""
    allowed = cache | {"offset"}
    if kind.space == "buffer":
        allowed |= {"offen", "idxen"}
    elif kind.addresses == 2:
        allowed = frozenset({"offset0", "offset1"})
    elif kind.space == "ds":
        allowed = frozenset({"offset"})
    if ins.modifiers.keys() - allowed:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers.keys() - allowed)}")


def _compile_load_or_store(ins: Instruction, kind: MemoryKind, spaces: Spaces) -> Compiled:
    """Compile a load or store of any memory space."""
    access = _read_access(ins, kind, spaces.target.cache)
    compile_run = _compile_store if access.is_store else _compile_load
    counter = STORE if access.is_store else VM
    if kind.space == "ds":
        counter = LGKM
    counters: tuple[int, ...] = (counter,)
    if kind.space == "flat":
        # A lane's address selects the memory. The memory decides which counter guarantees the
        # result.
        counters = (counter, LGKM)

        def compile_for(space: str) -> Callable:
            order = counters[::-1] if space == "ds" else counters
            return compile_run(ins, access, spaces, space, order)

        run = compile_flat(ins, access.address[0], compile_for)
    else:
        run = compile_run(ins, access, spaces, kind.space, counters)
    if kind.space == "buffer" and access.words > 1:
        run = _divide_at_range(
            ins,
            access,
            run,
            compile_run(ins, access.by_word(), spaces, kind.space, counters),
        )
    if {"offen", "idxen"} <= ins.modifiers.keys():
        # C supports OFFEN or IDXEN, but not both in one instruction.
        return Compiled(run)
    acquires = not access.is_store and reads_shared_memory(ins)
    return compiled_for_c(
        run,
        *_load_or_store_micros(ins, access, acquires),
        issues=(counters, access.outstanding(ins.text)),
        orders=note_acquire if acquires else None,
    )


def _divide_at_range(
    ins: Instruction, access: _Access, run: Callable, run_by_word: Callable
) -> Callable:
    """Return a buffer access of several words, each of which may be outside of the buffer's range.

    A buffer's range is checked for each word (RDNA3.5 ISA, "Range Checking").

    Args:
        ins: The instruction.
        access: Its access.
        run: Function on waves that accesses all words of a lane, or none.
        run_by_word: Function on waves that accesses the words one after the other.
    """
    crosses = addressing.crosses_range(ins, access.address, access.kind.size)

    def run_divided(g: Waves):
        if crosses(g):
            run_by_word(g)
        else:
            run(g)

    return run_divided


def _load_or_store_micros(ins: Instruction, access: _Access, acquires: bool) -> list[MicroOp]:
    fields = addressing.memory_fields(ins, access.address) | {
        "size": access.kind.size,
        "words": access.words,
        "acquires": int(acquires),
        "polls": int(acquires),
        "half": _HALF_NUMBERS[access.half],
        "extended": int(access.kind.signed),
    }
    sources = addressing.address_sources(ins, access.address)
    micros = []
    for register, offset in zip(access.data, access.offsets, strict=True):
        micro = MicroOp(
            "",
            None,
            "b32",
            Operand("v", register, access.words),
            sources,
            handler=access.kind.action,
            access=fields | {"offset": offset},
        )
        micros.append(micro)
    return micros


def note_acquire(_g: Waves, memory, at, size: int, marks) -> None:
    """Record for the race checks that a load with GLC at these offsets may order accesses."""
    memory.track_acquire(at, size, marks)


def _compile_load(
    ins: Instruction, access: _Access, spaces: Spaces, space: str, counters: tuple
) -> Callable:
    """Compile a load from one space. A wait for the first counter guarantees the result."""
    size = access.kind.size
    words = access.words
    memory, locators = make_locators(
        space, ins, access.address, size, False, spaces, access.offsets
    )
    # A load that bypasses the caches may read a flag, or memory that other workgroups change.
    polls_memory = reads_shared_memory(ins) and memory.name != "scratch"
    acquires = polls_memory and memory.name != "LDS"
    issued = access.outstanding(ins.text)
    swap_words = [ins.swap_words >> i * words & (1 << words) - 1 for i in range(len(access.data))]

    def run(g: Waves):
        places = [locate(g) for locate in locators]
        touches = []
        for first, compared, place in zip(access.data, swap_words, places, strict=True):
            at, inside, marks = place
            if marks is not None and acquires:
                memory.track_acquire(at, size, marks)
            elif marks is not None:
                if memory is spaces.arena:
                    spaces.note_load(at)
                touch = memory.track(at, size, marks, compared)
                if touch is not None:
                    touches.append(touch)
            data = memory.load(at, size) if len(at) else np.zeros((words, 0), np.uint32)
            if inside is not None:
                # A lane loads 0 if its address is outside the range of the buffer or the LDS.
                whole = np.zeros((words, len(inside)), np.uint32)
                whole[:, inside] = data
                data = whole
            if access.kind.signed:
                narrow = np.int8 if size == 1 else np.int16
                data = data.astype(narrow).astype(np.int32).view(np.uint32)
            _write_loaded(g, first, data, access.half)
            if polls_memory:
                record_active(g, memory, at, size, inside, range(first, first + words))
        issue_all(g, counters, issued, tuple(touches))

    return run


def _write_loaded(g: Waves, first: int, data: np.ndarray, half: str) -> None:
    """Write the active lanes' data to registers from `first` on, or to a half of `first`."""
    if half:
        halves = g.VF[first].view(np.uint16)[int(half == "h") :: 2]
        halves[g.lanes] = data[0].astype(np.uint16)
        return
    for i, words in enumerate(data):
        g.VF[first + i][g.lanes] = words


def _compile_store(
    ins: Instruction, access: _Access, spaces: Spaces, space: str, counters: tuple
) -> Callable:
    """Compile a store to one space. A wait for `counters[0]` guarantees the store's completion."""
    size = access.kind.size
    memory, locators = make_locators(space, ins, access.address, size, True, spaces, access.offsets)
    issued = access.outstanding(ins.text)

    def run(g: Waves):
        touches = []
        for locate, first in zip(locators, access.data, strict=True):
            at, inside, marks = locate(g)
            data = g.VF[first : first + access.words][:, g.lanes]
            if access.half == "h":
                data = data >> np.uint32(16)
            spaces.note_store(g, inside)
            if inside is not None:
                data = data[:, inside]
            if marks is None:
                continue
            touch = memory.track_store(at, data, size, marks)
            if touch is not None:
                touches.append(touch)
        issue_all(g, counters, issued, tuple(touches))

    return run


def _compile_lane_exchange(ins: Instruction) -> Compiled:
    """Compile DS_BPERMUTE, DS_PERMUTE or DS_SWIZZLE, which move data across lanes."""
    entry = Outstanding(registers("v", ins.operands[0].index), True, ins.text)
    if ins.name == "ds_swizzle_b32":
        return _compile_swizzle(ins, entry)
    return _compile_permute(ins, entry)


def _swizzle_sources(offset: int) -> np.ndarray:
    """Return the source lane of each of 64 lanes. Raise Unknown for the modes FFT and rotation."""
    if offset >> 8 > 0x80:
        raise Unknown("unsupported swizzle mode")
    lane = np.arange(64)
    if offset & 0x8000:
        return lane & 60 | offset >> lane % 4 * 2 & 3
    and_mask = offset & 31 | 32
    or_mask = offset >> 5 & 31
    xor_mask = offset >> 10 & 31
    return (lane & and_mask | or_mask) ^ xor_mask


def _compile_swizzle(ins: Instruction, entry: Outstanding) -> Compiled:
    target, operand = ins.operands[:2]
    source_lanes = _swizzle_sources(ins.modifiers.get("offset", 0))
    read = reader(operand, "b32")

    def run(g: Waves):
        lanes = source_lanes[: g.width]
        values = np.where(g.mask[:, lanes], read(g)[:, lanes], np.uint32(0))
        np.copyto(g.V[target.index], values, where=g.mask)
        issue(g, LGKM, entry)

    micro = MicroOp(
        "",
        None,
        "b32",
        target,
        ((operand, "b32"),),
        handler="swizzle",
        access={"lanes": tuple(source_lanes[:32].tolist())},
    )
    return compiled_for_c(run, micro, issues=((LGKM,), entry))


def _compile_permute(ins: Instruction, entry: Outstanding) -> Compiled:
    target, index, value = ins.operands
    offset = ins.modifiers.get("offset", 0)
    is_backward = ins.name == "ds_bpermute_b32"
    read_index = reader(index, "u32")
    read_value = reader(value, "b32")
    # The halves of a wave64 are permuted separately, "as if [they] were two independent wave32's"
    # (RDNA3.5 ISA, DS_BPERMUTE_B32).
    first_of_half = np.arange(64) & 32

    def run(g: Waves):
        indices = np.broadcast_to(read_index(g), g.mask.shape).astype(np.int64)
        lanes = (indices + offset) // 4 % 32 + first_of_half[: g.width]
        values = np.broadcast_to(read_value(g), g.mask.shape)
        if is_backward:
            active = np.where(g.mask, values, np.uint32(0))
            moved = np.take_along_axis(active, lanes, axis=1)
        else:
            moved = np.zeros(g.mask.shape, np.uint32)
            wave, lane = np.nonzero(g.mask)
            moved[wave, lanes[wave, lane]] = values[wave, lane]
        np.copyto(g.V[target.index], moved, where=g.mask)
        issue(g, LGKM, entry)

    micro = MicroOp(
        "",
        None,
        "b32",
        target,
        ((value, "b32"), (index, "u32")),
        handler="bpermute" if is_backward else "permute",
        access={"offset": offset},
    )
    return compiled_for_c(run, micro, issues=((LGKM,), entry))

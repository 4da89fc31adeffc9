# SPDX-License-Identifier: BSD-3-Clause
"""Computation of the offsets that memory instructions access in the memories of a launch.

A locator is a function on waves. It returns three values:

* the offset of each access in the memory, only for lanes that access it;
* for each active lane, whether it accesses the memory, or None if all active lanes do;
* the tags of the accesses, or None if no race is possible.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from strix_emulate.code.decode import APERTURES, Instruction, Operand
from strix_emulate.code.target import DEFAULT, Target
from strix_emulate.errors import Trap
from strix_emulate.memory.arena import Arena, Memory
from strix_emulate.memory.waves import ZERO, Waves, reader


def _no_clock() -> int:
    return 0


@dataclass
class Spaces:
    """The memories of a launch.

    Attributes:
        arena: Global memory.
        lds: LDS of the workgroups that run at a time.
        lds_size: Bytes of LDS of a workgroup.
        lds_stride: Bytes from one workgroup's LDS to the next one's.
        scratch: Scratch memory of the waves that run at a time.
        scratch_size: Bytes of scratch of a lane.
        code_address: Address of the kernel's first instruction.
        clock: Function that returns the number of wave-instructions executed so far.
        target: The GPU.
        polls: Whether the kernel may poll memory that other waves change.
        orders: Whether anything besides barriers may order the waves' accesses.
    """

    arena: Arena
    lds: Memory
    lds_size: int
    lds_stride: int
    scratch: Memory
    scratch_size: int
    code_address: int = 0
    clock: Callable[[], int] = _no_clock
    target: Target = DEFAULT
    polls: bool = False
    orders: bool = False

    def note_load(self, at: np.ndarray) -> None:
        """Record the arrays that a load of global memory touches, if races are judged later."""
        if self.arena.doubts is not None:
            self.arena.doubts.note_load(at)

    def note_store(self, g: Waves, inside: np.ndarray | None) -> None:
        """Record which waves store, if races are judged later.

        `inside` has a flag for each active lane: whether it stores. None means that all do.
        """
        if self.arena.doubts is not None:
            self.arena.doubts.note_store(g, inside)


#: Numbers of memories in emulate.c, by the first part of a mnemonic. "flat" stands for any memory.
_SPACES = {"global": 0, "buffer": 0, "ds": 1, "scratch": 2, "flat": 3}


def memory_fields(ins: Instruction, operands) -> dict:
    """Return the fields of C's operation that say which memory an access uses, and how."""
    space = ins.name.split("_")[0]
    fields = {
        "memory": _SPACES[space],
        "offset": ins.modifiers.get("offset", 0),
    }
    if space == "buffer":
        fields["resource"] = 1 + operands[1].index
        fields["indexed"] = int("idxen" in ins.modifiers)
    if space == "flat":
        fields["apertures"] = tuple(base >> 32 for base in APERTURES.values())
    return fields


def address_sources(
    ins: Instruction,
    operands,
    count: int = 0,
) -> tuple[tuple[Operand, str], ...]:
    """Return the operands of C's operation that are added to the constant offset, with their kinds.

    Args:
        ins: The instruction.
        operands: Its address operands.
        count: Minimum number of operands to return. Zeros are added.
    """
    space = ins.name.split("_")[0]
    if space == "buffer":
        first, _, base = operands
        has_offset = ins.modifiers.keys() & {"offen", "idxen"}
        operands = [first if has_offset else ZERO, base]
    if space in ("global", "flat"):
        first, base = operands
        kinds = [(base, "u64"), (first, "u32")]
        if base.kind == "off":
            kinds = [(first, "u64")]
    else:
        present = [ZERO if op.kind == "off" else op for op in operands]
        kinds = [(op, "u32") for op in present]
    zeros = [(ZERO, "u32")] * (count - len(kinds))
    return (*kinds, *zeros)


def global_address(
    ins: Instruction,
    address: Operand,
    base: Operand,
) -> Callable:
    """Return a function on waves that returns global addresses, uint64 by active lane."""
    constant = np.int64(ins.modifiers.get("offset", 0)).astype(np.uint64)
    if base.kind == "off":
        wide = reader(address, "u64")
        return lambda g: g.active(wide(g)) + constant
    start = reader(base, "u64")
    index = reader(address, "u32")
    return lambda g: g.active(start(g) + index(g)) + constant


def compile_flat(
    ins: Instruction,
    address: Operand,
    part: Callable[[str], Callable],
) -> Callable:
    """Compile a flat access. The high half of a lane's address selects its memory.

    Args:
        ins: The instruction.
        address: Its address operand.
        part: Function that returns, for a space such as "ds", a function on waves that accesses
            this space.
    """
    wide = global_address(ins, address, Operand("off"))
    shared_base, private_base = APERTURES.values()
    shared = np.uint64(shared_base >> 32)
    private = np.uint64(private_base >> 32)
    access_global = part("global")
    access_lds = part("ds")
    access_scratch = part("scratch")

    def run(g: Waves):
        high = wide(g) >> np.uint64(32)
        lanes = g.lanes
        in_lds = high == shared
        in_scratch = high == private
        in_global = ~(in_lds | in_scratch)
        if in_global.all():
            access_global(g)
            return
        active = np.arange(g.n * g.width)[lanes]
        parts = (
            (in_global, access_global),
            (in_lds, access_lds),
            (in_scratch, access_scratch),
        )
        try:
            for selected, access_part in parts:
                if selected.any():
                    g.lanes = active[selected]
                    access_part(g)
        finally:
            g.lanes = lanes

    return run


def _find(
    arena: Arena,
    g: Waves,
    addresses,
    size: int,
    write: bool,
    selected=None,
):
    """Call Arena.find, and add the lane to its trap.

    `selected` has a flag for each active lane: whether it accesses memory. None means that all do.
    """
    try:
        return arena.find(addresses, size, write)
    except Trap as trap:
        if trap.position is not None:
            lanes = np.arange(g.n * g.width)[g.lanes]
            if selected is not None:
                lanes = lanes[selected]
            row, lane = divmod(int(lanes[trap.position]), g.width)
            trap.lane = f" (lane {lane} of wave {g.wave[row]} of workgroup {g.workgroup[row]})"
        raise


def locate_global(
    ins: Instruction,
    operands,
    size: int,
    write: bool,
    arena: Arena,
) -> Callable:
    """Return the locator of a global access."""
    address = global_address(ins, *operands)

    def locate(g: Waves):
        at, is_writable = _find(arena, g, address(g), size, write)
        tags = g.lane_array(g.tags) if is_writable else None
        return at, None, tags

    return locate


def _buffer_range(ins: Instruction, operands, size: int, constant: int) -> Callable:
    """Return a function on waves that says which bytes of a buffer a buffer access addresses.

    An access by offset needs a raw resource, and an access by index a resource of records with
    `stride` bytes (ISA, "Buffer Addressing"). The access traps if the resource is of another kind,
    or if a resource of records is swizzled or adds the lane's number to the index.

    Args:
        ins: The instruction.
        operands: Its address operands.
        size: Bytes of the access.
        constant: Constant that is added to the offset.

    Returns:
        A function that returns by active lane the offset in the buffer, without the scalar offset,
        and whether the access lies in the resource's range.
    """
    first, resource, base = operands
    is_indexed = "idxen" in ins.modifiers
    descriptor = slice(resource.index, resource.index + 4)
    scalar = reader(base, "u32")
    index = reader(replace(first, count=1), "u32") if is_indexed else None
    offset = None
    if "offen" in ins.modifiers:
        # If the access has an index and an offset, the index is in the first address register.
        second = replace(first, index=first.index + is_indexed, count=1)
        offset = reader(second, "u32")

    def find_range(g: Waves):
        words = g.S[descriptor]
        offsets = np.uint32(0) if offset is None else offset(g)
        within = g.active(offsets).astype(np.int64) + constant
        if index is None:
            return within, _in_raw_buffer(g, words, within + size, scalar(g))
        return _in_records(g, words, g.active(index(g)), within, size)

    return find_range


def crosses_range(ins: Instruction, operands, size: int) -> Callable:
    """Return a function on waves: whether the range of a buffer ends inside of a lane's access.

    `size` is the number of bytes of the access, which has at least two words.
    """
    constant = ins.modifiers.get("offset", 0)
    first = _buffer_range(ins, operands, 4, constant)
    last = _buffer_range(ins, operands, 4, constant + size - 4)
    return lambda g: bool((first(g)[1] != last(g)[1]).any())


def locate_buffer(
    ins: Instruction,
    operands,
    size: int,
    write: bool,
    arena: Arena,
    constant: int,
) -> Callable:
    """Return the locator of a buffer access. Lanes outside the resource's range access no memory.

    See :func:`_buffer_range` for the resources that are supported, and for `constant`.
    """
    resource, base = operands[1:]
    find_range = _buffer_range(ins, operands, size, constant)
    scalar = reader(base, "u32")

    def locate(g: Waves):
        words = g.S[resource.index : resource.index + 4]
        within, inside = find_range(g)
        scalar_offset = scalar(g)
        low = words[0].astype(np.uint64)
        high = (words[1] & np.uint32(0xFFFF)).astype(np.uint64)
        start = low | high << np.uint64(32)
        address = g.active(start + scalar_offset) + within.astype(np.uint64)
        tags = g.lane_array(g.tags)
        if inside.all():
            inside = None
        else:
            address = address[inside]
            tags = tags[inside]
        at, is_writable = _find(arena, g, address, size, write, inside)
        return at, inside, tags if is_writable else None

    return locate


def _in_raw_buffer(g: Waves, words, end, scalar_offset):
    """Return by active lane whether an access that ends at offset `end` lies in a raw buffer.

    The scalar offset shortens the buffer (ISA, "Buffer Range Checking").
    """
    stride = words[1] >> np.uint32(16) & np.uint32(0x3FFF)
    select = words[3] >> np.uint32(28)
    if stride.any() or (select != 3).any():
        raise Trap("unknown", "an access by offset with a buffer resource that is not raw")
    size = words[2].astype(np.int64) - np.asarray(scalar_offset).astype(np.int64)
    return end <= g.active(size)


def _in_records(g: Waves, words, index, within, size: int):
    """Return by active lane the offset in a buffer of records, and whether it lies in the buffer.

    Args:
        g: The waves.
        words: The buffer resource, (4, n, 1).
        index: Record of each lane.
        within: Offset of each lane in its record.
        size: Bytes of the access. Its last byte must lie in the record, unless the resource limits
            only the index.
    """
    stride = words[1] >> np.uint32(16) & np.uint32(0x3FFF)
    select = words[3] >> np.uint32(28)
    is_swizzled = words[1] >> np.uint32(30) | words[3] >> np.uint32(23) & 1
    if ((select > 1) | is_swizzled).any():
        raise Trap("unknown", "a buffer resource that is swizzled or of another unsupported kind")
    record = index.astype(np.int64)
    # A resource without a format is not a buffer. MIOpen's Winograd kernels use one to switch off a
    # bias.
    has_format = words[3] & np.uint32(0x7F000) != 0
    inside = (record < g.active(words[2])) & g.active(has_format)
    inside &= g.active(select == 1) | (within + size <= g.active(stride))
    return within + record * g.active(stride).astype(np.int64), inside


def locate_scratch(
    ins: Instruction,
    operands,
    size: int,
    spaces: Spaces,
) -> Callable:
    """Return the locator of a scratch access. Its addresses count from the lane's own scratch."""
    address, base = operands
    index = reader(ZERO if address.kind == "off" else address, "u32")
    start = reader(ZERO if base.kind == "off" else base, "u32")
    constant = ins.modifiers.get("offset", 0)
    limit = spaces.scratch_size

    def locate(g: Waves):
        private = g.active(index(g) + start(g)).astype(np.int64) + constant
        if len(private) and (private.min() < 0 or private.max() + size > limit):
            outside = private.min() if private.min() < 0 else private.max()
            raise Trap("bounds", f"scratch offset {int(outside)} of {limit} bytes")
        lane = np.arange(g.width)
        at = private + g.active((g.slot[:, None] * g.width + lane) * limit)
        return at, None, g.lane_array(g.tags)

    return locate


def locate_lds(
    address: Operand,
    offset: int,
    size: int,
    spaces: Spaces,
) -> Callable:
    """Return the locator of an LDS access. Its addresses count from the workgroup's own LDS."""
    index = reader(address, "u32")
    limit = spaces.lds_size

    def locate(g: Waves):
        # Addresses wrap at 32 bits. LLVM relies on the wrap. For example, it addresses s[63 - i] by
        # the sum of -4 * i and a constant offset.
        within = g.active(index(g) + np.uint32(offset)).astype(np.int64)
        at = within + g.lane_array(g.lds_slot * spaces.lds_stride)
        tags = g.lane_array(g.tags) if len(at) else None
        if not len(within) or within.max() + size <= limit:
            return at, None, tags
        message = f"LDS address {int(within.max())} of {limit} bytes"
        spaces.lds.findings.report("lds", message)
        # If the finding does not end the launch, continue as hardware does: reads out of range
        # return 0, and writes are discarded (ISA, chapter on LDS).
        inside = within + size <= limit
        return at[inside], inside, None if tags is None else tags[inside]

    return locate


def make_locators(
    space: str,
    ins: Instruction,
    operands,
    size: int,
    write: bool,
    spaces: Spaces,
    offsets,
) -> tuple[Memory, list[Callable]]:
    """Return the memory of a space, and the locators of an instruction's accesses to it.

    An instruction that accesses LDS or a buffer has a locator for each of `offsets`. Other
    instructions have one locator.
    """
    if space == "ds":
        address = operands[0]
        locators = [locate_lds(address, offset, size, spaces) for offset in offsets]
        return spaces.lds, locators
    if space == "scratch":
        return spaces.scratch, [locate_scratch(ins, operands, size, spaces)]
    arena = spaces.arena
    if space == "buffer":
        return arena, [locate_buffer(ins, operands, size, write, arena, x) for x in offsets]
    return arena, [locate_global(ins, operands, size, write, arena)]

# SPDX-License-Identifier: BSD-3-Clause
"""Where memory instructions go: from address operands to offsets in the memories of a launch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from strix_emulate.code.decode import APERTURES, Instruction, Operand
from strix_emulate.code.target import DEFAULT, Target
from strix_emulate.errors import Trap
from strix_emulate.memory.arena import Arena, Memory
from strix_emulate.memory.waves import ZERO, Waves, reader


@dataclass
class Spaces:
    """The memories that a launch has; scratch and LDS are offset by wave and by workgroup."""

    arena: Arena
    lds: Memory
    lds_size: int
    lds_stride: int
    scratch: Memory
    scratch_size: int
    #: address of the kernel's first instruction
    code: int = 0
    #: wave-instructions so far
    clock: Callable[[], int] = lambda: 0
    target: Target = DEFAULT
    #: whether the kernel asks for memory that other waves change
    shares: bool = False

    def note_load(self, at: np.ndarray) -> None:
        """Note where a load of global memory goes, to judge races by."""
        if self.arena.doubts is not None:
            self.arena.doubts.note_load(at)

    def note_store(self, g: Waves, inside: np.ndarray | None) -> None:
        """Note that waves store; inside: which active lanes do, None for all."""
        if self.arena.doubts is not None:
            self.arena.doubts.note_store(g, inside)


_SPACES = {"global": 0, "buffer": 0, "ds": 1, "scratch": 2, "flat": 3}


def access(ins: Instruction, operands) -> dict:
    """Describe to C the memory of an access, its buffer resource, or what a flat one goes by."""
    space = ins.name.split("_")[0]
    found = {"memory": _SPACES[space], "offset": ins.modifiers.get("offset", 0)}
    if space == "buffer":
        found["resource"] = 1 + operands[1].index
        found["indexed"] = int("idxen" in ins.modifiers)
    if space == "flat":
        found["apertures"] = tuple(base >> 32 for base in APERTURES.values())
    return found


def sources(ins: Instruction, operands, least: int = 0) -> tuple[tuple[Operand, str], ...]:
    """Describe to C what is added to the constant offset; least: of so many operands."""
    space, zero = ins.name.split("_")[0], ZERO
    if space == "buffer":
        first, _, base = operands
        operands = [first if ins.modifiers.keys() & {"offen", "idxen"} else zero, base]
    found = [(zero if op.kind == "off" else op, "u32") for op in operands]
    if space in ("global", "flat"):
        first, base = operands
        found = [(first, "u64")] if base.kind == "off" else [(base, "u64"), (first, "u32")]
    return (*found, *[(zero, "u32")] * (least - len(found)))


def global_address(ins: Instruction, address: Operand, base: Operand) -> Callable:
    """Return a function of waves: the uint64 addresses of a global access, one per active lane."""
    constant = np.int64(ins.modifiers.get("offset", 0)).astype(np.uint64)
    if base.kind == "off":
        wide = reader(address, "u64")
        return lambda g: g.active(wide(g)) + constant
    start, index = reader(base, "u64"), reader(address, "u32")
    return lambda g: g.active(start(g) + index(g)) + constant


def in_apertures(ins: Instruction, address: Operand, part: Callable[[str], Callable]) -> Callable:
    """Locate a flat access: where a lane's goes is in the high half of its address.

    part: gives the access to one space, as a function on Waves.
    """
    wide = global_address(ins, address, Operand("off"))
    shared, private = (np.uint64(base >> 32) for base in APERTURES.values())
    everywhere, lds, scratch = map(part, ("global", "ds", "scratch"))

    def run(g: Waves):
        high, lanes = wide(g) >> np.uint64(32), g.lanes
        in_lds, in_scratch = high == shared, high == private
        outside = ~(in_lds | in_scratch)
        if outside.all():
            everywhere(g)
            return
        active = np.arange(g.n * g.width)[lanes]
        try:
            for chosen, part in ((outside, everywhere), (in_lds, lds), (in_scratch, scratch)):
                if chosen.any():
                    g.lanes = active[chosen]
                    part(g)
        finally:
            g.lanes = lanes

    return run


def _find(arena: Arena, g: Waves, addresses, size: int, write: bool, chosen=None):
    """Call Arena.find; its trap says which lane it was. chosen: of active lanes, None for all."""
    try:
        return arena.find(addresses, size, write)
    except Trap as trap:
        if trap.position is not None:
            lanes = np.arange(g.n * g.width)[g.lanes]
            lanes = lanes if chosen is None else lanes[chosen]
            row, lane = divmod(int(lanes[trap.position]), g.width)
            trap.lane = f" (lane {lane} of wave {g.wave[row]} of workgroup {g.workgroup[row]})"
        raise


def locate_global(ins: Instruction, operands, size: int, write: bool, arena: Arena) -> Callable:
    """Return a function of waves: where a global access lies, and the tags to leave there."""
    address = global_address(ins, *operands)

    def locate(g: Waves):
        at, changing = _find(arena, g, address(g), size, write)
        return at, None, g.lane_array(g.tags) if changing else None

    return locate


#: A locator gives, for the active lanes, offsets in the memory, which lanes are in a buffer's
#: range (None: all), and the tags to check them with (None where nothing can race).


def locate_buffer(ins: Instruction, operands, size: int, write: bool, arena: Arena) -> Callable:
    """Locate a buffer's access by offset or index; out of the resource's range it is none at all.

    A resource that fits the access: raw for an offset, for an index one of records of `stride`
    bytes (ISA, "Buffer Addressing"), neither swizzled nor with lanes added.
    """
    first, resource, base = operands
    indexed = "idxen" in ins.modifiers
    r, constant, scalar = resource.index, ins.modifiers.get("offset", 0), reader(base, "u32")
    index = reader(replace(first, count=1), "u32") if indexed else None
    # with both, the index is in front of the offset
    second = replace(first, index=first.index + indexed, count=1)
    offset = reader(second, "u32") if "offen" in ins.modifiers else (lambda _g: np.uint32(0))

    def locate(g: Waves):
        words = g.S[r : r + 4]
        stride, select = words[1] >> np.uint32(16) & np.uint32(0x3FFF), words[3] >> np.uint32(28)
        start = words[0].astype(np.uint64) | (words[1] & np.uint32(0xFFFF)).astype(
            np.uint64
        ) << np.uint64(32)
        within = g.active(offset(g)).astype(np.int64) + constant
        if index is None:
            if stride.any() or (select != 3).any():
                raise Trap("unknown", "a buffer resource that is not raw")
            # the scalar offset lessens what is left of the buffer (ISA, "Buffer Range Checking")
            left = words[2].astype(np.int64) - np.asarray(scalar(g)).astype(np.int64)
            inside = within + size <= g.active(left)
        else:
            if ((select > 1) | (words[1] >> np.uint32(30) | words[3] >> np.uint32(23) & 1)).any():
                raise Trap("unknown", "a buffer resource that is not of records, one by one")
            at = g.active(index(g)).astype(np.int64)
            # without a format there is no buffer: so MIOpen's Winograd switches off one of bias
            inside = (at < g.active(words[2])) & g.active(words[3] & np.uint32(0x7F000) != 0)
            inside &= g.active(select == 1) | (within < g.active(stride))
            within = within + at * g.active(stride).astype(np.int64)
        address = g.active(start + scalar(g)) + within.astype(np.uint64)
        marks = g.lane_array(g.tags)
        if inside.all():
            inside = None
        else:
            address, marks = address[inside], marks[inside]
        at, changing = _find(arena, g, address, size, write, inside)
        return at, inside, marks if changing else None

    return locate


def locate_scratch(ins: Instruction, operands, size: int, spaces: Spaces) -> Callable:
    """Return a function of waves: where a scratch access lies in the lanes' private memory."""
    address, base = (op if op.kind != "off" else ZERO for op in operands)
    index, start = reader(address, "u32"), reader(base, "u32")
    constant, limit = ins.modifiers.get("offset", 0), spaces.scratch_size

    def locate(g: Waves):
        private = g.active(index(g) + start(g)).astype(np.int64) + constant
        if len(private) and (private.min() < 0 or private.max() + size > limit):
            wrong = int(private.max() if private.min() >= 0 else private.min())
            raise Trap("bounds", f"scratch offset {wrong} of {limit} bytes")
        lane = np.arange(g.width)
        at = private + g.active((g.slot[:, None] * g.width + lane) * limit)
        return at, None, g.lane_array(g.tags)

    return locate


def locate_lds(address: Operand, offset: int, size: int, spaces: Spaces) -> Callable:
    """Return a function of waves: where an access to the LDS lies in its workgroup's."""
    index, limit = reader(address, "u32"), spaces.lds_size

    def locate(g: Waves):
        # 32 bits, as LLVM counts on: -4 * i with an offset is how it writes s[63 - i]
        inside = g.active(index(g) + np.uint32(offset)).astype(np.int64)
        at = inside + g.lane_array(g.lds_slot * spaces.lds_stride)
        marks = g.lane_array(g.tags) if len(at) else None
        if not len(inside) or inside.max() + size <= limit:
            return at, None, marks
        text = f"LDS address {int(inside.max())} of {limit} bytes"
        spaces.lds.findings.found("lds", text)
        # hardware: out of range, reads give 0 and writes are discarded (ISA, chapter on LDS)
        right = inside + size <= limit
        return at[right], right, None if marks is None else marks[right]

    return locate


def located(
    space: str, ins: Instruction, operands, size: int, write: bool, spaces: Spaces, offsets
) -> tuple[Memory, list[Callable]]:
    """Return the memory of a space, and a locator of an access to it for each constant offset."""
    if space == "ds":
        return spaces.lds, [locate_lds(operands[0], o, size, spaces) for o in offsets]
    if space == "scratch":
        return spaces.scratch, [locate_scratch(ins, operands, size, spaces)]
    find = locate_buffer if space == "buffer" else locate_global
    return spaces.arena, [find(ins, operands, size, write, spaces.arena)]

# SPDX-License-Identifier: BSD-3-Clause
"""Memory instructions: SMEM, MUBUF, global, flat and scratch, LDS, and their atomics."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strix_emulate.decode import Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.memory import Arena, Memory
from strix_emulate.waits import LGKM, STORE, VM, Outstanding, issue, registers
from strix_emulate.waves import Waves, reader

_CACHE = {"glc", "slc", "dlc"}
#: bytes and how they come into a register: zero or sign extended, or into one half of it
TYPES = {
    "b32": (4, ""), "b64": (8, ""), "b96": (12, ""), "b128": (16, ""), "u8": (1, ""),
    "i8": (1, "sign"),
    "u16": (2, ""), "i16": (2, "sign"), "b8": (1, ""), "b16": (2, ""), "d16_b16": (2, "low"),
    "d16_hi_b16": (2, "high"), "d16_u8": (1, "low"), "d16_hi_u8": (1, "high"),
    "d16_i8": (1, "low sign"),
    "d16_hi_i8": (1, "high sign"), "d16_hi_b8": (1, "high"), "u8_d16": (1, "low"),
    "u8_d16_hi": (1, "high"),
    "i8_d16": (1, "low sign"), "i8_d16_hi": (1, "high sign"), "u16_d16": (2, "low"),
    "u16_d16_hi": (2, "high"), "b16_d16_hi": (2, "high"), "b8_d16_hi": (1, "high"),
}  # fmt: skip
_ATOMICS = {
    "add_u32": ("u4", np.add.at), "sub_u32": ("u4", np.subtract.at),
    "and_b32": ("u4", np.bitwise_and.at),
    "or_b32": ("u4", np.bitwise_or.at), "xor_b32": ("u4", np.bitwise_xor.at),
    "min_u32": ("u4", np.minimum.at),
    "max_u32": ("u4", np.maximum.at), "min_i32": ("i4", np.minimum.at),
    "max_i32": ("i4", np.maximum.at),
    "add_f32": ("f4", np.add.at), "add_u64": ("u8", np.add.at),
}  # fmt: skip
_PATTERN = re.compile(
    r"(?P<space>global|flat|scratch|buffer|ds)_(?P<what>load|store)(?P<two>_2addr)?(?P<stride>_stride64)?_(?P<type>\w+)$"
)
_ATOMIC = re.compile(
    r"(?P<space>global|buffer|ds)_(?:atomic_)?(?P<op>\w+?)(?P<returns>_rtn)?(?P<type>_[uibf]\d+)$"
)
_SCALAR = re.compile(r"s_(buffer_)?load_b(\d+)$")
NO_EFFECT = {"buffer_gl0_inv", "buffer_gl1_inv", "s_dcache_inv", "s_gl1_inv", "s_icache_inv"}


@dataclass
class Spaces:
    """The memories that a launch has; scratch and LDS are offset by wave and by workgroup."""

    arena: Arena
    lds: Memory
    lds_size: int
    lds_stride: int
    scratch: Memory
    scratch_size: int


def is_memory(name: str) -> bool:
    return bool(_PATTERN.match(name) or _SCALAR.match(name) or name in NO_EFFECT or _atomic(name)
                or name.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")))  # fmt: skip


def access_size(ins: Instruction) -> int:
    """The smallest power of two of bytes that it touches in LDS or global memory; 0 if none."""
    match = _PATTERN.match(ins.name)
    if match and match["type"] in TYPES:
        return min(4, TYPES[match["type"]][0])
    return 0


def loaded_half(ins: Instruction) -> str:
    """ "low" or "high" if it is a load into half of a register, else ""."""
    match = _PATTERN.match(ins.name)
    if not match or match["what"] != "load" or match["type"] not in TYPES:
        return ""
    if ins.operands and ins.operands[0].half:
        return "high" if ins.operands[0].half == "h" else "low"
    return TYPES[match["type"]][1].split(" ")[0].replace("sign", "")


def compile_memory(ins: Instruction, spaces: Spaces) -> Callable:
    """A function that executes the instruction on Waves. Raises Unknown."""
    if ins.name in NO_EFFECT:
        return lambda _g: None
    if _SCALAR.match(ins.name):
        return _scalar_load(ins, spaces.arena)
    if match := _PATTERN.match(ins.name):
        if match["type"] not in TYPES:
            raise Unknown("mnemonic")
        size, how = TYPES[match["type"]]
        return _plain(ins, match, size, how, spaces)
    if _atomic(ins.name):
        return _atomic_access(ins, spaces)
    if ins.name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return _lane_exchange(ins)
    raise Unknown("mnemonic")


def _atomic(name: str):
    match = _ATOMIC.match(name)
    return match if match and match["op"] + match["type"] in _ATOMICS else None


def _scalar_load(ins: Instruction, arena: Arena) -> Callable:
    words = int(_SCALAR.match(ins.name)[2]) // 32
    if "buffer" in ins.name or ins.modifiers.keys() - _CACHE - {"offset"}:
        raise Unknown(f"form {ins.text}")
    target, base, offset = ins.operands
    address, extra = reader(base, "u64"), reader(offset, "u32")
    constant = ins.modifiers.get("offset", 0)
    if offset.kind == "const":
        constant, extra = int(offset.text, 0), lambda _g: np.uint64(0)
    entry = Outstanding(registers("s", target.index, words), False, ins.text)

    def run(g: Waves):
        start = (address(g) + extra(g)).ravel() + np.int64(constant).astype(np.uint64)
        at, changing = arena.find(start & ~np.uint64(3), 4 * words, False)
        if changing:
            arena.track(at, 4 * words, g.tags)
        g.S[target.index : target.index + words, :, 0] = np.stack(
            [arena.views[4][(at >> 2) + i] for i in range(words)]
        )
        issue(g, LGKM, entry)

    return run


def _global_address(ins: Instruction, address: Operand, base: Operand) -> Callable:
    constant = np.int64(ins.modifiers.get("offset", 0)).astype(np.uint64)
    if base.kind == "off":
        wide = reader(address, "u64")
        return lambda g: g.active(wide(g)) + constant
    start, index = reader(base, "u64"), reader(address, "u32")
    return lambda g: g.active(start(g) + index(g)) + constant


def _locate_global(ins: Instruction, operands, size: int, write: bool, arena: Arena) -> Callable:
    address = _global_address(ins, *operands)

    def locate(g: Waves):
        at, changing = arena.find(address(g), size, write)
        return at, None, g.lane_array(g.tags) if changing else None

    return locate


#: A locator gives, for the active lanes, offsets in the memory, which lanes are in a buffer's
#: range (None: all), and the tags to check them with (None where nothing can race).


def _locate_buffer(ins: Instruction, operands, size: int, write: bool, arena: Arena) -> Callable:
    """Raw buffers: out of range by the resource's own number of bytes is not an access at all."""
    index, resource, base = operands
    if "idxen" in ins.modifiers:
        raise Unknown("modifier idxen")
    r, constant, scalar = resource.index, ins.modifiers.get("offset", 0), reader(base, "u32")
    offset = reader(index, "u32") if "offen" in ins.modifiers else (lambda _g: np.uint32(0))

    def locate(g: Waves):
        words = g.S[r : r + 4]
        if (words[1] >> np.uint32(16) & np.uint32(0x3FFF)).any() or (
            words[3] >> np.uint32(28) != 3
        ).any():
            raise Trap("unknown", "a buffer resource that is not raw")
        start = words[0].astype(np.uint64) | (words[1] & np.uint32(0xFFFF)).astype(
            np.uint64
        ) << np.uint64(32)
        within = g.active(offset(g)).astype(np.int64) + constant
        inside = within + size <= g.active(words[2])
        address = g.active(start + scalar(g)) + within.astype(np.uint64)
        marks = g.lane_array(g.tags)
        if inside.all():
            inside = None
        else:
            address, marks = address[inside], marks[inside]
        at, changing = arena.find(address, size, write)
        return at, inside, marks if changing else None

    return locate


def _locate_scratch(ins: Instruction, operands, size: int, spaces: Spaces) -> Callable:
    address, base = (op if op.kind != "off" else Operand("const", text="0") for op in operands)
    index, start = reader(address, "u32"), reader(base, "u32")
    constant, limit = ins.modifiers.get("offset", 0), spaces.scratch_size

    def locate(g: Waves):
        private = g.active(index(g) + start(g)).astype(np.int64) + constant
        if len(private) and (private.min() < 0 or private.max() + size > limit):
            raise Trap("bounds", f"scratch offset {int(private.max())} of {limit} bytes")
        lane = np.arange(32)
        at = private + g.active((g.slot[:, None] * 32 + lane) * limit)
        return at, None, g.lane_array(g.tags)

    return locate


def _locate_lds(address: Operand, offset: int, size: int, spaces: Spaces) -> Callable:
    index, limit = reader(address, "u32"), spaces.lds_size

    def locate(g: Waves):
        inside = g.active(index(g)).astype(np.int64) + offset
        if len(inside) and (inside.min() < 0 or inside.max() + size > limit):
            raise Trap("bounds", f"LDS address {int(inside.max())} of {limit} bytes")
        at = inside + g.lane_array(g.lds_slot * spaces.lds_stride)
        return at, None, g.lane_array(g.tags) if len(at) else None

    return locate


def _plain(ins: Instruction, match, size: int, how: str, spaces: Spaces) -> Callable:
    """Loads and stores of every space; the two-address forms of LDS are two accesses."""
    space, write, ops = match["space"], match["what"] == "store", list(ins.operands)
    allowed = _CACHE | {"offset"} | ({"offen"} if space == "buffer" else set())
    if space == "ds":
        allowed = {"offset0", "offset1"} if match["two"] else {"offset"}
    # the row of "off" operands of scratch is parsed as an operand
    if ins.modifiers.keys() - allowed:
        raise Unknown(f"modifiers {sorted(ins.modifiers.keys() - allowed)}")
    counter = LGKM if space == "ds" else (STORE if write else VM)
    if space == "ds":
        address = ops[0] if write else ops[1]
        data = ops[1:] if write else ops[:1]
        unit = size * (64 if match["stride"] else 1)
        offsets = [ins.modifiers.get("offset", 0)]
        if match["two"]:
            offsets = [ins.modifiers.get(f"offset{i}", 0) * unit for i in (0, 1)]
        locates = [_locate_lds(address, o, size, spaces) for o in offsets]
        memory = spaces.lds
    elif space == "buffer":
        data, rest = ops[:1], ops[1:]
        locates, memory = [_locate_buffer(ins, rest, size, write, spaces.arena)], spaces.arena
    else:
        # stores have the address first
        data, rest = (ops[1:2], [ops[0], ops[2]]) if write else (ops[:1], ops[1:])
        if space == "scratch":
            locates, memory = [_locate_scratch(ins, rest, size, spaces)], spaces.scratch
        else:
            if space == "flat":
                rest = [ops[0] if write else ops[1], Operand("off")]
            locates, memory = [_locate_global(ins, rest, size, write, spaces.arena)], spaces.arena
    words = max(1, size // 4)
    if write:
        # a two-address store has a register of its own for each
        accesses = list(zip(locates, data, strict=True))
        return _store(ins, accesses, memory, size, words, how, counter)
    accesses = [(locate, data[0].index + i * words) for i, locate in enumerate(locates)]
    return _load(ins, accesses, memory, size, words, how, counter)


def _load(ins, accesses, memory, size, words, how, counter) -> Callable:
    signed, half = "sign" in how, loaded_half(ins)
    bits = 0
    for _, first in accesses:
        bits |= registers("v", first, words)

    def run(g: Waves):
        found = [locate(g) for locate, _ in accesses]
        touches = []
        for (_, first), (at, inside, marks) in zip(accesses, found, strict=True):
            touch = memory.track(at, size, marks) if marks is not None else None
            data = memory.load(at, size) if len(at) else np.zeros((words, 0), np.uint32)
            if inside is not None:
                # out of the buffer's range: zero
                whole = np.zeros((words, len(inside)), np.uint32)
                whole[:, inside] = data
                data = whole
            if signed:
                kind = np.int8 if size == 1 else np.int16
                data = data.astype(kind).astype(np.int32).view(np.uint32)
            if half:
                into = g.VF[first].view(np.uint16)[int(half == "high") :: 2]
                into[g.lanes] = data[0].astype(np.uint16)
            else:
                for i in range(words):
                    g.VF[first + i][g.lanes] = data[i]
            if touch is not None:
                touches.append(touch)
        issue(g, counter, Outstanding(bits, True, ins.text, tuple(touches), half=half))

    return run


def _store(ins, accesses, memory, size, words, how, counter) -> Callable:
    def run(g: Waves):
        touches = []
        for locate, source in accesses:
            at, inside, marks = locate(g)
            data = g.VF[source.index : source.index + words][:, g.lanes]
            if source.half == "h" or "high" in how:
                data = data >> np.uint32(16)
            if inside is not None:
                data = data[:, inside]
            touch = memory.track_store(at, data, size, marks) if marks is not None else None
            if touch is not None:
                touches.append(touch)
        issue(g, counter, Outstanding(0, True, ins.text, tuple(touches)))

    return run


def _atomic_access(ins: Instruction, spaces: Spaces) -> Callable:
    match = _atomic(ins.name)
    kind, apply = _ATOMICS[match["op"] + match["type"]]
    size = int(kind[1])
    space, ops = match["space"], list(ins.operands)
    returns = bool(match["returns"]) or "glc" in ins.modifiers
    if ins.modifiers.keys() - _CACHE - {"offset", "offen"}:
        raise Unknown(f"modifiers {sorted(ins.modifiers)}")
    if space == "ds":
        target, (address, data) = (ops[0] if returns else None), ops[-2:]
        locate = _locate_lds(address, ins.modifiers.get("offset", 0), size, spaces)
        memory = spaces.lds
    elif space == "buffer":
        target, data = (ops[0] if returns else None), ops[0]
        locate, memory = _locate_buffer(ins, ops[1:], size, True, spaces.arena), spaces.arena
    else:
        target = ops[0] if returns else None
        address, data, base = ops[-3:]
        locate, memory = _locate_atomic(ins, [address, base], size, spaces.arena), spaces.arena

    def run(g: Waves):
        at, inside, _ = locate(g)
        source = g.VF[data.index : data.index + size // 4][:, g.lanes]
        if inside is not None:
            source = source[:, inside]
        values = np.ascontiguousarray(source.T).view(kind).ravel()
        cells = memory.bytes.view(kind)
        if target is None:
            apply(cells, at // size, values)
        else:
            # one after the other: each lane gets what the lanes before it left
            old = np.zeros_like(values)
            for i, place in enumerate(at // size):
                old[i] = cells[place]
                apply(cells, place, values[i])
            g.VF[target.index : target.index + size // 4][:, g.lanes] = (
                old.view(np.uint32).reshape(-1, size // 4).T
            )
        bits = registers("v", target.index, size // 4) if target else 0
        counter = LGKM if space == "ds" else (VM if returns else STORE)
        issue(g, counter, Outstanding(bits, True, ins.text))

    return run


def _locate_atomic(ins: Instruction, operands, size: int, arena: Arena) -> Callable:
    """Atomics of different waves are no race with each other: only bounds are checked."""
    address = _global_address(ins, *operands)

    def locate(g: Waves):
        return arena.find(address(g), size, True)[0], None, None

    return locate


def _lane_exchange(ins: Instruction) -> Callable:
    """DS_BPERMUTE, DS_PERMUTE and DS_SWIZZLE move data between lanes and touch no memory."""
    target, offset = ins.operands[0].index, ins.modifiers.get("offset", 0)
    entry = Outstanding(registers("v", target), True, ins.text)
    lane = np.arange(32)
    if ins.name == "ds_swizzle_b32":
        raw = re.search(r"offset:(\d+)", ins.text)
        if not raw or int(raw[1]) & 0x8000:
            raise Unknown("swizzle mode")
        code = int(raw[1])
        source = (lane & (code & 31) | code >> 5 & 31) ^ (code >> 10 & 31)
        read = reader(ins.operands[1], "b32")

        def run_swizzle(g: Waves):
            got = np.where(g.mask[:, source], read(g)[:, source], np.uint32(0))
            np.copyto(g.V[target], got, where=g.mask)
            issue(g, LGKM, entry)

        return run_swizzle
    index, value = reader(ins.operands[1], "u32"), reader(ins.operands[2], "b32")

    def run(g: Waves):
        where = (np.broadcast_to(index(g), g.mask.shape).astype(np.int64) + offset) // 4 % 32
        values = np.broadcast_to(value(g), g.mask.shape)
        if ins.name == "ds_bpermute_b32":
            got = np.take_along_axis(np.where(g.mask, values, np.uint32(0)), where, axis=1)
        else:
            got = np.zeros(g.mask.shape, np.uint32)
            rows, lanes = np.nonzero(g.mask)
            got[rows, where[rows, lanes]] = values[rows, lanes]
        np.copyto(g.V[target], got, where=g.mask)
        issue(g, LGKM, entry)

    return run

# SPDX-License-Identifier: BSD-3-Clause
"""The fields of GFX11's encodings (RDNA3.5 ISA, "Microcode Formats").

Each encoding except VOPD has a reader, which returns slots and modifiers. A slot is a function that
returns an operand, given the operand's shape. Slots are in the order in which LLVM lists operands.
A modifier that has its default value is omitted, except row_mask and bank_mask of DPP.

Scalar registers have the numbers of the ISA's operand encoding: s0 is 0, vcc_lo 106, null 124, m0
125, exec_lo 126.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

VCC = 106
NULL = 124
M0 = 125
EXEC = 126
#: 64-bit constants: the first flat addresses of LDS and of scratch (their "apertures"). Linux's
#: amdkfd sets these values (MAKE_LDS_APP_BASE_V9).
APERTURES = {"src_shared_base": 1 << 48, "src_private_base": 2 << 48}


class Unknown(ValueError):
    """An instruction that the decoder does not understand or the emulator does not support."""


@dataclass(frozen=True)
class Operand:
    """A register range, or a constant.

    Attributes:
        kind: "v", "s", "const" or "off". A `MicroOp` may also use "scc" or "lane".
        index: Number of the first register.
        count: Number of registers.
        half: "l" or "h" for 16 bits of a register, else "".
        value: Value of a constant. An inline fraction such as 0.5 is a float, which readers of the
            operand convert to the operand's type.
        neg: Whether the value is negated.
        abs: Whether the absolute value is used.
        literal: Whether the constant is in the 32 bits that follow the instruction.
    """

    kind: str
    index: int = 0
    count: int = 1
    half: str = ""
    value: int | float = 0
    neg: bool = False
    abs: bool = False
    literal: bool = False

    def __str__(self) -> str:
        return str(self.value) if self.kind == "const" else f"{self.kind}{self.index}{self.half}"


@dataclass(frozen=True)
class Shape:
    """The shape of an operand, from LLVM's text.

    Attributes:
        count: Number of registers.
        half: Whether the operand is half of a register.
    """

    count: int = 1
    half: bool = False


#: A function that returns the operand for a shape.
Slot = Callable[[Shape], Operand]
#: The result of a reader: slots of the operands, and modifiers.
Read = tuple[list[Slot], dict]
#: A function that reads an encoding, given the bits, the mnemonic, and the number of operands in
#: LLVM's text.
Reader = Callable[["Code", str, int], Read]
#: Values of a source field. Those of DPP occur in the first one only.
_DPP8 = 233
_DPP8_FI = 234
_DPP16 = 250
_LITERAL = 255
#: The floats that the operand codes 240 to 248 stand for, in order. The last is 1 / (2 pi).
_FRACTIONS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)
#: Opcodes of VOP3 with a second destination, which is a scalar register.
_TWO_RESULTS = {0x120, 0x121, 0x122, *range(0x2FC, 0x303)}
#: DPP's operations on rows, by the high bits of the control field.
_ROWS = {
    0x10: "row_shl",
    0x11: "row_shr",
    0x12: "row_ror",
    0x15: "row_share",
    0x16: "row_xmask",
}
#: Output multipliers by OMOD.
_OUTPUT_MULTIPLIERS: dict[int, dict] = {1: {"mul": 2}, 2: {"mul": 4}, 3: {"div": 2}}
#: Parts of the names of LDS instructions that write a vector register.
_LDS_RESULTS = ("load", "_rtn", "permute", "swizzle", "append", "consume")


class Code:
    """An instruction's bits. They are numbered as in the ISA document.

    Attributes:
        bits: The instruction without the literal or the DPP fields that follow it.
        extra: The 32 bits of the literal or of the DPP fields, or 0.
    """

    def __init__(self, code: bytes, base: int):
        """`base` is the number of bytes in front of a literal or of DPP's fields."""
        self.bits = int.from_bytes(code[:base], "little")
        self.extra = 0
        if len(code) >= base + 4:
            self.extra = int.from_bytes(code[base : base + 4], "little")

    def __call__(self, high: int, low: int) -> int:
        """Return the field from bit `high` down to bit `low`, both included."""
        return self.bits >> low & ((1 << high - low + 1) - 1)

    def flags(self, **places: int) -> dict:
        """Return the modifiers whose bit is set. `places` has the number of each modifier's bit."""
        return {name: True for name, at in places.items() if self.bits >> at & 1}

    def number(self, name: str, value: int) -> dict:
        """Return a modifier with that value, or no modifier if the value is 0."""
        return {name: value} if value else {}


def fields(code: bytes, name: str, shapes: list[Shape]) -> tuple[tuple[Operand, ...], dict]:
    """Return the operands and modifiers of an instruction.

    Raises:
        Unknown: The instruction is not fully understood.
    """
    word = int.from_bytes(code[:4], "little")
    base, read = _find_encoding(word)
    if len(code) > base + 4:
        raise Unknown("a literal after the fields of DPP")
    slots, modifiers = read(Code(code, base), name, len(shapes))
    if not shapes:
        return (), {}
    if read in (_sopk, _sopp):
        # LLVM has a syntax of its own for hardware registers, counters and messages. So the number
        # of operands in its text may differ from the number of slots.
        shapes = [*shapes, Shape()][: len(slots)]
        slots = slots[: len(shapes)]
    if len(slots) != len(shapes):
        raise Unknown(f"{len(shapes)} operands, expected {len(slots)}")
    return _fill(slots, shapes), modifiers


def _find_encoding(word: int) -> tuple[int, Reader]:
    """Return the size in bytes of an instruction, and the reader of its encoding.

    The size does not count a literal or DPP's fields. `word` has the instruction's first 32 bits.
    """
    for mask, value, base, read in _ENCODINGS:
        if word & mask == value:
            return base, read
    raise Unknown("unsupported encoding")


def _fill(slots: list[Slot], shapes: list[Shape]) -> tuple[Operand, ...]:
    return tuple(slot(shape) for slot, shape in zip(slots, shapes, strict=True))


def pair(code: bytes, parts: list[tuple[str, list[Shape]]]) -> list[tuple[Operand, ...]]:
    """Return the operands of both instructions of a VOPD pair.

    Raises:
        Unknown: An instruction is not fully understood.
    """
    c = Code(code, 8)
    (name_x, shapes_x), (name_y, shapes_y) = parts
    target_x = c(63, 56)
    # One destination of a VOPD pair is an even register and the other an odd one. So the lowest bit
    # of Y's destination is not encoded: it is the opposite of X's.
    target_y = c(55, 49) << 1 | ~target_x & 1
    sources_x = _two(name_x, _short(c, c(8, 0)), _v(c(16, 9)), c)
    sources_y = _two(name_y, _short(c, c(40, 32)), _v(c(48, 41)), c)
    slots_x = [_v(target_x), *sources_x][: len(shapes_x)]
    slots_y = [_v(target_y), *sources_y][: len(shapes_y)]
    return [_fill(slots_x, shapes_x), _fill(slots_y, shapes_y)]


def _v(number: int) -> Slot:
    """Return the slot of a vector register with an 8-bit number.

    If the operand is half of a register, bit 7 of the number selects the half.
    """

    def slot(shape: Shape) -> Operand:
        if shape.half:
            return Operand("v", number & 127, 1, "h" if number & 128 else "l")
        return Operand("v", number, shape.count)

    return slot


def _constant(value: int | float) -> Slot:
    return lambda _shape: Operand("const", value=value)


def _literal(c: Code) -> Slot:
    return lambda _shape: Operand("const", value=c.extra, literal=True)


def _off(_shape: Shape) -> Operand:
    return Operand("off")


def _s(code: int, c: Code) -> Slot:
    """Return the slot of a scalar register or a constant. Calling the slot may raise Unknown."""

    def slot(shape: Shape) -> Operand:
        if code <= VCC + 1 or NULL <= code < 128:
            return Operand("s", code, shape.count)
        if 128 <= code <= 192:
            return Operand("const", value=code - 128)
        if 193 <= code <= 208:
            return Operand("const", value=192 - code)
        if 240 <= code <= 248:
            return Operand("const", value=_FRACTIONS[code - 240])
        if code == 235:
            return Operand("const", value=APERTURES["src_shared_base"])
        if code == 237:
            return Operand("const", value=APERTURES["src_private_base"])
        if code == _LITERAL:
            return _literal(c)(shape)
        raise Unknown(f"unsupported operand {code}")

    return slot


def _short(c: Code, code: int) -> Slot:
    """Return the slot of a source that is encoded in nine bits.

    With DPP, the number of the source register is in DPP's fields. If the operand is half of a
    vector register, bit 7 of the register's number selects the half.
    """
    if code in (_DPP8, _DPP8_FI, _DPP16):
        return _v(c.extra & 0xFF)
    return _v(code - 256) if code >= 256 else _s(code, c)


def _long(c: Code, code: int, high: int) -> Slot:
    """Return the slot of a source that is encoded in nine bits. See :func:`_v_of` for `high`."""
    if code in (_DPP8, _DPP8_FI, _DPP16):
        return _v_of(c.extra & 0xFF, high)
    return _v_of(code - 256, high) if code >= 256 else _s(code, c)


def _v_of(number: int, high: int) -> Slot:
    """Return the slot of a vector register. `high`, which is a bit of OP_SEL, selects a half."""
    half = "h" if high else "l"
    return lambda shape: Operand("v", number, shape.count, half if shape.half else "")


def _signed(slot: Slot, neg: int, absolute: int) -> Slot:
    return lambda shape: replace(slot(shape), neg=bool(neg), abs=bool(absolute))


def _dpp(c: Code, code: int) -> dict:
    """Return the modifiers of DPP, if the first source field, `code`, means DPP."""
    x = c.extra
    if code in (_DPP8, _DPP8_FI):
        lanes = tuple(x >> 8 + 3 * i & 7 for i in range(8))
        return {"dpp8": lanes, **c.number("fi", int(code == _DPP8_FI))}
    if code != _DPP16:
        return {}
    return {
        **_dpp_control(x >> 8 & 0x1FF),
        "row_mask": x >> 28 & 15,
        "bank_mask": x >> 24 & 15,
        **c.number("bound_ctrl", x >> 19 & 1),
        **c.number("fi", x >> 18 & 1),
    }


def _dpp_control(control: int) -> dict:
    """Return the modifier that says from which lane each lane reads.

    Raises:
        Unknown: The control is not supported.
    """
    if control < 0x100:
        return {"quad_perm": tuple(control >> 2 * i & 3 for i in range(4))}
    if control == 0x140:
        return {"row_mirror": True}
    if control == 0x141:
        return {"row_half_mirror": True}
    if control >> 4 in _ROWS:
        return {_ROWS[control >> 4]: control & 15}
    raise Unknown(f"unsupported DPP control {control:#x}")


def _short_sources(c: Code, code: int, name: str, second: Slot | None = None) -> list[Slot]:
    """Return the sources of VOP1, VOP2 and VOPC.

    With DPP16, sources of floating-point operations and of v_cndmask have neg and abs bits.
    """
    sources = [_short(c, code)]
    if second is not None:
        sources.append(second)
    if code == _DPP16 and ("_f" in name or "cndmask" in name):
        for i, source in enumerate(sources):
            first_bit = 20 + 2 * i
            neg = c.extra >> first_bit & 1
            absolute = c.extra >> first_bit + 1 & 1
            sources[i] = _signed(source, neg, absolute)
    return sources


def _two(name: str, first: Slot, second: Slot, c: Code) -> list[Slot]:
    """Return the sources of an instruction with two sources and perhaps a literal.

    FMAMK multiplies by the literal, and FMAAK adds it.
    """
    if "fmamk" in name:
        return [first, _literal(c), second]
    if "fmaak" in name:
        return [first, second, _literal(c)]
    return [first, second]


def _vop1(c: Code, name: str, _count: int) -> Read:
    target = _s(c(24, 17), c) if name == "v_readfirstlane_b32" else _v(c(24, 17))
    return [target, *_short_sources(c, c(8, 0), name)], _dpp(c, c(8, 0))


def _vop2(c: Code, name: str, _count: int) -> Read:
    first, second = _short_sources(c, c(8, 0), name, _v(c(16, 9)))
    carries = "_co_ci_" in name
    slots = [_v(c(24, 17))]
    if carries:
        slots.append(_s(VCC, c))
    slots += _two(name, first, second, c)
    if carries or "cndmask" in name:
        slots.append(_s(VCC, c))
    return slots, _dpp(c, c(8, 0))


def _vopc(c: Code, name: str, _count: int) -> Read:
    sources = _short_sources(c, c(8, 0), name, _v(c(16, 9)))
    if "cmpx" not in name:
        sources.insert(0, _s(VCC, c))
    return sources, _dpp(c, c(8, 0))


def _vop3(c: Code, name: str, count: int) -> Read:
    has_two_results = c(25, 16) in _TWO_RESULTS
    # In the form of VOP3 with two results, the number of the second result takes the place of
    # OP_SEL and ABS.
    picks = (0, 0, 0, 0)
    absolute = 0
    if not has_two_results:
        picks = (c(11, 11), c(12, 12), c(13, 13), c(14, 14))
        absolute = c(10, 8)
    modifiers = c.flags(clamp=15) | _dpp(c, c(40, 32))
    if any(picks):
        modifiers["op_sel"] = picks
    modifiers |= _OUTPUT_MULTIPLIERS.get(c(60, 59), {})
    slots: list[Slot] = []
    if name.startswith(("v_cmp_", "v_read")):
        slots.append(_s(c(7, 0), c))
    elif "cmpx" not in name:
        slots.append(_v_of(c(7, 0), picks[3]))
    if has_two_results:
        slots.append(_s(c(14, 8), c))
    for i, first_bit in enumerate((32, 41, 50)):
        source = _long(c, c(first_bit + 8, first_bit), picks[i])
        slots.append(_signed(source, c(61 + i, 61 + i), absolute >> i & 1))
    return slots[:count], modifiers


def _vop3p(c: Code, name: str, count: int) -> Read:
    mixes = "fma_mix" in name
    # V_PK_FMAC's third source is its destination.
    source_count = 3 if "fmac" in name else count - 1
    bits_by_modifier = {"op_sel": c(13, 11)}
    if not name.startswith(("v_wmma", "v_dot4", "v_dot8")):
        bits_by_modifier["op_sel_hi"] = c(60, 59) | c(14, 14) << 2
    if not mixes:
        bits_by_modifier["neg_lo"] = c(63, 61)
        bits_by_modifier["neg_hi"] = c(10, 8)
    modifiers = c.flags(clamp=15) | _dpp(c, c(40, 32))
    for key, bits in bits_by_modifier.items():
        flags = tuple(bits >> i & 1 for i in range(source_count))
        default = int(key == "op_sel_hi" and not mixes)
        if set(flags) - {default}:
            modifiers[key] = flags
    slots = [_v_of(c(7, 0), 0)]
    for i, first_bit in enumerate((32, 41, 50)):
        source = _long(c, c(first_bit + 8, first_bit), 0)
        if mixes:
            source = _signed(source, c(61 + i, 61 + i), c(8 + i, 8 + i))
        slots.append(source)
    return slots[:count], modifiers


def _sop1(c: Code, name: str, count: int) -> Read:
    target = _s(c(22, 16), c)
    source = _s(c(7, 0), c)
    if name.startswith("s_sendmsg_rtn"):
        return [target, _constant(c(7, 0))], {}
    if count == 1:
        return [target if name == "s_getpc_b64" else source], {}
    return [target, source], {}


def _sop2(c: Code, name: str, _count: int) -> Read:
    return [_s(c(22, 16), c), *_two(name, _s(c(7, 0), c), _s(c(15, 8), c), c)], {}


def _sopc(c: Code, _name: str, _count: int) -> Read:
    return [_s(c(7, 0), c), _s(c(15, 8), c)], {}


def _signed_16(number: int) -> int:
    return (number ^ 0x8000) - 0x8000


def _sopk(c: Code, name: str, _count: int) -> Read:
    number = _constant(_signed_16(c(15, 0)))
    if name == "s_setreg_imm32_b32":
        return [number, _literal(c)], {}
    if name == "s_version":
        return [number], {}
    return [_s(c(22, 16), c), number], {}


def _sopp(c: Code, _name: str, _count: int) -> Read:
    return [_constant(_signed_16(c(15, 0)))], {}


def _smem(c: Code, _name: str, _count: int) -> Read:
    offset = (c(52, 32) ^ 1 << 20) - (1 << 20)
    modifiers = c.flags(dlc=13, glc=14)
    slots = [_s(c(12, 6), c), _s(2 * c(5, 0), c)]
    if c(63, 57) == NULL:
        return [*slots, _constant(offset)], modifiers
    return [*slots, _s(c(63, 57), c)], modifiers | c.number("offset", offset)


def _ds(c: Code, name: str, count: int) -> Read:
    if "addtid" in name or "bvh" in name or "gs_reg" in name:
        raise Unknown("unsupported mnemonic")
    modifiers = c.flags(gds=17)
    if "_2addr" in name:
        modifiers |= c.number("offset0", c(7, 0)) | c.number("offset1", c(15, 8))
    else:
        modifiers |= c.number("offset", c(15, 0))
    slots = [_v(c(39, 32)), _v(c(47, 40)), _v(c(55, 48))]
    if any(word in name for word in _LDS_RESULTS):
        slots.insert(0, _v(c(63, 56)))
    return slots[:count], modifiers


def _mubuf(c: Code, _name: str, _count: int) -> Read:
    modifiers = c.flags(slc=12, dlc=13, glc=14, tfe=53, offen=54, idxen=55)
    modifiers |= c.number("offset", c(11, 0))
    address = _v(c(39, 32)) if modifiers.keys() & {"offen", "idxen"} else _off
    return [_v(c(47, 40)), address, _s(4 * c(52, 48), c), _s(c(63, 56), c)], modifiers


def _flat(c: Code, name: str, _count: int) -> Read:
    if "addtid" in name:
        raise Unknown("unsupported mnemonic")
    kind = name.partition("_")[0]
    modifiers = c.flags(dlc=13, glc=14, slc=15)
    # The offset of a flat instruction has 12 bits without a sign; the highest bit of the field is
    # ignored. Offsets of global and scratch instructions have a sign.
    offset = c(11, 0) if kind == "flat" else (c(12, 0) ^ 0x1000) - 0x1000
    modifiers |= c.number("offset", offset)
    is_load = "_load" in name
    address = _v(c(39, 32))
    if kind == "scratch" and not c(55, 55):
        address = _off
    slots = [address]
    if is_load or ("atomic" in name and "glc" in modifiers):
        slots.insert(0, _v(c(63, 56)))
    if not is_load:
        slots.append(_v(c(47, 40)))
    if kind != "flat":
        slots.append(_off if c(54, 48) == NULL else _s(c(54, 48), c))
    return slots, modifiers


#: (mask of the first 32 bits, value under the mask, bytes in front of a literal, reader)
_ENCODINGS: tuple[tuple[int, int, int, Reader], ...] = (
    (0xFE00_0000, 0x7E00_0000, 4, _vop1),
    (0xFE00_0000, 0x7C00_0000, 4, _vopc),
    (0x8000_0000, 0x0000_0000, 4, _vop2),
    (0xFF80_0000, 0xBE80_0000, 4, _sop1),
    (0xFF80_0000, 0xBF00_0000, 4, _sopc),
    (0xFF80_0000, 0xBF80_0000, 4, _sopp),
    (0xF000_0000, 0xB000_0000, 4, _sopk),
    (0xC000_0000, 0x8000_0000, 4, _sop2),
    (0xFC00_0000, 0xD400_0000, 8, _vop3),
    (0xFF00_0000, 0xCC00_0000, 8, _vop3p),
    (0xFC00_0000, 0xF400_0000, 8, _smem),
    (0xFC00_0000, 0xD800_0000, 8, _ds),
    (0xFC00_0000, 0xE000_0000, 8, _mubuf),
    (0xFC00_0000, 0xDC00_0000, 8, _flat),
)

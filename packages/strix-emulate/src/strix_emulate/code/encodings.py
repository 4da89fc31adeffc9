# SPDX-License-Identifier: BSD-3-Clause
"""The fields of GFX11's encodings (RDNA3.5 ISA, "Microcode Formats").

An encoding gives slots, in the order in which LLVM lists operands, and modifiers. A modifier that
has its default is left out. Numbers of scalar registers are those of the ISA's operand encoding: s0
is 0, vcc_lo 106, null 124, m0 125, exec_lo 126.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

VCC, NULL, M0, EXEC = 106, 124, 125, 126
#: 64-bit constants: where the apertures of LDS and of scratch lie in flat addresses, as Linux's
#: amdkfd sets them (MAKE_LDS_APP_BASE_V9).
APERTURES = {"src_shared_base": 1 << 48, "src_private_base": 2 << 48}


class Unknown(ValueError):
    """An instruction that this decoder does not understand."""


@dataclass(frozen=True)
class Operand:
    """A register range, or a constant.

    kind is "v", "s", "const" or "off"; half picks 16 bits of a 32-bit register. value: of a
    constant: an inline fraction as a float, which is one in the operand's own type; literal: it is
    the 32 bits behind the instruction.
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
    """How LLVM writes an operand: in how many registers, and whether it names one's half."""

    count: int = 1
    half: bool = False


#: A slot is a function of the operand's shape.
Slot = Callable[[Shape], Operand]
Read = tuple[list[Slot], dict]
_DPP8, _DPP8_FI, _DPP16, _LITERAL = 233, 234, 250, 255
_FRACTIONS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)
#: VOP3's opcodes with a second, scalar, destination
_TWO_RESULTS = {0x120, 0x121, 0x122, *range(0x2FC, 0x303)}
_ROWS = {0x10: "row_shl", 0x11: "row_shr", 0x12: "row_ror", 0x15: "row_share", 0x16: "row_xmask"}


class Code:
    """An instruction's bits, by the numbers that the ISA gives them."""

    def __init__(self, code: bytes, base: int):
        """Take base: the bytes in front of a literal or of DPP's fields."""
        self.bits, self.extra = int.from_bytes(code[:base], "little"), 0
        if len(code) >= base + 4:
            self.extra = int.from_bytes(code[base : base + 4], "little")

    def __call__(self, high: int, low: int) -> int:
        """Return the field between two bits, both included."""
        return self.bits >> low & ((1 << high - low + 1) - 1)

    def flags(self, **places: int) -> dict:
        """Return a modifier for each of these bits that is set."""
        return {name: True for name, at in places.items() if self.bits >> at & 1}

    def number(self, name: str, value: int) -> dict:
        """Return a modifier with that value, unless it is 0."""
        return {name: value} if value else {}


def fields(code: bytes, name: str, shapes: list[Shape]) -> tuple[tuple[Operand, ...], dict]:
    """Read operands and modifiers of an instruction. Raise Unknown."""
    word = int.from_bytes(code[:4], "little")
    for mask, value, base, read in _ENCODINGS:
        if word & mask == value:
            if len(code) > base + 4:
                raise Unknown("a literal behind DPP")
            slots, modifiers = read(Code(code, base), name, len(shapes))
            break
    else:
        raise Unknown("encoding")
    if not shapes:
        return (), {}
    if read in (_sopk, _sopp):
        # hardware registers, counters and messages have texts of their own
        known = (*shapes, Shape())
        return tuple(slot(s) for slot, s in zip(slots, known, strict=False)), modifiers
    if len(slots) != len(shapes):
        raise Unknown(f"{len(shapes)} operands, expected {len(slots)}")
    return tuple(slot(shape) for slot, shape in zip(slots, shapes, strict=True)), modifiers


def pair(code: bytes, parts: list[tuple[str, list[Shape]]]) -> list[tuple[Operand, ...]]:
    """Read the operands of both parts of a VOPD. Raise Unknown."""
    c = Code(code, 8)
    # Y's destination is in a register of the other parity
    targets = c(63, 56), c(55, 49) << 1 | ~c(56, 56) & 1
    found = []
    for (name, shapes), target, first, second in zip(
        parts, targets, (c(8, 0), c(40, 32)), (c(16, 9), c(48, 41)), strict=True
    ):
        slots = [_v(target), *_two(name, _short(c, first), _v(second), c)][: len(shapes)]
        found.append(tuple(slot(shape) for slot, shape in zip(slots, shapes, strict=True)))
    return found


def _v(number: int) -> Slot:
    """Return a vector register; in eight bits the last is the half of the first 128."""

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
    """Return a scalar source or destination, or a constant. Raise Unknown, when it is called."""

    def slot(shape: Shape) -> Operand:
        if code <= VCC + 1 or NULL <= code < 128:
            return Operand("s", code, shape.count)
        if 128 <= code <= 208:
            return Operand("const", value=code - 128 if code <= 192 else 192 - code)
        if 240 <= code <= 248:
            return Operand("const", value=_FRACTIONS[code - 240])
        if code in (235, 237):
            return Operand("const", value=list(APERTURES.values())[code == 237])
        if code == _LITERAL:
            return _literal(c)(shape)
        raise Unknown(f"operand {code}")

    return slot


def _short(c: Code, code: int) -> Slot:
    """Return a source of nine bits, a half of which is the register's last bit; or DPP's."""
    if code in (_DPP8, _DPP8_FI, _DPP16):
        return _v(c.extra & 0xFF)
    return _v(code - 256) if code >= 256 else _s(code, c)


def _long(c: Code, code: int, high: int) -> Slot:
    """Return a source of nine bits, of which OP_SEL picks a half."""
    number = c.extra & 0xFF if code in (_DPP8, _DPP8_FI, _DPP16) else code - 256
    return _v_of(number, high) if number >= 0 else _s(code, c)


def _v_of(number: int, high: int) -> Slot:
    return lambda shape: Operand("v", number, shape.count, ("l", "h")[high] if shape.half else "")


def _signed(slot: Slot, neg: int, absolute: int) -> Slot:
    return lambda shape: replace(slot(shape), neg=bool(neg), abs=bool(absolute))


def _dpp(c: Code, code: int) -> dict:
    """Read the modifiers of DPP, if the first source asks for it."""
    x = c.extra
    if code in (_DPP8, _DPP8_FI):
        lanes = tuple(x >> 8 + 3 * i & 7 for i in range(8))
        return {"dpp8": lanes, **c.number("fi", int(code == _DPP8_FI))}
    if code != _DPP16:
        return {}
    control = x >> 8 & 0x1FF
    if control < 0x100:
        found: dict = {"quad_perm": tuple(control >> 2 * i & 3 for i in range(4))}
    elif control in (0x140, 0x141):
        found = {"row_mirror" if control == 0x140 else "row_half_mirror": True}
    elif control >> 4 in _ROWS:
        found = {_ROWS[control >> 4]: control & 15}
    else:
        raise Unknown(f"DPP control {control:#x}")
    return {
        **found, "row_mask": x >> 28 & 15, "bank_mask": x >> 24 & 15,
        **c.number("bound_ctrl", x >> 19 & 1), **c.number("fi", x >> 18 & 1),
    }  # fmt: skip


def _short_sources(c: Code, code: int, name: str, second: Slot | None = None) -> list[Slot]:
    """Return sources of VOP1, VOP2 and VOPC; with DPP those that are numbers have signs."""
    sources = [_short(c, code), *([second] if second else [])]
    if code == _DPP16 and ("_f" in name or "cndmask" in name):
        signs = [(c.extra >> at & 1, c.extra >> at + 1 & 1) for at in (20, 22)]
        sources = [_signed(s, *sign) for s, sign in zip(sources, signs, strict=False)]
    return sources


def _two(name: str, first: Slot, second: Slot, c: Code) -> list[Slot]:
    """Return two sources, with the literal that some multiply by, others add."""
    if "fmamk" in name:
        return [first, _literal(c), second]
    return [first, second, *([_literal(c)] if "fmaak" in name else [])]


def _vop1(c: Code, name: str, _count: int) -> Read:
    target = _s(c(24, 17), c) if name == "v_readfirstlane_b32" else _v(c(24, 17))
    return [target, *_short_sources(c, c(8, 0), name)], _dpp(c, c(8, 0))


def _vop2(c: Code, name: str, _count: int) -> Read:
    first, second = _short_sources(c, c(8, 0), name, _v(c(16, 9)))
    vcc = [_s(VCC, c)]
    carries = "_co_ci_" in name
    slots = [_v(c(24, 17)), *(vcc if carries else []), *_two(name, first, second, c)]
    return slots + (vcc if carries or "cndmask" in name else []), _dpp(c, c(8, 0))


def _vopc(c: Code, name: str, _count: int) -> Read:
    target = [] if "cmpx" in name else [_s(VCC, c)]
    return target + _short_sources(c, c(8, 0), name, _v(c(16, 9))), _dpp(c, c(8, 0))


def _vop3(c: Code, name: str, count: int) -> Read:
    two_results = c(25, 16) in _TWO_RESULTS
    picks = (0,) * 4 if two_results else tuple(c(at, at) for at in (11, 12, 13, 14))
    modifiers = c.flags(clamp=15) | _dpp(c, c(40, 32))
    if any(picks):
        modifiers["op_sel"] = picks
    if c(60, 59):
        modifiers |= ({"mul": 2}, {"mul": 4}, {"div": 2})[c(60, 59) - 1]
    sources = [_long(c, c(8 + at, at), picks[i]) for i, at in enumerate((32, 41, 50))]
    absolute = 0 if two_results else c(10, 8)
    sources = [_signed(s, c(61 + i, 61 + i), absolute >> i & 1) for i, s in enumerate(sources)]
    targets: list[Slot] = [_v_of(c(7, 0), picks[3])]
    if name.startswith(("v_cmp_", "v_read")):
        targets = [_s(c(7, 0), c)]
    if "cmpx" in name:
        targets = []
    if two_results:
        targets.append(_s(c(14, 8), c))
    return (targets + sources)[:count], modifiers


def _vop3p(c: Code, name: str, count: int) -> Read:
    mixes = "fma_mix" in name
    # V_PK_FMAC's third source is its destination
    number = 3 if "fmac" in name else count - 1
    low, high = c(13, 11), c(60, 59) | c(14, 14) << 2
    modifiers = c.flags(clamp=15) | _dpp(c, c(40, 32))
    bits_of = {"op_sel": low}
    if not name.startswith(("v_wmma", "v_dot4", "v_dot8")):
        bits_of["op_sel_hi"] = high
    if not mixes:
        bits_of |= {"neg_lo": c(63, 61), "neg_hi": c(10, 8)}
    for key, bits in bits_of.items():
        flags = tuple(bits >> i & 1 for i in range(number))
        if set(flags) - {int(key == "op_sel_hi" and not mixes)}:
            modifiers[key] = flags
    sources = [_long(c, c(8 + at, at), 0) for at in (32, 41, 50)]
    if mixes:
        sources = [_signed(s, c(61 + i, 61 + i), c(8 + i, 8 + i)) for i, s in enumerate(sources)]
    return [_v_of(c(7, 0), 0), *sources][:count], modifiers


def _sop1(c: Code, name: str, count: int) -> Read:
    target, source = _s(c(22, 16), c), _s(c(7, 0), c)
    if name.startswith("s_sendmsg_rtn"):
        return [target, _constant(c(7, 0))], {}
    if count == 1:
        return [target if name == "s_getpc_b64" else source], {}
    return [target, source], {}


def _sop2(c: Code, name: str, _count: int) -> Read:
    return [_s(c(22, 16), c), *_two(name, _s(c(7, 0), c), _s(c(15, 8), c), c)], {}


def _sopc(c: Code, _name: str, _count: int) -> Read:
    return [_s(c(7, 0), c), _s(c(15, 8), c)], {}


def _sopk(c: Code, name: str, _count: int) -> Read:
    # a sign in 16 bits
    number = _constant((c(15, 0) ^ 0x8000) - 0x8000)
    if name == "s_setreg_imm32_b32":
        return [number, _literal(c)], {}
    if name == "s_version":
        return [number], {}
    return [_s(c(22, 16), c), number], {}


def _sopp(c: Code, _name: str, _count: int) -> Read:
    return [_constant((c(15, 0) ^ 0x8000) - 0x8000)], {}


def _smem(c: Code, _name: str, _count: int) -> Read:
    offset = (c(52, 32) ^ 1 << 20) - (1 << 20)
    modifiers = c.flags(dlc=13, glc=14)
    slots = [_s(c(12, 6), c), _s(2 * c(5, 0), c)]
    if c(63, 57) == NULL:
        return [*slots, _constant(offset)], modifiers
    return [*slots, _s(c(63, 57), c)], modifiers | c.number("offset", offset)


def _ds(c: Code, name: str, count: int) -> Read:
    modifiers = c.flags(gds=17)
    if "_2addr" in name:
        modifiers |= c.number("offset0", c(7, 0)) | c.number("offset1", c(15, 8))
    else:
        modifiers |= c.number("offset", c(15, 0))
    target, address, *data = (_v(c(at + 7, at)) for at in (56, 32, 40, 48))
    if "addtid" in name or "bvh" in name or "gs_reg" in name:
        raise Unknown("mnemonic")
    slots = [address, *data]
    if any(word in name for word in ("load", "_rtn", "permute", "swizzle", "append", "consume")):
        slots = [target, *slots]
    return slots[:count], modifiers


def _mubuf(c: Code, _name: str, _count: int) -> Read:
    modifiers = c.flags(slc=12, dlc=13, glc=14, tfe=53, offen=54, idxen=55)
    modifiers |= c.number("offset", c(11, 0))
    address = _v(c(39, 32)) if modifiers.keys() & {"offen", "idxen"} else _off
    return [_v(c(47, 40)), address, _s(4 * c(52, 48), c), _s(c(63, 56), c)], modifiers


def _flat(c: Code, name: str, _count: int) -> Read:
    modifiers = c.flags(dlc=13, glc=14, slc=15)
    kind = name.partition("_")[0]
    # of FLAT's own there are 12 bits without a sign; the highest is ignored
    offset = c(11, 0) if kind == "flat" else (c(12, 0) ^ 0x1000) - 0x1000
    modifiers |= c.number("offset", offset)
    address, data, target = (_v(c(at + 7, at)) for at in (32, 40, 56))
    if "addtid" in name:
        raise Unknown("mnemonic")
    if kind == "scratch" and not c(55, 55):
        address = _off
    base = _off if c(54, 48) == NULL else _s(c(54, 48), c)
    loads = "_load" in name
    slots = [address] if loads else [address, data]
    if loads or ("atomic" in name and "glc" in modifiers):
        slots = [target, *slots]
    return slots + ([] if kind == "flat" else [base]), modifiers


#: (mask of the first 32 bits, what they are there, bytes in front of a literal, how to read it)
_ENCODINGS: tuple[tuple[int, int, int, Callable[[Code, str, int], Read]], ...] = (
    (0xFE00_0000, 0x7E00_0000, 4, _vop1), (0xFE00_0000, 0x7C00_0000, 4, _vopc),
    (0x8000_0000, 0, 4, _vop2), (0xFF80_0000, 0xBE80_0000, 4, _sop1),
    (0xFF80_0000, 0xBF00_0000, 4, _sopc), (0xFF80_0000, 0xBF80_0000, 4, _sopp),
    (0xF000_0000, 0xB000_0000, 4, _sopk), (0xC000_0000, 0x8000_0000, 4, _sop2),
    (0xFC00_0000, 0xD400_0000, 8, _vop3), (0xFF00_0000, 0xCC00_0000, 8, _vop3p),
    (0xFC00_0000, 0xF400_0000, 8, _smem), (0xFC00_0000, 0xD800_0000, 8, _ds),
    (0xFC00_0000, 0xE000_0000, 8, _mubuf), (0xFC00_0000, 0xDC00_0000, 8, _flat),
)  # fmt: skip

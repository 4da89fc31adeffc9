# SPDX-License-Identifier: BSD-3-Clause
"""LLVM's text of an instruction, read into mnemonic, operands and modifiers.

Numbers of scalar registers are those of the ISA's operand encoding: s0 is 0, vcc_lo 106, null 124,
m0 125, exec_lo 126. Nothing is guessed: an instruction that is not fully understood is `unknown`.
"""

import re
from dataclasses import dataclass, field

from strix_emulate.code import llvm

VCC, NULL, M0, EXEC = 106, 124, 125, 126
_NAMED = {
    "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "vcc": (VCC, 2), "null": (NULL, 1),
    "m0": (M0, 1), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "exec": (EXEC, 2),
}  # fmt: skip
#: 64-bit constants: where the apertures of LDS and of scratch lie in flat addresses, as Linux's
#: amdkfd sets them (MAKE_LDS_APP_BASE_V9).
APERTURES = {"src_shared_base": 1 << 48, "src_private_base": 2 << 48}
#: Modifiers whose value is an integer, a list of integers, or which have none.
_INTEGERS = {
    "offset", "offset0", "offset1", "row_shl", "row_shr", "row_ror", "row_share", "row_xmask",
    "row_mask", "bank_mask", "bound_ctrl", "fi", "mul", "div",
}  # fmt: skip
_LISTS = {"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "quad_perm", "dpp8"}
_FLAGS = {
    "gds",
    "clamp",
    "glc",
    "slc",
    "dlc",
    "offen",
    "idxen",
    "off",
    "row_mirror",
    "row_half_mirror",
}
#: Instructions whose text after the mnemonic is no list of operands.
_VERBATIM = {"s_waitcnt", "s_delay_alu", "s_sendmsg", "s_waitcnt_depctr", "s_setreg_imm32_b32",
             "s_getreg_b32", "s_sendmsg_rtn_b64", "s_version"}  # fmt: skip
_REGISTER = re.compile(
    r"(?P<file>[vs])(?:(?P<one>\d+)|\[(?P<first>\d+):(?P<last>\d+)\])(?:\.(?P<half>[lh]))?$"
)
_SUFFIX = re.compile(r"_(e32|e64|e64_dpp|dpp|sdwa)$")


class Unknown(ValueError):
    """Text that this decoder does not understand."""


@dataclass(frozen=True)
class Operand:
    """A register range, or a constant as LLVM printed it.

    kind is "v", "s", "const" or "off"; half picks 16 bits of a 32-bit register.
    """

    kind: str
    index: int = 0
    count: int = 1
    half: str = ""
    text: str = ""
    neg: bool = False
    abs: bool = False


@dataclass(frozen=True)
class Instruction:
    """One instruction; a VOPD pair has its two halves in `pair` and the names in `name`.

    begins_swap: a plain load of what a compare-and-swap then replaces, see vmem.mark_swaps.
    """

    address: int
    size: int
    text: str
    name: str
    suffix: str = ""
    operands: tuple[Operand, ...] = ()
    modifiers: dict = field(default_factory=dict)
    raw: str = ""
    pair: tuple["Instruction", ...] = ()
    unknown: str = ""
    begins_swap: bool = False


def decode(code: bytes, start: int = 0, width: int = 32, padded: bool = False) -> list[Instruction]:
    """Decode all instructions up to the padding (s_code_end); padded: also those behind it.

    width: lanes of a wave.
    """
    found = []
    for address, size, text in llvm.disassemble(code, width=width):
        address, text = address + start, " ".join(text.split())
        if text == "s_code_end":
            if padded:
                continue
            break
        found.append(parse(text, address, size))
    return found


def parse(text: str, address: int = 0, size: int = 4) -> Instruction:
    """Parse one instruction; `unknown` says what was not understood."""
    if not text:
        return Instruction(address, size, "?", "?", unknown="LLVM cannot decode these bytes")
    try:
        if "::" in text:
            halves = tuple(parse(half.strip(), address, size) for half in text.split("::"))
            bad = "".join(half.unknown for half in halves)
            name = " :: ".join(half.name for half in halves)
            return Instruction(address, size, text, name, "dual", pair=halves, unknown=bad)
        name, _, rest = text.partition(" ")
        suffix = ""
        if match := _SUFFIX.search(name):
            name, suffix = name[: match.start()], match[1]
        if name in _VERBATIM:
            return Instruction(address, size, text, name, raw=rest)
        operands, modifiers = _operands(rest)
        return Instruction(address, size, text, name, suffix, operands, modifiers, rest)
    except ValueError as error:
        return Instruction(address, size, text, text.split()[0], unknown=str(error))


def _operands(rest: str) -> tuple[tuple[Operand, ...], dict]:
    operands, modifiers = [], {}
    # commas inside of brackets belong to a modifier or register range
    for part in re.split(r",\s*(?![^\[(]*[\])])", rest) if rest else ():
        words = part.split()
        if not words:
            raise Unknown("an empty operand")
        operands.append(operand(words[0]))
        for word in words[1:]:
            key, value = _modifier(word)
            modifiers[key] = value
    # a lone modifier, such as "glc", can follow no operand at all
    return tuple(operands), modifiers


def _modifier(word: str) -> tuple[str, int | tuple[int, ...] | bool]:
    key, _, value = word.partition(":")
    if value.startswith("swizzle("):
        return key, _swizzle(value)
    if key in _INTEGERS and value:
        return key, int(value, 0)
    if key in _LISTS and value:
        return key, tuple(int(x) for x in value.strip("[]").split(","))
    if word in _FLAGS:
        return word, True
    raise Unknown(f"modifier {word}")


def _swizzle(text: str) -> int:
    """Parse the offset of DS_SWIZZLE that LLVM prints as a pattern. Raise Unknown.

    Not those that rotate: LLVM leaves out a part of them.
    """
    kind, *words = text.removeprefix("swizzle(").rstrip(")").split(",")
    if kind == "BITMASK_PERM":
        # of each bit of the lane: 0, 1, preserved or inverted
        bits = words[0].strip('"')
        masks = (("pi", 0), ("1", 5), ("i", 10))
        return sum(int("".join(str(int(b in kept)) for b in bits), 2) << at for kept, at in masks)
    numbers = [int(word) for word in words]
    if kind == "QUAD_PERM":
        return 0x8000 | sum(lane << 2 * i for i, lane in enumerate(numbers))
    if kind == "BROADCAST":
        return 32 - numbers[0] | numbers[1] << 5
    if kind in ("SWAP", "REVERSE"):
        return 31 | (numbers[0] - (kind == "REVERSE")) << 10
    raise Unknown(text)


def operand(word: str) -> Operand:
    """Parse one operand. Raise Unknown."""
    if word == "off":
        return Operand("off")
    neg = abs_ = False
    if match := re.fullmatch(r"neg\((.*)\)", word):
        word, neg = match[1], True
    elif re.match(r"-[|vs]|-(vcc|exec|m0)", word):
        word, neg = word[1:], True
    if match := re.fullmatch(r"\|(.*)\|", word):
        word, abs_ = match[1], True
    base, dot, half = word.partition(".")
    if word in _NAMED or (dot and half in ("l", "h") and base in _NAMED):
        index, count = _NAMED[base if dot else word]
        return Operand("s", index, count, half, word, neg, abs_)
    if match := _REGISTER.match(word):
        first = int(match["one"] or match["first"])
        last = int(match["last"] or first)
        half = match["half"] or ""
        return Operand(match["file"], first, last - first + 1, half, word, neg, abs_)
    # so LLVM marks a literal that an inline constant could have encoded, too
    if match := re.fullmatch(r"lit\((0x[0-9a-f]+)\)", word):
        word = match[1]
    if word in APERTURES or re.fullmatch(r"-?(0x[0-9a-f]+|\d+(\.\d+)?(e-?\d+)?)", word):
        return Operand("const", text=word, neg=neg, abs=abs_)
    raise Unknown(f"operand {word}")

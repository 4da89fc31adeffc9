# SPDX-License-Identifier: BSD-3-Clause
"""Parse LLVM's text of an instruction into operands and modifiers.

Tests compare the operands and modifiers of the text with those that `code.encodings` reads from the
bytes.
"""

import re

from strix_emulate.code.decode import APERTURES, EXEC, M0, NULL, VCC, Operand, Unknown

_NAMED = {
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "vcc": (VCC, 2),
    "null": (NULL, 1),
    "m0": (M0, 1),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "exec": (EXEC, 2),
}
#: Modifiers with an integer, with a list of integers, and without a value.
_INTEGERS = {
    "offset",
    "offset0",
    "offset1",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_share",
    "row_xmask",
    "row_mask",
    "bank_mask",
    "bound_ctrl",
    "fi",
    "mul",
    "div",
}
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
_REGISTER = re.compile(
    r"(?P<file>[vs])(?:(?P<one>\d+)|\[(?P<first>\d+):(?P<last>\d+)\])(?:\.(?P<half>[lh]))?$"
)


def operands(text: str) -> tuple[tuple[Operand, ...], dict]:
    """Return the operands and modifiers of one instruction. Raises Unknown."""
    arguments = text.partition(" ")[2]
    operands = []
    modifiers = {}
    # A comma in brackets does not end an operand: it belongs to a modifier or a range of registers.
    for part in re.split(r",\s*(?![^\[(]*[\])])", arguments) if arguments else ():
        words = part.split()
        if not words:
            raise Unknown("an empty operand")
        operands.append(operand(words[0]))
        for word in words[1:]:
            key, value = _modifier(word)
            modifiers[key] = value
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
    """Return the offset of DS_SWIZZLE for the pattern that LLVM prints.

    Patterns that rotate are not supported, because LLVM prints only a part of such a pattern.
    """
    kind, *words = text.removeprefix("swizzle(").rstrip(")").split(",")
    if kind == "BITMASK_PERM":
        # Each character of the pattern clears, sets, preserves or inverts a bit of the lane's
        # number.
        bits = words[0].strip('"')
        masks = (("pi", 0), ("1", 5), ("i", 10))
        return sum(
            int("".join(str(int(b in letters)) for b in bits), 2) << shift
            for letters, shift in masks
        )
    numbers = [int(word) for word in words]
    if kind == "QUAD_PERM":
        return 0x8000 | sum(lane << 2 * i for i, lane in enumerate(numbers))
    if kind == "BROADCAST":
        return 32 - numbers[0] | numbers[1] << 5
    if kind in ("SWAP", "REVERSE"):
        return 31 | (numbers[0] - (kind == "REVERSE")) << 10
    raise Unknown(text)


def operand(word: str) -> Operand:
    """Parse one operand. Raises Unknown."""
    if word == "off":
        return Operand("off")
    neg = abs_ = False
    if match := re.fullmatch(r"neg\((.*)\)", word):
        word = match[1]
        neg = True
    elif re.match(r"-[|vs]|-(vcc|exec|m0)", word):
        word = word[1:]
        neg = True
    if match := re.fullmatch(r"\|(.*)\|", word):
        word = match[1]
        abs_ = True
    base, dot, half = word.partition(".")
    if word in _NAMED or (dot and half in ("l", "h") and base in _NAMED):
        index, count = _NAMED[base if dot else word]
        return Operand("s", index, count, half, 0, neg, abs_)
    if match := _REGISTER.match(word):
        first = int(match["one"] or match["first"])
        last = int(match["last"] or first)
        half = match["half"] or ""
        return Operand(match["file"], first, last - first + 1, half, 0, neg, abs_)
    # LLVM prints lit(...) around a literal if an inline constant could have the same value.
    if match := re.fullmatch(r"lit\((0x[0-9a-f]+)\)", word):
        word = match[1]
    if word in APERTURES:
        return Operand("const", value=APERTURES[word], neg=neg, abs=abs_)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+(\.\d+)?(e-?\d+)?)", word):
        value = float(word) if "." in word or "e-" in word else int(word, 0)
        return Operand("const", value=value, neg=neg, abs=abs_)
    raise Unknown(f"operand {word}")

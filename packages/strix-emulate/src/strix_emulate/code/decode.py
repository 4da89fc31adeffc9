# SPDX-License-Identifier: BSD-3-Clause
"""The decoder, which turns machine code into `Instruction` objects.

The mnemonic, the number of operands and their widths come from LLVM's text. Register numbers,
constants and modifiers come from the instruction's bit fields (:mod:`code.encodings`), because
LLVM's text can be wrong: LLVM 22.1.8 prints the literal of V_FMAAK_F16 as an inline constant.

Nothing is guessed. If an instruction is not fully understood, its `unknown` has the reason.
"""

from dataclasses import dataclass, field
from functools import lru_cache

from strix_emulate.code import encodings, llvm
from strix_emulate.code.encodings import (
    APERTURES,
    EXEC,
    M0,
    NULL,
    VCC,
    Operand,
    Shape,
    Unknown,
)
from strix_emulate.code.target import DEFAULT, Target

__all__ = ["APERTURES", "EXEC", "M0", "NULL", "VCC", "Operand", "Unknown"]

_SUFFIXES = ("e64_dpp", "e32", "e64", "dpp", "sdwa")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: Its address.
        size: Bytes.
        text: LLVM's text, for messages.
        name: Mnemonic without the suffix of the encoding. A VOPD pair has both mnemonics.
        suffix: Suffix of the encoding, such as "e64". A VOPD pair has none.
        operands: Operands in LLVM's order.
        modifiers: Values of the modifiers that do not have their defaults, and of DPP's masks.
        code: Its bytes.
        pair: The two instructions of a VOPD pair.
        unknown: Reason why the instruction is not understood, or "".
        swap_words: For a plain load: bit mask of the loaded words that a later compare-and-swap
            compares with memory (flow.mark_swaps).
    """

    address: int
    size: int
    text: str
    name: str
    suffix: str = ""
    operands: tuple[Operand, ...] = ()
    modifiers: dict = field(default_factory=dict)
    code: bytes = b""
    pair: tuple["Instruction", ...] = ()
    unknown: str = ""
    swap_words: int = 0

    def at(self, address: int) -> "Instruction":
        """Return a copy at another address. It takes a seventh of the time of replace()."""
        moved = object.__new__(Instruction)
        vars(moved).update(vars(self), address=address)
        if self.pair:
            vars(moved)["pair"] = tuple(part.at(address) for part in self.pair)
        return moved


def decode(
    code: bytes,
    start: int = 0,
    width: int = 32,
    padded: bool = False,
    target: Target = DEFAULT,
) -> list[Instruction]:
    """Return the instructions of machine code, up to the padding (s_code_end).

    Args:
        code: The bytes.
        start: Address of the first byte.
        width: Lanes of a wave.
        padded: Whether to continue after padding.
        target: The GPU.
    """
    instructions = []
    for offset, size, text in llvm.disassemble(code, width=width, target=target):
        text = " ".join(text.split())
        if text == "s_code_end":
            if padded:
                continue
            break
        instructions.append(read(code[offset : offset + size], text, offset + start))
    return instructions


def read(code: bytes, text: str, address: int = 0) -> Instruction:
    """Return one instruction from its bytes and LLVM's text."""
    return _read(code, text).at(address)


@lru_cache(maxsize=1 << 15)
def _read(code: bytes, text: str) -> Instruction:
    """Return the instruction at address 0, from a cache.

    Nine of ten instructions of unoptimised code have the same bytes as an earlier one.
    """
    size = len(code)
    if not text:
        return Instruction(0, size, "?", "?", unknown="LLVM cannot decode these bytes")
    try:
        if ";" in text or "/*" in text:
            raise Unknown("LLVM reports an error in this instruction")
        if "::" in text:
            return _read_pair(code, text)
        name, suffix, shapes = _parse_text(text)
        operands, modifiers = encodings.fields(code, name, shapes)
        return Instruction(0, size, text, name, suffix, operands, modifiers, code)
    except ValueError as error:
        return Instruction(0, size, text, text.split()[0], code=code, unknown=str(error))


def _read_pair(code: bytes, text: str) -> Instruction:
    """Return a VOPD pair. Raise Unknown if it is not fully understood."""
    size = len(code)
    parts = [_parse_text(part.strip()) for part in text.split("::")]
    names_and_shapes = [(name, shapes) for name, _, shapes in parts]
    operands_of_parts = encodings.pair(code, names_and_shapes)
    pair = []
    for (name, suffix, _), operands in zip(parts, operands_of_parts, strict=True):
        pair.append(Instruction(0, size, text, name, suffix, operands, {}, code))
    name = " :: ".join(part.name for part in pair)
    return Instruction(0, size, text, name, code=code, pair=tuple(pair))


def _parse_text(text: str) -> tuple[str, str, list[Shape]]:
    """Split LLVM's text. Return the mnemonic, the encoding's suffix, and the operands' shapes."""
    name, _, operands = text.partition(" ")
    suffix = ""
    for candidate in _SUFFIXES:
        if name.endswith("_" + candidate):
            suffix = candidate
            name = name.removesuffix("_" + candidate)
            break
    shapes: list[Shape] = []
    if not operands:
        return name, suffix, shapes
    for part in operands.split(", "):
        word, _, modifiers = part.partition(" ")
        shapes.append(_parse_shape(word))
        if modifiers:
            # Modifiers follow the last operand.
            break
    return name, suffix, shapes


def _parse_shape(word: str) -> Shape:
    word = word.strip("-|")
    is_half = word.endswith((".l", ".h"))
    if "[" in word and "(" not in word:
        first, _, last = word.partition("[")[2].partition("]")[0].partition(":")
        return Shape(int(last or first) - int(first) + 1, is_half)
    return Shape(2 if word in ("vcc", "exec") else 1, is_half)

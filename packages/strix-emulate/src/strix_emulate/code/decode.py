# SPDX-License-Identifier: BSD-3-Clause
"""Instructions as operands and modifiers, read from their bytes.

LLVM's text says what an instruction is called, how many operands it has and how wide they are;
which registers and numbers these are, and all modifiers, stand in the fields of the encodings
(:mod:`code.encodings`). LLVM's text of them is not to be relied on: 22.1.8 prints the literal of
V_FMAAK_F16 as if an inline constant had been encoded.

Nothing is guessed: an instruction that is not fully understood is `unknown`.
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
    """One instruction; a VOPD pair has its two parts in `pair` and the names in `name`.

    text: LLVM's, for messages; code: its bytes. swap_words: of what a plain load
    gives, as bits, the words that a compare-and-swap then compares: see flow.mark_swaps.
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
        """Return the same at an address: as replace() does, in a seventh of the time."""
        moved = object.__new__(Instruction)
        vars(moved).update(vars(self), address=address)
        if self.pair:
            vars(moved)["pair"] = tuple(part.at(address) for part in self.pair)
        return moved


def decode(
    code: bytes, start: int = 0, width: int = 32, padded: bool = False, target: Target = DEFAULT
) -> list[Instruction]:
    """Decode all instructions up to the padding (s_code_end); padded: also those behind it.

    width: lanes of a wave.
    """
    found = []
    for address, size, text in llvm.disassemble(code, width=width, target=target):
        text = " ".join(text.split())
        if text == "s_code_end":
            if padded:
                continue
            break
        found.append(read(code[address : address + size], text, address + start))
    return found


def read(code: bytes, text: str, address: int = 0) -> Instruction:
    """Read one instruction that LLVM calls so; `unknown` says what was not understood."""
    return _read(code, text).at(address)


@lru_cache(maxsize=1 << 15)
def _read(code: bytes, text: str) -> Instruction:
    """Read it at address 0. Nine of ten instructions of unoptimised code stand there before."""
    address, size = 0, len(code)
    if not text:
        return Instruction(address, size, "?", "?", unknown="LLVM cannot decode these bytes")
    try:
        if ";" in text or "/*" in text:
            raise Unknown("LLVM finds fault with it")
        if "::" in text:
            parts = [_names(part.strip()) for part in text.split("::")]
            pairs = encodings.pair(code, [(name, shapes) for name, _, shapes in parts])
            pair = tuple(
                Instruction(address, size, text, name, suffix, operands, {}, code)
                for (name, suffix, _), operands in zip(parts, pairs, strict=True)
            )
            name = " :: ".join(part.name for part in pair)
            return Instruction(address, size, text, name, "dual", code=code, pair=pair)
        name, suffix, shapes = _names(text)
        operands, modifiers = encodings.fields(code, name, shapes)
        return Instruction(address, size, text, name, suffix, operands, modifiers, code)
    except ValueError as error:
        return Instruction(address, size, text, text.split()[0], code=code, unknown=str(error))


def _names(text: str) -> tuple[str, str, list[Shape]]:
    """Split text into mnemonic, the suffix of its encoding, and the shapes of its operands."""
    name, _, rest = text.partition(" ")
    suffix = next((s for s in _SUFFIXES if name.endswith("_" + s)), "")
    name = name.removesuffix("_" + suffix) if suffix else name
    shapes = []
    for part in rest.split(", ") if rest else ():
        word, _, more = part.partition(" ")
        shapes.append(_shape(word))
        if more:
            break  # modifiers follow the last operand
    return name, suffix, shapes


def _shape(word: str) -> Shape:
    word = word.strip("-|")
    if "[" in word and "(" not in word:
        first, _, last = word.partition("[")[2].partition("]")[0].partition(":")
        return Shape(int(last or first) - int(first) + 1, word.endswith((".l", ".h")))
    return Shape(2 if word in ("vcc", "exec") else 1, word.endswith((".l", ".h")))

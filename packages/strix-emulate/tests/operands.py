# SPDX-License-Identifier: BSD-3-Clause
"""Random instructions for the oracle's entries: operands, constants and modifiers as text.

Kinds of sources are types such as f32 and u16. With the prefix `r:` a source is a register without
modifiers, and with `lit:` a literal constant. Other kinds are "mask" and "vcc" (a bit for each
lane), "old" (the previous value of the destination), "lane" (the number of the lane), "imm" (an
immediate of 16 bits), "scc", "exec" and "exec64".

Kinds of results are the types and "mask", a type with "+mask", and h2 (two float16), z16 (a float16
in the low half, with zeros in the high half), lo16 and hi16 (a float16 in the half that the
mnemonic names).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import exact
from oracle_parts import Choice
from strix_emulate.code.decode import EXEC, VCC

REGISTERS = 16
#: Scalar registers that are used only for masks. In wave64, each mask is a pair of registers (see
#: `widen`).
MASK_IN = 10
MASK_OUT = 12
_MASKED = re.compile(r"v_(cmp_|cndmask|\w+_co_|div_scale|mad_[iu]64)")
#: Values that implementations often get wrong: zeros, ones, denormals, largest numbers, infinities,
#: NaNs, integer limits.
EDGES = (
    0,
    1,
    0x80000000,
    0x7FFFFFFF,
    0xFFFFFFFF,
    0x3F800000,
    0xBF800000,
    0x00000001,
    0x807FFFFF,
    0x00800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x7FA00000,
    0x33800000,
    0x4F000000,
    0xCF000001,
    0x3C003C00,
    0x7C000001,
    0xFBFF7BFF,
    0x80000400,
    0x03FF8001,
    0x7E007D00,
    0x4B800001,
    0x3F000000,
    0x477FF000,
)
_INLINE = {
    "u32": ("0", "1", "-1", "64", "-16", "0x12345678"),
    "f32": ("0", "1.0", "-4.0", "0.5", "0x7f800000"),
    "u16": ("0", "1", "-1", "64", "0x1234"),
    "f16": ("0", "1.0", "-2.0", "0.5", "0x7c00"),
    "u64": ("0", "1", "-1"),
    "f64": ("0", "1.0", "-2.0", "0.5"),
}
#: Formats of the kinds that are floating-point numbers.
FORMS = {
    "f32": exact.F32,
    "f16": exact.F16,
    "f64": exact.F64,
    "bf16": exact.B16,
    "z16": exact.F16,
    "lo16": exact.F16,
    "hi16": exact.F16,
}
_MODIFIED = {"f16", "f32", "f64"}
_IMPLICIT = {
    "vcc": ("mask", VCC),
    "scc": ("scc", 0),
    "exec": ("s", EXEC),
    "exec64": ("s", EXEC),
    "lane": ("lane", 0),
}


@dataclass
class Source:
    """A generated operand: its text, and its register.

    A constant has no register: `file` is "", and `bits` is the value.
    """

    text: str
    file: str = ""
    index: int = 0
    high: bool = False
    bits: int = 0
    neg: bool = False
    abs: bool = False


@dataclass
class Operation:
    """A generated instruction with a mnemonic of the oracle, and the registers of its results.

    Attributes:
        mnemonic: The mnemonic.
        text: The instruction as assembly.
        kind: The kind of the result in target.
        target: The destination, or None.
        flag: The register of the resulting mask, or None.
        sources: The kinds and operands of the sources.
        function: The oracle's function.
        modifiers: The modifiers as text.
    """

    mnemonic: str
    text: str
    kind: str
    target: Source | None
    flag: int | None
    sources: list[tuple[str, Source]]
    function: Callable
    modifiers: set[str] = field(default_factory=set)


def operation(rng: random.Random, name: str, file: str, entry) -> Operation:
    """Return a random instruction for an entry of the oracle.

    `file` is "v" for vector instructions and "s" for scalar ones.
    """
    result, kinds, function = entry
    modifiers = set()
    words = []
    kind, _, second = result.partition("+")
    flag = target = None
    if kind == "mask":
        flag = EXEC if "cmpx" in name else rng.choice((MASK_OUT, VCC))
    elif second:
        flag = rng.choice((MASK_OUT, VCC))
    if kind not in ("mask", ""):
        target = _register(rng, file, kind)
        words.append(target.text)
    if flag not in (None, EXEC):
        words.append(f"s{flag}" if flag == MASK_OUT else "vcc_lo")
    if isinstance(function, Choice):
        text, function = function.make(rng)
        modifiers.add(text)
    sources: list[tuple[str, Source]] = []
    scalars = 0
    for token in kinds:
        k, source = _any_source(rng, file, token, target, result, file == "s" or scalars == 0)
        scalars += file == "v" and source.file != "v" and k != "mask"
        plain = k == token and k in _MODIFIED and file == "v" and source.file == "v"
        if plain and rng.random() < 0.3:
            source.neg = rng.random() < 0.5
            source.abs = rng.random() < 0.5
            text = f"|{source.text}|" if source.abs else source.text
            source.text = f"-{text}" if source.neg else text
        sources.append((k, source))
    words += [source.text for _, source in sources if source.text]
    numbers = file == "v" and kind in _MODIFIED and set(kinds) <= _MODIFIED
    if numbers and len(kinds) > 1 and rng.random() < 0.3:
        # The programs run in IEEE mode and keep denormals. So the output modifiers mul and div must
        # have no effect.
        modifiers.add(rng.choice([" clamp", " mul:2", " mul:4", " div:2"]))
    short = file == "s" or name.startswith(
        ("v_pk_", "v_fma_mix", "v_dot4", "v_dot8", "v_dot2_f32", "v_dot2acc")
    )
    short = short or any("lit:" in k for k in kinds)
    text = f"{name}{'' if short else '_e64'} {', '.join(words)}{''.join(sorted(modifiers))}"
    return Operation(name, text, kind or "u32", target, flag, sources, function, modifiers)


def _any_source(rng, file: str, token: str, target, result: str, allow_scalar: bool):
    """Return the kind of value that a token stands for, and a random operand of this kind."""
    if token == "old":
        return result.partition("+")[0], Source("", target.file, target.index, target.high)
    if token in _IMPLICIT:
        file_, index = _IMPLICIT[token]
        return {"vcc": "mask", "exec": "u32", "exec64": "u64"}.get(token, token), Source(
            "", file_, index
        )
    if token == "mask":
        index = rng.choice((MASK_IN, VCC))
        return "mask", Source(f"s{index}" if index == MASK_IN else "vcc_lo", "mask", index)
    if token == "imm":
        bits = rng.choice((rng.getrandbits(16), 0x8000, 0xFFFF, 5))
        return "imm", Source(f"{bits:#x}", bits=bits)
    prefix, _, kind = token.rpartition(":")
    if prefix == "lit":
        # A bit is set in each byte, so that few of these literals could be inline constants.
        bits = random_bits(rng) | 0x01010101
        bits = bits & 0xFFFF if kind == "f16" else bits
        return kind, Source(f"{bits:#x}", bits=bits)
    if prefix == "r":
        return kind, _register(rng, file, kind)
    return kind, _source(rng, file, kind, allow_scalar)


def _source(rng: random.Random, file: str, kind: str, allow_scalar: bool) -> Source:
    chance = rng.random()
    if chance < 0.2 and allow_scalar:
        text = rng.choice(_INLINE[kind])
        return Source(text, bits=_constant_bits(text, kind))
    return _register(rng, "s" if file == "s" or (chance < 0.35 and allow_scalar) else "v", kind)


def _constant_bits(text: str, kind: str) -> int:
    width = int(kind[1:])
    if "." in text:
        return exact.encode(Fraction(text), FORMS[kind])
    return int(text, 0) & ((1 << width) - 1)


def _register(rng: random.Random, file: str, kind: str) -> Source:
    if kind.endswith("64"):
        index = rng.randrange(0, (REGISTERS if file == "v" else 8) - 1, 2)
        return Source(f"{file}[{index}:{index + 1}]", file, index)
    index = rng.randrange(REGISTERS if file == "v" else 8)
    if kind in ("lo16", "hi16"):
        return Source(f"v{index}", file, index, kind == "hi16")
    if kind.endswith("16") and file == "v":
        high = rng.random() < 0.5
        return Source(f"v{index}.{'h' if high else 'l'}", file, index, high)
    return Source(f"{file}{index}", file, index)


def random_bits(rng: random.Random) -> int:
    """Return 32 random bits: a value of EDGES, an ordinary float32, or any bits."""
    chance = rng.random()
    if chance < 0.4:
        return rng.choice(EDGES)
    if chance < 0.7:
        # The number is of ordinary size, so that not all sums overflow.
        return exact.float_bits(rng.uniform(-8, 8))
    return rng.getrandbits(32)


def widen(text: str) -> str:
    """Convert a wave32 instruction for wave64, or return "" if wave64 does not have it.

    Masks become pairs of registers. The result and the addend of a matrix product take half as many
    registers.
    """
    if text.startswith("v_dual_"):
        return ""
    if text.startswith("v_wmma_"):
        parts = text.split(", ")
        for i in (0, -1):  # D and C
            parts[i] = re.sub(r"(\d+):\d+\]", lambda m: f"{m[1]}:{int(m[1]) + 3}]", parts[i])
        return ", ".join(parts)
    if not _MASKED.match(text):
        return text
    pairs = rf"\bs({MASK_IN}|{MASK_OUT})\b"
    text = re.sub(pairs, lambda m: f"s[{m[1]}:{int(m[1]) + 1}]", text)
    return text.replace("vcc_lo", "vcc").replace("exec_lo", "exec")

# SPDX-License-Identifier: BSD-3-Clause
"""The oracle for packed maths, dot products, mixed types, carries and saturation.

Entries have the format of :mod:`oracle`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from exact import (
    B16,
    BINARY_FUNCTIONS,
    F16,
    F32,
    M32,
    M64,
    ROUNDINGS,
    add,
    convert,
    encode,
    extreme,
    fma,
    make_rounding,
    multiply,
    signed,
    to_integer,
    value,
)


@dataclass
class Choice:
    """An operation with random modifiers.

    make(rng) returns the text of the modifiers, and the function.
    """

    make: Callable[[random.Random], tuple[str, Callable]]


def clip(x: int, kind: str) -> int:
    """Return x saturated to a type such as u16 or i32."""
    bits = int(kind[1:])
    if kind[0] == "i":
        return max(-(1 << bits - 1), min((1 << bits - 1) - 1, x))
    return max(0, min((1 << bits) - 1, x))


def number(x: int, kind: str) -> int:
    bits = int(kind[1:])
    return signed(x, bits) if kind[0] == "i" else x & ((1 << bits) - 1)


def saturating(function: Callable, kind: str) -> Choice:
    """Return an exact integer operation, with or without CLAMP."""

    def make(rng: random.Random):
        clamp = rng.random() < 0.5

        def run(*sources):
            total = function(*(number(x, kind) for x in sources))
            return clip(total, kind) if clamp else total

        return (" clamp" if clamp else ""), run

    return Choice(make)


def packed(function: Callable, kind: str, count: int, clamps: bool = True) -> Choice:
    """Return an operation on both halves, with random op_sel and, for f16, random signs."""

    def make(rng: random.Random):
        low, high = ([rng.randrange(2) for _ in range(count)] for _ in range(2))
        text = f" op_sel:{low} op_sel_hi:{high}".replace(", ", ",")
        signs = [[0] * count] * 2
        if kind == "f16" and rng.random() < 0.5:
            signs = [[rng.randrange(2) for _ in range(count)] for _ in range(2)]
            text += f" neg_lo:{signs[0]} neg_hi:{signs[1]}".replace(", ", ",")
        clamp = clamps and rng.random() < 0.5
        text += " clamp" if clamp else ""

        def run(*sources):
            result = 0
            for i, (picks, negated) in enumerate(zip((low, high), signs, strict=True)):
                parts = [
                    x >> 16 * p & 0xFFFF ^ n << 15
                    for x, p, n in zip(sources, picks, negated, strict=True)
                ]
                if kind == "f16":
                    half = function(*parts)
                    half = limited(half, F16) if clamp else half
                else:
                    half = function(*(number(x, kind) for x in parts))
                    half = clip(half, kind) if clamp else half
                result |= (half & 0xFFFF) << 16 * i
            return result

        return text, run

    return Choice(make)


def limited(bits: int, form: tuple) -> int:
    """Return a number clamped to 0 .. 1. NaN becomes 0."""
    one_bits = encode(Fraction(1), form)
    if value(bits, form)[0] == "nan":
        return 0
    return extreme(extreme(bits, 0, form, True), one_bits, form, False)


def dot(bits: int, mixed: bool) -> Choice:
    """Return an exact dot product of fields, wrapped or saturated.

    With `mixed`, neg_lo selects the operands whose fields are signed.
    """

    def make(rng: random.Random):
        signs = [rng.randrange(2) * mixed for _ in range(2)]
        clamp = rng.random() < 0.5
        text = f" neg_lo:[{signs[0]},{signs[1]},0]" if any(signs) else ""

        def run(a, b, c):
            total = signed(c) if mixed else c
            for i in range(0, 32, bits):
                x, y = (v >> i & (1 << bits) - 1 for v in (a, b))
                if signs[0]:
                    x = signed(x, bits)
                if signs[1]:
                    y = signed(y, bits)
                total += x * y
            if clamp:
                return clip(total, "i32" if mixed else "u32")
            return total

        return text + (" clamp" if clamp else ""), run

    return Choice(make)


def dot2(source: tuple) -> Callable:
    """Return a function that adds two products to a float32, one after the other."""

    def run(a, b, c):
        for shift in (0, 16):
            x, y = (convert(v >> shift & 0xFFFF, source, F32) for v in (a, b))
            c = add(c, multiply(x, y, F32), F32)
        return c

    return run


def dot2_short(form: tuple) -> Callable:
    """Return a dot product with two allowed results: the document does not specify the rounding."""

    def run(a, b, c):
        parts = [[convert(v >> s & 0xFFFF, form, F32) for v in (a, b)] for s in (0, 16)]
        wide = convert(c, form, F32)
        for x, y in parts:
            wide = add(wide, multiply(x, y, F32), F32)
        short = c
        for s in (0, 16):
            short = add(short, multiply(a >> s & 0xFFFF, b >> s & 0xFFFF, form), form)
        return {convert(wide, F32, form), short}

    return run


def mixed(target: tuple) -> Choice:
    """Return V_FMA_MIX, each of whose sources is a float32 or a half of a register."""

    def make(rng: random.Random):
        halves, narrow = ([rng.randrange(2) for _ in range(3)] for _ in range(2))
        halves = [h & n for h, n in zip(halves, narrow, strict=True)]

        def run(*sources):
            parts = []
            for x, half, is_narrow in zip(sources, halves, narrow, strict=True):
                if is_narrow:
                    x = convert(x >> 16 * half & 0xFFFF, F16, F32)
                parts.append(x)
            return convert(fma(*parts, F32), F32, target)

        return f" op_sel:{halves} op_sel_hi:{narrow}".replace(", ", ","), run

    return Choice(make)


def towards_zero(a: int) -> int:
    """Convert float32 to float16, rounded towards zero."""
    x, _ = value(a, F32)
    half = convert(a, F32, F16)
    if isinstance(x, str):
        return half
    back = value(half, F16)[0]
    return half - 1 if isinstance(back, str) or abs(back) > abs(x) else half


def pair(function: Callable) -> Callable:
    return lambda a, b: function(a) & 0xFFFF | (function(b) & 0xFFFF) << 16


def normalised(form: tuple, low: int, high: int) -> Callable:
    """Return a function that scales a float to an integer.

    The float is clamped to -1 .. 1, or to 0 .. 1 if `low` is 0, and multiplied by `high`.
    """

    def run(a: int) -> int:
        x, _ = value(a, form)
        x = {"nan": Fraction(0), "inf": Fraction(1), "-inf": Fraction(-1)}.get(x, x)
        return round(max(Fraction(-1 if low else 0), min(Fraction(1), x)) * high)

    return run


def carry(total: int) -> tuple[int, int]:
    """Return 32 bits of a sum or difference, and the carry."""
    return total & M32, int(not 0 <= total <= M32)


def _wide_mad(a: int, b: int, c: int) -> tuple[int, int]:
    """Return 64 bits of a * b + c, and bit 64."""
    total = a * b + c
    return total & M64, total >> 64 & 1


def _byte_into(a: int, place: int, old: int) -> int:
    shift = 8 * (place & 3)
    return old & ~(255 << shift) | to_integer(a, F32, 0, 255, round) << shift


def vector_table() -> dict[str, tuple[str, tuple[str, ...], Callable | Choice]]:
    u = "u32"
    table: dict[str, tuple[str, tuple[str, ...], Callable | Choice]] = {}
    for kind in ("u16", "i16", "u32", "i32"):
        raw = f"u{kind[1:]}"
        for op, exact in (
            ("add", lambda a, b: a + b),
            ("sub", lambda a, b: a - b),
            ("subrev", lambda a, b: b - a),
        ):
            table[f"v_{op}_nc_{kind}"] = (raw, (raw,) * 2, saturating(exact, kind))
        if raw == "u16":
            table[f"v_mad_{kind}"] = (raw, (raw,) * 3, saturating(lambda a, b, c: a * b + c, kind))
    halves = {
        name: lambda a, b, f=function: f(a, b, F16) for name, function in BINARY_FUNCTIONS.items()
    }
    for name in ("add", "mul", "max", "min"):
        table[f"v_pk_{name}_f16"] = ("h2", ("r:u32",) * 2, packed(halves[name], "f16", 2))
    table["v_pk_fma_f16"] = (
        "h2",
        ("r:u32",) * 3,
        packed(lambda a, b, c: fma(a, b, c, F16), "f16", 3),
    )
    table["v_pk_fmac_f16"] = (
        "h2",
        ("r:u32", "r:u32", "old"),
        lambda a, b, c: sum(fma(*(x >> s & 0xFFFF for x in (a, b, c)), F16) << s for s in (0, 16)),
    )
    for name, kinds, count, function in (
        ("add", "ui", 2, lambda a, b: a + b),
        ("sub", "ui", 2, lambda a, b: a - b),
        ("mul_lo", "u", 2, lambda a, b: a * b & 0xFFFF),
        ("max", "ui", 2, max),
        ("min", "ui", 2, min),
        ("mad", "ui", 3, lambda a, b, c: a * b + c),
        ("lshlrev", "b", 2, lambda a, b: b << (a & 15) & 0xFFFF),
        ("lshrrev", "b", 2, lambda a, b: b >> (a & 15)),
        ("ashrrev", "i", 2, lambda a, b: b >> (a & 15)),
    ):
        for sign in kinds:
            table[f"v_pk_{name}_{sign}16"] = (
                u,
                ("r:u32",) * count,
                packed(
                    function,
                    "u16" if sign == "b" else f"{sign}16",
                    count,
                    name in ("add", "sub", "mad"),
                ),
            )
    three = ("r:u32",) * 3
    table |= {
        "v_dot4_i32_iu8": (u, three, dot(8, True)),
        "v_dot4_u32_u8": (u, three, dot(8, False)),
        "v_dot8_i32_iu4": (u, three, dot(4, True)),
        "v_dot8_u32_u4": (u, three, dot(4, False)),
        "v_dot2_f32_f16": ("f32", ("r:u32", "r:u32", "r:f32"), dot2(F16)),
        "v_dot2_f32_bf16": ("f32", ("r:u32", "r:u32", "r:f32"), dot2(B16)),
        "v_dot2acc_f32_f16": ("f32", ("r:u32", "r:u32", "old"), dot2(F16)),
        "v_dot2_f16_f16": ("f16", ("r:u32", "r:u32", "r:f16"), dot2_short(F16)),
        "v_dot2_bf16_bf16": ("bf16", ("r:u32", "r:u32", "r:u16"), dot2_short(B16)),
        "v_fma_mix_f32": ("f32", three, mixed(F32)),
        "v_fma_mixlo_f16": ("lo16", three, mixed(F16)),
        "v_fma_mixhi_f16": ("hi16", three, mixed(F16)),
        "v_add_co_u32": ("u32+mask", (u, u), lambda a, b: carry(a + b)),
        "v_sub_co_u32": ("u32+mask", (u, u), lambda a, b: carry(a - b)),
        "v_subrev_co_u32": ("u32+mask", (u, u), lambda a, b: carry(b - a)),
        "v_add_co_ci_u32": ("u32+mask", (u, u, "mask"), lambda a, b, c: carry(a + b + c)),
        "v_sub_co_ci_u32": ("u32+mask", (u, u, "mask"), lambda a, b, c: carry(a - b - c)),
        "v_subrev_co_ci_u32": ("u32+mask", (u, u, "mask"), lambda a, b, c: carry(b - a - c)),
        "v_mad_u64_u32": ("u64+mask", (u, u, "u64"), _wide_mad),
        "v_mad_i64_i32": (
            "u64+mask",
            (u, u, "u64"),
            lambda a, b, c: _wide_mad(signed(a), signed(b), signed(c, 64)),
        ),
        "v_cndmask_b32": (u, ("f32", "f32", "mask"), lambda a, b, c: b if c else a),
        "v_cndmask_b16": ("u16", ("f16", "f16", "mask"), lambda a, b, c: b if c else a),
        "v_mbcnt_lo_u32_b32": (
            u,
            (u, u, "lane"),
            lambda a, b, n: (a & (1 << n) - 1).bit_count() + b,
        ),
        "v_mbcnt_hi_u32_b32": (u, (u, u), lambda a, b: b),
        "v_cvt_pk_rtz_f16_f32": ("h2", ("f32", "f32"), pair(towards_zero)),
        "v_cvt_pk_i16_i32": (u, (u, u), pair(lambda a: clip(signed(a), "i16"))),
        "v_cvt_pk_u16_u32": (u, (u, u), pair(lambda a: clip(a, "u16"))),
        "v_cvt_pk_i16_f32": (
            u,
            ("f32",) * 2,
            pair(lambda a: to_integer(a, F32, -(2**15), 2**15 - 1)),
        ),
        "v_cvt_pk_u16_f32": (u, ("f32",) * 2, pair(lambda a: to_integer(a, F32, 0, 0xFFFF))),
        "v_cvt_pk_u8_f32": (u, ("f32", u, u), _byte_into),
        "v_cvt_off_f32_i4": ("f32", (u,), lambda a: encode(Fraction(signed(a, 4), 16), F32)),
        "v_sat_pk_u8_i16": (
            "u16",
            (u,),
            lambda a: sum(max(0, min(255, signed(a >> s, 16))) << s // 2 for s in (0, 16)),
        ),
    }
    table["v_cvt_pkrtz_f16_f32"] = table["v_cvt_pk_rtz_f16_f32"]
    for kind, low, high in (("i16", -0x7FFF, 0x7FFF), ("u16", 0, 0xFFFF)):
        table[f"v_cvt_norm_{kind}_f16"] = ("u16", ("f16",), normalised(F16, low, high))
        for source, form in (("f16", F16), ("f32", F32)):
            table[f"v_cvt_pk_norm_{kind}_{source}"] = (
                u,
                (source,) * 2,
                pair(normalised(form, low, high)),
            )
    return table


def scalar_table() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    """Return a table like :func:`oracle.scalar_table`."""
    u = "u32"
    table: dict[str, tuple[str, tuple[str, ...], Callable]] = {}

    def overflow(x: int) -> tuple[int, int]:
        return x & M32, int(not -(2**31) <= x < 2**31)

    for kind, form, target in (("f32", F32, "f32"), ("f16", F16, "z16")):
        for name, rounding in ROUNDINGS.items():
            rounded = make_rounding(rounding, form)
            table[f"s_{name}_{kind}"] = (target, (kind,), lambda a, r=rounded: (r(a), None))
        for name, function in BINARY_FUNCTIONS.items():
            table[f"s_{name}_{kind}"] = (
                target,
                (kind,) * 2,
                lambda a, b, f=form, o=function: (o(a, b, f), None),
            )
        table[f"s_fmac_{kind}"] = (
            target,
            (kind, kind, "old"),
            lambda a, b, c, f=form: (fma(a, b, c & (1 << f[3]) - 1, f), None),
        )
    for name, sources in (
        ("fmamk", ("r:f32", "lit:f32", "r:f32")),
        ("fmaak", ("r:f32", "r:f32", "lit:f32")),
    ):
        table[f"s_{name}_f32"] = ("f32", sources, lambda a, b, c: (fma(a, b, c, F32), None))
    return table | {
        "s_addc_u32": (u, (u, u, "scc"), lambda a, b, c: carry(a + b + c)),
        "s_subb_u32": (u, (u, u, "scc"), lambda a, b, c: carry(a - b - c)),
        "s_movk_i32": (u, ("imm",), lambda a: (signed(a, 16), None)),
        "s_addk_i32": (u, ("old", "imm"), lambda a, b: overflow(signed(a) + signed(b, 16))),
        "s_mulk_i32": (u, ("old", "imm"), lambda a, b: (signed(a) * signed(b, 16), None)),
        "s_cvt_f16_f32": ("z16", ("f32",), lambda a: (convert(a, F32, F16), None)),
        "s_cvt_f32_f16": ("f32", ("f16",), lambda a: (convert(a, F16, F32), None)),
        "s_cvt_hi_f32_f16": ("f32", (u,), lambda a: (convert(a >> 16, F16, F32), None)),
        "s_cvt_pk_rtz_f16_f32": (
            "h2",
            ("f32", "f32"),
            lambda a, b: (pair(towards_zero)(a, b), None),
        ),
    }

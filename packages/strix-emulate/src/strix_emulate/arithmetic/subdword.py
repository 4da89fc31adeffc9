# SPDX-License-Identifier: BSD-3-Clause
"""Vector operations on parts of 32 bits: dot products, bytes, packed conversions, 16 bits.

TABLE and PACKED have the form of TABLE in :mod:`arithmetic.operations`: by mnemonic, the kind of
the result, the kinds of the sources, and the function.
"""

from collections.abc import Callable
from itertools import product

import numpy as np

from strix_emulate.arithmetic import doubles, floats
from strix_emulate.arithmetic.mode_register import clamped, saturated

U32 = np.uint32


def _int64(x):
    return np.asanyarray(x).astype(np.int64)


def _part(x, bits: int, number: int, signed: bool):
    """Return field `number` of x as int64. Fields have `bits` bits."""
    field = (np.asanyarray(x).view(U32).astype(np.int64) >> bits * number) & ((1 << bits) - 1)
    return field - (field >> (bits - 1) << bits) if signed else field


def dot(bits: int, signed_a: bool, signed_b: bool):
    """Return V_DOT4 or V_DOT8: the exact int64 sum of c and the products of the fields."""

    def run(a, b, c):
        total = _int64(c)
        for i in range(32 // bits):
            total = total + _part(a, bits, i, signed_a) * _part(b, bits, i, signed_b)
        return total

    return run


def _halves(x, convert):
    return [convert((np.asanyarray(x) >> U32(shift)).astype(np.uint16)) for shift in (0, 16)]


def _half(bits):
    return bits.view(np.float16).astype(np.float32)


def dot2(convert):
    """Return a function that adds the products of two pairs of 16-bit numbers to a float32.

    The products are added one after the other. `convert` converts 16-bit numbers to float32.
    """

    def run(a, b, total):
        for x, y in zip(_halves(a, convert), _halves(b, convert), strict=True):
            total = total + x * y
        return total

    return run


def _dot2_bf16(a, b, c):
    total = dot2(floats.bfloat)(a, b, floats.bfloat(np.asanyarray(c)))
    return floats.to_bfloat(np.asanyarray(total))


def _dot2_f16(a, b, c):
    return dot2(_half)(a, b, np.asanyarray(c).astype(np.float32)).astype(np.float16)


def _sad(bits: int, shift: int = 0, masked: bool = False):
    """Return a function that adds the absolute differences of the fields of a and b to c.

    Args:
        bits: Number of bits of a field.
        shift: Number of bits by which the sum is shifted left before c is added.
        masked: Whether a field is skipped if it is 0 in b.
    """

    def run(a, b, c):
        total = np.int64(0)
        for i in range(32 // bits):
            x = _part(a, bits, i, False)
            y = _part(b, bits, i, False)
            total = total + np.where(masked & (y == 0), 0, np.abs(x - y))
        return ((total << shift) + _int64(c)).astype(U32)

    return run


def _quad_sad(masked: bool):
    """Return a function that adds four sums of absolute differences to four 16-bit fields of c.

    Sum i compares the four bytes of b with bytes i to i + 3 of a. See :func:`_sad` for `masked`.
    """
    sad = _sad(8, masked=masked)
    low_16 = np.uint64(0xFFFF)

    def run(a, b, c):
        result = np.uint64(0)
        for i in range(4):
            part = (np.asanyarray(a) >> np.uint64(8 * i)).astype(U32)
            old = (np.asanyarray(c) >> np.uint64(16 * i) & low_16).astype(U32)
            total = sad(part, b, old).astype(np.uint64) & low_16
            result = result | total << np.uint64(16 * i)
        return result

    return run


def quad_sad32(a, b, *addends):
    """Compute V_MQSAD_U32_U8: the four masked sums of `_quad_sad`, but with 32 bits each."""
    sad = _sad(8, masked=True)
    parts = [(a >> np.uint64(8 * i)).astype(U32) for i in range(4)]
    return [sad(part, b, c) for part, c in zip(parts, addends, strict=True)]


def _lerp(a, b, c):
    """Compute V_LERP_U8: by byte, the mean of a and b, rounded up if the byte of c is odd."""
    result = U32(0)
    for i in range(4):
        total = _part(a, 8, i, False) + _part(b, 8, i, False) + (_part(c, 8, i, False) & 1)
        result = result | (total >> 1).astype(U32) << U32(8 * i)
    return result


def _pack(convert):
    """Return a function that packs two 16-bit results into one register."""

    def run(a, b):
        low, high = (np.asanyarray(convert(x)).astype(np.int64) & 0xFFFF for x in (a, b))
        return (low | high << 16).astype(U32)

    return run


def _clip(low: int, high: int):
    return lambda x: np.clip(_int64(x), low, high)


def _norm(low: int, high: int):
    """Return V_CVT_*_NORM, which multiplies by `high` and rounds to nearest even.

    First, the source is limited to the range -1 .. 1, or 0 .. 1 if `low` is 0. NaN becomes 0.
    """
    lowest = -1 if low else 0

    def run(x):
        x = np.asanyarray(x).astype(np.float64)
        scaled = np.rint(np.clip(np.where(np.isnan(x), 0, x), lowest, 1) * high)
        return scaled.astype(np.int64)

    return run


def _norm_as(low: int, high: int, dtype: str):
    convert = _norm(low, high)
    return lambda x: convert(x).astype(dtype)


def _pk_u8(x, byte, old):
    """Compute V_CVT_PK_U8_F32: convert x, and write it to byte number `byte` of `old`."""
    shift = (np.asanyarray(byte) & U32(3)) * U32(8)
    value = np.clip(np.rint(np.where(np.isnan(x), 0, x)), 0, 255).astype(U32)
    return (old & ~(U32(255) << shift)) | value << shift


def leading_signs(x):
    """Compute V_CLS_I32: the number of highest bits that equal the sign bit, or -1 if all do."""
    x = _int64(x)
    y = np.where(x < 0, ~x, x)
    length = np.where(y == 0, 0, np.floor(np.log2(np.maximum(y, 1))) + 1)
    return np.where(y == 0, -1, 32 - length).astype(np.int32)


def _unit(x, quarters: int):
    """Compute V_SIN if `quarters` is 0, or V_COS if it is 1. The unit of x is a turn.

    If x is finite and |x| > 256, the result is the one for x = 0.
    """
    turns = np.asanyarray(x).astype(np.float64)
    part = np.copysign(turns - np.trunc(turns), turns)
    turns = np.where(np.abs(turns) <= 256, part, np.where(np.isnan(turns), turns, 0))
    turns = np.where(np.isinf(x), np.nan, turns)
    result = doubles.sine(2 * np.pi * turns, quarters)
    # At quarters of a turn, the result is exact, as in the hardware's table.
    result = np.where(turns * 4 == np.trunc(turns * 4), np.rint(result), result)
    return result.astype(np.asanyarray(x).dtype)


def _nearest(x):
    return floats.to_integer(np.floor(x.astype(np.float64) + 0.5), np.int32)


def _offset_i4(x):
    return (_part(x, 4, 0, True) / 16).astype(np.float32)


def _mad_i32_i16(a, b, c):
    return (_int64(a) * b + c).astype(np.int32)


def _mad_u32_u16(a, b, c):
    return (_int64(a) * b + c).astype(U32)


def _multiply_high_24(a, b):
    return (_signed_24(a) * _signed_24(b) >> 32).astype(np.int32)


def _signed_24(x):
    return (_int64(x) << 40) >> 40


def _sat_pk_u8(x):
    low, high = (np.clip(_part(x, 16, n, True), 0, 255) for n in (0, 1))
    return (low | high << 8).astype(np.uint16)


def _zero_wins(a, b, c):
    """Compute a * b + c. Zero times any number is zero, even times infinity or NaN."""
    return np.where((a == 0) | (b == 0), np.asanyarray(c) + np.float32(0), floats.fma32(a, b, c))


_Entry = tuple[str, tuple[str, ...], Callable]


def _sums() -> dict[str, _Entry]:
    """Return the table entries of dot products, sums of absolute differences, and V_LERP_U8."""
    return {
        "v_dot2acc_f32_f16": ("f32", ("u32", "u32", "f32"), dot2(_half)),
        "v_dot2_f32_f16": ("f32", ("u32", "u32", "f32"), dot2(_half)),
        "v_dot2_f32_bf16": ("f32", ("u32", "u32", "f32"), dot2(floats.bfloat)),
        "v_dot2_f16_f16": ("f16", ("u32", "u32", "f16"), _dot2_f16),
        "v_dot2_bf16_bf16": ("u16", ("u32", "u32", "u16"), _dot2_bf16),
        "v_sad_u8": ("u32", ("u32", "u32", "u32"), _sad(8)),
        "v_sad_u16": ("u32", ("u32", "u32", "u32"), _sad(16)),
        "v_sad_u32": ("u32", ("u32", "u32", "u32"), _sad(32)),
        "v_sad_hi_u8": ("u32", ("u32", "u32", "u32"), _sad(8, shift=16)),
        "v_msad_u8": ("u32", ("u32", "u32", "u32"), _sad(8, masked=True)),
        "v_lerp_u8": ("u32", ("u32", "u32", "u32"), _lerp),
        "v_qsad_pk_u16_u8": ("u64", ("u64", "u32", "u64"), _quad_sad(False)),
        "v_mqsad_pk_u16_u8": ("u64", ("u64", "u32", "u64"), _quad_sad(True)),
    }


def _conversions() -> dict[str, _Entry]:
    to_i16 = _pack(lambda x: floats.to_integer(x, np.int16))
    to_u16 = _pack(lambda x: floats.to_integer(x, np.uint16))
    return {
        "v_cls_i32": ("i32", ("i32",), leading_signs),
        "v_cvt_pk_i16_i32": ("u32", ("i32", "i32"), _pack(_clip(-0x8000, 0x7FFF))),
        "v_cvt_pk_u16_u32": ("u32", ("u32", "u32"), _pack(_clip(0, 0xFFFF))),
        "v_cvt_pk_i16_f32": ("u32", ("f32", "f32"), to_i16),
        "v_cvt_pk_u16_f32": ("u32", ("f32", "f32"), to_u16),
        "v_cvt_pk_u8_f32": ("u32", ("f32", "u32", "u32"), _pk_u8),
        "v_cvt_i32_i16": ("i32", ("i16",), lambda x: np.asanyarray(x).astype(np.int32)),
        "v_cvt_u32_u16": ("u32", ("u16",), lambda x: np.asanyarray(x).astype(U32)),
        "v_cvt_nearest_i32_f32": ("i32", ("f32",), _nearest),
        "v_cvt_floor_i32_f32": (
            "i32",
            ("f32",),
            lambda x: floats.to_integer(np.floor(x), np.int32),
        ),
        "v_cvt_off_f32_i4": ("f32", ("u32",), _offset_i4),
    }


def _products() -> dict[str, _Entry]:
    """Return the table entries of products, sine, cosine, V_SAT_PK_U8_I16 and V_DIV_FIXUP_F16.

    In a DX9 product, zero times any number is zero.
    """
    return {
        "v_mad_i32_i16": ("i32", ("i16", "i16", "i32"), _mad_i32_i16),
        "v_mad_u32_u16": ("u32", ("u16", "u16", "u32"), _mad_u32_u16),
        "v_mad_i16": ("i16", ("i16", "i16", "i16"), lambda a, b, c: a * b + c),
        "v_mul_hi_i32_i24": ("i32", ("i32", "i32"), _multiply_high_24),
        "v_sat_pk_u8_i16": ("u16", ("u32",), _sat_pk_u8),
        "v_sin_f32": ("f32", ("f32",), lambda x: _unit(x, 0)),
        "v_cos_f32": ("f32", ("f32",), lambda x: _unit(x, 1)),
        "v_sin_f16": ("f16", ("f16",), lambda x: _unit(x, 0)),
        "v_cos_f16": ("f16", ("f16",), lambda x: _unit(x, 1)),
        "v_div_fixup_f16": ("f16", ("f16", "f16", "f16"), floats.fixup),
        "v_fma_dx9_zero_f32": ("f32", ("f32", "f32", "f32"), _zero_wins),
        "v_fmac_dx9_zero_f32": ("f32", ("f32", "f32", "f32"), _zero_wins),
    }


def _normalizations() -> dict[str, _Entry]:
    table: dict[str, _Entry] = {}
    for kind, low, high in (("i16", -0x7FFF, 0x7FFF), ("u16", 0, 0xFFFF)):
        convert = _norm_as(low, high, f"{kind[0]}2")
        table[f"v_cvt_norm_{kind}_f16"] = (kind, ("f16",), convert)
        for source in ("f32", "f16"):
            packed_pair = _pack(_norm(low, high))
            table[f"v_cvt_pk_norm_{kind}_{source}"] = ("u32", (source, source), packed_pair)
    return table


def _extremes() -> dict[str, _Entry]:
    """Return the table entries of integer combinations of max and min.

    LLVM has integer maxmin and minmax only for 32 bits.
    """
    table: dict[str, _Entry] = {}
    for kind in ("i16", "u16", "i32", "u32"):
        three = (kind, kind, kind)
        table[f"v_max3_{kind}"] = (kind, three, _in_turn(np.maximum, np.maximum))
        table[f"v_min3_{kind}"] = (kind, three, _in_turn(np.minimum, np.minimum))
        if kind in ("i32", "u32"):
            table[f"v_maxmin_{kind}"] = (kind, three, _in_turn(np.maximum, np.minimum))
            table[f"v_minmax_{kind}"] = (kind, three, _in_turn(np.minimum, np.maximum))
        table[f"v_med3_{kind}"] = (kind, three, _median)
    return table


def _in_turn(first: Callable, second: Callable) -> Callable:
    """Return an operation that applies `first` to a and b, and `second` to that result and c."""
    return lambda a, b, c: second(first(a, b), c)


def _median(a, b, c):
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


TABLE = _sums() | _conversions() | _products() | _normalizations() | _extremes()


def _mixed(kind: str):
    """Return V_FMA_MIX with a result of this kind. Sources are float16 or float32.

    A float16 result is rounded twice: to float32, and then to float16.
    """

    def run(a, b, c):
        value = floats.fma32(*(np.asanyarray(x).astype(np.float32) for x in (a, b, c)))
        return value.astype(np.float16) if kind == "f16" else value

    return run


def _mixed_table() -> dict[tuple[str, tuple[str, ...]], Callable]:
    table: dict[tuple[str, tuple[str, ...]], Callable] = {}
    for kind in ("f32", "f16"):
        for kinds in product(("f16", "f32"), repeat=3):
            table[kind, kinds] = _mixed(kind)
    return table


#: V_FMA_MIX, V_FMA_MIXLO and V_FMA_MIXHI by the kind of the result and those of the sources.
MIXED = _mixed_table()


def mixed_name(kind: str, kinds: tuple[str, ...]) -> str:
    """Return the name in C of a function of MIXED."""
    return ".".join(("v_fma_mix", kind, *kinds))


_PACKED_FUNCTIONS = {
    "add_f16": np.add,
    "mul_f16": np.multiply,
    "fma_f16": floats.fma16,
    "fmac_f16": floats.fma16,
    "max_f16": lambda a, b: floats.larger(a, b, True),
    "min_f16": lambda a, b: floats.smaller(a, b, True),
    "add_u16": np.add,
    "sub_u16": np.subtract,
    "add_i16": np.add,
    "sub_i16": np.subtract,
    "mul_lo_u16": np.multiply,
    "max_i16": np.maximum,
    "min_i16": np.minimum,
    "max_u16": np.maximum,
    "min_u16": np.minimum,
    "lshlrev_b16": lambda a, b: b << (a & np.uint16(15)),
    "lshrrev_b16": lambda a, b: b >> (a & np.uint16(15)),
    "ashrrev_i16": lambda a, b: b >> (a & np.int16(15)),
    "mad_u16": lambda a, b, c: a * b + c,
    "mad_i16": lambda a, b, c: a * b + c,
}


def _packed_table() -> dict[str, _Entry]:
    table: dict[str, _Entry] = {}
    for name, function in _PACKED_FUNCTIONS.items():
        kind = name[-3:].replace("b", "u")
        count = 3 if name.startswith(("fma", "mad")) else 2
        table[f"v_pk_{name}"] = (kind, (kind,) * count, function)
    return table


#: V_PK_* by mnemonic: kinds and function of the operation on each half.
PACKED = _packed_table()


def packed(name: str, clamp: bool) -> _Entry:
    """Return an entry of PACKED, with or without CLAMP."""
    kind, kinds, function = PACKED[name]
    if not clamp:
        return kind, kinds, function
    if kind == "f16":
        return kind, kinds, clamped_half(function)
    return kind, kinds, saturated(function, kind)


def packed_name(name: str, clamp: bool) -> str:
    """Return the name in C of an entry of PACKED, with or without CLAMP."""
    return f"{name}.clamp" if clamp else name


def clamped_half(function):
    """Return the function with its result limited to the range from 0 to 1."""

    def run(*sources):
        return clamped(np.asanyarray(function(*sources)))

    return run

# SPDX-License-Identifier: BSD-3-Clause
"""Compute on bit patterns with Python's integers and fractions; round exact results once.

This module shares no code with the emulator.
"""

import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF
#: Each format is a tuple: significand bits, smallest normal exponent, largest exponent, total bits.
F32 = (24, -126, 127, 32)
F16 = (11, -14, 15, 16)
F64 = (53, -1022, 1023, 64)
B16 = (8, -126, 127, 16)
NAN = {F32: 0x7FC00000, F16: 0x7E00, F64: 0x7FF8 << 48, B16: 0x7FC0}


@cache
def power_of_two(n: int) -> Fraction:
    return Fraction(2) ** max(-5000, min(5000, n))


def value(bits: int, form: tuple):
    """Return the number as a Fraction, "nan", "inf" or "-inf", and whether the sign bit is set."""
    precision, min_exponent, _, width = form
    negative = bool(bits >> (width - 1))
    field = bits >> (precision - 1) & (1 << (width - precision)) - 1
    fraction = bits & (1 << (precision - 1)) - 1
    if field == (1 << (width - precision)) - 1:
        if fraction:
            return "nan", negative
        return ("-inf" if negative else "inf"), negative
    scale = min_exponent - precision + 1
    significand = fraction if field == 0 else (fraction | 1 << (precision - 1)) << (field - 1)
    number = significand * power_of_two(scale)
    return (-number if negative else number), negative


def encode(number, form: tuple, negative_zero: bool = False) -> int:
    """Return the bits of a Fraction, rounded to nearest even, or of "nan", "inf" or "-inf"."""
    precision, min_exponent, max_exponent, width = form
    infinity = ((1 << (width - precision)) - 1) << (precision - 1)
    if number == "nan":
        return NAN[form]
    if number in ("inf", "-inf"):
        return infinity | (number == "-inf") << (width - 1)
    if number == 0:
        return int(negative_zero) << (width - 1)
    sign = number < 0
    number = abs(number)
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    if power_of_two(exponent) > number:
        exponent -= 1
    exponent = max(exponent, min_exponent)
    steps = number / power_of_two(exponent - precision + 1)
    significand = steps.numerator // steps.denominator
    remainder = steps - significand
    if remainder > Fraction(1, 2) or (remainder == Fraction(1, 2) and significand & 1):
        significand += 1
    if significand >= 1 << precision:
        significand = significand >> 1
        exponent = exponent + 1
    if exponent > max_exponent:
        return infinity | sign << (width - 1)
    bits = significand
    implicit_bit = 1 << (precision - 1)
    if significand >= implicit_bit:
        bits -= implicit_bit
        bits |= (exponent - min_exponent + 1) << (precision - 1)
    return bits | sign << (width - 1)


def add(a: int, b: int, form: tuple) -> int:
    return fma(a, encode(Fraction(1), form), b, form)


def multiply(a: int, b: int, form: tuple) -> int:
    (x, nx), (y, ny) = value(a, form), value(b, form)
    if "nan" in (x, y) or ({x, y} & {"inf", "-inf"} and 0 in (x, y)):
        return NAN[form]
    if isinstance(x, str) or isinstance(y, str):
        return encode("-inf" if nx != ny else "inf", form)
    return encode(x * y, form, nx != ny)


def fma(a: int, b: int, c: int, form: tuple) -> int:
    (x, nx), (y, ny), (z, nz) = value(a, form), value(b, form), value(c, form)
    if "nan" in (x, y, z):
        return NAN[form]
    negative = nx != ny
    if isinstance(x, str) or isinstance(y, str):
        if 0 in (x, y) or (isinstance(z, str) and nz != negative):
            return NAN[form]
        return encode("-inf" if negative else "inf", form)
    if isinstance(z, str):
        return encode(z, form)
    return encode(x * y + z, form, negative and nz)


def negate(a: int, form: tuple) -> int:
    return a ^ 1 << (form[3] - 1)


def compare_numbers(a: int, b: int, form: tuple) -> int | None:
    """Return -1, 0 or 1 for a < b, a = b or a > b, and None if a or b is a NaN."""
    big = {"inf": power_of_two(1999), "-inf": -power_of_two(1999)}
    x, y = (value(v, form)[0] for v in (a, b))
    if "nan" in (x, y):
        return None
    x = big.get(x, x)
    y = big.get(y, y)
    return (x > y) - (x < y)


def extreme(a: int, b: int, form: tuple, largest: bool) -> int:
    """Return the maximum or minimum in IEEE mode.

    A signalling NaN gives a NaN, a quiet NaN gives the other number, and +0 is larger than -0.
    """
    quiet = 1 << (form[0] - 2)
    nans = [value(v, form)[0] == "nan" for v in (a, b)]
    if any(nan and not v & quiet for nan, v in zip(nans, (a, b), strict=True)):
        return NAN[form]
    if nans[0]:
        return b
    if nans[1]:
        return a
    order = compare_numbers(a, b, form)
    if order == 0:
        # Equal numbers have the same bits, except zeros with different signs. Of these, AND selects
        # +0, and OR selects -0.
        return (a & b) if largest else (a | b)
    return a if (order > 0) == largest else b


def subtract(a: int, b: int, form: tuple) -> int:
    return add(a, negate(b, form), form)


#: Functions of two numbers and their format.
BINARY_FUNCTIONS: dict[str, Callable] = {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "max": lambda a, b, form: extreme(a, b, form, True),
    "min": lambda a, b, form: extreme(a, b, form, False),
}
ROUNDINGS: dict[str, Callable] = {
    "floor": lambda x: x // 1,
    "ceil": lambda x: -(-x // 1),
    "trunc": int,
    "rndne": round,
}


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def bfe(a: int, b: int, c: int, sign: bool) -> int:
    offset = b & 31
    width = c & 31
    field = (signed(a) if sign else a) >> offset & ((1 << width) - 1)
    return (signed(field, width) if sign and width else field) & M32


def perm(a: int, b: int, selector: int) -> int:
    """Compute V_PERM_B32 byte by byte, from the table in the ISA document."""
    pool = (b & M32).to_bytes(4, "little") + (a & M32).to_bytes(4, "little")
    result = 0
    for i in range(4):
        pick = selector >> 8 * i & 255
        if pick <= 7:
            byte = pool[pick]
        elif pick <= 11:
            byte = 255 if pool[(pick - 8) * 2 + 1] & 128 else 0
        else:
            byte = 0 if pick == 12 else 255
        result |= byte << 8 * i
    return result


def to_integer(a: int, form: tuple, low: int, high: int, rounding: Callable = int) -> int:
    x, _ = value(a, form)
    if x == "nan":
        return 0
    if isinstance(x, str):
        return high if x == "inf" else low
    return max(low, min(high, int(rounding(x))))


def convert(a: int, source: tuple, target: tuple) -> int:
    x, negative = value(a, source)
    return encode(x, target, negative)


def make_rounding(rounding: Callable, form: tuple = F32) -> Callable:
    def run(a: int) -> int:
        x, negative = value(a, form)
        if x == "nan":
            return encode(x, form, negative)
        if isinstance(x, str):
            return a
        return encode(Fraction(rounding(x)), form, negative)

    return run


def shift_left(x: int, n: int, bits: int) -> int:
    return x << n & ((1 << bits) - 1)


COMPARE = {
    "lt": lambda o: o == -1,
    "eq": lambda o: o == 0,
    "le": lambda o: o in (-1, 0),
    "gt": lambda o: o == 1,
    "lg": lambda o: o in (-1, 1),
    "ge": lambda o: o in (0, 1),
    "o": lambda o: o is not None,
    "u": lambda o: o is None,
    "nge": lambda o: o not in (0, 1),
    "nlg": lambda o: o not in (-1, 1),
    "ngt": lambda o: o != 1,
    "nle": lambda o: o not in (-1, 0),
    "neq": lambda o: o != 0,
    "nlt": lambda o: o != -1,
    "f": lambda _o: False,
    "t": lambda _o: True,
}


def compare_integers(a: int, b: int) -> int:
    return (a > b) - (a < b)


def fields(a: int, b: int, bits: int) -> list[tuple[int, int]]:
    mask = (1 << bits) - 1
    return [(a >> i & mask, b >> i & mask) for i in range(0, 32, bits)]


def leading_signs(x: int, bits: int) -> int:
    y = ~x if x < 0 else x
    return bits - y.bit_length() if y else -1


def float_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]

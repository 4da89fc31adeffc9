# SPDX-License-Identifier: BSD-3-Clause
"""Floating-point operations of the RDNA3.5 ISA that numpy lacks, on its arrays.

All round to nearest even. "Flush" functions keep the sign of zero, as the hardware does.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from strix_emulate.arithmetic.translate import in_c

#: smallest normal number
_TINY = {np.dtype(t): np.finfo(t).smallest_normal for t in ("f2", "f4", "f8")}
# the bits of a float64 that its rounding to float32 drops, and their value at a tie
_DROPPED, _TIE = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)


def flush(x):
    """Turn denormal numbers of x into zeros of the same sign."""
    return np.where(np.abs(x) < _TINY[x.dtype], np.copysign(x.dtype.type(0), x), x)


def finite(function):
    """Turn what overflows into the largest number, if no source is infinite, as with FP16_OVFL."""

    def run(*sources):
        result = np.asanyarray(function(*sources))
        infinite = np.isinf(result)
        if infinite.any():
            for x in sources:
                if np.asanyarray(x).dtype.kind == "f":
                    infinite = infinite & ~np.isinf(x)
            most = np.copysign(np.finfo(result.dtype).max, result)
            result = np.where(infinite, most, result)
        return result

    return run


@in_c("fmaf")
def fma32(a, b, c):
    """Compute a * b + c in float32, rounded once.

    float64 holds the product exactly; the sum is rounded to float64 and again to float32. Only
    where the first rounding made a tie of the second, or the result is denormal, can that differ
    from one rounding: there, and only there, the sum is rounded to odd first.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = total.view(np.uint64)
    suspect = (bits & _DROPPED) == _TIE
    suspect |= np.abs(total) < 2.0**-126
    if suspect.any():
        total = np.where(
            suspect, _to_odd(product, np.asanyarray(c).astype(np.float64), total), total
        )
    return total.astype(np.float32)


def fma16(a, b, c):
    """Compute a * b + c in float16, rounded once."""
    product = np.multiply(a, b, dtype=np.float64)
    c = np.asanyarray(c).astype(np.float64)
    return _to_odd(product, c, product + c).astype(np.float16)


@in_c("fma")
def fma64(a, b, c):
    """Compute a * b + c in float64, rounded once."""
    return scaled_fma64(a, b, c, 0)


def scaled_fma64(a, b, c, power):
    """Compute (a * b + c) * 2**power in float64, rounded once.

    By error-free steps (Boldo and Melquiond, "Emulation of FMA") where nothing can overflow or
    become denormal, elsewhere by rational arithmetic, one lane at a time.
    """
    a, b, c, power = np.broadcast_arrays(a, b, c, power)
    plain = a * b + c
    high, low = _product(a, b)
    small, lowest = _sum(c, low)
    top, rest = _sum(high, small)
    result = np.asanyarray(top + _to_odd(lowest, rest, lowest + rest))
    calm = [(np.abs(x) < 2.0**900) & ((np.abs(x) > 2.0**-900) | (x == 0)) for x in (a * b, c)]
    calm = calm[0] & calm[1] & (np.abs(a) < 2.0**900) & (np.abs(b) < 2.0**900) & (a * b != 0)
    calm &= (c != 0) & (power == 0) & (top != 0)
    result = np.where(calm, result, np.ldexp(plain, power))
    for i in np.argwhere(~calm & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        at = tuple(i)
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if exact:
            exact *= Fraction(2) ** int(power[at])
            try:
                result[at] = float(exact)
            except OverflowError:
                result[at] = np.inf if exact > 0 else -np.inf
    return result


def _product(a, b):
    """Compute a * b and its rounding error (Dekker, Veltkamp)."""
    high = a * b
    parts = []
    for x in (a, b):
        big = x * 134217729.0
        top = big - (big - x)
        parts.append((top, x - top))
    (ah, al), (bh, bl) = parts
    return high, ((ah * bh - high) + ah * bl + al * bh) + al * bl


def _sum(x, y):
    """Compute x + y and its rounding error (Knuth)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


def _to_odd(x, y, total):
    """Round x + y to odd: a second rounding of it, to fewer bits, then is correct."""
    other = total - x
    error = (x - (total - other)) + (y - other)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(error) & (error != 0) & even
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def larger(a, b, ieee):
    """Compute V_MAX: a number beats a NaN, +0 beats -0, a signalling NaN gives a quiet one."""
    return _extreme(np.fmax, np.bitwise_and, a, b, ieee)


def smaller(a, b, ieee):
    """Compute V_MIN, like :func:`larger`."""
    return _extreme(np.fmin, np.bitwise_or, a, b, ieee)


def _extreme(pick, zero, a, b, ieee):
    a, b = np.broadcast_arrays(a, b)
    result = pick(a, b)
    both_zero = (a == 0) & (b == 0)
    kind = f"u{a.dtype.itemsize}"
    if both_zero.any():
        zeros = zero(a.view(kind), b.view(kind)).view(a.dtype)
        result = np.where(both_zero, zeros, result)
    if ieee:
        a_nan, b_nan = np.isnan(a), np.isnan(b)
        if a_nan.any() or b_nan.any():
            signalling = (a_nan & ~is_quiet(a)) | (b_nan & ~is_quiet(b))
            result = np.where(signalling, a.dtype.type(np.nan), result)
    return result


def is_quiet(x):
    """Return whether the highest bit of the fraction is set: of a NaN, that it is a quiet one."""
    kind = np.dtype(f"u{x.dtype.itemsize}").type
    bit = np.finfo(x.dtype).nmant - 1
    return (np.asanyarray(x).view(kind) >> kind(bit) & kind(1)) != 0


def exponent(x):
    """Return the biased exponent field of float32 numbers."""
    return (np.asanyarray(x).view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int32)


def ldexp(x, power):
    """Compute x * 2**power, rounded once to the type of x."""
    return np.ldexp(np.asanyarray(x).astype(np.float64), np.clip(power, -400, 400)).astype(x.dtype)


class Division(NamedTuple):
    """What tells the division of one format from another's.

    Attributes:
        word: integers of its size.
        power: of two, by which V_DIV_SCALE scales.
        apart: the difference of exponents from which it scales both.
        few: the exponent of a numerator up to which it scales.
    """

    word: type
    one: float
    smallest: float
    power: int
    apart: int
    few: int
    exponent: Callable
    ldexp: Callable


def scale(value, denominator, numerator, of: Division):
    """Compute V_DIV_SCALE: the scaled value, and a flag for V_DIV_FMAS.

    The document's pseudocode scales a denominator up even if its reciprocal is denormal, so that it
    overflows. LLVM's division of float32 is exact only if it is scaled down.
    """

    def denormal(x):
        return (np.abs(x) < of.smallest) & (x != 0)

    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    up, down = of.ldexp(value, of.power), of.ldexp(value, -of.power)
    is_denominator = value.view(of.word) == denominator.view(of.word)
    is_numerator = value.view(of.word) == numerator.view(of.word)
    small_quotient = denormal(numerator / denominator)
    small_reciprocal = denormal(of.one / denominator)
    apart = of.exponent(numerator) - of.exponent(denominator) >= of.apart
    cases = [
        ((numerator == 0) | (denominator == 0), np.full_like(value, np.nan), False),
        (apart, np.where(is_denominator, up, value), True),
        (of.exponent(denominator) == 0, up, False),
        (small_reciprocal & small_quotient, np.where(is_denominator, down, value), True),
        (small_reciprocal, down, False),
        (small_quotient, np.where(is_numerator, up, value), True),
        (of.exponent(numerator) <= of.few, up, False),
    ]
    conditions = [condition for condition, _, _ in cases]
    scaled = np.select(conditions, [result for _, result, _ in cases], value)
    flag = np.select(conditions, [np.bool_(flag) for _, _, flag in cases], False)
    return scaled, flag


_DIVISION = Division(np.uint32, np.float32(1), 2.0**-126, 64, 96, 23, exponent, ldexp)


def div_scale(value, denominator, numerator):
    """Compute V_DIV_SCALE_F32: see :func:`scale`."""
    return scale(value, denominator, numerator, _DIVISION)


def div_fmas(a, b, c, flag):
    """Compute V_DIV_FMAS_F32: fma, scaled by 2**64 up or down if flagged, rounded once."""
    product, c = np.multiply(a, b, dtype=np.float64), np.asanyarray(c)
    total = _to_odd(product, c.astype(np.float64), product + c)
    power = np.where(flag, np.where(exponent(c) > 127, 64, -64), 0)
    return np.ldexp(total, power).astype(np.float32)


def div_fixup(quotient, denominator, numerator):
    """Compute V_DIV_FIXUP_F32: the quotient, or what division gives for special operands.

    A quotient that overflows reaches it as NaN (infinity less infinity in the steps before). The
    document's pseudocode would keep that; LLVM's division of float32 needs the infinity.
    """
    return fixup(quotient, denominator, numerator, exponent, -150)


def fixup(quotient, denominator, numerator, exponent=None, least=0):
    """See :func:`div_fixup`; a quotient whose exponent is below `least` is zero.

    Without a function of the exponent: V_DIV_FIXUP_F16, whose quotient neither vanishes nor is NaN.
    """
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    one = np.full_like(quotient, 1)
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), -one, one)
    infinite_n, infinite_d = np.isinf(numerator), np.isinf(denominator)
    invalid = ((denominator == 0) & (numerator == 0)) | (infinite_n & infinite_d)
    cases = [
        (np.isnan(numerator), numerator),
        (np.isnan(denominator), denominator),
        (invalid, np.full_like(quotient, np.nan)),
        ((denominator == 0) | infinite_n, sign * np.inf),
        (infinite_d | (numerator == 0), sign * 0.0),
    ]
    if exponent is not None:
        small = exponent(numerator) - exponent(denominator) < least
        cases += [(small, sign * 0.0), (np.isnan(quotient), sign * np.inf)]
    conditions, results = zip(*cases, strict=True)
    return np.select(conditions, results, np.copysign(quotient, sign))


def to_integer(x, kind):
    """Convert floats to int32, uint32, int16 or uint16: towards zero, saturated, NaN is 0."""
    info = np.iinfo(kind)
    whole = np.trunc(np.asanyarray(x).astype(np.float64))
    return np.where(np.isnan(whole), 0, np.clip(whole, info.min, info.max)).astype(kind)


def to_half_towards_zero(x):
    """Convert float32 to float16, rounded towards zero."""
    half = x.astype(np.float16)
    too_large = np.abs(half.astype(np.float32)) > np.abs(x)
    # the next one towards zero, of either sign
    less = (half.view(np.uint16) - np.uint16(1)).view(np.float16)
    return np.where(too_large, less, half)


def bfloat(x):
    """Convert bfloat16 numbers, given as uint16, to float32."""
    return (np.asanyarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(x):
    """Convert float32 to bfloat16 in uint16, to nearest even."""
    bits = np.asanyarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))

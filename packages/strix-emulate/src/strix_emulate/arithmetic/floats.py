# SPDX-License-Identifier: BSD-3-Clause
"""Floating-point operations of the RDNA3.5 ISA that numpy lacks, on numpy arrays.

They round to nearest even, unless a docstring says otherwise. Flushing a denormal number to zero
keeps its sign, as in the hardware.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from strix_emulate.arithmetic.translate import in_c

#: Smallest normal number.
_TINY = {np.dtype(t): np.finfo(t).smallest_normal for t in ("f2", "f4", "f8")}
#: The bits of a float64 that are dropped when it is rounded to float32, and their value at a tie.
_DROPPED = np.uint64(0x1FFFFFFF)
_TIE = np.uint64(0x10000000)


def flush(x):
    """Turn denormal numbers of x into zeros of the same sign."""
    return np.where(np.abs(x) < _TINY[x.dtype], np.copysign(x.dtype.type(0), x), x)


def finite(function):
    """Return a function that replaces infinite results by the largest finite number of their sign.

    FP16_OVFL has this effect. A result of `function` stays infinite if a float source is infinite.
    """

    def run(*sources):
        result = np.asanyarray(function(*sources))
        infinite = np.isinf(result)
        if infinite.any():
            for x in sources:
                if np.asanyarray(x).dtype.kind == "f":
                    infinite = infinite & ~np.isinf(x)
            largest = np.copysign(np.finfo(result.dtype).max, result)
            result = np.where(infinite, largest, result)
        return result

    return run


@in_c("fmaf")
def fma32(a, b, c):
    """Compute a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to float64 and then to float32. The result
    can differ from a single rounding only if the float64 is a tie for the second rounding, or if
    the result is denormal. In these cases, the first rounding is to odd.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = total.view(np.uint64)
    suspect = (bits & _DROPPED) == _TIE
    suspect |= np.abs(total) < 2.0**-126
    if suspect.any():
        odd = _to_odd(product, np.asanyarray(c).astype(np.float64), total)
        total = np.where(suspect, odd, total)
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

    An element is computed in error-free steps (Boldo and Melquiond, "Emulation of FMA") if `power`
    is 0, none of a * b, c and their sum is 0, all operands and a * b are far from overflow, and
    a * b and c are far from denormal numbers. Other elements with finite operands are computed one
    by one with rational arithmetic.
    """
    a, b, c, power = np.broadcast_arrays(a, b, c, power)
    product = a * b
    plain = product + c
    high, low = _product(a, b)
    small, lowest = _sum(c, low)
    top, remainder = _sum(high, small)
    result = np.asanyarray(top + _to_odd(lowest, remainder, lowest + remainder))
    is_exact = _is_moderate(product) & _is_moderate(c)
    is_exact &= (np.abs(a) < 2.0**900) & (np.abs(b) < 2.0**900)
    is_exact &= (product != 0) & (c != 0) & (power == 0) & (top != 0)
    result = np.where(is_exact, result, np.ldexp(plain, power))
    for i in np.argwhere(~is_exact & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        at = tuple(i)
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if exact:
            exact *= Fraction(2) ** int(power[at])
            try:
                result[at] = float(exact)
            except OverflowError:
                result[at] = np.inf if exact > 0 else -np.inf
    return result


def _is_moderate(x):
    """Return by element whether x is 0, or far from overflow and from denormal numbers."""
    size = np.abs(x)
    return (size < 2.0**900) & ((size > 2.0**-900) | (x == 0))


def _product(a, b):
    """Compute a * b and its rounding error (Dekker, Veltkamp)."""
    high = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = (a_high * b_high - high) + a_high * b_low + a_low * b_high
    return high, error + a_low * b_low


def _split(x):
    """Split x into two halves. The product of two such halves is exact (Veltkamp)."""
    big = x * 134217729.0
    top = big - (big - x)
    return top, x - top


def _sum(x, y):
    """Compute x + y and its rounding error (Knuth)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


def _to_odd(x, y, total):
    """Round x + y to odd. A second rounding, to fewer bits, then gives the correct result."""
    other = total - x
    error = (x - (total - other)) + (y - other)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(error) & (error != 0) & even
    neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact, neighbour, total)


def larger(a, b, ieee):
    """Compute V_MAX. A number wins over a NaN, and +0 over -0.

    In IEEE mode, the result for a signalling NaN is a quiet NaN.
    """
    return _extreme(np.fmax, np.bitwise_and, a, b, ieee)


def smaller(a, b, ieee):
    """Compute V_MIN, like :func:`larger`."""
    return _extreme(np.fmin, np.bitwise_or, a, b, ieee)


def _extreme(pick, pick_zero, a, b, ieee):
    """Compute V_MAX or V_MIN.

    Args:
        pick: np.fmax or np.fmin.
        pick_zero: Operation on the bits of two zeros.
        a: First source.
        b: Second source.
        ieee: Whether the mode is IEEE mode.
    """
    a, b = np.broadcast_arrays(a, b)
    result = pick(a, b)
    both_zero = (a == 0) & (b == 0)
    kind = f"u{a.dtype.itemsize}"
    if both_zero.any():
        zeros = pick_zero(a.view(kind), b.view(kind)).view(a.dtype)
        result = np.where(both_zero, zeros, result)
    if ieee:
        a_nan = np.isnan(a)
        b_nan = np.isnan(b)
        if a_nan.any() or b_nan.any():
            signalling = (a_nan & ~is_quiet(a)) | (b_nan & ~is_quiet(b))
            result = np.where(signalling, a.dtype.type(np.nan), result)
    return result


def is_quiet(x):
    """Return by element whether the fraction's highest bit is set. A NaN with that bit is quiet."""
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
    """Parameters of the division of a floating-point format.

    Attributes:
        word: Unsigned integer type of the format's size.
        one: The number 1, as a number of the format.
        smallest: Smallest normal number.
        power: V_DIV_SCALE multiplies or divides by 2**power.
        apart: If the numerator's exponent is at least this much larger than the denominator's,
            V_DIV_SCALE scales the denominator up and sets the flag.
        few: If the numerator's biased exponent is at most this and no other case applies,
            V_DIV_SCALE scales the value up.
        exponent: Function that returns the biased exponent field of numbers.
        ldexp: Function that computes x * 2**power.
    """

    word: type
    one: float
    smallest: float
    power: int
    apart: int
    few: int
    exponent: Callable
    ldexp: Callable


def scale(value, denominator, numerator, division: Division):
    """Compute V_DIV_SCALE. Return the scaled value, and a flag for V_DIV_FMAS.

    This function scales a denominator down if its reciprocal is denormal, because LLVM's division
    of float32 is exact only then. The ISA document's pseudocode scales such a denominator up, so
    that it overflows.
    """

    def denormal(x):
        return (np.abs(x) < division.smallest) & (x != 0)

    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    up = division.ldexp(value, division.power)
    down = division.ldexp(value, -division.power)
    is_denominator = value.view(division.word) == denominator.view(division.word)
    is_numerator = value.view(division.word) == numerator.view(division.word)
    small_quotient = denormal(numerator / denominator)
    small_reciprocal = denormal(division.one / denominator)
    apart = division.exponent(numerator) - division.exponent(denominator) >= division.apart
    cases = [
        ((numerator == 0) | (denominator == 0), np.full_like(value, np.nan), False),
        (apart, np.where(is_denominator, up, value), True),
        (division.exponent(denominator) == 0, up, False),
        (small_reciprocal & small_quotient, np.where(is_denominator, down, value), True),
        (small_reciprocal, down, False),
        (small_quotient, np.where(is_numerator, up, value), True),
        (division.exponent(numerator) <= division.few, up, False),
    ]
    conditions = [condition for condition, _, _ in cases]
    results = [result for _, result, _ in cases]
    flags = [np.bool_(flag) for _, _, flag in cases]
    scaled = np.select(conditions, results, value)
    return scaled, np.select(conditions, flags, False)


_DIVISION = Division(
    word=np.uint32,
    one=np.float32(1),
    smallest=2.0**-126,
    power=64,
    apart=96,
    few=23,
    exponent=exponent,
    ldexp=ldexp,
)


def div_scale(value, denominator, numerator):
    """Compute V_DIV_SCALE_F32: see :func:`scale`."""
    return scale(value, denominator, numerator, _DIVISION)


def div_fmas(a, b, c, flag):
    """Compute V_DIV_FMAS_F32: an fma, rounded once.

    Where V_DIV_SCALE has set `flag`, the fma is multiplied before it is rounded: by 2**64 if
    |c| >= 2, or else by 2**-64.
    """
    product = np.multiply(a, b, dtype=np.float64)
    c = np.asanyarray(c)
    total = _to_odd(product, c.astype(np.float64), product + c)
    power = np.where(flag, np.where(exponent(c) > 127, 64, -64), 0)
    return np.ldexp(total, power).astype(np.float32)


def div_fixup(quotient, denominator, numerator):
    """Compute V_DIV_FIXUP_F32: the quotient, or the result of the division for special operands.

    If the division overflows, the argument `quotient` is NaN, because earlier steps of the division
    subtract infinities. The result is then infinite, as LLVM's division of float32 requires. The
    ISA document's pseudocode would return the NaN.
    """
    return fixup(quotient, denominator, numerator, exponent, -150)


def fixup(quotient, denominator, numerator, exponent=None, lowest_exponent=0):
    """Compute V_DIV_FIXUP: see :func:`div_fixup`.

    Args:
        quotient: Result of the division's steps.
        denominator: Denominator of the division.
        numerator: Numerator of the division.
        exponent: Function that returns the biased exponent of numbers. None for V_DIV_FIXUP_F16,
            whose quotient is neither too small nor NaN.
        lowest_exponent: If the numerator's exponent minus the denominator's is lower, the result
            is 0. Not used if `exponent` is None.
    """
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    one = np.full_like(quotient, 1)
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), -one, one)
    infinite_n = np.isinf(numerator)
    infinite_d = np.isinf(denominator)
    invalid = ((denominator == 0) & (numerator == 0)) | (infinite_n & infinite_d)
    cases = [
        (np.isnan(numerator), numerator),
        (np.isnan(denominator), denominator),
        (invalid, np.full_like(quotient, np.nan)),
        ((denominator == 0) | infinite_n, sign * np.inf),
        (infinite_d | (numerator == 0), sign * 0.0),
    ]
    if exponent is not None:
        small = exponent(numerator) - exponent(denominator) < lowest_exponent
        cases.append((small, sign * 0.0))
        cases.append((np.isnan(quotient), sign * np.inf))
    conditions, results = zip(*cases, strict=True)
    return np.select(conditions, results, np.copysign(quotient, sign))


def to_integer(x, kind):
    """Convert floats to a 16-bit or 32-bit integer type, towards zero, saturated. NaN gives 0."""
    info = np.iinfo(kind)
    whole = np.trunc(np.asanyarray(x).astype(np.float64))
    return np.where(np.isnan(whole), 0, np.clip(whole, info.min, info.max)).astype(kind)


def to_half_towards_zero(x):
    """Convert float32 to float16, rounded towards zero."""
    half = x.astype(np.float16)
    too_large = np.abs(half.astype(np.float32)) > np.abs(x)
    # For both signs, the next lower bit pattern is the next number towards zero.
    lower = (half.view(np.uint16) - np.uint16(1)).view(np.float16)
    return np.where(too_large, lower, half)


def bfloat(x):
    """Convert bfloat16 numbers, given as uint16, to float32."""
    return (np.asanyarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(x):
    """Convert float32 to bfloat16 in uint16, to nearest even."""
    bits = np.asanyarray(x).view(np.uint32)
    below_tie = bits + np.uint32(0x7FFF)
    is_odd = bits >> np.uint32(16) & np.uint32(1)
    rounded = (below_tie + is_odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))

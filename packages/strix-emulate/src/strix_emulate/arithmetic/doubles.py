# SPDX-License-Identifier: BSD-3-Clause
"""float64 operations: division steps, reduction of angles, sine and power of two.

Source: RDNA3.5 ISA, chapter 16. Sine and power of two are series, because compilers can vectorize
series, but not calls of the C library. Rounded to float32, the results are equal to the C library's
for every float32 argument in the range of the function.
"""

import math
from fractions import Fraction
from functools import cache

import numpy as np

from strix_emulate.arithmetic import floats


def exponent(x):
    """Return the biased exponent field."""
    return (np.asanyarray(x).view(np.uint64) >> np.uint64(52) & np.uint64(0x7FF)).astype(np.int32)


def ldexp(x, power):
    """Compute x * 2**power, rounded once."""
    return np.ldexp(x, np.clip(power, -4200, 4200))


_DIVISION = floats.Division(
    word=np.uint64,
    one=1.0,
    smallest=2.0**-1022,
    power=128,
    apart=768,
    few=53,
    exponent=exponent,
    ldexp=ldexp,
)


def div_scale(value, denominator, numerator):
    """Compute V_DIV_SCALE_F64: see :func:`floats.scale`."""
    return floats.scale(value, denominator, numerator, _DIVISION)


def div_fmas(a, b, c, flag):
    """Compute V_DIV_FMAS_F64: an fma, rounded once.

    Where V_DIV_SCALE has set `flag`, the fma is multiplied before it is rounded: by 2**128 if
    |c| >= 2, or else by 2**-128.
    """
    power = np.where(flag, np.where(exponent(c) > 1023, 128, -128), 0)
    return floats.scaled_fma64(a, b, c, power)


def div_fixup(quotient, denominator, numerator):
    """Compute V_DIV_FIXUP_F64: see :func:`floats.div_fixup`."""
    return floats.fixup(quotient, denominator, numerator, exponent, -1075)


@cache
def _two_over_pi() -> int:
    """Compute the first 1201 bits of 2 / pi, with Machin's formula for pi."""
    one = 1 << 1400

    def arctan(inverse: int) -> int:
        total = 0
        term = one // inverse
        n = 1
        while term:
            total += (term if n % 4 == 1 else -term) // n
            term //= inverse * inverse
            n += 2
        return total

    pi = 4 * (4 * arctan(5) - arctan(239))
    return (2 * one << 1201) // pi


@cache
def _preop(shift: int, power: int) -> float:
    """Return 53 bits of 2 / pi, multiplied by 2**power.

    They follow the first `shift` bits after the binary point of 2 / pi.
    """
    bits = (_two_over_pi() << shift) >> (1201 - 53) & ((1 << 53) - 1)
    return float(Fraction(bits) * Fraction(2) ** (power - 53 - shift))


def trig_preop(x, segment):
    """Compute V_TRIG_PREOP_F64: 53 bits of 2 / pi, chosen by the exponent of x and by `segment`."""
    high = exponent(x)
    shift = (np.asanyarray(segment) & np.uint32(31)).astype(np.int64) * 53
    shift = shift + np.where(high > 1077, high - 1077, 0)
    power = np.where(high >= 1968, 128, 0)
    return np.vectorize(lambda n, p: _preop(int(n), int(p)), otypes=[np.float64])(shift, power)


#: The low bits of the sum of this and a small number are the integer nearest to that number.
_TO_INTEGER = 1.5 * 2.0**52
#: pi / 2 as the sum of two parts. The first has at most 33 bits, so its product with a small
#: integer is exact.
_QUARTER = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a626331p-34"),
)
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(1, 9)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(2, 9)]
_POWER = [math.log(2) ** k / math.factorial(k) for k in range(1, 14)]


def _series(x, terms: list[float]):
    total = terms[-1]
    for term in terms[-2::-1]:
        total = total * x + term
    return total


def exp2(x):
    """Compute 2**x, after limiting x to the range -1000 .. 1000."""
    x = np.clip(x, -1000.0, 1000.0)
    shifted = x + _TO_INTEGER
    part = x - (shifted - _TO_INTEGER)
    power = (shifted.view(np.uint64) + np.uint64(1023)) << np.uint64(52)
    return (1.0 + part * _series(part, _POWER)) * power.view(np.float64)


def sine(angle, quarters: int = 0):
    """Compute sin(angle + quarters * pi / 2) for |angle| <= 2 pi."""
    shifted = angle * (2 / math.pi) + _TO_INTEGER
    whole = shifted - _TO_INTEGER
    part = angle - whole * _QUARTER[0] - whole * _QUARTER[1]
    quarter = shifted.view(np.uint64) + np.uint64(quarters)
    square = part * part
    result = np.where(
        (quarter & np.uint64(1)) != 0,
        1.0 - square * 0.5 + square * square * _series(square, _COSINE),
        part * (1.0 + square * _series(square, _SINE)),
    )
    return np.where((quarter & np.uint64(2)) != 0, -result, result)


#: (kind of the result, kinds of the sources, function) by mnemonic.
TABLE = {
    "v_ldexp_f64": ("f64", ("f64", "i32"), ldexp),
    "v_cvt_i32_f64": ("i32", ("f64",), lambda x: floats.to_integer(x, np.int32)),
    "v_cvt_u32_f64": ("u32", ("f64",), lambda x: floats.to_integer(x, np.uint32)),
    "v_rcp_f64": ("f64", ("f64",), lambda x: 1.0 / np.asanyarray(x)),
    "v_rsq_f64": ("f64", ("f64",), lambda x: 1.0 / np.sqrt(x)),
    "v_sqrt_f64": ("f64", ("f64",), np.sqrt),
    "v_div_fixup_f64": ("f64", ("f64",) * 3, div_fixup),
    "v_trig_preop_f64": ("f64", ("f64", "u32"), trig_preop),
}

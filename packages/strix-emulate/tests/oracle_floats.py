# SPDX-License-Identifier: BSD-3-Clause
"""The oracle for roots, logarithms, division, exponents and other functions of floating point.

Entries have the format of :mod:`oracle`. A function may return the set of results that the ISA
document allows.
"""

import math
from collections.abc import Callable
from fractions import Fraction

from exact import (
    F16,
    F32,
    F64,
    M64,
    NAN,
    ROUNDINGS,
    add,
    compare_numbers,
    encode,
    extreme,
    fma,
    make_rounding,
    multiply,
    negate,
    power_of_two,
    signed,
    to_integer,
    value,
)

FORMS = {"f16": F16, "f32": F32, "f64": F64}
_SIGN = 1 << 31


def near(number, form: tuple, negative: bool = False) -> set[int]:
    """Return the nearest number and its neighbours, because an error of 1 ulp is allowed."""
    bits = encode(number, form, negative)
    if isinstance(number, str):
        return {bits}
    sign = bits & 1 << (form[3] - 1)
    size = bits ^ sign
    return {sign | max(size - 1, 0), bits, sign | size + 1}


def square_root(x: Fraction) -> Fraction:
    """Return the square root with a relative error below 2**-150."""
    shift = 600 + 2 * max(0, x.denominator.bit_length() - x.numerator.bit_length())
    return Fraction(math.isqrt((x.numerator << shift) // x.denominator), 1 << shift // 2)


def _exp2(x, _negative):
    if isinstance(x, str):
        return ("inf" if x == "inf" else Fraction(0)), False
    integer = math.floor(x)
    return Fraction(2.0 ** float(x - integer)) * power_of_two(integer), False


def _log2(x, negative):
    if x == 0:
        return "-inf", True
    if negative:
        return "nan", False
    return (x, False) if x == "inf" else (Fraction(math.log2(x)), False)


def _reciprocal(x, negative):
    if isinstance(x, str):
        return Fraction(0), negative
    if x == 0:
        return ("-inf" if negative else "inf"), negative
    return 1 / x, negative


def _square_root(x, negative):
    if x == 0:
        return Fraction(0), negative
    if negative:
        return "nan", False
    return (x, False) if x == "inf" else (square_root(x), False)


def _inverse_root(x, negative):
    root, sign = _square_root(x, negative)
    return (root, sign) if root == "nan" else _reciprocal(root, sign)


def _wave(function: Callable) -> Callable:
    """Return sine or cosine of x turns. As documented, x counts as 0 if |x| > 256."""

    def run(x, negative):
        if isinstance(x, str):
            return "nan", False
        turns = x - int(x) if abs(x) <= 256 else Fraction(0)
        quarter = turns * 4
        if quarter.denominator == 1:
            number = Fraction(round(function(2 * math.pi * float(turns))))
        else:
            number = Fraction(function(2 * math.pi * float(turns)))
        return number, negative

    return run


def _approximated(function: Callable, form: tuple, flushes: bool) -> Callable:
    """Return a function with an allowed error of 1 ulp.

    With `flushes`, denormal operands and results count as zero.
    """
    tiny = 1 << (form[0] - 1)
    top = 1 << (form[3] - 1)

    def run(bits: int) -> set[int]:
        x, negative = value(bits, form)
        if x == "nan":
            return {NAN[form]}
        small = not isinstance(x, str) and bits & ~top < tiny
        number, sign = function(Fraction(0) if flushes and small else x, negative)
        result = near(number, form, sign)
        if flushes:
            denormal = {b for b in result if b & ~top < tiny}
            result = (result - denormal) | {b & top for b in denormal}
        if 0 in result or top in result:
            # The sign of a zero is not documented, so both zeros are allowed.
            result |= {0, top}
        return result

    return run


def _fraction(form: tuple) -> Callable:
    floor = make_rounding(lambda x: x // 1, form)
    one_bits = encode(Fraction(1), form)

    def run(bits: int) -> set[int] | int:
        if isinstance(value(bits, form)[0], str):
            return NAN[form]
        result = add(bits, negate(floor(bits), form), form)
        # For a number just below zero, the result may be 1 or the largest number below 1.
        return {one_bits, one_bits - 1} if result == one_bits else result

    return run


def _mantissa(form: tuple) -> Callable:
    def run(bits: int) -> int:
        x, negative = value(bits, form)
        if isinstance(x, str) or not x:
            return NAN[form] if x == "nan" else bits
        return encode(x / power_of_two(_exponent_of(x)), form, negative)

    return run


def _exponent_of(x: Fraction) -> int:
    """Return the exponent e for which 0.5 * 2**e <= |x| < 2**e."""
    x = abs(x)
    n = x.numerator.bit_length() - x.denominator.bit_length()
    return n + 1 if x >= power_of_two(n) else n


def _exponent(form: tuple) -> Callable:
    def run(bits: int) -> int:
        x, _ = value(bits, form)
        return 0 if isinstance(x, str) or not x else _exponent_of(x)

    return run


def scaled(bits: int, power: int, form: tuple) -> int:
    """Return a number times 2**power, rounded once."""
    x, negative = value(bits, form)
    return encode(x if isinstance(x, str) else x * power_of_two(power), form, negative)


def _field(bits: int, form: tuple) -> int:
    precision, _, _, width = form
    return bits >> (precision - 1) & (1 << (width - precision)) - 1


def _is_denormal(bits: int, form: tuple) -> bool:
    return not _field(bits, form) and value(bits, form)[0] != 0


def _quotient(a: int, b: int, form: tuple) -> int:
    (x, nx), (y, ny) = value(a, form), value(b, form)
    negative = nx != ny
    if "nan" in (x, y) or (isinstance(x, str) and isinstance(y, str)) or x == y == 0:
        return NAN[form]
    if isinstance(x, str) or y == 0:
        return encode("-inf" if negative else "inf", form)
    return encode(Fraction(0) if isinstance(y, str) else x / y, form, negative)


def _division_scale(form: tuple, power: int, min_difference: int, max_numerator: int) -> Callable:
    """Return the function of V_DIV_SCALE. Its result is a tuple: allowed numbers, and the flag."""
    one_bits = encode(Fraction(1), form)

    def run(a: int, denominator: int, numerator: int):
        up = scaled(a, power, form)
        down = scaled(a, -power, form)
        if 0 in (value(numerator, form)[0], value(denominator, form)[0]):
            return NAN[form], 0
        small_inverse = _is_denormal(_quotient(one_bits, denominator, form), form)
        small_quotient = _is_denormal(_quotient(numerator, denominator, form), form)
        if _field(numerator, form) - _field(denominator, form) >= min_difference:
            return (up if a == denominator else a), 1
        if _is_denormal(denominator, form):
            return up, 0
        if small_inverse and small_quotient:
            # The document scales the denominator up, but LLVM's division is correct only if
            # V_DIV_SCALE scales it down. Both results are allowed.
            return ({up, down} if a == denominator else a), 1
        if small_inverse:
            return down, 0
        if small_quotient:
            return (up if a == numerator else a), 1
        return (up if _field(numerator, form) <= max_numerator else a), 0

    return run


def _division_fix(form: tuple, underflow: int | None) -> Callable:
    """Return V_DIV_FIXUP, a function of the quotient, the denominator and the numerator."""

    def run(quotient: int, denominator: int, numerator: int):
        (n, nn), (d, nd) = value(numerator, form), value(denominator, form)
        negative = nn != nd
        infinity = encode("-inf" if negative else "inf", form)
        zero = encode(Fraction(0), form, negative)
        if "nan" in (n, d) or (d == 0 and n == 0) or (isinstance(d, str) and isinstance(n, str)):
            return NAN[form]
        if d == 0 or isinstance(n, str):
            return infinity
        if isinstance(d, str) or n == 0:
            return zero
        if underflow and _field(numerator, form) - _field(denominator, form) < underflow:
            return zero
        top = 1 << (form[3] - 1)
        size = quotient & ~top
        if value(quotient, form)[0] == "nan":
            # The quotient is a NaN because earlier steps overflowed. In the ISA document, the
            # result is this NaN, but LLVM's division is correct only if V_DIV_FIXUP returns
            # infinity. Both results are allowed.
            return {NAN[form], infinity}
        return size | top * negative

    return run


def _division_fma(form: tuple, power: int) -> Callable:
    """Return the function of V_DIV_FMAS.

    If the flag is set, the result is scaled: up if the addend is large, otherwise down.
    """
    bias = form[2]

    def run(a: int, b: int, c: int, flag: int) -> int:
        if not flag:
            return fma(a, b, c, form)
        exponent = power if _field(c, form) > bias else -power
        (x, nx), (y, ny), (z, nz) = (value(v, form) for v in (a, b, c))
        if any(isinstance(v, str) for v in (x, y, z)):
            return fma(a, b, c, form)
        return encode((x * y + z) * power_of_two(exponent), form, nx != ny and nz)

    return run


def _in_class(form: tuple) -> Callable:
    quiet = 1 << (form[0] - 2)

    def run(bits: int, class_mask: int) -> int:
        x, negative = value(bits, form)
        if x == "nan":
            return class_mask >> bool(bits & quiet) & 1
        if isinstance(x, str):
            size = 3
        elif x == 0:
            size = 0
        else:
            size = 1 if _is_denormal(bits, form) else 2
        return class_mask >> (5 - size if negative else 6 + size) & 1

    return run


def median(a: int, b: int, c: int, form: tuple) -> int:
    """Return the median, as the document defines it."""
    if any(value(x, form)[0] == "nan" for x in (a, b, c)):
        return extreme(extreme(a, b, form, False), c, form, False)
    top = extreme(extreme(a, b, form, True), c, form, True)
    for x, y, z in ((a, b, c), (b, a, c), (c, a, b)):
        if value(x, form)[0] == value(top, form)[0]:
            return extreme(y, z, form, True)
    raise AssertionError


def _preop(shift: int) -> Callable:
    def run(bits: int, segment: int) -> int:
        exponent = _field(bits, F64)
        offset = (segment & 31) * 53 + max(0, exponent - 1077)
        significand = (_TWO_OVER_PI << offset) >> shift & ((1 << 53) - 1)
        power = -53 - offset + 128 * (exponent >= 1968)
        return encode(significand * power_of_two(power), F64)

    return run


def _arctan(inverse: int, unit: int) -> int:
    total = 0
    n = 0
    while term := unit // inverse ** (2 * n + 1):
        total = total + (-1) ** n * (term // (2 * n + 1))
        n = n + 1
    return total


def _two_over_pi() -> int:
    """Return 1201 bits of 2 / pi, by Gauss's formula for pi."""
    unit = 1 << 1500
    pi = 4 * (12 * _arctan(18, unit) + 8 * _arctan(57, unit) - 5 * _arctan(239, unit))
    return (2 * unit << 1201) // pi


_TWO_OVER_PI = _two_over_pi()


def zero_wins(a: int, b: int, c: int | None) -> int | set[int]:
    """Return a * b + c, where 0 times anything is 0. For V_MUL, `c` is None."""
    if 0 in (value(a, F32)[0], value(b, F32)[0]):
        # If the addend is -0, the document's result is -0, but the sum of +0 and -0 is +0.
        return 0 if c is None else {c, add(c, 0, F32)}
    return multiply(a, b, F32) if c is None else fma(a, b, c, F32)


def _cube(name: str) -> Callable:
    """Return the function of a V_CUBE instruction, with the branches of the document's text."""

    def run(x, y, z):
        def size_at_least(a, b):
            return compare_numbers(a & ~_SIGN, b & ~_SIGN, F32) in (0, 1)

        def below_zero(a):
            return compare_numbers(a, 0, F32) == -1

        if size_at_least(z, x) and size_at_least(z, y):
            face = 4
            low = below_zero(z)
            sc = (x, x ^ _SIGN)
            tc = (y ^ _SIGN,) * 2
            ma = z
        elif size_at_least(y, x):
            face = 2
            low = below_zero(y)
            sc = (x, x)
            tc = (z, z ^ _SIGN)
            ma = y
        else:
            face = 0
            low = below_zero(x)
            sc = (z ^ _SIGN, z)
            tc = (y ^ _SIGN,) * 2
            ma = x
        if name == "id":
            return encode(Fraction(face + low), F32)
        if name == "ma":
            return add(ma, ma, F32)
        return sc[low] if name == "sc" else tc[low]

    return run


def vector_table() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    table: dict[str, tuple[str, tuple[str, ...], Callable]] = {}
    for name in ("id", "sc", "tc", "ma"):
        table[f"v_cube{name}_f32"] = ("f32", ("f32",) * 3, _cube(name))
    for kind, form in FORMS.items():
        for name, function in (
            ("rcp", _reciprocal),
            ("rsq", _inverse_root),
            ("sqrt", _square_root),
            ("exp", _exp2),
            ("log", _log2),
            ("sin", _wave(math.sin)),
            ("cos", _wave(math.cos)),
            ("rcp_iflag", _reciprocal),
        ):
            flushes = form is F32 and name not in ("sin", "cos")
            table[f"v_{name}_{kind}"] = (kind, (kind,), _approximated(function, form, flushes))
        for name, rounding in ROUNDINGS.items():
            table[f"v_{name}_{kind}"] = (kind, (kind,), make_rounding(rounding, form))
        table[f"v_fract_{kind}"] = (kind, (kind,), _fraction(form))
        table[f"v_frexp_mant_{kind}"] = (kind, (kind,), _mantissa(form))
        result, power = ("u16", "u16") if form is F16 else ("u32", "u32")
        table[f"v_frexp_exp_i{result[1:]}_{kind}"] = (result, (kind,), _exponent(form))

        def scale(a, n, form=form, bits=int(power[1:])):
            return scaled(a, signed(n, bits), form)

        table[f"v_ldexp_{kind}"] = (kind, (kind, power), scale)
        table[f"v_cmp_class_{kind}"] = (
            "mask",
            (kind, "u16" if form is F16 else "u32"),
            _in_class(form),
        )
        table[f"v_med3_{kind}"] = (kind, (kind,) * 3, lambda a, b, c, f=form: median(a, b, c, f))
        r = f"r:{kind}"
        literal = f"lit:{kind}"
        for name, sources in (
            ("fmac", (kind, kind, "old")),
            ("fmamk", (r, literal, r)),
            ("fmaak", (r, r, literal)),
        ):
            table[f"v_{name}_{kind}"] = (kind, sources, lambda a, b, c, f=form: fma(a, b, c, f))
    for kind, power, min_difference, max_numerator in (("f32", 64, 96, 23), ("f64", 128, 768, 53)):
        form = FORMS[kind]
        registers = (f"r:{kind}",) * 3
        table[f"v_div_scale_{kind}"] = (
            f"{kind}+mask",
            registers,
            _division_scale(form, power, min_difference, max_numerator),
        )
        table[f"v_div_fmas_{kind}"] = (kind, (kind,) * 3 + ("vcc",), _division_fma(form, power))
        table[f"v_div_fixup_{kind}"] = (
            kind,
            (kind,) * 3,
            _division_fix(form, -150 if form is F32 else -1075),
        )
    table["v_div_fixup_f16"] = ("f16", ("f16",) * 3, _division_fix(F16, None))
    table["v_trig_preop_f64"] = ("f64", ("f64", "u32"), _preop(1201 - 53))
    table["v_mul_dx9_zero_f32"] = ("f32", ("f32",) * 2, lambda a, b: zero_wins(a, b, None))
    table["v_fma_dx9_zero_f32"] = ("f32", ("f32",) * 3, zero_wins)
    table["v_fmac_dx9_zero_f32"] = ("f32", ("f32", "f32", "old"), zero_wins)
    for name, rounding in (
        ("floor", lambda x: x // 1),
        ("nearest", lambda x: (x + Fraction(1, 2)) // 1),
    ):
        table[f"v_cvt_{name}_i32_f32"] = (
            "u32",
            ("f32",),
            lambda a, r=rounding: to_integer(a, F32, -(2**31), 2**31 - 1, r) & M64,
        )
    return table

# SPDX-License-Identifier: BSD-3-Clause
"""Vector operations by mnemonic: kind of the result, kinds of the sources, and the function.

Names, operands and results are those of the RDNA3.5 ISA document, chapter 16. Kinds are f32, u16,
b64 and so on. The kind "lane" is the number of the lane. Operations that do not fit this form are
compiled in :mod:`instructions.valu` and :mod:`instructions.crosslane`.
"""

from collections.abc import Callable

import numpy as np

from strix_emulate.arithmetic import doubles, floats, subdword

U32 = np.uint32
_24_BITS = U32(0xFFFFFF)


def _dtype(kind: str) -> np.dtype:
    """Return numpy's type for a kind such as "f32" or "i16"."""
    return np.dtype(f"{kind[0]}{int(kind[1:]) // 8}")


def _as_int64(x):
    return np.asanyarray(x).astype(np.int64)


def _as_uint64(x):
    return np.asanyarray(x).astype(np.uint64)


def _shift(function, bits):
    return lambda count, value: function(value, (count & (bits - 1)).astype(value.dtype))


def _bfe(value, offset, width):
    offset = offset & U32(31)
    width = width & U32(31)
    return (value >> offset) & ((U32(1) << width) - U32(1))


def _bfe_signed(value, offset, width):
    offset = offset & U32(31)
    width = (width & U32(31)).astype(np.int64)
    field = (_as_int64(value) & 0xFFFFFFFF) >> _as_int64(offset) & ((1 << width) - 1)
    # If the field reaches beyond bit 31, its upper bits are copies of the sign bit.
    field = np.where(offset + width > 32, _as_int64(value) >> _as_int64(offset), field)
    sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((field & ((1 << width) - 1) ^ sign) - sign).astype(np.int32)


def _perm(a, b, selector):
    """Compute V_PERM_B32. A byte of `selector` selects a byte of {a, b}, a sign bit, 0 or 0xff."""
    both = (_as_uint64(a) << np.uint64(32)) | b
    result = np.uint64(0)
    for i in range(4):
        pick = (np.asanyarray(selector) >> U32(8 * i) & U32(0xFF)).astype(np.uint64)
        byte = both >> (np.minimum(pick, 7) * np.uint64(8)) & np.uint64(0xFF)
        if (pick > 7).any():
            # Selectors 8 to 11 repeat the sign bit of byte 1, 3, 5 or 7. Selector 12 gives 0, and
            # larger selectors give 0xff.
            sign = both >> ((pick & np.uint64(3)) * np.uint64(16) + np.uint64(15)) & np.uint64(1)
            other = np.where(pick < 12, sign * np.uint64(0xFF), np.where(pick == 12, 0, 0xFF))
            byte = np.where(pick > 7, other.astype(np.uint64), byte)
        result = result | byte << np.uint64(8 * i)
    return result.astype(U32)


def _align(a, b, count, unit):
    """Shift {a, b} right by count units of 1 or 8 bits, modulo 32 bits. Return the low half."""
    both = _as_uint64(a) << np.uint64(32) | b
    units = _as_uint64(count) % np.uint64(32 // unit)
    return (both >> (units * np.uint64(unit))).astype(U32)


def _multiply_wide(a, b):
    return np.multiply(a, b, dtype=np.uint64)


def _multiply_high(a, b):
    return (_multiply_wide(a, b) >> np.uint64(32)).astype(U32)


def _multiply_high_signed(a, b):
    return (np.multiply(a, b, dtype=np.int64) >> 32).astype(np.int32)


def _multiply_24(a, b):
    return (a & _24_BITS) * (b & _24_BITS)


def _multiply_high_24(a, b):
    return _multiply_high(a & _24_BITS, b & _24_BITS)


def _multiply_signed_24(a, b):
    return (_sign_extended(24, a) * _sign_extended(24, b)).astype(np.int32)


def _mad_signed_24(a, b, c):
    return (_sign_extended(24, a) * _sign_extended(24, b) + c).astype(np.int32)


def _sign_extended(bits, value):
    """Sign-extend the low bits of value to int64."""
    return (_as_int64(value) << (64 - bits)) >> (64 - bits)


def _bit_field_mask(a, b):
    return ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))


def reverse_bits(x):
    """Reverse the order of 32 bits."""
    for shift, keep in (
        (1, 0x55555555),
        (2, 0x33333333),
        (4, 0x0F0F0F0F),
        (8, 0x00FF00FF),
        (16, 0xFFFF),
    ):
        x = (x >> U32(shift) & U32(keep)) | (x & U32(keep)) << U32(shift)
    return x


def leading_zeros(x):
    """Return the number of zeros above the highest set bit, or -1 if no bit is set."""
    is_zero = x == 0
    highest = np.floor(np.log2(np.maximum(x, 1).astype(np.float64)))
    return np.where(is_zero, -1, 31 - highest).astype(np.int32)


def trailing_zeros(x):
    """Return the number of zeros below the lowest set bit, or -1 if no bit is set."""
    is_zero = x == 0
    lowest_bit = x & (~x + U32(1))
    lowest = np.log2(np.maximum(lowest_bit, 1).astype(np.float64))
    return np.where(is_zero, -1, lowest).astype(np.int32)


def _lane_count(first):
    """Return V_MBCNT: for each lane, a base plus the number of lower lanes in a mask of 32 lanes.

    `first` is the number of the lane of the mask's lowest bit.
    """

    def count(mask, base, lane):
        bits = np.maximum(np.minimum(lane.astype(np.int64) - first, 32), 0).astype(np.uint64)
        below = ((np.uint64(1) << bits) - np.uint64(1)).astype(U32)
        return np.bitwise_count(mask & below).astype(U32) + base

    return count


def _in_float64(function):
    """Return a function that computes in float64, and converts the result to its argument's type.

    numpy's vector code for shorter types has errors of up to 3 ulp.
    """
    return lambda x: function(np.asanyarray(x).astype(np.float64)).astype(x.dtype)


def _log2(x):
    """Compute log2, with the same NaN for all negative numbers.

    Otherwise the sign of the NaN would depend on the machine, because the NaN of the C library and
    the NaN of numpy without AVX-512 have different signs.
    """
    return np.where(x < 0, np.float64(np.nan), np.log2(x))


def _reciprocal_root(x):
    return 1 / np.sqrt(x)


def _flushed(function):
    """Return a float32 operation that treats a denormal source or result as zero.

    LLVM describes these operations as "1 ulp, flushed".
    """

    def run(x):
        result = function(floats.flush(np.asanyarray(x)))
        return floats.flush(np.asanyarray(result).astype(np.float32))

    return run


def _on_face(choose: Callable) -> Callable:
    """Return a V_CUBE operation. The largest of |x|, |y| and |z| selects one of three results.

    If several of them are the largest, z takes precedence over y, and y over x.
    """

    def run(x, y, z):
        a, b, c = np.abs(x), np.abs(y), np.abs(z)
        by_x, by_y, by_z = choose(x, y, z)
        return np.where((c >= a) & (c >= b), by_z, np.where(b >= a, by_y, by_x))

    return run


def _by_sign(x, negative: float, positive: float):
    return np.where(x < 0, np.float32(negative), np.float32(positive))


def _cube_id(x, y, z):
    return _by_sign(x, 1, 0), _by_sign(y, 3, 2), _by_sign(z, 5, 4)


def _cube_sc(x, y, z):
    return np.where(x < 0, z, -z), x, np.where(z < 0, -x, x)


def _cube_tc(_x, y, z):
    return -y, np.where(y < 0, -z, z), -y


def _cube_ma(x, y, z):
    return x + x, y + y, z + z


class _Table(dict[str, tuple[str, tuple[str, ...], Callable]]):
    """Operations by mnemonic: the kind of the result, the kinds of the sources, the function."""

    def add(self, kind, count, names):
        """Add operations whose `count` sources and result are all of one kind."""
        for name, function in names.items():
            self[name] = (kind, (kind,) * count, function)


def _on_floats() -> _Table:
    table = _Table()
    for kind, fma in (
        ("f32", floats.fma32),
        ("f16", floats.fma16),
        ("f64", floats.fma64),
    ):
        _add_arithmetic(table, kind, fma)
    _add_transcendental(table)
    table.add("f32", 3, {"v_div_fixup_f32": floats.div_fixup})
    table.add(
        "f32",
        3,
        {
            "v_cubeid_f32": _on_face(_cube_id),
            "v_cubesc_f32": _on_face(_cube_sc),
            "v_cubetc_f32": _on_face(_cube_tc),
            "v_cubema_f32": _on_face(_cube_ma),
        },
    )
    table["v_ldexp_f32"] = ("f32", ("f32", "i32"), floats.ldexp)
    table["v_ldexp_f16"] = ("f16", ("f16", "i16"), floats.ldexp)
    table.add("f32", 2, {"v_mul_dx9_zero_f32": _multiply_dx9})
    for kind, power_kind in (
        ("f32", "i32"),
        ("f16", "i16"),
        ("f64", "i32"),
    ):
        table[f"v_fract_{kind}"] = (kind, (kind,), _fraction(kind))
        table[f"v_frexp_mant_{kind}"] = (kind, (kind,), _mantissa)
        table[f"v_frexp_exp_{power_kind}_{kind}"] = (power_kind, (kind,), _exponent(power_kind))
    return table


def _add_arithmetic(table: _Table, kind: str, fma: Callable) -> None:
    two_sources = {
        f"v_add_{kind}": np.add,
        f"v_sub_{kind}": np.subtract,
        f"v_mul_{kind}": np.multiply,
        f"v_subrev_{kind}": lambda a, b: b - a,
    }
    three_sources = {
        f"v_fma_{kind}": fma,
        f"v_fmac_{kind}": fma,
        f"v_fmamk_{kind}": fma,
        f"v_fmaak_{kind}": fma,
    }
    one_source = {
        f"v_trunc_{kind}": np.trunc,
        f"v_floor_{kind}": np.floor,
        f"v_ceil_{kind}": np.ceil,
        f"v_rndne_{kind}": np.rint,
    }
    table.add(kind, 2, two_sources)
    table.add(kind, 3, three_sources)
    table.add(kind, 1, one_source)


def _add_transcendental(table: _Table) -> None:
    table.add(
        "f32",
        1,
        {
            "v_exp_f32": _flushed(_in_float64(doubles.exp2)),
            "v_log_f32": _flushed(_in_float64(_log2)),
            "v_rcp_f32": _flushed(lambda x: np.float32(1) / x),
            "v_sqrt_f32": _flushed(np.sqrt),
            "v_rsq_f32": _flushed(_in_float64(_reciprocal_root)),
            "v_rcp_iflag_f32": _flushed(lambda x: np.float32(1) / x),
        },
    )
    table.add(
        "f16",
        1,
        {
            "v_exp_f16": _in_float64(doubles.exp2),
            "v_log_f16": _in_float64(_log2),
            "v_rcp_f16": lambda x: np.float16(1) / x,
            "v_sqrt_f16": np.sqrt,
            "v_rsq_f16": _in_float64(_reciprocal_root),
        },
    )


def _multiply_dx9(a, b):
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def _fraction(kind: str) -> Callable:
    dtype = _dtype(kind)
    # The ISA requires a result below 1, but the rounded difference may be 1.
    largest = dtype.type(1 - np.finfo(dtype).epsneg)
    return lambda x: np.minimum(x - np.floor(x), largest)


def _mantissa(x):
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def _exponent(kind: str) -> Callable:
    dtype = _dtype(kind)
    return lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(dtype)


def _conversions() -> _Table:
    table = _Table()
    for kind, source in (
        ("f32", "f16"),
        ("f16", "f32"),
        ("f32", "i32"),
        ("f32", "u32"),
        ("f16", "i16"),
        ("f16", "u16"),
        ("f64", "f32"),
        ("f32", "f64"),
        ("f64", "i32"),
        ("f64", "u32"),
    ):
        table[f"v_cvt_{kind}_{source}"] = (kind, (source,), _to_float(kind))
    for kind, source in (
        ("i32", "f32"),
        ("u32", "f32"),
        ("i16", "f16"),
        ("u16", "f16"),
    ):
        table[f"v_cvt_{kind}_{source}"] = (kind, (source,), _to_integer(kind))
    for number in range(4):
        table[f"v_cvt_f32_ubyte{number}"] = ("f32", ("u32",), _byte_to_float(number))
    for name in ("v_cvt_pk_rtz_f16_f32", "v_cvt_pkrtz_f16_f32"):
        table[name] = ("u32", ("f32", "f32"), _pack_halves_towards_zero)
    return table


def _to_float(kind: str) -> Callable:
    dtype = _dtype(kind)
    return lambda x: np.asanyarray(x).astype(dtype)


def _to_integer(kind: str) -> Callable:
    dtype = _dtype(kind).type
    return lambda x: floats.to_integer(x, dtype)


def _byte_to_float(number: int) -> Callable:
    return lambda x: (x >> U32(8 * number) & U32(255)).astype(np.float32)


def _pack_halves_towards_zero(a, b):
    low, high = (_half_bits_towards_zero(x) for x in (a, b))
    return low | high << U32(16)


def _half_bits_towards_zero(x):
    return floats.to_half_towards_zero(np.asanyarray(x)).view(np.uint16).astype(U32)


def _on_words() -> _Table:
    table = _Table()
    table.add(
        "u32",
        2,
        {
            "v_add_nc_u32": np.add,
            "v_sub_nc_u32": np.subtract,
            "v_subrev_nc_u32": lambda a, b: b - a,
            "v_mul_lo_u32": np.multiply,
            "v_mul_hi_u32": _multiply_high,
            "v_and_b32": np.bitwise_and,
            "v_or_b32": np.bitwise_or,
            "v_xor_b32": np.bitwise_xor,
            "v_xnor_b32": lambda a, b: ~(a ^ b),
            "v_max_u32": np.maximum,
            "v_min_u32": np.minimum,
            "v_lshlrev_b32": _shift(np.left_shift, 32),
            "v_lshrrev_b32": _shift(np.right_shift, 32),
            "v_mul_u32_u24": _multiply_24,
            "v_mul_hi_u32_u24": _multiply_high_24,
            "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
            "v_bfm_b32": _bit_field_mask,
        },
    )
    table.add(
        "i32",
        2,
        {
            "v_max_i32": np.maximum,
            "v_min_i32": np.minimum,
            "v_ashrrev_i32": _shift(np.right_shift, 32),
            "v_add_nc_i32": np.add,
            "v_sub_nc_i32": np.subtract,
            "v_mul_hi_i32": _multiply_high_signed,
            "v_mul_i32_i24": _multiply_signed_24,
        },
    )
    _add_three_words(table)
    return table


def _add_three_words(table: _Table) -> None:
    table.add(
        "u32",
        3,
        {
            "v_add3_u32": lambda a, b, c: a + b + c,
            "v_lshl_add_u32": lambda a, b, c: (a << (b & U32(31))) + c,
            "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & U32(31)),
            "v_xad_u32": lambda a, b, c: (a ^ b) + c,
            "v_lshl_or_b32": lambda a, b, c: (a << (b & U32(31))) | c,
            "v_and_or_b32": lambda a, b, c: (a & b) | c,
            "v_or3_b32": lambda a, b, c: a | b | c,
            "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
            "v_perm_b32": _perm,
            "v_bfe_u32": _bfe,
            "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
            "v_mad_u32_u24": lambda a, b, c: _multiply_24(a, b) + c,
        },
    )
    table.add("i32", 3, {"v_mad_i32_i24": _mad_signed_24})


def _on_bits() -> _Table:
    table = _Table()
    for name, first in (("lo", 0), ("hi", 32)):
        table[f"v_mbcnt_{name}_u32_b32"] = ("u32", ("u32", "u32", "lane"), _lane_count(first))
    table["v_alignbit_b32"] = (
        "u32",
        ("u32", "u32", "u16"),
        lambda a, b, count: _align(a, b, count, 1),
    )
    table["v_alignbyte_b32"] = (
        "u32",
        ("u32", "u32", "u16"),
        lambda a, b, count: _align(a, b, count, 8),
    )
    table["v_bfe_i32"] = ("i32", ("i32", "u32", "u32"), _bfe_signed)
    table.add(
        "u32",
        1,
        {
            "v_mov_b32": lambda x: x,
            "v_not_b32": np.invert,
            "v_bfrev_b32": reverse_bits,
        },
    )
    table["v_clz_i32_u32"] = ("i32", ("u32",), leading_zeros)
    table["v_ctz_i32_b32"] = ("i32", ("u32",), trailing_zeros)
    table["v_lshlrev_b64"] = ("u64", ("u32", "u64"), _shift(np.left_shift, 64))
    table["v_lshrrev_b64"] = ("u64", ("u32", "u64"), _shift(np.right_shift, 64))
    table["v_ashrrev_i64"] = ("i64", ("u32", "i64"), _shift(np.right_shift, 64))
    _add_16_bits(table)
    return table


def _add_16_bits(table: _Table) -> None:
    table.add(
        "u16",
        2,
        {
            "v_add_nc_u16": np.add,
            "v_sub_nc_u16": np.subtract,
            "v_mul_lo_u16": np.multiply,
            "v_and_b16": np.bitwise_and,
            "v_or_b16": np.bitwise_or,
            "v_xor_b16": np.bitwise_xor,
            "v_lshlrev_b16": _shift(np.left_shift, 16),
            "v_lshrrev_b16": _shift(np.right_shift, 16),
            "v_max_u16": np.maximum,
            "v_min_u16": np.minimum,
        },
    )
    table.add(
        "i16",
        2,
        {
            "v_max_i16": np.maximum,
            "v_min_i16": np.minimum,
            "v_ashrrev_i16": _shift(np.right_shift, 16),
            "v_add_nc_i16": np.add,
            "v_sub_nc_i16": np.subtract,
        },
    )
    table.add("u16", 1, {"v_mov_b16": lambda x: x, "v_not_b16": np.invert})
    table["v_mad_u16"] = ("u16", ("u16",) * 3, lambda a, b, c: a * b + c)
    table["v_pack_b32_f16"] = (
        "u32",
        ("u16", "u16"),
        lambda a, b: a.astype(U32) | b.astype(U32) << U32(16),
    )


TABLE = _on_floats() | _conversions() | _on_words() | _on_bits() | subdword.TABLE | doubles.TABLE
#: Operations of TABLE whose last source is the destination's old value.
ACCUMULATING = {
    "v_fmac_f32",
    "v_fmac_f16",
    "v_fmac_f64",
    "v_dot2acc_f32_f16",
    "v_fmac_dx9_zero_f32",
}
#: Integer operations whose result CLAMP saturates.
SATURATING = {
    "v_add_nc_u32",
    "v_add_nc_i32",
    "v_add_nc_u16",
    "v_add_nc_i16",
    "v_sub_nc_u32",
    "v_sub_nc_i32",
    "v_sub_nc_u16",
    "v_sub_nc_i16",
    "v_subrev_nc_u32",
    "v_subrev_nc_i32",
    "v_subrev_nc_u16",
    "v_subrev_nc_i16",
    "v_mad_u16",
    "v_mad_i16",
}
#: Steps of max, min and their combinations. The first step compares the first two sources. The
#: second step compares the result of the first step with the third source. A step "M" returns the
#: larger number, and a step "m" the smaller number. "med" is the median, which has no such steps.
_EXTREME_STEPS = {
    "max": "M",
    "min": "m",
    "max3": "MM",
    "min3": "mm",
    "maxmin": "Mm",
    "minmax": "mM",
    "med3": "med",
}


def _extremes() -> dict[str, tuple[str, str]]:
    table = {}
    for kind in ("f32", "f16", "f64"):
        for name, steps in _EXTREME_STEPS.items():
            table[f"v_{name}_{kind}"] = (kind, steps)
    return table


#: By mnemonic of max, min and their combinations: kind of the numbers, and steps as in
#: _EXTREME_STEPS. `extreme` makes the functions from these, because they depend on the IEEE mode.
EXTREMES = _extremes()


def extreme(name: str, ieee: bool) -> tuple[str, tuple[str, ...], Callable]:
    """Return an entry as in TABLE for an operation of EXTREMES, in IEEE mode or not."""
    kind, steps = EXTREMES[name]
    if steps == "med":
        return kind, (kind,) * 3, _median(ieee)
    pick = {"M": floats.larger, "m": floats.smaller}
    first = pick[steps[0]]
    if len(steps) == 1:
        return kind, (kind,) * 2, lambda a, b: first(a, b, ieee)
    second = pick[steps[1]]
    return kind, (kind,) * 3, lambda a, b, c: second(first(a, b, ieee), c, ieee)


def _median(ieee: bool) -> Callable:
    """Return V_MED3 as the ISA defines it.

    If a source is NaN, the result is that of V_MIN3. Otherwise the largest source is removed, and
    the result is the larger one of the two others.
    """

    def median(a, b, c):
        low = floats.smaller(floats.smaller(a, b, ieee), c, ieee)
        top = floats.larger(floats.larger(a, b, ieee), c, ieee)
        middle = np.where(top == b, floats.larger(a, c, ieee), floats.larger(a, b, ieee))
        middle = np.where(top == a, floats.larger(b, c, ieee), middle)
        return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), low, middle)

    return median


def _differs(a, b):
    return (a < b) | (a > b)


def _is_unordered(a, b):
    return np.isnan(a) | np.isnan(b)


#: Comparisons of floats by the condition in their mnemonics.
FLOAT_COMPARISONS = {
    "f": lambda _a, _b: np.False_,
    "t": lambda _a, _b: np.True_,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "lg": _differs,
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~_differs(a, b),
    "o": lambda a, b: ~_is_unordered(a, b),
    "u": _is_unordered,
}
_INTEGER_COMPARISONS = {
    "f": FLOAT_COMPARISONS["f"],
    "t": FLOAT_COMPARISONS["t"],
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def _comparisons() -> dict[str, tuple[str, Callable]]:
    table = {}
    for prefix in ("v_cmp", "v_cmpx"):
        for kind in ("f16", "f32", "f64"):
            for condition, function in FLOAT_COMPARISONS.items():
                table[f"{prefix}_{condition}_{kind}"] = (kind, function)
        for kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
            for condition, function in _INTEGER_COMPARISONS.items():
                table[f"{prefix}_{condition}_{kind}"] = (kind, function)
    return table


#: Vector comparisons: kind of both sources, and the function.
COMPARISONS = _comparisons()


def _carry(sign: int, swapped: bool):
    """Return a function that returns a sum or difference, and its carry or borrow."""

    def run(a, b, carry_in=0):
        if swapped:
            a, b = b, a
        total = _as_int64(a) + sign * _as_int64(b)
        total = total + sign * _as_int64(carry_in)
        return total.astype(U32), (total >> 32) != 0

    return run


def _mad_64(dtype):
    """Return a function that adds a product to a 64-bit addend. It returns the sum and bit 64."""

    def run(a, b, addend):
        product = np.multiply(a, b, dtype=dtype)
        total = product + addend
        if dtype is np.uint64:
            return total, total < addend
        overflows = ((product ^ total) & (addend ^ total)) < 0
        return total, overflows ^ (total < 0)

    return run


def _is_in_class(x, class_mask):
    """Compute V_CMP_CLASS: whether x is in one of the classes whose bits are set in the mask.

    The classes, from bit 0 on, are: signalling NaN, quiet NaN, -infinity, -normal, -denormal, -0,
    +0, +denormal, +normal, +infinity.
    """
    x = np.asanyarray(x)
    negative = np.signbit(x)
    quiet = floats.is_quiet(x)
    denormal = (np.abs(x) < np.finfo(x.dtype).smallest_normal) & (x != 0)
    normal = np.isfinite(x) & (x != 0) & ~denormal
    class_mask = np.asanyarray(class_mask).astype(U32)
    classes = (
        np.isnan(x) & ~quiet,
        np.isnan(x) & quiet,
        np.isinf(x) & negative,
        normal & negative,
        denormal & negative,
        (x == 0) & negative,
        (x == 0) & ~negative,
        denormal & ~negative,
        normal & ~negative,
        np.isinf(x) & ~negative,
    )
    result = np.False_
    for bit, is_of_class in enumerate(classes):
        result = result | is_of_class & ((class_mask >> U32(bit) & U32(1)) != 0)
    return result


def _select_by_mask(a, b, mask):
    return np.where(mask, b, a)


#: Entry of MASKED: kind of the result or "", kinds of the sources, the function, and whether the
#: function returns a mask.
_MaskedEntry = tuple[str, tuple[str, ...], Callable, bool]


def _masked() -> dict[str, _MaskedEntry]:
    sums = {
        "add": _carry(1, False),
        "sub": _carry(-1, False),
        "subrev": _carry(-1, True),
    }
    table: dict[str, _MaskedEntry] = {}
    for name, function in sums.items():
        table[f"v_{name}_co_u32"] = ("u32", ("u32", "u32"), function, True)
    for name, function in sums.items():
        table[f"v_{name}_co_ci_u32"] = ("u32", ("u32", "u32", "mask"), function, True)
    for kind in ("b16", "b32"):
        table[f"v_cndmask_{kind}"] = (kind, (kind, kind, "mask"), _select_by_mask, False)
    table["v_mad_u64_u32"] = ("u64", ("u32", "u32", "u64"), _mad_64(np.uint64), True)
    table["v_mad_i64_i32"] = ("i64", ("i32", "i32", "i64"), _mad_64(np.int64), True)
    table["v_div_scale_f32"] = ("f32", ("f32",) * 3, floats.div_scale, True)
    table["v_div_scale_f64"] = ("f64", ("f64",) * 3, doubles.div_scale, True)
    table["v_div_fmas_f32"] = ("f32", ("f32", "f32", "f32", "mask"), floats.div_fmas, False)
    table["v_div_fmas_f64"] = ("f64", ("f64", "f64", "f64", "mask"), doubles.div_fmas, False)
    for prefix in ("v_cmp", "v_cmpx"):
        for kind in ("f16", "f32", "f64"):
            table[f"{prefix}_class_{kind}"] = ("", (kind, "u16"), _is_in_class, True)
    for name, (kind, function) in COMPARISONS.items():
        table[name] = ("", (kind, kind), function, True)
    return table


#: Operations with lane masks. The source kind "mask" is a bit for each lane. The function returns
#: the result, a mask, or both in this order.
MASKED = _masked()
NAMES = {*TABLE, *EXTREMES, *MASKED, "v_nop", "v_swap_b32", "v_swap_b16", "v_mqsad_u32_u8"}

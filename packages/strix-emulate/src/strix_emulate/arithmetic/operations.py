# SPDX-License-Identifier: BSD-3-Clause
"""Vector operations by mnemonic: kinds of the result and of each source, and the function.

Names, operands and results are those of the RDNA3.5 ISA document, chapter 16. Kinds are f32, u16,
b64 and the like; "lane" is the number of the lane. What does not fit the form (carries, masks) is
compiled in :mod:`valu`.
"""

from collections.abc import Callable

import numpy as np

from strix_emulate.arithmetic import doubles, floats, subdword

U32 = np.uint32


def _shift(function, bits):
    return lambda count, value: function(value, (count & (bits - 1)).astype(value.dtype))


def _bfe(value, offset, width):
    offset, width = offset & U32(31), width & U32(31)
    return (value >> offset) & ((U32(1) << width) - U32(1))


def _bfe_signed(value, offset, width):
    offset, width = offset & U32(31), (width & U32(31)).astype(np.int64)
    field = (value.astype(np.int64) & 0xFFFFFFFF) >> offset.astype(np.int64) & ((1 << width) - 1)
    # bits past the top are copies of the sign
    field = np.where(offset + width > 32, value.astype(np.int64) >> offset.astype(np.int64), field)
    sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((field & ((1 << width) - 1) ^ sign) - sign).astype(np.int32)


def _perm(a, b, selector):
    """Compute V_PERM_B32: each selector byte picks one of the 8 bytes {a, b}, a sign, 0 or 0xff."""
    both = (np.asanyarray(a).astype(np.uint64) << np.uint64(32)) | b
    result = np.uint64(0)
    for i in range(4):
        pick = (np.asanyarray(selector) >> U32(8 * i) & U32(0xFF)).astype(np.uint64)
        byte = both >> (np.minimum(pick, 7) * np.uint64(8)) & np.uint64(0xFF)
        if (pick > 7).any():
            # 8 to 11 repeat the sign of bytes 1, 3, 5, 7; 12 is 0, the rest 0xff
            sign = both >> ((pick & np.uint64(3)) * np.uint64(16) + np.uint64(15)) & np.uint64(1)
            other = np.where(pick < 12, sign * np.uint64(0xFF), np.where(pick == 12, 0, 0xFF))
            byte = np.where(pick > 7, other.astype(np.uint64), byte)
        result = result | byte << np.uint64(8 * i)
    return result.astype(U32)


def _align(a, b, count, unit):
    """Shift {a, b} right by count bits or bytes; return the low half."""
    both = np.asanyarray(a).astype(np.uint64) << np.uint64(32) | b
    return (
        both >> (np.asanyarray(count).astype(np.uint64) % np.uint64(32 // unit) * np.uint64(unit))
    ).astype(U32)


def _wide(a, b):
    return np.multiply(a, b, dtype=np.uint64)


def _signed(bits, value):
    """Sign-extend the low bits of value to int64."""
    return (np.asanyarray(value).astype(np.int64) << (64 - bits)) >> (64 - bits)


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
    """Count zeros before the highest set bit; -1 if none is set."""
    return np.where(x == 0, -1, 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64)))).astype(
        np.int32
    )


def trailing_zeros(x):
    """Count zeros after the lowest set bit; -1 if none is set."""
    return np.where(
        x == 0, -1, np.log2(np.maximum(x & (~x + U32(1)), 1).astype(np.float64))
    ).astype(np.int32)


def _lane_count(first):
    """Count the lanes that the mask names below a lane, of the 32 from the first on."""

    def count(mask, base, lane):
        bits = np.maximum(np.minimum(lane.astype(np.int64) - first, 32), 0).astype(np.uint64)
        below = ((np.uint64(1) << bits) - np.uint64(1)).astype(U32)
        return np.bitwise_count(mask & below).astype(U32) + base

    return count


def _wide_float(function):
    """Compute in float64: numpy's vector code for the shorter types is up to 3 ulp off."""
    return lambda x: function(np.asanyarray(x).astype(np.float64)).astype(x.dtype)


def _log2(x):
    """A negative number has one NaN: libm's has another sign than numpy's without AVX-512."""
    return np.where(x < 0, np.float64(np.nan), np.log2(x))


def _flushed(function):
    """Flush a transcendental float32 operation's source and result (LLVM: "1 ulp, flushed")."""
    return lambda x: floats.flush(
        np.asanyarray(function(floats.flush(np.asanyarray(x)))).astype(np.float32)
    )


def _on_face(choose: Callable) -> Callable:
    """Return an operation of V_CUBE: by which of x, y, z is the largest, z before y before x."""

    def run(x, y, z):
        a, b, c = np.abs(x), np.abs(y), np.abs(z)
        by_x, by_y, by_z = choose(x, y, z)
        return np.where((c >= a) & (c >= b), by_z, np.where(b >= a, by_y, by_x))

    return run


def _sign_picks(x, negative: float, positive: float):
    return np.where(x < 0, np.float32(negative), np.float32(positive))


#: A direction's face of a cube, where it is on it, and twice the largest coordinate.
_CUBE = {
    "id": _on_face(lambda x, y, z: (_sign_picks(x, 1, 0), _sign_picks(y, 3, 2),
                                    _sign_picks(z, 5, 4))),
    "sc": _on_face(lambda x, y, z: (np.where(x < 0, z, -z), x, np.where(z < 0, -x, x))),
    "tc": _on_face(lambda x, y, z: (-y, np.where(y < 0, -z, z), -y)),
    "ma": _on_face(lambda x, y, z: (x + x, y + y, z + z)),
}  # fmt: skip


class _Table(dict[str, tuple[str, tuple[str, ...], Callable]]):
    """Of a name, the kind of the result, those of the sources, and the function."""

    def add(self, kind, names, count):
        for name, function in names.items():
            self[name] = (kind, (kind,) * count, function)


def _on_floats() -> _Table:
    table, f, h = _Table(), "f32", "f16"
    add = table.add
    for kind, fma in ((f, floats.fma32), (h, floats.fma16), ("f64", floats.fma64)):
        add(kind, {f"v_add_{kind}": np.add, f"v_sub_{kind}": np.subtract,
                   f"v_mul_{kind}": np.multiply,
                   f"v_subrev_{kind}": lambda a, b: b - a}, 2)  # fmt: skip
        add(kind, {f"v_fma_{kind}": fma, f"v_fmac_{kind}": fma,
                   f"v_fmamk_{kind}": fma, f"v_fmaak_{kind}": fma}, 3)  # fmt: skip
        add(kind, {f"v_{op}_{kind}": function for op, function in (
            ("trunc", np.trunc), ("floor", np.floor), ("ceil", np.ceil), ("rndne", np.rint),
        )}, 1)  # fmt: skip
    one32, one16 = np.float32(1), np.float16(1)
    add(f, {
        "v_exp_f32": _flushed(_wide_float(doubles.exp2)),
        "v_log_f32": _flushed(_wide_float(_log2)),
        "v_rcp_f32": _flushed(lambda x: one32 / x), "v_sqrt_f32": _flushed(np.sqrt),
        "v_rsq_f32": _flushed(_wide_float(lambda x: 1 / np.sqrt(x))),
        "v_rcp_iflag_f32": _flushed(lambda x: one32 / x),
    }, 1)  # fmt: skip
    add(h, {
        "v_exp_f16": _wide_float(doubles.exp2), "v_log_f16": _wide_float(_log2),
        "v_rcp_f16": lambda x: one16 / x,
        "v_sqrt_f16": np.sqrt,
        "v_rsq_f16": _wide_float(lambda x: 1 / np.sqrt(x)),
    }, 1)  # fmt: skip
    add(f, {"v_div_fixup_f32": floats.div_fixup}, 3)
    add(f, {f"v_cube{name}_f32": function for name, function in _CUBE.items()}, 3)
    table["v_ldexp_f32"] = (f, (f, "i32"), floats.ldexp)
    table["v_ldexp_f16"] = (h, (h, "i16"), floats.ldexp)
    add(f, {"v_mul_dx9_zero_f32": lambda a, b: (
        np.where((a == 0) | (b == 0), np.float32(0), a * b))}, 2)  # fmt: skip
    for kind, power in ((f, "i32"), (h, "i16"), ("f64", "i32")):
        dtype, whole = np.dtype(f"f{int(kind[1:]) // 8}"), np.dtype(f"i{int(power[1:]) // 8}")
        # below 1, as the ISA has it
        most = dtype.type(1 - np.finfo(dtype).epsneg)
        table[f"v_fract_{kind}"] = (
            kind, (kind,), lambda x, most=most: np.minimum(x - np.floor(x), most))  # fmt: skip
        table[f"v_frexp_mant_{kind}"] = (
            kind, (kind,), lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x))  # fmt: skip
        table[f"v_frexp_exp_{power}_{kind}"] = (
            power, (kind,),
            lambda x, to=whole: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(to))  # fmt: skip
    return table


def _conversions() -> _Table:
    table, f, u, i, h = _Table(), "f32", "u32", "i32", "f16"
    for kind, source in (
        (f, h), (h, f), (f, i), (f, u), (h, "i16"), (h, "u16"), ("f64", f), (f, "f64"),
        ("f64", i), ("f64", u),
    ):  # fmt: skip
        dtype = np.dtype(f"f{int(kind[1:]) // 8}")
        table[f"v_cvt_{kind}_{source}"] = (
            kind, (source,), lambda x, dtype=dtype: np.asanyarray(x).astype(dtype))  # fmt: skip
    for kind, source, dtype in ((i, f, np.int32), (u, f, U32), ("i16", h, np.int16),
                                ("u16", h, np.uint16)):  # fmt: skip
        table[f"v_cvt_{kind}_{source}"] = (
            kind, (source,), lambda x, dtype=dtype: floats.to_integer(x, dtype))  # fmt: skip
    for n in range(4):
        table[f"v_cvt_f32_ubyte{n}"] = (
            f, (u,), lambda x, n=n: (x >> U32(8 * n) & U32(255)).astype(np.float32))  # fmt: skip
    table["v_cvt_pk_rtz_f16_f32"] = (
        u, (f, f), lambda a, b: _pair(floats.to_half_towards_zero, a, b))  # fmt: skip
    table["v_cvt_pkrtz_f16_f32"] = table["v_cvt_pk_rtz_f16_f32"]
    return table


def _on_words() -> _Table:
    table, u, i = _Table(), "u32", "i32"
    add = table.add
    add(u, {
        "v_add_nc_u32": np.add, "v_sub_nc_u32": np.subtract, "v_subrev_nc_u32": lambda a, b: b - a,
        "v_mul_lo_u32": np.multiply,
        "v_mul_hi_u32": lambda a, b: (_wide(a, b) >> np.uint64(32)).astype(U32),
        "v_and_b32": np.bitwise_and, "v_or_b32": np.bitwise_or, "v_xor_b32": np.bitwise_xor,
        "v_xnor_b32": lambda a, b: ~(a ^ b), "v_max_u32": np.maximum, "v_min_u32": np.minimum,
        "v_lshlrev_b32": _shift(np.left_shift, 32), "v_lshrrev_b32": _shift(np.right_shift, 32),
        "v_mul_u32_u24": lambda a, b: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)),
        "v_mul_hi_u32_u24": lambda a, b: (
            _wide(a & U32(0xFFFFFF), b & U32(0xFFFFFF)) >> np.uint64(32)
        ).astype(U32),
        "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
        "v_bfm_b32": lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    }, 2)  # fmt: skip
    add(i, {
        "v_max_i32": np.maximum, "v_min_i32": np.minimum,
        "v_ashrrev_i32": _shift(np.right_shift, 32),
        "v_add_nc_i32": np.add, "v_sub_nc_i32": np.subtract,
        "v_mul_hi_i32": lambda a, b: (np.multiply(a, b, dtype=np.int64) >> 32).astype(np.int32),
        "v_mul_i32_i24": lambda a, b: (_signed(24, a) * _signed(24, b)).astype(np.int32),
    }, 2)  # fmt: skip
    add(u, {
        "v_add3_u32": lambda a, b, c: a + b + c,
        "v_lshl_add_u32": lambda a, b, c: (a << (b & U32(31))) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & U32(31)),
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_lshl_or_b32": lambda a, b, c: (a << (b & U32(31))) | c,
        "v_and_or_b32": lambda a, b, c: (a & b) | c,
        "v_or3_b32": lambda a, b, c: a | b | c, "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
        "v_perm_b32": _perm,
        "v_bfe_u32": _bfe, "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
        "v_mad_u32_u24": lambda a, b, c: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c,
    }, 3)  # fmt: skip
    add(i, {
        "v_mad_i32_i24": lambda a, b, c: (_signed(24, a) * _signed(24, b) + c).astype(np.int32),
    }, 3)  # fmt: skip
    return table


def _on_bits() -> _Table:
    table, u, i = _Table(), "u32", "i32"
    add = table.add
    for name, first in (("lo", 0), ("hi", 32)):
        table[f"v_mbcnt_{name}_u32_b32"] = (u, (u, u, "lane"), _lane_count(first))
    for name, unit in (("v_alignbit_b32", 1), ("v_alignbyte_b32", 8)):
        table[name] = (u, (u, u, "u16"), lambda a, b, c, unit=unit: _align(a, b, c, unit))
    table["v_bfe_i32"] = (i, (i, u, u), _bfe_signed)
    add(u, {"v_mov_b32": lambda x: x, "v_not_b32": np.invert, "v_bfrev_b32": reverse_bits}, 1)
    table["v_clz_i32_u32"] = (i, (u,), leading_zeros)
    table["v_ctz_i32_b32"] = (i, (u,), trailing_zeros)
    for name, kind, function in (("lshlrev_b64", "u64", np.left_shift),
                                 ("lshrrev_b64", "u64", np.right_shift),
                                 ("ashrrev_i64", "i64", np.right_shift)):  # fmt: skip
        table[f"v_{name}"] = (kind, (u, kind), _shift(function, 64))
    add("u16", {
        "v_add_nc_u16": np.add, "v_sub_nc_u16": np.subtract, "v_mul_lo_u16": np.multiply,
        "v_and_b16": np.bitwise_and, "v_or_b16": np.bitwise_or, "v_xor_b16": np.bitwise_xor,
        "v_lshlrev_b16": _shift(np.left_shift, 16), "v_lshrrev_b16": _shift(np.right_shift, 16),
        "v_max_u16": np.maximum, "v_min_u16": np.minimum,
    }, 2)  # fmt: skip
    add("i16", {
        "v_max_i16": np.maximum, "v_min_i16": np.minimum,
        "v_ashrrev_i16": _shift(np.right_shift, 16),
        "v_add_nc_i16": np.add, "v_sub_nc_i16": np.subtract,
    }, 2)  # fmt: skip
    add("u16", {"v_mov_b16": lambda x: x, "v_not_b16": np.invert}, 1)
    table["v_mad_u16"] = ("u16", ("u16",) * 3, lambda a, b, c: a * b + c)
    table["v_pack_b32_f16"] = (
        u, ("u16", "u16"), lambda a, b: a.astype(U32) | b.astype(U32) << U32(16))  # fmt: skip
    return table


def _pair(convert, a, b):
    low, high = (convert(np.asanyarray(x)).view(np.uint16).astype(U32) for x in (a, b))
    return low | high << U32(16)


TABLE = _on_floats() | _conversions() | _on_words() | _on_bits() | subdword.TABLE | doubles.TABLE
#: Operations whose last source is the old value of the destination.
ACCUMULATING = {"v_fmac_f32", "v_fmac_f16", "v_fmac_f64", "v_dot2acc_f32_f16",
                "v_fmac_dx9_zero_f32"}  # fmt: skip
#: Integer operations for which CLAMP saturates.
SATURATING = {
    f"v_{op}_nc_{kind}" for op in ("add", "sub", "subrev") for kind in ("u32", "i32", "u16", "i16")
} | {"v_mad_u16", "v_mad_i16"}
#: max, min and their combinations: the function needs to know the IEEE mode.
EXTREMES = {
    f"v_{name}_{kind}": (kind, steps)
    for kind in ("f32", "f16", "f64")
    for name, steps in {
        "max": "M", "min": "m", "max3": "MM", "min3": "mm", "maxmin": "Mm", "minmax": "mM",
        "med3": "med",
    }.items()
}  # fmt: skip


def extreme(name: str, ieee: bool) -> tuple[str, tuple[str, ...], Callable]:
    """Return an entry of EXTREMES as one of TABLE, for the IEEE mode or the other one."""
    kind, steps = EXTREMES[name]
    pick = {"M": floats.larger, "m": floats.smaller}
    if steps == "med":
        # the document's words: with a NaN the smallest, else the largest but for the largest
        def median(a, b, c):
            low = floats.smaller(floats.smaller(a, b, ieee), c, ieee)
            top = floats.larger(floats.larger(a, b, ieee), c, ieee)
            rest = np.where(top == b, floats.larger(a, c, ieee), floats.larger(a, b, ieee))
            rest = np.where(top == a, floats.larger(b, c, ieee), rest)
            return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), low, rest)

        return kind, (kind,) * 3, median
    if len(steps) == 1:
        return kind, (kind,) * 2, lambda a, b: pick[steps](a, b, ieee)
    return kind, (kind,) * 3, lambda a, b, c: pick[steps[1]](pick[steps[0]](a, b, ieee), c, ieee)


#: What comparisons of floats test, by the name in their mnemonics.
FLOAT_COMPARISONS = {
    "f": lambda _a, _b: np.False_, "t": lambda _a, _b: np.True_,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "lg": lambda a, b: (a < b) | (a > b), "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
_INTEGER = {k: FLOAT_COMPARISONS[k] for k in ("f", "t", "lt", "le", "gt", "ge", "eq")} | {
    "ne": np.not_equal
}
COMPARISONS = {
    f"v_{cmp}_{name}_{kind}": (kind, function)
    for cmp in ("cmp", "cmpx")
    for kinds, names in (
        (("f16", "f32", "f64"), FLOAT_COMPARISONS),
        (("i16", "u16", "i32", "u32", "i64", "u64"), _INTEGER),
    )
    for kind in kinds
    for name, function in names.items()
}

_SUMS = (("add", (1, False)), ("sub", (-1, False)), ("subrev", (-1, True)))


def _carry(sign: int, swapped: bool):
    """Compute a sum or difference, and whether it lies outside of 32 bits: a carry or a borrow."""

    def run(a, b, taken=0):
        a, b = (b, a) if swapped else (a, b)
        total = np.asanyarray(a).astype(np.int64) + sign * np.asanyarray(b).astype(np.int64)
        total = total + sign * np.asanyarray(taken).astype(np.int64)
        return total.astype(U32), (total >> 32) != 0

    return run


def _wide_mad(wide):
    """Compute the product plus the addend; the carry is bit 64 of the sum."""

    def run(a, b, addend):
        product = np.multiply(a, b, dtype=wide)
        total = product + addend
        if wide is np.uint64:
            return total, total < addend
        over = ((product ^ total) & (addend ^ total)) < 0
        return total, over ^ (total < 0)

    return run


def _in_class(x, wanted):
    """Test V_CMP_CLASS: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    x = np.asanyarray(x)
    negative, quiet = np.signbit(x), floats.is_quiet(x)
    denormal = (np.abs(x) < np.finfo(x.dtype).smallest_normal) & (x != 0)
    normal = np.isfinite(x) & (x != 0) & ~denormal
    wanted = np.asanyarray(wanted).astype(U32)
    found = np.False_
    for bit, kind in enumerate((
        np.isnan(x) & ~quiet, np.isnan(x) & quiet, np.isinf(x) & negative, normal & negative,
        denormal & negative, (x == 0) & negative, (x == 0) & ~negative, denormal & ~negative,
        normal & ~negative, np.isinf(x) & ~negative,
    )):  # fmt: skip
        found = found | kind & ((wanted >> U32(bit) & U32(1)) != 0)
    return found


#: With lane masks: (kind of the result or "", kinds of sources, function, whether it gives a mask,
#: after the result if there is one). The source kind "mask" is a bit for each lane.
MASKED = {
    **{f"v_{name}_co_u32": ("u32", ("u32", "u32"), _carry(*how), True) for name, how in _SUMS},
    **{f"v_{name}_co_ci_u32": ("u32", ("u32", "u32", "mask"), _carry(*how), True)
       for name, how in _SUMS},
    **{f"v_cndmask_{kind}": (kind, (kind, kind, "mask"), lambda a, b, c: np.where(c, b, a), False)
       for kind in ("b16", "b32")},
    "v_mad_u64_u32": ("u64", ("u32", "u32", "u64"), _wide_mad(np.uint64), True),
    "v_mad_i64_i32": ("i64", ("i32", "i32", "i64"), _wide_mad(np.int64), True),
    **{f"v_div_scale_{kind}": (kind, (kind,) * 3, module.div_scale, True)
       for kind, module in (("f32", floats), ("f64", doubles))},
    **{f"v_div_fmas_{kind}": (kind, (kind, kind, kind, "mask"), module.div_fmas, False)
       for kind, module in (("f32", floats), ("f64", doubles))},
    **{f"v_{cmp}_class_{kind}": ("", (kind, "u16"), _in_class, True)
       for cmp in ("cmp", "cmpx") for kind in ("f16", "f32", "f64")},
    **{name: ("", (kind, kind), function, True) for name, (kind, function) in COMPARISONS.items()},
}  # fmt: skip
NAMES = {*TABLE, *EXTREMES, *MASKED, "v_nop", "v_swap_b32", "v_swap_b16", "v_mqsad_u32_u8"}

# SPDX-License-Identifier: BSD-3-Clause
"""Scalar operations by mnemonic: kind of the result, kinds of the sources, and the function."""

import numpy as np

from strix_emulate.arithmetic import floats
from strix_emulate.arithmetic.operations import (
    FLOAT_COMPARISONS,
    leading_zeros,
    reverse_bits,
    trailing_zeros,
)
from strix_emulate.arithmetic.subdword import leading_signs

U32 = np.uint32


def wide(x):
    """Return x as int64, so that sums of 32-bit numbers do not wrap."""
    return np.asanyarray(x).astype(np.int64)


def overflow(result):
    """Return whether an exact int64 result does not fit into 32 signed bits."""
    return result != result.astype(np.int32)


def _add_u(a, b, carry=0):
    total = wide(a) + wide(b) + carry
    return total.astype(U32), total > 0xFFFFFFFF


def _sub_u(a, b, carry=0):
    total = wide(a) - wide(b) - carry
    return total.astype(U32), total < 0


def _signed(function):
    """Return an int32 operation that also returns SCC: whether the result overflows."""

    def run(a, b):
        total = function(wide(a), wide(b))
        return total.astype(np.int32), overflow(total)

    return run


def _nonzero(function):
    """Return an operation that also returns SCC: whether the result is not 0."""

    def run(*values):
        result = function(*values)
        return result, result != 0

    return run


def _shift_add(count):
    def run(a, b):
        total = (np.asanyarray(a).astype(np.uint64) << np.uint64(count)) + b
        return total.astype(U32), total > 0xFFFFFFFF

    return run


_FIELD_TYPES = {
    (False, 32): np.uint32,
    (True, 32): np.int32,
    (False, 64): np.uint64,
    (True, 64): np.int64,
}


def _bfe(signed, bits):
    """Return S_BFE, which extracts a field of the first source.

    The second source has the field's offset in its low bits, and its width from bit 16 on.
    """

    def run(value, field):
        offset = wide(field) & (bits - 1)
        width = np.minimum(wide(field) >> 16 & 0x7F, bits)
        if bits == 64:
            shift = offset if signed else offset.astype(np.uint64)
            plain = (value >> shift).astype(np.int64)
        else:
            plain = value.astype(np.int64) >> offset
        all_bits = np.int64(-1)
        mask = np.where(width < 64, (np.int64(1) << np.minimum(width, 63)) - 1, all_bits)
        plain = plain & mask
        if signed:
            sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
            plain = (plain ^ sign) - sign
        result = plain.astype(_FIELD_TYPES[signed, bits])
        return result, result != 0

    return run


def _shift(function, bits):
    def run(value, count):
        result = function(value, (count & U32(bits - 1)).astype(value.dtype))
        return result, result != 0

    return run


def _pick(compare):
    """Return S_MIN or S_MAX. The function also returns SCC: whether the first source is chosen."""
    return lambda a, b: (np.where(compare(a, b), a, b), compare(a, b))


_LOGIC = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "and_not1": lambda x, y: x & ~y,
    "or_not1": lambda x, y: x | ~y,
    "nand": lambda x, y: ~(x & y),
    "nor": lambda x, y: ~(x | y),
    "xnor": lambda x, y: ~(x ^ y),
}


def _logic(bits: str) -> dict:
    table = {}
    for name, function in _LOGIC.items():
        table[f"s_{name}_{bits}"] = (bits, (bits, bits), _nonzero(function))
    return table


def _absolute_difference(a, b):
    return np.abs(np.subtract(a, b))


def _count_ones(x):
    return np.bitwise_count(x).astype(U32)


def _count_zeros(x):
    return np.bitwise_count(~x).astype(U32)


#: Operations that set SCC, by mnemonic: kind of the result, kinds of the sources, function that
#: returns the result and SCC.
WITH_SCC = {
    **_logic("b32"),
    **_logic("b64"),
    "s_add_u32": ("u32", ("u32", "u32"), _add_u),
    "s_sub_u32": ("u32", ("u32", "u32"), _sub_u),
    "s_add_i32": ("i32", ("i32", "i32"), _signed(np.add)),
    "s_sub_i32": ("i32", ("i32", "i32"), _signed(np.subtract)),
    "s_absdiff_i32": ("i32", ("i32", "i32"), _nonzero(_absolute_difference)),
    "s_lshl_b32": ("u32", ("u32", "u32"), _shift(np.left_shift, 32)),
    "s_lshr_b32": ("u32", ("u32", "u32"), _shift(np.right_shift, 32)),
    "s_ashr_i32": ("i32", ("i32", "u32"), _shift(np.right_shift, 32)),
    "s_lshl_b64": ("u64", ("u64", "u32"), _shift(np.left_shift, 64)),
    "s_lshr_b64": ("u64", ("u64", "u32"), _shift(np.right_shift, 64)),
    "s_ashr_i64": ("i64", ("i64", "u32"), _shift(np.right_shift, 64)),
    "s_min_i32": ("i32", ("i32", "i32"), _pick(np.less)),
    "s_max_i32": ("i32", ("i32", "i32"), _pick(np.greater_equal)),
    "s_min_u32": ("u32", ("u32", "u32"), _pick(np.less)),
    "s_max_u32": ("u32", ("u32", "u32"), _pick(np.greater_equal)),
    "s_bfe_u32": ("u32", ("u32", "u32"), _bfe(False, 32)),
    "s_bfe_i32": ("i32", ("i32", "u32"), _bfe(True, 32)),
    "s_bfe_u64": ("u64", ("u64", "u32"), _bfe(False, 64)),
    "s_bfe_i64": ("i64", ("i64", "u32"), _bfe(True, 64)),
    "s_lshl1_add_u32": ("u32", ("u32", "u32"), _shift_add(1)),
    "s_lshl2_add_u32": ("u32", ("u32", "u32"), _shift_add(2)),
    "s_lshl3_add_u32": ("u32", ("u32", "u32"), _shift_add(3)),
    "s_lshl4_add_u32": ("u32", ("u32", "u32"), _shift_add(4)),
    "s_not_b32": ("u32", ("u32",), _nonzero(np.invert)),
    "s_not_b64": ("u64", ("u64",), _nonzero(np.invert)),
    "s_abs_i32": ("i32", ("i32",), _nonzero(np.abs)),
    "s_bcnt1_i32_b64": ("u32", ("u64",), _nonzero(_count_ones)),
    "s_bcnt0_i32_b32": ("u32", ("u32",), _nonzero(_count_zeros)),
    "s_bcnt0_i32_b64": ("u32", ("u64",), _nonzero(_count_zeros)),
    "s_bcnt1_i32_b32": ("u32", ("u32",), _nonzero(_count_ones)),
}


def _multiply_high(a, b):
    return (np.multiply(a, b, dtype=np.uint64) >> np.uint64(32)).astype(U32)


def _multiply_high_signed(a, b):
    return (np.multiply(a, b, dtype=np.int64) >> 32).astype(np.int32)


def _bit_field_mask(a, b):
    return ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))


def _pack16(low, high):
    """Return S_PACK. Its result has half `low` of the first source and half `high` of the second.

    Half 0 is the low half of a source, and half 1 is the high half.
    """

    def run(a, b):
        low_half = a >> U32(16 * low) & U32(0xFFFF)
        high_half = b >> U32(16 * high) & U32(0xFFFF)
        return low_half | high_half << U32(16)

    return run


def _larger(a, b):
    return floats.larger(a, b, True)


def _smaller(a, b):
    return floats.smaller(a, b, True)


def _to_float(x):
    return x.astype(np.float32)


def _half_of_float(x):
    return x.astype(np.float16).view(np.uint16).astype(U32)


#: Operations that do not use SCC, by mnemonic: kind of the result, kinds of the sources, function.
PLAIN = {
    "s_mov_b32": ("b32", ("b32",), lambda x: x),
    "s_mov_b64": ("b64", ("b64",), lambda x: x),
    "s_mul_i32": ("u32", ("u32", "u32"), np.multiply),
    "s_mul_hi_u32": ("u32", ("u32", "u32"), _multiply_high),
    "s_mul_hi_i32": ("i32", ("i32", "i32"), _multiply_high_signed),
    "s_brev_b32": ("u32", ("u32",), reverse_bits),
    "s_ctz_i32_b32": ("i32", ("u32",), trailing_zeros),
    "s_clz_i32_u32": ("i32", ("u32",), leading_zeros),
    "s_sext_i32_i8": ("i32", ("u32",), lambda x: x.astype(np.int8).astype(np.int32)),
    "s_sext_i32_i16": ("i32", ("u32",), lambda x: x.astype(np.int16).astype(np.int32)),
    "s_bfm_b32": ("u32", ("u32", "u32"), _bit_field_mask),
    "s_pack_ll_b32_b16": ("u32", ("u32", "u32"), _pack16(0, 0)),
    "s_pack_lh_b32_b16": ("u32", ("u32", "u32"), _pack16(0, 1)),
    "s_pack_hh_b32_b16": ("u32", ("u32", "u32"), _pack16(1, 1)),
    "s_pack_hl_b32_b16": ("u32", ("u32", "u32"), _pack16(1, 0)),
    # The scalar floating-point operations of RDNA3.5.
    "s_add_f32": ("f32", ("f32", "f32"), np.add),
    "s_sub_f32": ("f32", ("f32", "f32"), np.subtract),
    "s_mul_f32": ("f32", ("f32", "f32"), np.multiply),
    "s_fmac_f32": ("f32", ("f32", "f32", "f32"), floats.fma32),
    "s_fmaak_f32": ("f32", ("f32", "f32", "f32"), floats.fma32),
    "s_fmamk_f32": ("f32", ("f32", "f32", "f32"), floats.fma32),
    "s_max_f32": ("f32", ("f32", "f32"), _larger),
    "s_min_f32": ("f32", ("f32", "f32"), _smaller),
    "s_trunc_f32": ("f32", ("f32",), np.trunc),
    "s_floor_f32": ("f32", ("f32",), np.floor),
    "s_ceil_f32": ("f32", ("f32",), np.ceil),
    "s_rndne_f32": ("f32", ("f32",), np.rint),
    "s_cvt_f32_i32": ("f32", ("i32",), _to_float),
    "s_cvt_f32_u32": ("f32", ("u32",), _to_float),
    "s_cvt_i32_f32": ("i32", ("f32",), lambda x: floats.to_integer(x, np.int32)),
    "s_cvt_u32_f32": ("u32", ("f32",), lambda x: floats.to_integer(x, U32)),
    "s_cvt_f16_f32": ("u32", ("f32",), _half_of_float),
    "s_cvt_f32_f16": ("f32", ("f16",), _to_float),
    "s_add_f16": ("h16", ("f16", "f16"), np.add),
    "s_sub_f16": ("h16", ("f16", "f16"), np.subtract),
    "s_mul_f16": ("h16", ("f16", "f16"), np.multiply),
    "s_fmac_f16": ("h16", ("f16", "f16", "f16"), floats.fma16),
    "s_max_f16": ("h16", ("f16", "f16"), _larger),
    "s_min_f16": ("h16", ("f16", "f16"), _smaller),
    "s_trunc_f16": ("h16", ("f16",), np.trunc),
    "s_floor_f16": ("h16", ("f16",), np.floor),
    "s_ceil_f16": ("h16", ("f16",), np.ceil),
    "s_rndne_f16": ("h16", ("f16",), np.rint),
}


def _leading_signs_64(x):
    return _leading_zeros_64(np.where(x < 0, ~x, x))


def _trailing_zeros_64(x):
    is_zero = x == 0
    lowest_bit = x & (~x + np.uint64(1))
    return np.where(is_zero, -1, 63 - _leading_zeros_64(lowest_bit)).astype(np.int32)


def _reverse_bits_64(x):
    high = reverse_bits(x.astype(U32)).astype(np.uint64) << np.uint64(32)
    return high | reverse_bits((x >> np.uint64(32)).astype(U32)).astype(np.uint64)


def _bit_field_mask_64(a, b):
    mask = (np.uint64(1) << (a & U32(63)).astype(np.uint64)) - np.uint64(1)
    return mask << (b & U32(63)).astype(np.uint64)


def _high_half_to_float(x):
    return (x >> U32(16)).astype(np.uint16).view(np.float16).astype(np.float32)


def _pack_halves_towards_zero(a, b):
    return _half_bits_towards_zero(a) | _half_bits_towards_zero(b) << U32(16)


def _half_bits_towards_zero(x):
    return floats.to_half_towards_zero(x).view(np.uint16).astype(U32)


def _leading_zeros_64(x):
    """Return the number of leading zeros of 64 bits, or -1 for 0."""
    x = np.asanyarray(x).astype(np.uint64)
    high = (x >> np.uint64(32)).astype(U32)
    low = x.astype(U32)
    zeros = np.where(high != 0, leading_zeros(high), 32 + leading_zeros(low))
    return np.where(x == 0, -1, zeros).astype(np.int32)


PLAIN |= {
    "s_cls_i32": ("i32", ("i32",), leading_signs),
    "s_cls_i32_i64": ("i32", ("i64",), _leading_signs_64),
    "s_clz_i32_u64": ("i32", ("u64",), _leading_zeros_64),
    "s_ctz_i32_b64": ("i32", ("u64",), _trailing_zeros_64),
    "s_brev_b64": ("u64", ("u64",), _reverse_bits_64),
    "s_bfm_b64": ("u64", ("u32", "u32"), _bit_field_mask_64),
    "s_cvt_hi_f32_f16": ("f32", ("u32",), _high_half_to_float),
    "s_cvt_pk_rtz_f16_f32": ("u32", ("f32", "f32"), _pack_halves_towards_zero),
}


def _test_bit_32(a, b):
    return a >> (b & U32(31)) & U32(1)


def _test_bit_64(a, b):
    return a >> (b & U32(63)).astype(np.uint64) & np.uint64(1)


_CONDITIONS = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def _comparisons() -> dict:
    table = {}
    for kind in ("i32", "u32"):
        for condition, function in _CONDITIONS.items():
            table[f"s_cmp_{condition}_{kind}"] = (kind, function)
    for condition in ("eq", "lg"):
        table[f"s_cmp_{condition}_u64"] = ("u64", _CONDITIONS[condition])
    for kind in ("f32", "f16"):
        for condition, function in FLOAT_COMPARISONS.items():
            if condition not in ("f", "t"):
                table[f"s_cmp_{condition}_{kind}"] = (kind, function)
    table["s_bitcmp0_b64"] = ("u64", lambda a, b: _test_bit_64(a, b) == 0)
    table["s_bitcmp1_b64"] = ("u64", lambda a, b: _test_bit_64(a, b) != 0)
    table["s_bitcmp0_b32"] = ("u32", lambda a, b: _test_bit_32(a, b) == 0)
    table["s_bitcmp1_b32"] = ("u32", lambda a, b: _test_bit_32(a, b) != 0)
    return table


#: Comparisons by name: kind of the sources, and the function, which returns SCC. The second source
#: of S_BITCMP is a u32.
COMPARES = _comparisons()


def _immediate_comparisons() -> dict:
    table = {}
    for kind in ("i32", "u32"):
        for condition, function in _CONDITIONS.items():
            table[f"s_cmpk_{condition}_{kind}"] = (kind, function)
    return table


#: Comparisons with a constant of 16 bits.
IMMEDIATE = _immediate_comparisons()
#: Operations on a source and EXEC.
_WITH_EXEC = {
    "and": lambda source, exec_mask: source & exec_mask,
    "or": lambda source, exec_mask: source | exec_mask,
    "xor": lambda source, exec_mask: source ^ exec_mask,
    "and_not1": lambda source, exec_mask: source & ~exec_mask,
    "and_not0": lambda source, exec_mask: ~source & exec_mask,
    "or_not0": lambda source, exec_mask: ~source | exec_mask,
    "or_not1": lambda source, exec_mask: source | ~exec_mask,
    "nand": lambda source, exec_mask: ~(source & exec_mask),
    "nor": lambda source, exec_mask: ~(source | exec_mask),
    "xnor": lambda source, exec_mask: ~(source ^ exec_mask),
}


def _saveexec() -> dict:
    table = {}
    for name, function in _WITH_EXEC.items():
        for kind in ("b32", "b64"):
            table[f"s_{name}_saveexec_{kind}"] = function
    return table


#: Operations with EXEC. The destination gets the old EXEC, and EXEC gets the result.
SAVEEXEC = _saveexec()
#: Operations with EXEC. The destination and EXEC get the result.
WREXEC = {
    "s_and_not0_wrexec_b32": _WITH_EXEC["and_not0"],
    "s_and_not0_wrexec_b64": _WITH_EXEC["and_not0"],
    "s_and_not1_wrexec_b32": _WITH_EXEC["and_not1"],
    "s_and_not1_wrexec_b64": _WITH_EXEC["and_not1"],
}


def _select(a, b, scc):
    return np.where(scc, a, b)


#: S_CSELECT by mnemonic: kinds of the sources, of which the last is SCC, and the function.
SELECTS = {
    "s_cselect_b32": (("b32", "b32", "scc"), _select),
    "s_cselect_b64": (("b64", "b64", "scc"), _select),
}
#: Operations with a carry, by mnemonic: kinds of the sources, of which the last is SCC, and the
#: function, which returns the result and SCC.
CARRIES = {
    "s_addc_u32": (("u32", "u32", "scc"), _add_u),
    "s_subb_u32": (("u32", "u32", "scc"), _sub_u),
}
OTHER = {
    *CARRIES,
    *SELECTS,
    "s_movk_i32",
    "s_addk_i32",
    "s_mulk_i32",
    "s_cmov_b32",
    "s_cmov_b64",
    "s_bitset0_b32",
    "s_bitset0_b64",
    "s_bitset1_b32",
    "s_bitset1_b64",
}
NAMES = {*WITH_SCC, *PLAIN, *COMPARES, *IMMEDIATE, *SAVEEXEC, *WREXEC, *OTHER}

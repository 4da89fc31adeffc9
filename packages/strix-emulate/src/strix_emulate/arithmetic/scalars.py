# SPDX-License-Identifier: BSD-3-Clause
"""Scalar operations by mnemonic: kinds of the result and of each source, and the function."""

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
    """Return x as int64, in which sums of 32 bits do not wrap."""
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
    def run(a, b):
        total = function(wide(a), wide(b))
        return total.astype(np.int32), overflow(total)

    return run


def _nonzero(function):
    def run(*values):
        result = function(*values)
        return result, result != 0

    return run


def _shift_add(count):
    def run(a, b):
        total = (np.asanyarray(a).astype(np.uint64) << np.uint64(count)) + b
        return total.astype(U32), total > 0xFFFFFFFF

    return run


_FIELDS = {
    (False, 32): np.uint32, (True, 32): np.int32, (False, 64): np.uint64, (True, 64): np.int64,
}  # fmt: skip


def _bfe(signed, bits):
    """Extract a field: its offset is in the second source's low bits, its width from bit 16."""

    def run(value, field):
        offset = np.asanyarray(field).astype(np.int64) & (bits - 1)
        width = np.minimum(np.asanyarray(field).astype(np.int64) >> 16 & 0x7F, bits)
        if bits == 64:
            shift = offset if signed else offset.astype(np.uint64)
            plain = (value >> shift).astype(np.int64)
        else:
            plain = value.astype(np.int64) >> offset
        whole = np.int64(-1)
        plain = plain & np.where(width < 64, (np.int64(1) << np.minimum(width, 63)) - 1, whole)
        if signed:
            sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
            plain = (plain ^ sign) - sign
        result = plain.astype(_FIELDS[signed, bits])
        return result, result != 0

    return run


def _shift(function, bits):
    def run(value, count):
        result = function(value, (count & U32(bits - 1)).astype(value.dtype))
        return result, result != 0

    return run


def _pick(compare):
    return lambda a, b: (np.where(compare(a, b), a, b), compare(a, b))


def _logic(bits: str) -> dict:
    b = {
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "and_not1": lambda x, y: x & ~y, "or_not1": lambda x, y: x | ~y,
        "nand": lambda x, y: ~(x & y),
        "nor": lambda x, y: ~(x | y), "xnor": lambda x, y: ~(x ^ y),
    }  # fmt: skip
    return {f"s_{name}_{bits}": (bits, (bits, bits), _nonzero(f)) for name, f in b.items()}


#: name: (kind of result, kinds of sources, function giving the result and SCC)
WITH_SCC = {
    **_logic("b32"), **_logic("b64"),
    "s_add_u32": ("u32", ("u32", "u32"), _add_u), "s_sub_u32": ("u32", ("u32", "u32"), _sub_u),
    "s_add_i32": ("i32", ("i32", "i32"), _signed(np.add)),
    "s_sub_i32": ("i32", ("i32", "i32"), _signed(np.subtract)),
    "s_absdiff_i32": (
        "i32", ("i32", "i32"), _nonzero(lambda a, b: np.abs(np.subtract(a, b)))),
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
    **{f"s_lshl{n}_add_u32": ("u32", ("u32", "u32"), _shift_add(n)) for n in (1, 2, 3, 4)},
    "s_not_b32": ("u32", ("u32",), _nonzero(np.invert)),
    "s_not_b64": ("u64", ("u64",), _nonzero(np.invert)),
    "s_abs_i32": ("i32", ("i32",), _nonzero(np.abs)),
    "s_bcnt1_i32_b64": ("u32", ("u64",), _nonzero(lambda x: np.bitwise_count(x).astype(U32))),
    "s_bcnt0_i32_b32": ("u32", ("u32",), _nonzero(lambda x: np.bitwise_count(~x).astype(U32))),
    "s_bcnt0_i32_b64": ("u32", ("u64",), _nonzero(lambda x: np.bitwise_count(~x).astype(U32))),
    "s_bcnt1_i32_b32": ("u32", ("u32",), _nonzero(lambda x: np.bitwise_count(x).astype(U32))),
}  # fmt: skip


def _pack16(low, high):
    """Compute S_PACK; low and high say which half of each source goes into the low and high one."""
    return lambda a, b: (
        (a >> U32(16 * low) & U32(0xFFFF)) | (b >> U32(16 * high) & U32(0xFFFF)) << U32(16)
    )


#: name: (kind of result, kinds of sources, function)
PLAIN = {
    "s_mov_b32": ("b32", ("b32",), lambda x: x), "s_mov_b64": ("b64", ("b64",), lambda x: x),
    "s_mul_i32": ("u32", ("u32", "u32"), np.multiply),
    "s_mul_hi_u32": (
        "u32", ("u32", "u32"),
        lambda a, b: (np.multiply(a, b, dtype=np.uint64) >> np.uint64(32)).astype(U32)
    ),
    "s_mul_hi_i32": (
        "i32", ("i32", "i32"),
        lambda a, b: (np.multiply(a, b, dtype=np.int64) >> 32).astype(np.int32)),
    "s_brev_b32": ("u32", ("u32",), reverse_bits),
    "s_ctz_i32_b32": ("i32", ("u32",), trailing_zeros),
    "s_clz_i32_u32": ("i32", ("u32",), leading_zeros),
    "s_sext_i32_i8": ("i32", ("u32",), lambda x: x.astype(np.int8).astype(np.int32)),
    "s_sext_i32_i16": ("i32", ("u32",), lambda x: x.astype(np.int16).astype(np.int32)),
    "s_bfm_b32": (
        "u32", ("u32", "u32"), lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))),
    "s_pack_ll_b32_b16": ("u32", ("u32", "u32"), _pack16(0, 0)),
    "s_pack_lh_b32_b16": ("u32", ("u32", "u32"), _pack16(0, 1)),
    "s_pack_hh_b32_b16": ("u32", ("u32", "u32"), _pack16(1, 1)),
    "s_pack_hl_b32_b16": ("u32", ("u32", "u32"), _pack16(1, 0)),
    # RDNA3.5's scalar floating point
    "s_add_f32": ("f32", ("f32", "f32"), np.add), "s_sub_f32": ("f32", ("f32", "f32"), np.subtract),
    "s_mul_f32": ("f32", ("f32", "f32"), np.multiply),
    "s_fmac_f32": ("f32", ("f32", "f32", "f32"), floats.fma32),
    "s_fmaak_f32": ("f32", ("f32", "f32", "f32"), floats.fma32),
    "s_fmamk_f32": ("f32", ("f32", "f32", "f32"), floats.fma32),
    "s_max_f32": ("f32", ("f32", "f32"), lambda a, b: floats.larger(a, b, True)),
    "s_min_f32": ("f32", ("f32", "f32"), lambda a, b: floats.smaller(a, b, True)),
    "s_trunc_f32": ("f32", ("f32",), np.trunc), "s_floor_f32": ("f32", ("f32",), np.floor),
    "s_ceil_f32": ("f32", ("f32",), np.ceil), "s_rndne_f32": ("f32", ("f32",), np.rint),
    "s_cvt_f32_i32": ("f32", ("i32",), lambda x: x.astype(np.float32)),
    "s_cvt_f32_u32": ("f32", ("u32",), lambda x: x.astype(np.float32)),
    "s_cvt_i32_f32": ("i32", ("f32",), lambda x: floats.to_integer(x, np.int32)),
    "s_cvt_u32_f32": ("u32", ("f32",), lambda x: floats.to_integer(x, U32)),
    "s_cvt_f16_f32": ("u32", ("f32",), lambda x: x.astype(np.float16).view(np.uint16).astype(U32)),
    "s_cvt_f32_f16": ("f32", ("f16",), lambda x: x.astype(np.float32)),
}  # fmt: skip
_HALF = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fmac": floats.fma16,
         "max": lambda a, b: floats.larger(a, b, True),
         "min": lambda a, b: floats.smaller(a, b, True)}  # fmt: skip
PLAIN |= {f"s_{n}_f16": ("h16", ("f16",) * (3 if n == "fmac" else 2), f) for n, f in _HALF.items()}
PLAIN |= {
    f"s_{n}_f16": ("h16", ("f16",), f)
    for n, f in (("trunc", np.trunc), ("floor", np.floor), ("ceil", np.ceil), ("rndne", np.rint))
}
PLAIN |= {
    "s_cls_i32": ("i32", ("i32",), leading_signs),
    "s_cls_i32_i64": ("i32", ("i64",), lambda x: _first64(np.where(x < 0, ~x, x))),
    "s_clz_i32_u64": ("i32", ("u64",), lambda x: _first64(x)),
    "s_ctz_i32_b64": ("i32", ("u64",), lambda x: np.where(
        x == 0, -1, 63 - _first64(x & (~x + np.uint64(1)))).astype(np.int32)),
    "s_brev_b64": ("u64", ("u64",), lambda x: (
        reverse_bits(x.astype(U32)).astype(np.uint64) << np.uint64(32)
        | reverse_bits((x >> np.uint64(32)).astype(U32)).astype(np.uint64))),
    "s_bfm_b64": ("u64", ("u32", "u32"), lambda a, b: (
        ((np.uint64(1) << (a & U32(63)).astype(np.uint64)) - np.uint64(1))
        << (b & U32(63)).astype(np.uint64))),
    "s_cvt_hi_f32_f16": ("f32", ("u32",), lambda x: (
        (x >> U32(16)).astype(np.uint16).view(np.float16).astype(np.float32))),
    "s_cvt_pk_rtz_f16_f32": ("u32", ("f32", "f32"), lambda a, b: (
        _half_bits(a) | _half_bits(b) << U32(16))),
}  # fmt: skip


def _half_bits(x):
    return floats.to_half_towards_zero(x).view(np.uint16).astype(U32)


def _first64(x):
    """Count the leading zeros of 64 bits; -1 for 0."""
    x = np.asanyarray(x).astype(np.uint64)
    high, low = (x >> np.uint64(32)).astype(U32), x.astype(U32)
    zeros = np.where(high != 0, leading_zeros(high), 32 + leading_zeros(low))
    return np.where(x == 0, -1, zeros).astype(np.int32)


def _bit64(place):
    return (place & U32(63)).astype(np.uint64)


_ORDER = {"eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
          "lt": np.less, "le": np.less_equal}  # fmt: skip
COMPARES = {
    **{f"s_cmp_{n}_{k}": (k, f) for k in ("i32", "u32") for n, f in _ORDER.items()},
    **{f"s_cmp_{n}_u64": ("u64", _ORDER[n]) for n in ("eq", "lg")},
    **{f"s_cmp_{n}_{k}": (k, f) for k in ("f32", "f16") for n, f in FLOAT_COMPARISONS.items()
       if n not in ("f", "t")},
    "s_bitcmp0_b64": ("u64", lambda a, b: (a >> _bit64(b) & np.uint64(1)) == 0),
    "s_bitcmp1_b64": ("u64", lambda a, b: (a >> _bit64(b) & np.uint64(1)) != 0),
    "s_bitcmp0_b32": ("u32", lambda a, b: (a >> (b & U32(31)) & U32(1)) == 0),
    "s_bitcmp1_b32": ("u32", lambda a, b: (a >> (b & U32(31)) & U32(1)) != 0),
}  # fmt: skip
IMMEDIATE = {f"s_cmpk_{n}_{k}": (k, f) for k in ("i32", "u32") for n, f in _ORDER.items()}
_OF_EXEC = {
    "and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e,
    "and_not1": lambda s, e: s & ~e, "and_not0": lambda s, e: ~s & e,
    "or_not0": lambda s, e: ~s | e, "or_not1": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e), "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
}  # fmt: skip
#: The destination gets EXEC, and EXEC the result; or both get it.
SAVEEXEC = {f"s_{n}_saveexec_{k}": f for n, f in _OF_EXEC.items() for k in ("b32", "b64")}
WREXEC = {f"s_and_{n}_wrexec_{k}": _OF_EXEC[f"and_{n}"]
          for n in ("not0", "not1") for k in ("b32", "b64")}  # fmt: skip
#: kinds of the sources, the last of which is SCC, and the function
SELECTS = {f"s_cselect_{kind}": ((kind, kind, "scc"), lambda a, b, scc: np.where(scc, a, b))
           for kind in ("b32", "b64")}  # fmt: skip
CARRIES = {
    name: (("u32", "u32", "scc"), function)
    for name, function in (("s_addc_u32", _add_u), ("s_subb_u32", _sub_u))
}
OTHER = {*CARRIES, *SELECTS, "s_movk_i32", "s_addk_i32",
          "s_mulk_i32", "s_cmov_b32", "s_cmov_b64",
          *(f"s_bitset{on}_{kind}" for on in (0, 1) for kind in ("b32", "b64"))}  # fmt: skip
NAMES = {*WITH_SCC, *PLAIN, *COMPARES, *IMMEDIATE, *SAVEEXEC, *WREXEC, *OTHER}

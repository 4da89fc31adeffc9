# SPDX-License-Identifier: BSD-3-Clause
"""A second, slow reading of the ISA document: what one lane computes.

It shares no code with the machine. Each entry is a mnemonic with the kinds of its operands and a
function on bit patterns, by the arithmetic of `exact`.
"""

from collections.abc import Callable
from fractions import Fraction

import oracle_floats
import oracle_parts
from exact import (
    COMPARE,
    F16,
    F32,
    F64,
    M32,
    M64,
    add,
    bfe,
    compared,
    convert,
    encode,
    extreme,
    fields,
    floor_like,
    fma,
    leading_signs,
    multiply,
    negate,
    perm,
    shifted,
    sign_of,
    signed,
    to_integer,
)


def vector_table() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    """mnemonic: (kind of result, kinds of sources, function on bits); a "mask" is one bit."""
    table: dict[str, tuple[str, tuple[str, ...], Callable]] = {}
    for kind, form in (("f32", F32), ("f16", F16), ("f64", F64)):
        two, three = (kind,) * 2, (kind,) * 3
        table |= {
            f"v_add_{kind}": (kind, two, lambda a, b, f=form: add(a, b, f)),
            f"v_sub_{kind}": (kind, two, lambda a, b, f=form: add(a, negate(b, f), f)),
            f"v_subrev_{kind}": (kind, two, lambda a, b, f=form: add(b, negate(a, f), f)),
            f"v_mul_{kind}": (kind, two, lambda a, b, f=form: multiply(a, b, f)),
            f"v_fma_{kind}": (kind, three, lambda a, b, c, f=form: fma(a, b, c, f)),
            f"v_max_{kind}": (kind, two, lambda a, b, f=form: extreme(a, b, f, True)),
            f"v_min_{kind}": (kind, two, lambda a, b, f=form: extreme(a, b, f, False)),
            f"v_max3_{kind}": (
                kind,
                three,
                lambda a, b, c, f=form: extreme(extreme(a, b, f, True), c, f, True),
            ),
            f"v_min3_{kind}": (
                kind,
                three,
                lambda a, b, c, f=form: extreme(extreme(a, b, f, False), c, f, False),
            ),
        }
        for name, test in COMPARE.items():
            table[f"v_cmp_{name}_{kind}"] = (
                "mask",
                two,
                lambda a, b, f=form, t=test: int(t(compared(a, b, f))),
            )
    for bits in (16, 32, 64):
        for name in ("lt", "eq", "le", "gt", "ge", "lg", "f", "t"):
            spelt, kinds = {"lg": "ne"}.get(name, name), (f"u{bits}",) * 2
            table[f"v_cmp_{spelt}_u{bits}"] = (
                "mask", kinds, lambda a, b, t=COMPARE[name]: int(t(sign_of(a, b))))  # fmt: skip
            table[f"v_cmp_{spelt}_i{bits}"] = (
                "mask",
                kinds,
                lambda a, b, t=COMPARE[name], n=bits: int(t(sign_of(signed(a, n), signed(b, n)))),
            )
    u = "u32"
    two = {
        "v_mul_lo_u32": lambda a, b: a * b, "v_mul_hi_u32": lambda a, b: a * b >> 32,
        "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32, "v_and_b32": lambda a, b: a & b,
        "v_or_b32": lambda a, b: a | b, "v_xor_b32": lambda a, b: a ^ b,
        "v_xnor_b32": lambda a, b: ~(a ^ b),
        "v_lshlrev_b32": lambda a, b: b << (a & 31), "v_lshrrev_b32": lambda a, b: b >> (a & 31),
        "v_ashrrev_i32": lambda a, b: signed(b) >> (a & 31), "v_max_u32": max, "v_min_u32": min,
        "v_max_i32": lambda a, b: max(signed(a), signed(b)),
        "v_min_i32": lambda a, b: min(signed(a), signed(b)),
        "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
        "v_mul_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24),
        "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
        "v_mul_hi_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24) >> 32,
        "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
        "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    }  # fmt: skip
    three = {
        "v_add3_u32": lambda a, b, c: a + b + c,
        "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
        "v_and_or_b32": lambda a, b, c: a & b | c,
        "v_or3_b32": lambda a, b, c: a | b | c, "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
        "v_perm_b32": perm,
        "v_bfe_u32": lambda a, b, c: bfe(a, b, c, False),
        "v_bfe_i32": lambda a, b, c: bfe(a, b, c, True),
        "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
        "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
        "v_mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + signed(c),
        "v_max3_i32": lambda a, b, c: max(map(signed, (a, b, c))),
        "v_min3_u32": lambda a, b, c: min(a, b, c),
        "v_max3_u32": lambda a, b, c: max(a, b, c),
        "v_min3_i32": lambda a, b, c: min(map(signed, (a, b, c))),
        "v_maxmin_i32": lambda a, b, c: min(max(signed(a), signed(b)), signed(c)),
        "v_minmax_i32": lambda a, b, c: max(min(signed(a), signed(b)), signed(c)),
        "v_maxmin_u32": lambda a, b, c: min(max(a, b), c),
        "v_minmax_u32": lambda a, b, c: max(min(a, b), c),
        "v_sad_u8": lambda a, b, c: sum(abs(x - y) for x, y in fields(a, b, 8)) + c,
        "v_sad_hi_u8": lambda a, b, c: (
            sum(abs(x - y) for x, y in fields(a, b, 8)) << 16) + c,
        "v_sad_u16": lambda a, b, c: sum(abs(x - y) for x, y in fields(a, b, 16)) + c,
        "v_sad_u32": lambda a, b, c: abs(a - b) + c,
        "v_msad_u8": lambda a, b, c: sum(abs(x - y) for x, y in fields(a, b, 8) if y) + c,
        "v_lerp_u8": lambda a, b, c: sum(
            (x + y + (c >> 8 * i & 1) >> 1) << 8 * i for i, (x, y) in enumerate(fields(a, b, 8))),
        "v_med3_i32": lambda a, b, c: sorted(map(signed, (a, b, c)))[1],
        "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    }  # fmt: skip
    one = {
        "v_mov_b32": lambda a: a, "v_not_b32": lambda a: ~a,
        "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
        "v_clz_i32_u32": lambda a: 32 - a.bit_length() if a else -1,
        "v_ctz_i32_b32": lambda a: (a & -a).bit_length() - 1,
        "v_cvt_i32_f32": lambda a: to_integer(a, F32, -(2**31), 2**31 - 1),
        "v_cvt_u32_f32": lambda a: to_integer(a, F32, 0, M32),
        "v_cvt_f32_i32": lambda a: encode(Fraction(signed(a)), F32),
        "v_cvt_f32_u32": lambda a: encode(Fraction(a), F32),
        "v_cls_i32": lambda a: leading_signs(signed(a), 32),
        "v_cvt_f32_ubyte1": lambda a: encode(Fraction(a >> 8 & 255), F32),
        "v_cvt_f32_ubyte2": lambda a: encode(Fraction(a >> 16 & 255), F32),
        "v_cvt_f32_ubyte0": lambda a: encode(Fraction(a & 255), F32),
        "v_cvt_f32_ubyte3": lambda a: encode(Fraction(a >> 24), F32),
    }  # fmt: skip
    for count, group in ((1, one), (2, two), (3, three)):
        for name, function in group.items():
            table[name] = (u, (u,) * count, function)
    table["v_cvt_f32_f16"] = ("f32", ("f16",), lambda a: convert(a, F16, F32))
    table["v_cvt_f16_f32"] = ("f16", ("f32",), lambda a: convert(a, F32, F16))
    for name, rounding in (
        ("floor", lambda x: x // 1),
        ("ceil", lambda x: -(-x // 1)),
        ("trunc", int),
        ("rndne", round),
    ):
        table[f"v_{name}_f32"] = ("f32", ("f32",), floor_like(rounding))
    for name, function in {
        "v_mul_lo_u16": lambda a, b: a * b,
        "v_lshlrev_b16": lambda a, b: b << (a & 15), "v_lshrrev_b16": lambda a, b: b >> (a & 15),
        "v_ashrrev_i16": lambda a, b: signed(b, 16) >> (a & 15), "v_max_u16": max,
        "v_and_b16": lambda a, b: a & b, "v_or_b16": lambda a, b: a | b,
        "v_xor_b16": lambda a, b: a ^ b, "v_min_u16": min,
        "v_max_i16": lambda a, b: max(signed(a, 16), signed(b, 16)),
        "v_min_i16": lambda a, b: min(signed(a, 16), signed(b, 16)),
    }.items():  # fmt: skip
        table[name] = ("u16", ("u16", "u16"), function)
    for sign, read in (("i", lambda x: signed(x, 16)), ("u", int)):
        for name, function in (
            ("max3", max), ("min3", min), ("med3", lambda *x: sorted(x)[1]),
        ):  # fmt: skip
            table[f"v_{name}_{sign}16"] = (
                "u16", ("u16",) * 3,
                lambda a, b, c, f=function, r=read: f(r(a), r(b), r(c)))  # fmt: skip
        table[f"v_mad_{sign}32_{sign}16"] = (
            u, ("u16", "u16", u), lambda a, b, c, r=read: r(a) * r(b) + c)  # fmt: skip
        table[f"v_cvt_{sign}32_{sign}16"] = (u, ("u16",), lambda a, r=read: r(a))
    table["v_not_b16"] = ("u16", ("u16",), lambda a: ~a)
    for source, form in (("f32", F32), ("f64", F64)):
        for target, other in (("f32", F32), ("f64", F64)):
            if source != target:
                table[f"v_cvt_{target}_{source}"] = (
                    target, (source,), lambda a, f=form, o=other: convert(a, f, o))  # fmt: skip
    table["v_cvt_f64_i32"] = ("f64", (u,), lambda a: encode(Fraction(signed(a)), F64))
    table["v_cvt_f64_u32"] = ("f64", (u,), lambda a: encode(Fraction(a), F64))
    table["v_cvt_i32_f64"] = (u, ("f64",), lambda a: to_integer(a, F64, -(2**31), 2**31 - 1))
    table["v_cvt_u32_f64"] = (u, ("f64",), lambda a: to_integer(a, F64, 0, M32))
    table["v_cvt_f16_u16"] = ("f16", ("u16",), lambda a: encode(Fraction(a), F16))
    table["v_cvt_f16_i16"] = ("f16", ("u16",), lambda a: encode(Fraction(signed(a, 16)), F16))
    table["v_cvt_i16_f16"] = ("u16", ("f16",), lambda a: to_integer(a, F16, -(2**15), 2**15 - 1))
    table["v_cvt_u16_f16"] = ("u16", ("f16",), lambda a: to_integer(a, F16, 0, 0xFFFF))
    table["v_alignbit_b32"] = (u, (u, u, "u16"), lambda a, b, c: (a << 32 | b) >> (c & 31))
    table["v_alignbyte_b32"] = (u, (u, u, "u16"), lambda a, b, c: (a << 32 | b) >> 8 * (c & 3))
    table["v_mov_b16"] = ("u16", ("u16",), lambda a: a)
    table["v_pack_b32_f16"] = ("u32", ("u16", "u16"), lambda a, b: a | b << 16)
    for name, counts in (("qsad", lambda _y: True), ("mqsad", bool)):
        table[f"v_{name}_pk_u16_u8"] = (
            "u64", ("u64", u, "u64"), lambda a, b, c, n=counts: sum(
                (sum(abs(x - y) for x, y in fields(a >> 8 * i & M32, b, 8) if n(y))
                 + (c >> 16 * i) & 0xFFFF) << 16 * i for i in range(4)))  # fmt: skip
    table["v_lshlrev_b64"] = ("u64", ("u32", "u64"), lambda a, b: shifted(b, a & 63, 64))
    table["v_lshrrev_b64"] = ("u64", ("u32", "u64"), lambda a, b: b >> (a & 63))
    table["v_ashrrev_i64"] = ("u64", ("u32", "u64"), lambda a, b: signed(b, 64) >> (a & 63))
    return table | oracle_floats.vector_table() | oracle_parts.vector_table()


def scalar_table() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    """Like vector_table; functions give (result, SCC), SCC None where it is left alone."""

    def bits(x: int) -> tuple[int, int]:
        return x, int(x & M32 != 0)

    def wide(x: int) -> tuple[int, int]:
        return x, int(x & M64 != 0)

    def add_signed(x: int) -> tuple[int, int]:
        return x, int(not -(2**31) <= x < 2**31)

    def field(a: int, b: int, sign: bool, span: int = 32) -> tuple[int, int]:
        width = min(b >> 16 & 127, span)
        plain = (signed(a, span) if sign else a) >> (b & span - 1)
        plain &= (1 << width) - 1
        found = signed(plain, width) if sign and width else plain
        return bits(found) if span == 32 else wide(found)

    u, q = ("u32", "u32"), ("u64", "u64")
    f = {
        "s_add_f32": lambda a, b: (add(a, b, F32), None),
        "s_mul_f32": lambda a, b: (multiply(a, b, F32), None),
        "s_sub_f32": lambda a, b: (add(a, negate(b, F32), F32), None),
        "s_max_f32": lambda a, b: (extreme(a, b, F32, True), None),
        "s_min_f32": lambda a, b: (extreme(a, b, F32, False), None),
    }  # fmt: skip
    two = {
        "s_add_u32": lambda a, b: (a + b, int(a + b > M32)),
        "s_sub_u32": lambda a, b: (a - b, int(a < b)),
        "s_add_i32": lambda a, b: add_signed(signed(a) + signed(b)),
        "s_sub_i32": lambda a, b: add_signed(signed(a) - signed(b)),
        "s_and_b32": lambda a, b: bits(a & b), "s_or_b32": lambda a, b: bits(a | b),
        "s_xor_b32": lambda a, b: bits(a ^ b),
        "s_and_not1_b32": lambda a, b: bits(a & ~b),
        "s_or_not1_b32": lambda a, b: bits(a | ~b & M32),
        "s_nand_b32": lambda a, b: bits(~(a & b)), "s_nor_b32": lambda a, b: bits(~(a | b)),
        "s_xnor_b32": lambda a, b: bits(~(a ^ b)),
        "s_lshl_b32": lambda a, b: bits(a << (b & 31)),
        "s_lshr_b32": lambda a, b: bits(a >> (b & 31)),
        "s_ashr_i32": lambda a, b: bits(signed(a) >> (b & 31)),
        "s_mul_i32": lambda a, b: (a * b, None),
        "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
        "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32, None),
        "s_min_i32": lambda a, b: (min(signed(a), signed(b)), int(signed(a) < signed(b))),
        "s_max_i32": lambda a, b: (max(signed(a), signed(b)), int(signed(a) >= signed(b))),
        "s_min_u32": lambda a, b: (min(a, b), int(a < b)),
        "s_max_u32": lambda a, b: (max(a, b), int(a >= b)),
        "s_bfe_u32": lambda a, b: field(a, b, False), "s_bfe_i32": lambda a, b: field(a, b, True),
        "s_absdiff_i32": lambda a, b: bits(abs(signed(a - b))),
        "s_pack_ll_b32_b16": lambda a, b: (a & 65535 | (b & 65535) << 16, None),
        "s_pack_lh_b32_b16": lambda a, b: (a & 65535 | b >> 16 << 16, None),
        "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | b >> 16 << 16, None),
        **{
            f"s_lshl{n}_add_u32": lambda a, b, n=n: ((a << n) + b, int((a << n) + b > M32))
            for n in (1, 2, 3, 4)
        },
    }  # fmt: skip
    one = {
        "s_mov_b32": lambda a: (a, None), "s_not_b32": lambda a: bits(~a),
        "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
        "s_abs_i32": lambda a: bits(abs(signed(a))),
        "s_bcnt1_i32_b32": lambda a: bits(a.bit_count()),
        "s_sext_i32_i16": lambda a: (signed(a, 16), None),
        "s_sext_i32_i8": lambda a: (signed(a, 8), None),
        "s_ctz_i32_b32": lambda a: ((a & -a).bit_length() - 1, None),
        "s_clz_i32_u32": lambda a: (32 - a.bit_length() if a else -1, None),
        "s_cls_i32": lambda a: (leading_signs(signed(a), 32), None),
        "s_bcnt0_i32_b32": lambda a: bits(32 - a.bit_count()),
        "s_cvt_f32_u32": lambda a: (encode(Fraction(a), F32), None),
        "s_cvt_u32_f32": lambda a: (to_integer(a, F32, 0, M32), None),
        "s_cvt_f32_i32": lambda a: (encode(Fraction(signed(a)), F32), None),
        "s_cvt_i32_f32": lambda a: (to_integer(a, F32, -(2**31), 2**31 - 1), None),
    }  # fmt: skip
    compare = {
        f"s_cmp_{name}_{kind}": lambda a, b, t=COMPARE[name], read=read: (
            None, int(t(sign_of(read(a), read(b)))))
        for kind, read in (("i32", signed), ("u32", int))
        for name in ("lt", "eq", "le", "gt", "lg", "ge")
    }  # fmt: skip
    compare |= {
        "s_bitcmp0_b32": lambda a, b: (None, int(not a >> (b & 31) & 1)),
        "s_bitcmp1_b32": lambda a, b: (None, a >> (b & 31) & 1),
        **{
            f"s_cmp_{name}_f32": lambda a, b, t=test: (None, int(t(compared(a, b, F32))))
            for name, test in COMPARE.items()
        },
    }  # fmt: skip
    table = {name: ("u32", u, function) for name, function in two.items()}
    table |= {name: ("f32", ("f32", "f32"), function) for name, function in f.items()}
    table |= {name: ("u32", ("u32",), function) for name, function in one.items()}
    table |= {name: ("", u, function) for name, function in compare.items()}
    for name, function in {
        "xor": lambda a, b: a ^ b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b), "and_not1": lambda a, b: a & ~b,
        "or_not1": lambda a, b: a | ~b & M64,
    }.items():  # fmt: skip
        table[f"s_{name}_b64"] = ("u64", q, lambda a, b, f=function: wide(f(a, b)))
    for name, test in (("eq", 0), ("lg", 1)):
        table[f"s_cmp_{name}_u64"] = ("", q, lambda a, b, t=test: (None, int((a != b) == t)))
    table["s_bcnt1_i32_b64"] = ("u32", ("u64",), lambda a: bits(a.bit_count()))
    table["s_bcnt0_i32_b64"] = ("u32", ("u64",), lambda a: bits(64 - a.bit_count()))
    table["s_clz_i32_u64"] = (
        "u32", ("u64",), lambda a: (64 - a.bit_length() if a else -1, None))  # fmt: skip
    table["s_ctz_i32_b64"] = ("u32", ("u64",), lambda a: ((a & -a).bit_length() - 1, None))
    table["s_cls_i32_i64"] = ("u32", ("u64",), lambda a: (leading_signs(signed(a, 64), 64), None))
    table["s_not_b64"] = ("u64", ("u64",), lambda a: wide(~a))
    for on in (0, 1):
        table[f"s_bitcmp{on}_b64"] = (
            "",
            ("u64", "u32"),
            lambda a, b, on=on: (None, int((a >> (b & 63) & 1) == on)),
        )
    table["s_mov_b64"] = ("u64", ("u64",), lambda a: (a, None))
    table["s_brev_b64"] = ("u64", ("u64",), lambda a: (int(f"{a:064b}"[::-1], 2), None))
    for name, test in COMPARE.items():
        table[f"s_cmp_{name}_f16"] = (
            "",
            ("f16", "f16"),
            lambda a, b, t=test: (None, int(t(compared(a, b, F16)))),
        )
    table["s_and_b64"] = ("u64", q, lambda a, b: wide(a & b))
    table["s_or_b64"] = ("u64", q, lambda a, b: wide(a | b))
    table["s_lshl_b64"] = ("u64", ("u64", "u32"), lambda a, b: wide(shifted(a, b & 63, 64)))
    table["s_lshr_b64"] = ("u64", ("u64", "u32"), lambda a, b: wide(a >> (b & 63)))
    table["s_bfe_u64"] = ("u64", ("u64", "u32"), lambda a, b: field(a, b, False, 64))
    table["s_bfe_i64"] = ("u64", ("u64", "u32"), lambda a, b: field(a, b, True, 64))
    table["s_ashr_i64"] = ("u64", ("u64", "u32"), lambda a, b: wide(signed(a, 64) >> (b & 63)))
    return table | oracle_parts.scalar_table()

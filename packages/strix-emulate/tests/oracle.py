# SPDX-License-Identifier: BSD-3-Clause
"""A second, slow implementation of the ISA document, for one lane.

The oracle shares no code with the emulator. Each entry is a mnemonic with the kinds of its operands
and a function on bit patterns. The functions use the arithmetic of the module `exact`.
"""

from collections.abc import Callable
from fractions import Fraction

import oracle_floats
import oracle_parts
from exact import (
    BINARY_FUNCTIONS,
    COMPARE,
    F16,
    F32,
    F64,
    M32,
    bfe,
    compare_integers,
    compare_numbers,
    convert,
    encode,
    extreme,
    fields,
    fma,
    leading_signs,
    perm,
    shift_left,
    signed,
    subtract,
    to_integer,
)


def vector_table() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    """Return, for each mnemonic, the kinds of result and sources, and a function on bits.

    A value of the kind "mask" is one bit.
    """
    table: dict[str, tuple[str, tuple[str, ...], Callable]] = {}
    for kind, form in (("f32", F32), ("f16", F16), ("f64", F64)):
        two_kinds = (kind,) * 2
        three_kinds = (kind,) * 3
        for name, function in BINARY_FUNCTIONS.items():
            table[f"v_{name}_{kind}"] = (
                kind,
                two_kinds,
                lambda a, b, f=form, o=function: o(a, b, f),
            )
        table[f"v_subrev_{kind}"] = (kind, two_kinds, lambda a, b, f=form: subtract(b, a, f))
        table[f"v_fma_{kind}"] = (kind, three_kinds, lambda a, b, c, f=form: fma(a, b, c, f))
        for name, first, second in (
            ("max3", True, True),
            ("min3", False, False),
            ("maxmin", True, False),
            ("minmax", False, True),
        ):
            table[f"v_{name}_{kind}"] = (
                kind,
                three_kinds,
                lambda a, b, c, f=form, i=first, o=second: extreme(extreme(a, b, f, i), c, f, o),
            )
        for name, test in COMPARE.items():
            table[f"v_cmp_{name}_{kind}"] = (
                "mask",
                two_kinds,
                lambda a, b, f=form, t=test: int(t(compare_numbers(a, b, f))),
            )
    for bits in (16, 32, 64):
        kinds = (f"u{bits}",) * 2
        for sign, read in (("u", int), ("i", lambda x, n=bits: signed(x, n))):
            for name in ("lt", "eq", "le", "gt", "ge", "lg", "f", "t"):
                table[f"v_cmp_{'ne' if name == 'lg' else name}_{sign}{bits}"] = (
                    "mask",
                    kinds,
                    lambda a, b, t=COMPARE[name], r=read: int(t(compare_integers(r(a), r(b)))),
                )
            if bits == 64:
                continue
            table |= {
                f"v_{name}_{sign}{bits}": (
                    kinds[0],
                    kinds[:1] * count,
                    lambda *x, f=pick, r=read: f(*map(r, x)),
                )
                for name, count, pick in (
                    ("max", 2, max),
                    ("min", 2, min),
                    ("max3", 3, max),
                    ("min3", 3, min),
                    ("med3", 3, lambda *x: sorted(x)[1]),
                )
            }
        of_any_size = {
            "and_b": lambda a, b: a & b,
            "or_b": lambda a, b: a | b,
            "xor_b": lambda a, b: a ^ b,
            "mul_lo_u": lambda a, b: a * b,
            "not_b": lambda a: ~a,
            "mov_b": lambda a: a,
        }
        for name, function in of_any_size.items() if bits < 64 else ():
            count = function.__code__.co_argcount
            table[f"v_{name}{bits}"] = (kinds[0], kinds[:1] * count, function)
        shift_kind = "u16" if bits == 16 else "u32"
        for name, function in (
            ("lshlrev_b", lambda a, b, n=bits: shift_left(b, a & n - 1, n)),
            ("lshrrev_b", lambda a, b, n=bits: b >> (a & n - 1)),
            ("ashrrev_i", lambda a, b, n=bits: signed(b, n) >> (a & n - 1)),
        ):
            table[f"v_{name}{bits}"] = (kinds[0], (shift_kind, kinds[0]), function)
    u = "u32"
    binary = {
        "v_mul_hi_u32": lambda a, b: a * b >> 32,
        "v_xnor_b32": lambda a, b: ~(a ^ b),
        "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
        "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
        "v_mul_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24),
        "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
        "v_mul_hi_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24) >> 32,
        "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
        "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    }
    ternary = {
        "v_add3_u32": lambda a, b, c: a + b + c,
        "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
        "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
        "v_xad_u32": lambda a, b, c: (a ^ b) + c,
        "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
        "v_and_or_b32": lambda a, b, c: a & b | c,
        "v_or3_b32": lambda a, b, c: a | b | c,
        "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
        "v_perm_b32": perm,
        "v_bfe_u32": lambda a, b, c: bfe(a, b, c, False),
        "v_bfe_i32": lambda a, b, c: bfe(a, b, c, True),
        "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
        "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
        "v_mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + signed(c),
        **{
            f"v_{name}_{sign}32": lambda a, b, c, i=first, o=second, r=read: o(i(r(a), r(b)), r(c))
            for name, first, second in (("maxmin", max, min), ("minmax", min, max))
            for sign, read in (("i", signed), ("u", int))
        },
        "v_sad_u8": lambda a, b, c: sum(abs(x - y) for x, y in fields(a, b, 8)) + c,
        "v_sad_hi_u8": lambda a, b, c: (sum(abs(x - y) for x, y in fields(a, b, 8)) << 16) + c,
        "v_sad_u16": lambda a, b, c: sum(abs(x - y) for x, y in fields(a, b, 16)) + c,
        "v_sad_u32": lambda a, b, c: abs(a - b) + c,
        "v_msad_u8": lambda a, b, c: sum(abs(x - y) for x, y in fields(a, b, 8) if y) + c,
        "v_lerp_u8": lambda a, b, c: sum(
            (x + y + (c >> 8 * i & 1) >> 1) << 8 * i for i, (x, y) in enumerate(fields(a, b, 8))
        ),
    }
    unary = {
        "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
        "v_clz_i32_u32": lambda a: 32 - a.bit_length() if a else -1,
        "v_ctz_i32_b32": lambda a: (a & -a).bit_length() - 1,
        "v_cvt_i32_f32": lambda a: to_integer(a, F32, -(2**31), 2**31 - 1),
        "v_cvt_u32_f32": lambda a: to_integer(a, F32, 0, M32),
        "v_cvt_f32_i32": lambda a: encode(Fraction(signed(a)), F32),
        "v_cvt_f32_u32": lambda a: encode(Fraction(a), F32),
        "v_cls_i32": lambda a: leading_signs(signed(a), 32),
        **{
            f"v_cvt_f32_ubyte{i}": lambda a, i=i: encode(Fraction(a >> 8 * i & 255), F32)
            for i in range(4)
        },
    }
    for count, group in ((1, unary), (2, binary), (3, ternary)):
        for name, function in group.items():
            table[name] = (u, (u,) * count, function)
    table["v_cvt_f32_f16"] = ("f32", ("f16",), lambda a: convert(a, F16, F32))
    table["v_cvt_f16_f32"] = ("f16", ("f32",), lambda a: convert(a, F32, F16))
    for sign, read in (("i", lambda x: signed(x, 16)), ("u", int)):
        table[f"v_mad_{sign}32_{sign}16"] = (
            u,
            ("u16", "u16", u),
            lambda a, b, c, r=read: r(a) * r(b) + c,
        )
        table[f"v_cvt_{sign}32_{sign}16"] = (u, ("u16",), lambda a, r=read: r(a))
    for source, form in (("f32", F32), ("f64", F64)):
        for target, target_form in (("f32", F32), ("f64", F64)):
            if source != target:
                table[f"v_cvt_{target}_{source}"] = (
                    target,
                    (source,),
                    lambda a, f=form, t=target_form: convert(a, f, t),
                )
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
    table["v_pack_b32_f16"] = ("h2", ("f16", "f16"), lambda a, b: a | b << 16)
    for name, counts in (("qsad", lambda _y: True), ("mqsad", bool)):

        def add_differences(a, b, c, counts=counts):
            result = 0
            for i in range(4):
                total = c >> 16 * i
                for x, y in fields(a >> 8 * i & M32, b, 8):
                    if counts(y):
                        total += abs(x - y)
                result |= (total & 0xFFFF) << 16 * i
            return result

        table[f"v_{name}_pk_u16_u8"] = ("u64", ("u64", u, "u64"), add_differences)
    return table | oracle_floats.vector_table() | oracle_parts.vector_table()


def keep_scc(function: Callable) -> Callable:
    """Wrap the function of an instruction that leaves SCC unchanged."""
    return lambda *x: (function(*x), None)


def set_scc(function: Callable, mask: int = M32) -> Callable:
    """Wrap the function of an instruction that sets SCC if the result is not 0."""
    return lambda *x: (function(*x), int(function(*x) & mask != 0))


def scalar_table() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    """Return a table like vector_table's, with functions that also return SCC.

    The functions return (result, SCC), or (result, SCC, EXEC) if they write EXEC. They return None
    in place of an unchanged SCC.
    """
    table: dict[str, tuple[str, tuple[str, ...], Callable]] = {}

    def enter(result: str, sources: tuple[str, ...], functions: dict[str, Callable]) -> None:
        table.update({f"s_{name}": (result, sources, f) for name, f in functions.items()})

    def add_signed(x: int) -> tuple[int, int]:
        return x, int(not -(2**31) <= x < 2**31)

    enter(
        "u32",
        ("u32", "u32"),
        {
            "add_u32": lambda a, b: (a + b, int(a + b > M32)),
            "sub_u32": lambda a, b: (a - b, int(a < b)),
            "add_i32": lambda a, b: add_signed(signed(a) + signed(b)),
            "sub_i32": lambda a, b: add_signed(signed(a) - signed(b)),
            "min_i32": lambda a, b: (min(signed(a), signed(b)), int(signed(a) < signed(b))),
            "max_i32": lambda a, b: (max(signed(a), signed(b)), int(signed(a) >= signed(b))),
            "min_u32": lambda a, b: (min(a, b), int(a < b)),
            "max_u32": lambda a, b: (max(a, b), int(a >= b)),
            "absdiff_i32": set_scc(lambda a, b: abs(signed(a - b))),
            "mul_i32": keep_scc(lambda a, b: a * b),
            "mul_hi_u32": keep_scc(lambda a, b: a * b >> 32),
            "mul_hi_i32": keep_scc(lambda a, b: signed(a) * signed(b) >> 32),
            **{
                f"pack_{'lh'[i]}{'lh'[j]}_b32_b16": keep_scc(
                    lambda a, b, i=i, j=j: a >> 16 * i & 0xFFFF | (b >> 16 * j & 0xFFFF) << 16
                )
                for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))
            },
            **{
                f"lshl{n}_add_u32": lambda a, b, n=n: ((a << n) + b, int((a << n) + b > M32))
                for n in (1, 2, 3, 4)
            },
        },
    )
    enter(
        "u32",
        ("u32",),
        {
            "abs_i32": set_scc(lambda a: abs(signed(a))),
            "sext_i32_i16": keep_scc(lambda a: signed(a, 16)),
            "sext_i32_i8": keep_scc(lambda a: signed(a, 8)),
            "cvt_f32_u32": keep_scc(lambda a: encode(Fraction(a), F32)),
            "cvt_u32_f32": keep_scc(lambda a: to_integer(a, F32, 0, M32)),
            "cvt_f32_i32": keep_scc(lambda a: encode(Fraction(signed(a)), F32)),
            "cvt_i32_f32": keep_scc(lambda a: to_integer(a, F32, -(2**31), 2**31 - 1)),
        },
    )
    for kind, form in (("f32", F32), ("f16", F16)):
        enter(
            "",
            (kind, kind),
            {
                f"cmp_{name}_{kind}": lambda a, b, t=test, f=form: (
                    None,
                    int(t(compare_numbers(a, b, f))),
                )
                for name, test in COMPARE.items()
            },
        )
    for name in ("lt", "eq", "le", "gt", "lg", "ge"):
        for kind, read in (("i", signed), ("u", lambda x, _bits=0: x)):

            def compare(a, b, test=COMPARE[name], r=read, bits=32):
                return None, int(test(compare_integers(r(a), r(b, bits))))

            enter("", ("u32", "u32"), {f"cmp_{name}_{kind}32": compare})
            enter(
                "",
                ("r:u32", "imm"),
                {f"cmpk_{name}_{kind}32": lambda a, b, c=compare: c(a, b, bits=16)},
            )
        if name in ("eq", "lg"):
            enter("", ("u64", "u64"), {f"cmp_{name}_u64": compare})
    for bits in (32, 64):
        _enter_size(bits, enter)
    return table | oracle_parts.scalar_table()


def _enter_size(n: int, enter: Callable) -> None:
    """Enter the instructions that exist for both 32 and 64 bits, in the form for n bits."""
    kind = f"u{n}"
    mask = (1 << n) - 1

    def field(a: int, b: int, sign: bool) -> int:
        width = min(b >> 16 & 127, n)
        plain = (signed(a, n) if sign else a) >> (b & n - 1) & (1 << width) - 1
        return signed(plain, width) if sign and width else plain

    logic = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "and_not1": lambda a, b: a & ~b,
        "or_not1": lambda a, b: a | ~b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
    }
    enter(kind, (kind, kind), {f"{name}_b{n}": set_scc(f, mask) for name, f in logic.items()})
    logic |= {"and_not0": lambda a, b: ~a & b, "or_not0": lambda a, b: ~a | b}
    for name, function in logic.items():

        def result(s, e, f=function):
            return f(s, e) & mask

        sources = (kind, "exec" if n == 32 else "exec64")
        enter(
            kind,
            sources,
            {f"{name}_saveexec_b{n}": lambda s, e, f=result: (e, int(f(s, e) != 0), f(s, e))},
        )
        if name in ("and_not0", "and_not1"):
            enter(
                kind,
                sources,
                {
                    f"{name}_wrexec_b{n}": lambda s, e, f=result: (
                        f(s, e),
                        int(f(s, e) != 0),
                        f(s, e),
                    )
                },
            )
    enter(
        kind,
        (kind, "u32"),
        {
            f"lshl_b{n}": set_scc(lambda a, b: a << (b & n - 1), mask),
            f"lshr_b{n}": set_scc(lambda a, b: a >> (b & n - 1), mask),
            f"ashr_i{n}": set_scc(lambda a, b: signed(a, n) >> (b & n - 1), mask),
            f"bfe_u{n}": set_scc(lambda a, b: field(a, b, False), mask),
            f"bfe_i{n}": set_scc(lambda a, b: field(a, b, True), mask),
        },
    )
    enter(
        kind,
        (kind,),
        {
            f"mov_b{n}": keep_scc(lambda a: a),
            f"not_b{n}": set_scc(lambda a: ~a, mask),
            f"brev_b{n}": keep_scc(lambda a: int(f"{a:0{n}b}"[::-1], 2)),
        },
    )
    enter(
        "u32",
        (kind,),
        {
            f"bcnt1_i32_b{n}": set_scc(lambda a: a.bit_count()),
            f"bcnt0_i32_b{n}": set_scc(lambda a: n - a.bit_count()),
            f"clz_i32_u{n}": keep_scc(lambda a: n - a.bit_length() if a else -1),
            f"ctz_i32_b{n}": keep_scc(lambda a: (a & -a).bit_length() - 1),
            "cls_i32" if n == 32 else "cls_i32_i64": keep_scc(
                lambda a: leading_signs(signed(a, n), n)
            ),
        },
    )
    for on in (0, 1):
        enter(
            "",
            (kind, "u32"),
            {f"bitcmp{on}_b{n}": lambda a, b, on=on: (None, int(a >> (b & n - 1) & 1 == on))},
        )
        enter(
            kind,
            ("u32", "old"),
            {
                f"bitset{on}_b{n}": keep_scc(
                    lambda a, old, on=on: old & ~(1 << (a & n - 1)) | on << (a & n - 1)
                )
            },
        )
    enter(
        kind,
        ("u32", "u32"),
        {f"bfm_b{n}": keep_scc(lambda a, b: ((1 << (a & n - 1)) - 1) << (b & n - 1))},
    )
    enter(kind, (kind, kind, "scc"), {f"cselect_b{n}": keep_scc(lambda a, b, c: a if c else b)})
    enter(kind, (kind, "old", "scc"), {f"cmov_b{n}": keep_scc(lambda a, old, c: a if c else old)})

# SPDX-License-Identifier: BSD-3-Clause
"""Single instructions that emulators got wrong, with operands that the oracles seldom generate."""

from fractions import Fraction

import exact
import numpy as np
import pytest
import selftest
from single import FULL, LANE, f32, run
from strix_emulate.arithmetic import floats
from strix_emulate.code import decode
from strix_emulate.errors import Trap
from strix_emulate.memory.waves import LANES, SCALARS, constant_value

#: LLVM's expansions of IEEE divisions: v3 = v1 / v2, and v[4:5] = v[0:1] / v[2:3].
DIVISION = {
    "f32": """
    v_div_scale_f32 v3, null, v2, v2, v1
    v_rcp_f32 v4, v3
    v_fma_f32 v5, -v3, v4, 1.0
    v_fmac_f32 v4, v5, v4
    v_div_scale_f32 v5, vcc_lo, v1, v2, v1
    v_mul_f32 v6, v5, v4
    v_fma_f32 v7, -v3, v6, v5
    v_fmac_f32 v6, v7, v4
    v_fma_f32 v3, -v3, v6, v5
    v_div_fmas_f32 v3, v3, v4, v6
    v_div_fixup_f32 v3, v3, v2, v1
    """,
    "f64": """
    v_div_scale_f64 v[4:5], null, v[2:3], v[2:3], v[0:1]
    v_rcp_f64 v[6:7], v[4:5]
    v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
    v_fma_f64 v[6:7], v[6:7], v[8:9], v[6:7]
    v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
    v_div_scale_f64 v[10:11], vcc_lo, v[0:1], v[2:3], v[0:1]
    v_fma_f64 v[6:7], v[6:7], v[8:9], v[6:7]
    v_mul_f64 v[8:9], v[10:11], v[6:7]
    v_fma_f64 v[4:5], -v[4:5], v[8:9], v[10:11]
    v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[8:9]
    v_div_fixup_f64 v[4:5], v[4:5], v[2:3], v[0:1]
    """,
}
EDGES = {
    "f32": (0, -0.0, 1e-45, 1e-40, 1e-38, 3, 1e38, 3.4e38, np.inf, np.nan),
    "f64": (0, -0.0, 5e-324, 1e-310, 1e308, np.inf, np.nan, 3),
}


@pytest.mark.parametrize(
    ("kind", "waves", "places"), [("f32", 500, (1, 2, 3)), ("f64", 8, (0, 2, 4))]
)
def test_division_rounds_correctly(kind, waves, places):
    """LLVM's expansion of a division, which scales numbers, rounds quotients correctly."""
    words = int(kind[1:]) // 32
    edges = EDGES[kind]
    dtype = np.dtype(f"f{4 * words}")
    draw = np.random.default_rng(0).integers(0, 1 << 32, (2, waves, LANES, words), np.uint32)
    n, d = draw.view(dtype)[..., 0]
    pairs = np.array([(x, y) for x in edges for y in edges], dtype)
    n.flat[: len(pairs)], d.flat[: len(pairs)] = pairs.T
    registers = {}
    for i in range(words):
        registers[f"v{places[0] + i}"] = draw[0, ..., i]
        registers[f"v{places[1] + i}"] = draw[1, ..., i]
    g = run(DIVISION[kind], waves=waves, **registers)
    bits = np.ascontiguousarray(g.V[places[2] : places[2] + words].transpose(1, 2, 0))
    got = bits.view(dtype)[..., 0]
    with np.errstate(all="ignore"):
        expected = n / d
    same = (got.view(f"u{4 * words}") == expected.view(f"u{4 * words}")) | (
        np.isnan(got) & np.isnan(expected)
    )
    assert same.all(), (n[~same], d[~same], got[~same], expected[~same])


def test_division_scale_flushes_where_the_kernel_does():
    text = "v_div_scale_f32 v3, vcc_lo, v1, v1, v2"
    numbers = {"v1": f32(1e-40), "v2": f32(1)}
    assert (run(text, **numbers).F[3] == f32(1e-40) * np.float32(2.0**64)).all()
    assert np.isnan(run(text, mode={"denormals_32": False}, **numbers).F[3]).all()


def test_fma_rounds_once():
    a = np.float32(1 + 2**-12)
    # a * a is halfway between two float32 numbers, so that the tiny addend decides the rounding.
    for c, expected in (
        (2.0**-60, np.nextafter(np.float32(1 + 2**-11), np.float32(2))),
        (-(2.0**-60), np.float32(1 + 2**-11)),
    ):
        assert floats.fma32(f32(a), f32(a), f32(c))[0] == expected
    rng = np.random.default_rng(0)
    x, y, z = rng.integers(0, 2**32, (3, 3000), np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        got = floats.fma32(x, y, z)
    for i in range(len(x)):
        expected = exact.fma(*(int(v[i].view(np.uint32)) for v in (x, y, z)), exact.F32)
        assert int(got[i].view(np.uint32)) == expected or (
            np.isnan(got[i]) and expected == exact.NAN[exact.F32]
        )


def test_fma_of_float64_rounds_once():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 2000)) * 2.0 ** rng.integers(-600, 500, (3, 2000))
    c[:1000] = -a[:1000] * b[:1000]
    with np.errstate(all="ignore"):
        got = floats.fma64(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert r == (float(exact) if abs(exact) < 2**1024 else np.copysign(np.inf, exact))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("exp", np.exp2),
        ("log", np.log2),
        ("sin", lambda x: np.sin(2 * np.pi * (x % 1))),
        ("cos", lambda x: np.cos(2 * np.pi * (x % 1))),
    ],
)
def test_transcendental_functions_are_within_half_an_ulp(name, function):
    """The ISA document allows an error of 1 ulp. numpy's float32 code errs by up to 2.7 ulp."""
    x = np.linspace(0.01, 100, LANES * 40, dtype=np.float32).reshape(40, LANES)
    g = run(f"v_{name}_f32 v2, v1", waves=40, v1=x)
    expected = function(x.astype(float))
    ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(float)
    assert (np.abs(g.F[2] - expected) <= 0.501 * ulp).all()


def test_each_segment_of_two_over_pi_has_53_bits():
    segments = run("v_trig_preop_f64 v[2:3], 1.0, v1", v1=LANE)
    values = np.ascontiguousarray(segments.V[2:4, 0, :2].T).view(np.float64)[:, 0]
    # fdlibm's table of 2 / pi begins with these bits.
    bits = 0xA2F9836E4E441529FC2757D1F53 >> 2
    assert values.tolist() == [(bits >> 53) * 2.0**-53, (bits & (1 << 53) - 1) * 2.0**-106]


def test_denormals_follow_the_descriptor():
    tiny = f32(1e-40)
    text = "v_add_f32 v2, v1, v1\nv_rcp_f32 v3, v1"
    with_denormals = run(text, v1=tiny)
    flushed = run(text, mode={"denormals_32": False}, v1=tiny)
    assert (with_denormals.F[2][0] == tiny + tiny).all()
    assert (flushed.V[2][0] == 0).all()
    # Transcendental float32 operations treat denormals as zero in every mode.
    assert (with_denormals.F[3][0] == np.inf).all()


@pytest.mark.parametrize("text", ["f16 {}, v2.l, v1.l", "f32 {}, v2, v1", "f64 {}, v[2:3], v1"])
def test_the_class_of_a_denormal_is_seen_in_every_mode(text):
    text = f"v_cmp_class_{text.format('vcc_lo')}\nv_cndmask_b32 v4, 0, 1, vcc_lo"
    for mode in ({}, {"denormals_32": False, "denormals_16_64": False}):
        g = run(text, mode=mode, v1=LANE * 0 + 0x80, v2=LANE * 0 + 1, v3=LANE * 0)
        assert (g.V[4, 0] == 1).all()


def test_mixed_operations_flush_as_others_do():
    """In a mode that flushes, V_FMA_MIX flushes float32 sources and results, as others do."""
    tiny = f32(1e-40)
    text = "v_fma_mix_f32 v2, v1, 1.0, v3\nv_fma_mix_f32 v4, v5, v5, v3"
    numbers = {"v1": tiny, "v3": f32(0), "v5": f32(1e-20)}
    assert (run(text, **numbers).V[[2, 4], 0] != 0).all()
    flushed = run(text, mode={"denormals_32": False}, **numbers)
    assert (flushed.V[[2, 4], 0] == 0).all()


def test_packed_operations_flush_as_others_do():
    numbers = {"v1": LANE * 0 + 0x00010400, "v2": LANE * 0 + 0x3C003800}
    text = "v_pk_mul_f16 v3, v1, v2\nv_pk_max_f16 v4, v1, v1"
    g = run(text, **numbers)
    assert (g.V[3][0] == 0x00010200).all()
    assert (g.V[4][0] == 0x00010400).all()
    g = run(text, mode={"denormals_16_64": False}, **numbers)
    assert (g.V[3][0] == 0).all()
    assert (g.V[4][0] == 0x00000400).all()


def test_mixed_operations_through_dpp():
    controls = "quad_perm:[3,2,1,0] row_mask:0xf bank_mask:0x7"
    text = f"v_fma_mix_f32_e64_dpp v2, -v1, v4, v3 op_sel_hi:[0,0,0] {controls}"
    g = run(text, v1=LANE.astype(np.float32), v2=f32(7), v3=f32(1), v4=f32(2))
    expected = np.where(LANE % 16 < 12, 1 - 2.0 * (LANE ^ 3), 7)
    assert (g.F[2][0] == expected).all()


@pytest.mark.parametrize("text", ["v_mul_f32_dpp v2, -v1, v3", "v_mul_f16_dpp v2.l, -v1.l, v3.l"])
def test_a_zero_from_dpp_is_negated_like_other_sources(text):
    """LLVM combines a move through DPP and an operation on its negated result."""
    controls = "row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    g = run(f"{text} {controls}", v1=LANE * 0, v2=LANE * 0, v3=LANE * 0 + 0x3F803C00)
    assert (g.V[2, 0] == (0x80000000 if "f32" in text else 0x8000)).all()


def test_output_modifiers():
    scaled = "v_mul_f32 v3, v1, v1 mul:4\nv_mul_f32 v4, v1, v1 div:2\nv_mul_f32 v5, v0, v1 div:2"
    flushing = {"ieee": False, "denormals_32": False}
    g = run(scaled, mode=flushing, v0=f32(-0.0), v1=f32(3))
    assert (g.F[3][0] == 36).all()
    assert (g.F[4][0] == 4.5).all()
    assert (g.V[5][0] == 0).all()
    # Output modifiers have no effect in IEEE mode, or if denormals are kept.
    for mode in ({}, flushing | {"ieee": True}, flushing | {"denormals_32": True}):
        g = run(scaled, mode=mode, v0=f32(-0.0), v1=f32(3))
        assert (g.F[3:5, 0] == 9).all()
        assert (g.V[5][0] == 0x80000000).all()


@pytest.mark.parametrize(
    "text",
    [
        "v_cvt_i32_f32_e64 v2, v1 clamp",
        "v_cvt_pk_rtz_f16_f32_e64 v2, v1, v1 clamp",
        "v_div_scale_f32 v2, vcc_lo, v1, v1, v1 clamp",
    ],
)
def test_clamp_is_refused_where_it_is_not_computed(text):
    """In particular, the bits of an integer result must not be limited to 0 to 1."""
    with pytest.raises(Trap, match="unsupported modifier clamp"):
        run(text, v1=f32(7))


def test_clamp_limits_the_last_step_of_a_division():
    numbers = {"v1": f32(5), "v2": f32(3), "scalars": {decode.VCC: 0}}
    assert (run("v_div_fmas_f32 v3, v1, v2, v2 clamp", **numbers).F[3][0] == 1).all()


def test_a_dot_product_of_halves_ignores_clamp():
    """V_DOT2_F32_F16 ignores CLAMP, as on hardware. ROCm's device library always sets the bit."""
    ones = 0x3C003C00
    minus_two = 0xC000C000
    g = run("v_dot2_f32_f16 v2, v0, v1, 1.0 clamp", v0=ones, v1=minus_two)
    assert (g.F[2][0] == -3).all()
    g = run("v_dot2_f32_bf16 v2, v0, v1, 1.0 clamp", v0=0x3F803F80, v1=minus_two)
    assert (g.F[2][0] == 0).all(), "clamp must apply to bfloat16: no hardware is known to ignore it"


@pytest.mark.parametrize(
    ("name", "one_bits", "two_bits"),
    [
        ("bf16_bf16", 0x3F80, 0x4000),
        ("f16_f16", 0x3C00, 0x4000),
        ("f32_bf16", 0x3F80, 2 << 29),
        ("f32_f16", 0x3C00, 2 << 29),
    ],
)
def test_a_fraction_in_a_dot_product_is_its_low_half(name, one_bits, two_bits):
    """An inline 2.0 is a 16-bit number of the instruction's type, in the low half of the source.

    Triton multiplies bfloat16 numbers by such constants. The low half of a float32 2.0 would be 0.
    """
    for sources in ("v0, 2.0", "2.0, v0"):
        g = run(f"v_dot2_{name} v2, {sources}, 0", v0=one_bits)
        assert (g.V[2][0] & (0xFFFFFFFF if "f32" in name else 0xFFFF) == two_bits).all()


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_signalling_nan_wins_over_a_number(kind):
    """In IEEE mode, V_MAX_F32 and others return NaN for a signalling NaN only, not a quiet one."""
    high, bits = {"f16": (0, 16), "f32": (0, 32), "f64": (1, 32)}[kind]
    quiet = {"f16": 0x7E00, "f32": 0x7FC00000, "f64": 0x7FF80000}[kind]
    one_bits = {"f16": 0x3C00, "f32": 0x3F800000, "f64": 0x3FF00000}[kind]
    signalling = quiet - (1 << {"f16": 9, "f32": 22, "f64": 19}[kind]) + 1
    half = ".l" if kind == "f16" else ""
    v = "v[{}:{}]".format if kind == "f64" else (lambda i, _: f"v{i}{half}")
    text = f"""
    v_min_{kind} {v(6, 7)}, {v(0, 1)}, {v(2, 3)}
    v_max_{kind} {v(8, 9)}, {v(4, 5)}, {v(2, 3)}
    """
    g = run(
        text,
        **{f"v{i}": LANE * 0 for i in range(10)}
        | {
            f"v{high}": LANE * 0 + signalling,
            f"v{2 + high}": LANE * 0 + one_bits,
            f"v{4 + high}": LANE * 0 + quiet,
        },
    )
    mask = (1 << bits) - 1
    assert (g.V[6 + high][0] & mask == quiet).all()
    assert (g.V[8 + high][0] & mask == one_bits).all()


def test_constants_of_packed_operations():
    """op_sel selects a half of a constant's 32 bits.

    For an inline constant, LLVM's getInlineEncodingV216 defines these bits.
    """
    text = """
    v_pk_add_f16 v1, v0, 1.0
    v_pk_add_f16 v2, v0, 1.0 op_sel_hi:[1,0]
    v_pk_add_u16 v3, v4, 2.0
    v_pk_add_u16 v5, v4, -1
    v_pk_add_u16 v6, v4, 0x00070009
    v_pk_add_u16 v7, v4, 0x00070009 op_sel:[0,1] op_sel_hi:[1,0]
    """
    g = run(text, v0=LANE * 0 + 0x3C003C00, v4=LANE * 0 + 0x00030005)
    expected = {
        1: 0x3C004000,
        2: 0x40004000,
        3: 0x40030005,
        5: 0x00020004,
        6: 0x000A000E,
        7: 0x000C000C,
    }
    assert {i: int(g.V[i][0, 0]) for i in expected} == expected
    # In an operation on one 16-bit integer, an inline fraction is the low half of a float32.
    two = decode.Operand("const", value=2.0)
    assert constant_value(two, "u16") == 0
    assert constant_value(two, "f16") == 2


def test_literals_that_an_inline_constant_would_do_for():
    """LLVM prints a literal as lit(...) if an inline constant has the same value."""
    ins = decode.read(
        bytes.fromhex("010013d600e5fd03 0000803f"), "v_fma_f32 v1, v0, 1.0, lit(0x3f800000)"
    )
    assert ins.unknown == ""
    assert ins.operands[2:] == (
        decode.Operand("const", value=1.0),
        decode.Operand("const", value=0x3F800000, literal=True),
    )


def test_literals_of_64_bits_are_sign_extended_for_signed_operands():
    text = """
    v_ashrrev_i64 v[0:1], 4, 0xffffff00
    v_lshrrev_b64 v[2:3], 4, 0xffffff00
    s_ashr_i64 s[0:1], 0xffffff00, 4
    v_cmp_lt_i64 s2, 0xffffff00, v[4:5]
    v_cmp_lt_u64 s3, 0xffffff00, v[4:5]
    """
    g = run(text, v4=LANE, v5=LANE * 0)
    assert g.V[:4, 0, 0].tolist() == [0xFFFFFFF0, FULL, 0x0FFFFFF0, 0]
    assert g.S[:4, 0, 0].tolist() == [0xFFFFFFF0, FULL, FULL, 0]


@pytest.mark.parametrize(("kind", "number"), [("i32", FULL), ("u32", 0xFFFF)])
def test_constants_of_short_comparisons_are_extended_by_their_type(kind, number):
    assert run(f"s_cmpk_eq_{kind} s2, 0xffff", scalars={2: number}).scc.all()


def test_carries_through_dpp():
    g = run(
        "v_add_co_u32_e64_dpp v2, vcc_lo, v0, v1 row_xmask:1 row_mask:0xf bank_mask:0xf",
        v0=LANE * 0x08000000,
        v1=LANE * 0 + 0xF0000000,
    )
    total = (LANE ^ 1).astype(np.uint64) * 0x08000000 % 2**32 + 0xF0000000
    assert (g.V[2, 0] == total.astype(np.uint32)).all()
    assert (selftest.waves(g.V, g.S).S[106, 0, 0] >> LANE & 1 == total >> 32).all()


def test_half_overflow_mode():
    """With FP16_OVFL, an overflow gives the largest number, and infinities stay."""
    text = """
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
    v_cvt_f16_f32 v2.l, v0
    v_cvt_f16_f32 v2.h, v1
    v_pk_add_f16 v4, v2, v2
    v_pk_add_f16 v5, v2, v2 clamp
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0
    v_cvt_f16_f32 v3.l, v0
    s_getreg_b32 s1, hwreg(HW_REG_MODE, 23, 1)
    """
    g = run(text, v0=f32(1e6), v1=f32(-np.inf))
    assert g.H[2, 0, :2].tolist() == [65504, -np.inf]
    assert g.H[3, 0, 0] == np.inf
    assert g.H[4, 0, :2].tolist() == [65504, -np.inf]
    assert g.H[5, 0, :2].tolist() == [1, 0]
    assert g.S[1, 0, 0] == 0


@pytest.mark.parametrize("modifier", ["op_sel", "op_sel_hi"])
def test_a_dot_product_with_selected_halves_is_refused(modifier):
    with pytest.raises(Trap, match=f"unsupported modifier {modifier}$"):
        run(f"v_dot2_f32_f16 v2, v0, v1, v1 {modifier}:[0,1,0]", v0=LANE, v1=LANE)


def test_a_dot_product_of_halves_is_refused_in_the_overflow_mode():
    """The effect of FP16_OVFL on V_DOT2_F16_F16 is not known, so the instruction traps."""
    with pytest.raises(Trap, match="not supported with FP16_OVFL"):
        run("v_dot2_f16_f16 v2.l, v0, v1, v0.l", v0=LANE, v1=LANE, mode={"finite_16": True})


#: Scalar instructions on floats. {} is "s" or "v". For vectors, {l} is the low half of a register.
SCALAR_FLOATS = [
    *(
        f"{{}}_{name}_f32 {{}}4, {{}}2, {{}}3"
        for name in ("add", "sub", "mul", "min", "max", "fmac")
    ),
    *(f"{{}}_{name}_f32 {{}}4, {{}}2" for name in ("ceil", "floor", "trunc", "rndne")),
    *(
        f"{{}}_{name}_f16 {{}}4{{l}}, {{}}2{{l}}, {{}}3{{l}}"
        for name in ("add", "sub", "mul", "min", "max", "fmac")
    ),
    *(f"{{}}_{name}_f16 {{}}4{{l}}, {{}}2{{l}}" for name in ("ceil", "floor", "trunc", "rndne")),
    "{}_fmaak_f32 {}4, {}2, {}3, 0x00000005",
    "{}_fmamk_f32 {}4, {}2, 0x3f800000, {}3",
    "{}_cvt_f32_i32 {}4, {}2",
    "{}_cvt_f32_u32 {}4, {}2",
    "{}_cvt_i32_f32 {}4, {}2",
    "{}_cvt_u32_f32 {}4, {}2",
    "{}_cvt_f16_f32 {}4{l}, {}2",
    "{}_cvt_f32_f16 {}4, {}2{l}",
    "{}_cvt_pk_rtz_f16_f32 {}4, {}2, {}3",
]
#: Zero, denormals, their neighbours, infinities, NaN and others, as float32 or as pairs of float16.
SPECIAL = [0, 3, 0x80000003, 0x007FFFFF, 0x00800001, 0x3F800000, 0x7F800000, 0x7F800001]
SPECIAL += [0x00030003, 0x800303FF, 0x04010400, 0x7BFF7BFF, 0x7C01FC00, 0x477FF000, 0x42F6E979]


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"denormals_32": False},
        {"denormals_16_64": False},
        {"denormals_32": False, "denormals_16_64": False, "ieee": False},
        {"finite_16": True},
    ],
)
def test_scalar_floats_are_those_of_the_vector_instructions(mode):
    """Scalar and vector floats depend on the mode alike (RDNA3.5 ISA, "SALU Floating Point")."""
    pairs = np.array([(a, b) for a in SPECIAL for b in SPECIAL], np.uint32)
    first, second = pairs[:, :1], pairs[:, 1:]

    def execute(text: str):
        scalars = {2: first, 3: second, 4: 3}
        registers = {"v2": first, "v3": second, "v4": LANE * 0 + 3}
        return run(text, scalars=scalars, waves=len(pairs), mode=mode, **registers)

    for text in SCALAR_FLOATS:
        scalar = execute(text.replace("{}", "s").replace("{l}", ""))
        vector = execute(text.replace("{}", "v").replace("{l}", ".l"))
        assert (scalar.S[4, :, 0] == vector.V[4, :, 0]).all(), text
    g = execute("s_cvt_hi_f32_f16 s4, s2\nv_cvt_f32_f16 v4, v2.h")
    assert (g.S[4, :, 0] == g.V[4, :, 0]).all()
    for condition in ("lt", "eq", "nge"):
        for kind, half in (("f32", ""), ("f16", ".l")):
            g = execute(
                f"s_cmp_{condition}_{kind} s2, s3\ns_cselect_b32 s4, 1, 0\n"
                f"v_cmp_{condition}_{kind} vcc_lo, v2{half}, v3{half}\n"
                "v_cndmask_b32 v4, 0, 1, vcc_lo"
            )
            assert (g.S[4, :, 0] == g.V[4, :, 0]).all()


def test_reciprocals_of_denormals_overflow():
    """With FP16_OVFL, the reciprocal of zero is infinite, and that of a denormal is not.

    If the mode flushes denormals, a denormal is a zero.
    """
    bits = np.resize([0, 0x8000, 0x0003, 0x8100, 0x0101, 0x7C00], LANES).astype(np.uint32)
    largest = [0x7BFF, 0xFBFF]
    text = "v_rcp_f16 v1.l, v0.l"
    for mode, expected in (
        ({"finite_16": True}, [0x7C00, 0xFC00, *largest, 0x7BF8, 0]),
        (
            {"finite_16": True, "denormals_16_64": False},
            [0x7C00, 0xFC00, 0x7C00, 0xFC00, 0x7C00, 0],
        ),
        ({}, [0x7C00, 0xFC00, 0x7C00, 0xFC00, 0x7BF8, 0]),
    ):
        g = run(text, v0=bits, v1=LANE * 0, mode=mode)
        assert g.V[1, 0, :6].tolist() == expected


def test_a_mode_from_a_register_is_the_one_that_the_kernel_began_with():
    """The emulator takes MODE from the code, so another mode in the register causes a trap."""
    text = "s_denorm_mode 0\ns_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s2\nv_add_f32 v1, v0, v0"
    g = run(text, scalars={2: 15}, v0=LANE * 0 + 3)
    assert (g.V[1, 0] == 6).all()
    with pytest.raises(Trap, match="sets another mode than the mode at the kernel's start"):
        run(text, scalars={2: 3}, v0=LANE * 0 + 3)


@pytest.mark.parametrize(("name", "source"), [("b32", "s2"), ("imm32_b32", "15")])
def test_other_registers_than_the_mode_are_not_set(name, source):
    with pytest.raises(Trap, match="a hardware register other than MODE"):
        run(f"s_setreg_{name} hwreg(HW_REG_TRAPSTS, 4, 4), {source}", scalars={2: 15})


def test_waves_say_where_they_run():
    """HIP's __smid() reads engine, array and processor from HW_ID1."""
    registers = np.zeros((4, 6, LANES), np.uint32), np.zeros((SCALARS, 6, 1), np.uint32)
    waves = selftest.waves(*registers)
    waves.workgroup = np.array([0, 0, 1, 2, 4, 20])
    waves.wave = np.array([0, 5, 0, 0, 0, 0])
    g = selftest.execute("s_getreg_b32 s1, hwreg(HW_REG_HW_ID1)", waves)
    assert g.S[1, :, 0].tolist() == [0, 1 | 1 << 8, 1 << 16, 1 << 18, 1 << 10, 0]
    g = selftest.execute("s_getreg_b32 s1, hwreg(HW_REG_HW_ID1, 18, 3)", waves)
    assert g.S[1, :, 0].tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("selector", "picked"),
    [
        (0x0B0A0908, 0xFF0000FF),
        (0x0D0C0700, 0xFF008000),
    ],
)
def test_a_picked_byte_may_be_a_sign_or_a_constant(selector, picked):
    registers = {"v0": LANE * 0 + 0x80000000, "v1": LANE * 0 + 0x8000, "v2": LANE * 0 + selector}
    assert (run("v_perm_b32 v3, v0, v1, v2", **registers).V[3] == picked).all()


def test_permlanex16_takes_its_lanes_from_a_literal():
    g = run("v_permlanex16_b32 v2, v1, s0, 0xfedcba98", scalars={0: 0x01234567}, v1=LANE)
    nibbles = [int(c, 16) for c in "76543210"] + list(range(8, 16))
    expected = [(nibbles[i % 16]) + (0 if i >= 16 else 16) for i in range(32)]
    assert g.V[2][0].tolist() == expected


def test_negated_sources():
    """Constants, literals, and a half in a mixed operation can be negated."""
    g = run("v_fma_f32 v2, v1, neg(0), -2.0\nv_mul_f32 v3, 0x40490fdb, v1", v1=f32(3))
    assert (g.F[2][0] == -2).all()
    assert (g.F[3][0] == np.float32(3) * np.float32(np.pi)).all()
    half = LANE * 0 + 0x3E00  # 1.5
    g = run("v_fma_mixhi_f16 v4, -v1, v2, v2 op_sel_hi:[1,0,0]", v1=half, v2=f32(3))
    assert (g.V[4][0].view(np.float16)[1::2] == -1.5).all()


def test_the_null_register_is_zero_as_a_pair_and_as_a_mask():
    """As an ordinary pair, NULL would have M0 as its second register."""
    text = "s_mov_b64 s[0:1], null\nv_cndmask_b32_e64 v2, v0, v1, null\nv_add_f16 v3.l, null, null"
    g = run(text, scalars={decode.M0: 7}, v0=LANE, v1=LANE + 100, v3=LANE)
    assert g.S[:2, 0, 0].tolist() == [0, 0]
    assert (g.V[2][0] == LANE).all()
    assert (g.V[3][0] == 0).all()


def test_packed_halves_may_be_fractions_and_negated():
    numbers = {"v1": LANE * 0 + 0x40003C00, "v2": LANE * 0 + 0xC4004200}
    for sources, expected in (
        ("1.0, v2.l", 0x42003C00),
        ("v1.h, -0.5", 0xB8004000),
        ("-v1.l, |v2.h|", 0x4400BC00),
    ):
        assert (run(f"v_pack_b32_f16 v0, {sources}", **numbers).V[0] == expected).all(), sources


@pytest.mark.parametrize(
    "text",
    [
        "v_dot2_f16_f16 v2.l, -v0, v1, v0.l",
        "v_movrels_b32_dpp v2, v1 row_mirror row_mask:0xf bank_mask:0xf",
    ],
)
def test_modifiers_are_not_dropped(text):
    with pytest.raises(Trap, match="cannot execute"):
        run(text, scalars={decode.M0: 0}, v0=LANE, v1=LANE)


@pytest.mark.parametrize(
    "text", ["v_swaprel_b32 v1, v2", "s_movrels_b32 s4, s5", "s_movreld_b64 s[4:5], s[6:7]"]
)
def test_unsupported_moves_by_register_number_are_refused(text):
    with pytest.raises(Trap, match=r"cannot execute `.*`: unsupported mnemonic"):
        run(text, scalars={decode.M0: 3})


def test_vopd_reads_before_it_writes():
    g = run("v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", v1=LANE, v2=LANE + 100)
    assert (g.V[1][0] == LANE + 100).all()
    assert (g.V[2][0] == LANE).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wmma_needs_all_lanes_and_rows_that_repeat(kind):
    text = f"v_wmma_f32_16x16x16_{kind} v[24:31], v[0:7], v[8:15], v[16:23]"
    registers = {f"v{i}": LANE % 16 for i in range(24)}
    run(text, **registers)
    with pytest.raises(Trap, match="EXEC"):
        run(text, exec_mask=1, **registers)
    with pytest.raises(Trap, match="repeat"):
        run(text, **registers | {"v3": LANE})


def test_lds_out_of_range():
    # The address of lane 31 is outside of LDS, but lane 31 is not active.
    g = run(
        "ds_store_b32 v1, v2\nds_load_b32 v3, v1",
        0x7FFFFFFF,
        v1=np.where(LANE == 31, 1 << 20, LANE * 4).astype(np.uint32),
        v2=LANE,
    )
    assert (g.V[3][0][:31] == LANE[:31]).all()
    assert g.V[3][0][31] == 0xDEADBEEF

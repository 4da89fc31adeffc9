# SPDX-License-Identifier: BSD-3-Clause
"""Arithmetic of single instructions: division, rounding, NaN, denormals, constants."""

import exact
import numpy as np
import pytest
import selftest
from single import FULL, LANE, f32, run
from strix_emulate.arithmetic import floats
from strix_emulate.code import decode
from strix_emulate.code.decode import EXEC
from strix_emulate.memory.waves import LANES, SCALARS, constant


def test_division_sequence_rounds_correctly():
    """LLVM's expansion of an IEEE division, with all of its scaling, of any float32 numbers."""
    text = """
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
    """
    waves = 500
    n, d = np.random.default_rng(0).integers(0, 2**32, (2, waves, LANES), np.uint32)
    edges = np.float32([0, -0.0, 1e-45, 1e-40, 1e-38, 3, 1e38, 3.4e38, np.inf, np.nan])
    n.flat[:100], d.flat[:100] = (
        np.repeat(edges, 10).view(np.uint32),
        np.tile(edges, 10).view(n.dtype),
    )
    g = run(text, waves=waves, v1=n, v2=d)
    with np.errstate(all="ignore"):
        expected = n.view(np.float32) / d.view(np.float32)
    nan = np.isnan(expected)
    assert (g.V[3] == expected.view(np.uint32))[~nan].all() and np.isnan(g.F[3][nan]).all()


def test_division_scale_flushes_where_the_kernel_does():
    text = "v_div_scale_f32 v3, vcc_lo, v1, v1, v2"
    numbers = {"v1": f32(1e-40), "v2": f32(1)}
    assert (run(text, **numbers).F[3] == f32(1e-40) * np.float32(2.0**64)).all()
    assert np.isnan(run(text, mode={"denormals_32": False}, **numbers).F[3]).all()


def test_fma_rounds_once():
    a = np.float32(1 + 2**-12)
    # a * a is a tie of float32, which only the tiny addend breaks
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


def test_output_modifiers_and_nan():
    scaled = "v_mul_f32 v3, v1, v1 mul:4\nv_mul_f32 v4, v1, v1 div:2\nv_mul_f32 v5, v0, v1 div:2"
    flushing = {"ieee": False, "denormals_32": False}
    g = run(scaled, mode=flushing, v0=f32(-0.0), v1=f32(3))
    assert (g.F[3][0] == 36).all() and (g.F[4][0] == 4.5).all() and (g.V[5][0] == 0).all()
    # without effect in IEEE mode, and where denormals are kept
    for mode in ({}, flushing | {"ieee": True}, flushing | {"denormals_32": True}):
        g = run(scaled, mode=mode, v0=f32(-0.0), v1=f32(3))
        assert (g.F[3:5, 0] == 9).all() and (g.V[5][0] == 0x80000000).all()
    assert (run("v_add_f32 v2, v1, v1 clamp", v1=f32(3)).F[2][0] == 1).all()
    assert (run("v_add_f32 v2, v1, v1 clamp", v1=f32(np.nan)).F[2][0] == 0).all()
    assert (
        run("v_sub_nc_u32 v2, 1, v1 clamp", v1=LANE).V[2][0] == np.where(LANE < 2, 1 - LANE, 0)
    ).all()


def test_a_dot_product_of_halves_ignores_clamp():
    """As hardware does: ROCm's device library always sets the bit."""
    ones, minus_two = 0x3C003C00, 0xC000C000
    g = run("v_dot2_f32_f16 v2, v0, v1, 1.0 clamp", v0=ones, v1=minus_two)
    assert (g.F[2][0] == -3).all()
    g = run("v_dot2_f32_bf16 v2, v0, v1, 1.0 clamp", v0=0x3F803F80, v1=minus_two)
    assert (g.F[2][0] == 0).all(), "of bfloat16 nobody has seen it"


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [("bf16_bf16", 0x3F80, 0x4000), ("f16_f16", 0x3C00, 0x4000), ("f32_bf16", 0x3F80, 2 << 29),
     ("f32_f16", 0x3C00, 2 << 29)],
)  # fmt: skip
def test_a_fraction_in_a_dot_product_is_its_low_half(name, one, two):
    """As Triton multiplies bfloat16; it was a float32, whose low half is 0."""
    for sources in ("v0, 2.0", "2.0, v0"):
        g = run(f"v_dot2_{name} v2, {sources}, 0", v0=one)
        assert (g.V[2][0] & (0xFFFFFFFF if "f32" in name else 0xFFFF) == two).all()


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_signalling_nan_wins_over_a_number(kind):
    """In IEEE mode; a quiet one loses (V_MAX_F32 and relatives)."""
    high, bits = {"f16": (0, 16), "f32": (0, 32), "f64": (1, 32)}[kind]
    quiet = {"f16": 0x7E00, "f32": 0x7FC00000, "f64": 0x7FF80000}[kind]
    one = {"f16": 0x3C00, "f32": 0x3F800000, "f64": 0x3FF00000}[kind]
    signalling = quiet - (1 << {"f16": 9, "f32": 22, "f64": 19}[kind]) + 1
    half = ".l" if kind == "f16" else ""
    v = "v[{}:{}]".format if kind == "f64" else (lambda i, _: f"v{i}{half}")
    text = f"""
    v_min_{kind} {v(6, 7)}, {v(0, 1)}, {v(2, 3)}
    v_max_{kind} {v(8, 9)}, {v(4, 5)}, {v(2, 3)}
    """
    g = run(text, **{f"v{i}": LANE * 0 for i in range(10)} | {
        f"v{high}": LANE * 0 + signalling, f"v{2 + high}": LANE * 0 + one,
        f"v{4 + high}": LANE * 0 + quiet})  # fmt: skip
    mask = (1 << bits) - 1
    assert (g.V[6 + high][0] & mask == quiet).all() and (g.V[8 + high][0] & mask == one).all()


def test_constants_of_packed_operations():
    """What op_sel picks from: as LLVM's getInlineEncodingV216 has it."""
    text = """
    v_pk_add_f16 v1, v0, 1.0
    v_pk_add_f16 v2, v0, 1.0 op_sel_hi:[1,0]
    v_pk_add_u16 v3, v4, 2.0
    v_pk_add_u16 v5, v4, -1
    v_pk_add_u16 v6, v4, 0x00070009
    v_pk_add_u16 v7, v4, 0x00070009 op_sel:[0,1] op_sel_hi:[1,0]
    """
    g = run(text, v0=LANE * 0 + 0x3C003C00, v4=LANE * 0 + 0x00030005)
    expected = {1: 0x3C004000, 2: 0x40004000, 3: 0x40030005, 5: 0x00020004, 6: 0x000A000E,
                7: 0x000C000C}  # fmt: skip
    assert {i: int(g.V[i][0, 0]) for i in expected} == expected
    # of integers of 16 bits alone, too
    two = decode.Operand("const", value=2.0)
    assert constant(two, "u16") == 0 and constant(two, "f16") == 2


def test_literals_that_an_inline_constant_would_do_for():
    """LLVM prints them as lit(...)."""
    ins = decode.read(
        bytes.fromhex("010013d600e5fd03 0000803f"), "v_fma_f32 v1, v0, 1.0, lit(0x3f800000)"
    )
    assert ins.unknown == "" and ins.operands[2:] == (
        decode.Operand("const", value=1.0),
        decode.Operand("const", value=0x3F800000, literal=True),
    )


def test_scalar_extremes_of_equal_numbers_and_differences_that_overflow():
    """SCC of a maximum: the first source was taken. S_ABSDIFF wraps (the ISA's examples)."""
    for name in ("s_max_i32", "s_max_u32"):
        assert run(f"{name} s0, s1, s1", scalars={1: 7}).scc[0, 0]
    for name in ("s_min_i32", "s_min_u32"):
        assert not run(f"{name} s0, s1, s1", scalars={1: 7}).scc[0, 0]
    for a, b, difference in (
        (2, 5, 3), (0xFFFFFFFF, 0, 1), (0x80000000, 0, 0x80000000), (0x80000000, 1, 0x7FFFFFFF),
        (0x80000000, 0xFFFFFFFF, 0x7FFFFFFF),
    ):  # fmt: skip
        assert run("s_absdiff_i32 s0, s1, s2", scalars={1: a, 2: b}).S[0, 0, 0] == difference


def test_denormals_follow_the_descriptor():
    tiny = f32(1e-40)
    V = np.zeros((8, 1, LANES), np.uint32)
    V[1] = tiny.view(np.uint32)
    S = np.zeros((SCALARS, 1, 1), np.uint32)
    S[EXEC] = FULL
    kept = selftest.execute("v_add_f32 v2, v1, v1", selftest.waves(V, S))
    flushed = selftest.execute("v_add_f32 v2, v1, v1", selftest.waves(V, S), denormals_32=False)
    assert (kept.F[2][0] == tiny + tiny).all() and (flushed.V[2][0] == 0).all()
    # transcendental operations never have them
    assert (selftest.execute("v_rcp_f32 v2, v1", selftest.waves(V, S)).F[2][0] == np.inf).all()

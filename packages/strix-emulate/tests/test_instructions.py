# SPDX-License-Identifier: BSD-3-Clause
"""Single instructions against what the ISA document says, mostly where emulators went wrong."""

import numpy as np
import oracle
import pytest
import selftest
from strix_emulate import decode, floats
from strix_emulate.decode import EXEC, VCC
from strix_emulate.errors import Trap
from strix_emulate.waves import LANES, SCALARS, constant

LANE = np.arange(LANES, dtype=np.uint32)
FULL = 0xFFFFFFFF


def run(text: str, exec_mask: int = FULL, scalars=None, waves: int = 1, mode=None, **registers):
    """Executes assembly; registers are v0=array of 32 (uint32 or float32). Returns the waves."""
    V = np.full((64, waves, LANES), 0xDEADBEEF, np.uint32)
    S = np.full((SCALARS, waves, 1), 0xDEADBEEF, np.uint32)
    S[EXEC] = exec_mask
    for name, value in registers.items():
        value = np.asarray(value)
        V[int(name[1:])] = (
            value.view(np.uint32) if value.dtype.itemsize == 4 else value.astype(np.uint32)
        )
    for index, value in (scalars or {}).items():
        S[index] = value
    return selftest.execute(text, selftest.waves(V, S), **(mode or {}))


def f32(x) -> np.ndarray:
    return np.broadcast_to(np.asarray(x, np.float32), LANES).copy()


def test_machine_agrees_with_oracle():
    report = selftest.run(programs=30, seed=3)
    assert report.disagreements == [] and report.compared == 1200 and len(report.covered) > 200


def test_oracle_comparison_can_fail(monkeypatch):
    table = oracle.vector_table()
    wrong = {"v_add_nc_u32": ("u32", ("u32", "u32"), lambda a, b: a + b + 1)}
    monkeypatch.setattr(oracle, "vector_table", lambda: table | wrong)
    assert any("v_add_nc_u32" in line for line in selftest.run(programs=10).disagreements)


def test_dpp_reads_all_lanes_before_it_writes():
    g = run(
        "v_add_f32_dpp v1, v1, v1 row_xmask:1 row_mask:0xf bank_mask:0xf",
        v1=LANE.astype(np.float32),
    )
    assert (g.F[1][0] == LANE + (LANE ^ 1)).all()


@pytest.mark.parametrize(
    ("control", "source"),
    [
        ("row_share:3", lambda i: i // 16 * 16 + 3),
        ("row_ror:5", lambda i: i // 16 * 16 + (i % 16 - 5) % 16),
        ("quad_perm:[3,2,1,0]", lambda i: i // 4 * 4 + 3 - i % 4),
        ("row_mirror", lambda i: i // 16 * 16 + 15 - i % 16),
        ("row_half_mirror", lambda i: i // 8 * 8 + 7 - i % 8),
    ],
)
def test_dpp_controls(control, source):
    g = run(f"v_mov_b32_dpp v2, v1 {control} row_mask:0xf bank_mask:0xf", v1=LANE * 7)
    assert (g.V[2][0] == source(LANE) * 7).all()


def test_dpp_lanes_without_source_keep_or_zero():
    text = "v_mov_b32_dpp v2, v1 row_shr:4 row_mask:0xf bank_mask:0xf"
    kept, zeroed = run(text, v1=LANE + 1), run(text + " bound_ctrl:1", v1=LANE + 1)
    outside = LANE % 16 < 4
    assert (kept.V[2][0][outside] == 0xDEADBEEF).all() and (zeroed.V[2][0][outside] == 0).all()
    assert (kept.V[2][0][~outside] == (LANE + 1 - 4)[~outside]).all()


def test_dpp_inactive_source_lanes():
    g = run(
        "v_mov_b32_dpp v2, v1 row_xmask:1 row_mask:0xf bank_mask:0xf", exec_mask=0x55555555, v1=LANE
    )
    assert (g.V[2][0] == 0xDEADBEEF).all(), "each active lane has an inactive source"
    g = run(
        "v_mov_b32_dpp v2, v1 row_xmask:1 row_mask:0xf bank_mask:0xf bound_ctrl:1",
        0x55555555,
        v1=LANE,
    )
    assert (g.V[2][0][::2] == 0).all()


def test_dpp_bank_mask():
    g = run("v_mov_b32_dpp v2, v1 row_share:0 row_mask:0x1 bank_mask:0xa", v1=LANE)
    written = (LANE < 16) & (LANE // 4 % 2 == 1)
    assert ((g.V[2][0] != 0xDEADBEEF) == written).all()


def test_permlanex16_takes_its_lanes_from_a_literal():
    g = run("v_permlanex16_b32 v2, v1, s0, 0xfedcba98", scalars={0: 0x01234567}, v1=LANE)
    nibbles = [int(c, 16) for c in "76543210"] + list(range(8, 16))
    expected = [(nibbles[i % 16]) + (0 if i >= 16 else 16) for i in range(32)]
    assert g.V[2][0].tolist() == expected


def test_writelane_and_readlane_ignore_exec():
    g = run(
        "v_writelane_b32 v1, s0, 5\nv_readlane_b32 s1, v1, 5", exec_mask=0, scalars={0: 77}, v1=LANE
    )
    assert int(g.S[1, 0, 0]) == 77 and (np.delete(g.V[1][0], 5) == np.delete(LANE, 5)).all()


def test_readfirstlane_takes_the_first_active_one():
    assert int(run("v_readfirstlane_b32 s1, v1", 0xFF00, v1=LANE).S[1, 0, 0]) == 8


@pytest.mark.parametrize("value", [0x8000, 0xFFFF, 0x7FFF])
def test_sopk_immediates_are_signed(value):
    expected = (value - 0x10000 if value & 0x8000 else value) & FULL
    g = run(
        f"s_movk_i32 s1, {value:#x}\ns_addk_i32 s2, {value:#x}\ns_mulk_i32 s3, {value:#x}",
        scalars={2: 5, 3: 3},
    )
    assert [int(g.S[i, 0, 0]) for i in (1, 2, 3)] == [
        expected,
        (expected + 5) & FULL,
        expected * 3 & FULL,
    ]
    assert bool(run(f"s_cmpk_lt_i32 s1, {value:#x}", scalars={1: 0}).scc[0, 0]) == (value == 0x7FFF)
    assert bool(run(f"s_cmpk_lt_u32 s1, {value:#x}", scalars={1: 0}).scc[0, 0])


def test_negated_constants_and_literals():
    g = run("v_fma_f32 v2, v1, neg(0), -2.0\nv_mul_f32 v3, 0x40490fdb, v1", v1=f32(3))
    assert (g.F[2][0] == -2).all() and (g.F[3][0] == np.float32(3) * np.float32(np.pi)).all()


def test_halves_of_registers():
    g = run("v_mov_b16 v2.l, v1.h\nv_mov_b16 v3.h, v1.l", v1=np.uint32(0x12345678) + LANE * 0)
    assert (g.V[2][0] == 0xDEAD1234).all() and (g.V[3][0] == 0x5678BEEF).all()
    g = run("v_cvt_f16_f32 v2.h, v1", v1=f32(1.5))
    assert (g.V[2][0] == 0x3E00BEEF).all()


def test_fma_mix_picks_types_and_halves():
    pair = np.array([1.5, -2.0], np.float16).view(np.uint32)[0]
    text = "v_fma_mix_f32 v3, v1, v2, 1.0 op_sel:[1,0,0] op_sel_hi:[1,0,0]\n"
    text += "v_fma_mixlo_f16 v4, v1, v2, v2 op_sel_hi:[1,0,0]\n"
    text += "v_fma_mixhi_f16 v4, -v1, v2, v2 op_sel_hi:[1,0,0]"
    g = run(text, v1=LANE * 0 + pair, v2=f32(3))
    assert (g.F[3][0] == -5).all()
    assert (g.V[4][0].view(np.float16)[::2] == 7.5).all() and (
        g.V[4][0].view(np.float16)[1::2] == -1.5
    ).all()


def test_vopd_reads_before_it_writes():
    g = run("v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", v1=LANE, v2=LANE + 100)
    assert (g.V[1][0] == LANE + 100).all() and (g.V[2][0] == LANE).all()


def test_exec_masks_results_and_comparisons():
    g = run("v_add_nc_u32 v2, v1, v1\nv_cmp_ge_u32 vcc_lo, v1, v1", exec_mask=0x0000FFFE, v1=LANE)
    assert (g.V[2][0][1:16] == 2 * LANE[1:16]).all() and (g.V[2][0][16:] == 0xDEADBEEF).all()
    assert int(g.S[VCC, 0, 0]) == 0xFFFE


def test_cmpx_writes_exec():
    g = run("v_cmpx_gt_u32 8, v1\nv_mov_b32 v2, 1", v1=LANE)
    assert int(g.S[EXEC, 0, 0]) == 0xFF and (g.V[2][0] == 1).sum() == 8


def test_carries():
    high = np.where(LANE < 16, 0xFFFFFFFF, 5).astype(np.uint32)
    g = run(
        "v_add_co_u32 v3, vcc_lo, v1, v2\nv_add_co_ci_u32 v4, vcc_lo, 0, v2, vcc_lo",
        v1=high,
        v2=LANE * 0 + 1,
    )
    assert (g.V[3][0] == high + np.uint32(1)).all() and (
        g.V[4][0] == np.where(LANE < 16, 2, 1)
    ).all()
    g = run("v_sub_co_u32 v3, s2, v2, v1\ns_nop 0", v1=high, v2=LANE * 0 + 7)
    assert int(g.S[2, 0, 0]) == 0x0000FFFF
    g = run("s_add_u32 s2, s0, s1\ns_addc_u32 s3, s0, 0", scalars={0: FULL, 1: 1})
    assert [int(g.S[i, 0, 0]) for i in (2, 3)] == [0, 0] and bool(g.scc[0, 0])
    g = run("s_sub_u32 s2, s0, s1\ns_subb_u32 s3, s1, s0", scalars={0: 1, 1: 2})
    assert int(g.S[3, 0, 0]) == 0


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
        expected = oracle.fma(*(int(v[i].view(np.uint32)) for v in (x, y, z)), oracle.F32)
        assert int(got[i].view(np.uint32)) == expected or (
            np.isnan(got[i]) and expected == oracle.NAN[oracle.F32]
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
    assert constant("2.0", "u16") == 0 and constant("2.0", "f16") == 2


def test_halves_of_16_bit_operands():
    """V_CMPX has no destination that op_sel counts; V_CNDMASK's mask has no half."""
    values = {"v0": LANE << 16, "v1": LANE * 0 + 0x00070000}
    assert (run("v_cmpx_lt_u16_e64 v0.h, v1.h", **values).S[EXEC] == 0x7F).all()
    g = run("v_cndmask_b16_e64 v2.l, v0.h, v1.h, s4", scalars={4: 1}, **values)
    assert (g.V[2][0] & 0xFFFF == np.where(LANE == 0, 7, LANE)).all()


def test_literals_that_an_inline_constant_would_do_for():
    """LLVM prints them as lit(...)."""
    ins = decode.parse("v_fma_f32 v1, v0, 1.0, lit(0x3f800000)")
    assert ins.unknown == "" and ins.operands[3].text == "0x3f800000"


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


def test_transcendentals_are_within_one_ulp():
    x = np.abs(np.random.default_rng(0).standard_normal(LANES)).astype(np.float32) * 10
    g = run(
        "v_exp_f32 v2, v1\nv_log_f32 v3, v1\nv_rcp_f32 v4, v1\nv_rsq_f32 v5, v1\nv_sqrt_f32 v6, v1",
        v1=x,
    )
    wide = x.astype(float)
    for register, exact in (
        (2, np.exp2(wide)),
        (3, np.log2(wide)),
        (4, 1 / wide),
        (5, wide**-0.5),
        (6, wide**0.5),
    ):
        ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(float)
        assert (np.abs(g.F[register][0] - exact) <= ulp).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wmma(kind):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float32)
    c = rng.standard_normal((16, 16)).astype(np.float32)
    if kind == "f16":
        a, b = a.astype(np.float16), b.astype(np.float16)
        bits = [x.view(np.uint16) for x in (a, b.T.copy())]
    else:
        bits = [floats.to_bfloat(x) for x in (a, b.T.copy())]
        a, b = (floats.bfloat(x) for x in (bits[0], bits[1].T))
    registers = {}
    for first, rows in ((0, bits[0]), (8, bits[1])):
        words = np.ascontiguousarray(rows).view(np.uint32)
        registers |= {f"v{first + i}": np.tile(words[:, i], 2) for i in range(8)}
    row = 2 * np.arange(8)[:, None] + (LANE >= 16)
    registers |= {f"v{16 + i}": c[row[i], LANE % 16] for i in range(8)}
    g = run(f"v_wmma_f32_16x16x16_{kind} v[24:31], v[0:7], v[8:15], v[16:23]", **registers)
    expected = (a.astype(float) @ b.astype(float) + c)[row, LANE % 16]
    assert np.abs(g.F[24:32, 0] - expected).max() < 1e-5
    with pytest.raises(Trap, match="repeat"):
        registers["v3"] = registers["v3"] + (LANE == 20)
        run(f"v_wmma_f32_16x16x16_{kind} v[24:31], v[0:7], v[8:15], v[16:23]", **registers)
    with pytest.raises(Trap, match="EXEC"):
        run(
            f"v_wmma_f32_16x16x16_{kind} v[24:31], v[0:7], v[8:15], v[16:23]",
            exec_mask=1,
            **registers,
        )


def test_lds_two_addresses_halves_and_inactive_lanes():
    text = """
    ds_store_2addr_b32 v1, v2, v3 offset0:0 offset1:64
    ds_load_2addr_b32 v[4:5], v1 offset0:64 offset1:0
    ds_load_u16_d16 v6, v1
    ds_load_u16_d16_hi v7, v1 offset:2
    """
    g = run(text, v1=LANE * 4, v2=LANE + 0x10000, v3=LANE + 7)
    assert (g.V[4][0] == LANE + 7).all() and (g.V[5][0] == LANE + 0x10000).all()
    assert (g.V[6][0] == 0xDEAD0000 + LANE).all() and (g.V[7][0] == 0x0001BEEF).all()
    # lane 31's address lies outside, but it is not active
    g = run(
        "ds_store_b32 v1, v2\nds_load_b32 v3, v1",
        0x7FFFFFFF,
        v1=np.where(LANE == 31, 1 << 20, LANE * 4).astype(np.uint32),
        v2=LANE,
    )
    assert (g.V[3][0][:31] == LANE[:31]).all() and g.V[3][0][31] == 0xDEADBEEF
    with pytest.raises(Trap, match="bounds"):
        run("ds_load_b32 v3, v1", v1=LANE * 0 + 5000)


def test_scratch_is_private():
    g = run(
        "scratch_store_b32 off, v1, off offset:4\nscratch_load_b32 v2, off, off offset:4",
        waves=2,
        v1=LANE,
    )
    assert (g.V[2] == LANE).all()


def test_bpermute():
    g = run("ds_bpermute_b32 v3, v1, v2", v1=(31 - LANE) * 4, v2=LANE)
    assert (g.V[3][0] == 31 - LANE).all()

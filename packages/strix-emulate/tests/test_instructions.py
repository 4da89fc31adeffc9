# SPDX-License-Identifier: BSD-3-Clause
"""Single instructions against what the ISA document says, mostly where emulators went wrong."""

import numpy as np
import pytest
from single import FULL, LANE, f32, run
from strix_emulate.arithmetic import floats
from strix_emulate.code.decode import EXEC, VCC
from strix_emulate.errors import Trap


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
    with pytest.raises(Trap, match="lds: LDS address 5000 of 4096 bytes"):
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

# SPDX-License-Identifier: BSD-3-Clause
"""Single instructions against what the ISA document says, mostly where emulators went wrong."""

import numpy as np
import pytest
from single import LANE, f32, run
from strix_emulate.errors import Trap


def test_permlanex16_takes_its_lanes_from_a_literal():
    g = run("v_permlanex16_b32 v2, v1, s0, 0xfedcba98", scalars={0: 0x01234567}, v1=LANE)
    nibbles = [int(c, 16) for c in "76543210"] + list(range(8, 16))
    expected = [(nibbles[i % 16]) + (0 if i >= 16 else 16) for i in range(32)]
    assert g.V[2][0].tolist() == expected


def test_negated_constants_and_literals():
    g = run("v_fma_f32 v2, v1, neg(0), -2.0\nv_mul_f32 v3, 0x40490fdb, v1", v1=f32(3))
    assert (g.F[2][0] == -2).all() and (g.F[3][0] == np.float32(3) * np.float32(np.pi)).all()


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

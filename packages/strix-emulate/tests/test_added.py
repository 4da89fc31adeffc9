# SPDX-License-Identifier: BSD-3-Clause
"""Instructions beyond those of attention kernels, against Python's numbers or plain arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import selftest
from single import FULL, LANE, f32, run
from strix_emulate.arithmetic import floats
from strix_emulate.errors import Trap
from strix_emulate.memory.waves import LANES, SCALARS
from test_checks import LOAD, execute


def wide(x) -> dict[str, np.ndarray]:
    """A float64 for each lane in v0 and v1."""
    bits = np.broadcast_to(np.asarray(x, np.float64), LANES).copy().view(np.uint64)
    return {"low": bits.astype(np.uint32), "high": (bits >> np.uint64(32)).astype(np.uint32)}


def pairs(**numbers) -> dict[str, np.ndarray]:
    """Registers for float64 operands: v2=x fills v2 and v3."""
    found = {}
    for name, x in numbers.items():
        parts, first = wide(x), int(name[1:])
        found |= {f"v{first}": parts["low"], f"v{first + 1}": parts["high"]}
    return found


def double(g, register: int) -> np.ndarray:
    return (g.V[register, 0].astype(np.uint64)
            | g.V[register + 1, 0].astype(np.uint64) << np.uint64(32)).view(np.float64)  # fmt: skip


DIVISION = """
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
"""


@pytest.mark.parametrize("seed", range(8))
def test_division_of_float64_rounds_correctly(seed):
    """LLVM's expansion (LowerFDIV64), of any numbers."""
    n, d = np.random.default_rng(seed).integers(0, 2**64, (2, LANES), np.uint64).view(np.float64)
    edges = np.float64([0, -0.0, 5e-324, 1e-310, 1e308, np.inf, np.nan, 3])
    n[:8], d[:8] = edges, np.roll(edges, seed)
    with np.errstate(all="ignore"):
        expected = n / d
    got = double(run(DIVISION, **pairs(v0=n, v2=d)), 4)
    same = (got.view(np.uint64) == expected.view(np.uint64)) | (np.isnan(got) & np.isnan(expected))
    assert same.all(), (n[~same], d[~same], got[~same], expected[~same])


def test_fma_of_float64_rounds_once():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 2000)) * 2.0 ** rng.integers(-600, 500, (3, 2000))
    c[:1000] = -a[:1000] * b[:1000]
    with np.errstate(all="ignore"):
        got = floats.fma64(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert r == (float(exact) if abs(exact) < 2**1024 else np.copysign(np.inf, exact))


def test_carries_through_dpp():
    g = run("v_add_co_u32_e64_dpp v2, vcc_lo, v0, v1 row_xmask:1 row_mask:0xf bank_mask:0xf",
            v0=LANE * 0x08000000, v1=LANE * 0 + 0xF0000000)  # fmt: skip
    total = (LANE ^ 1).astype(np.uint64) * 0x08000000 % 2**32 + 0xF0000000
    assert (g.V[2, 0] == total.astype(np.uint32)).all()
    assert (selftest.waves(g.V, g.S).S[106, 0, 0] >> LANE & 1 == total >> 32).all()


def test_half_overflow_mode():
    """FP16_OVFL: what overflows is the largest number; infinities stay."""
    text = """
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
    v_cvt_f16_f32 v2.l, v0
    v_cvt_f16_f32 v2.h, v1
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0
    v_cvt_f16_f32 v3.l, v0
    s_getreg_b32 s1, hwreg(HW_REG_MODE, 23, 1)
    """
    g = run(text, v0=f32(1e6), v1=f32(-np.inf))
    assert g.H[2, 0, :2].tolist() == [65504, -np.inf] and g.H[3, 0, 0] == np.inf
    assert g.S[1, 0, 0] == 0


FLAG = """
s_load_b128 s[4:7], s[0:1], 0x0
v_mov_b32 v1, 0
s_cmp_eq_u32 s2, 1
s_waitcnt lgkmcnt(0)
s_cbranch_scc1 writer
poll:
global_load_b32 v2, v1, s[6:7] glc
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s8, v2
s_cmp_eq_u32 s8, 0
s_cbranch_scc1 poll
buffer_gl1_inv
buffer_gl0_inv
global_load_b32 v3, v1, s[6:7] offset:4
s_waitcnt vmcnt(0)
global_store_b32 v1, v3, s[6:7] offset:8
s_endpgm
writer:
v_mov_b32 v2, 77
global_store_b32 v1, v2, s[6:7] offset:4
{release}
v_mov_b32 v2, 1
global_atomic_swap_b32 v1, v2, s[6:7]
s_endpgm
"""


def test_a_flag_orders_what_was_stored_before_it():
    """The workgroup that waits has the lower number and the lower pc: it must let the other by."""
    text = FLAG.format(release="s_waitcnt_vscnt null, 0x0")
    out = execute(text, threads=32, grid=(2,), second="inout")
    assert out[:3].tolist() == [1, 77, 77]
    with pytest.raises(Trap, match="race"):
        execute(FLAG.format(release="s_nop 0"), threads=32, grid=(2,), second="inout")
    # a load that asks the wave's own cache orders nothing
    with pytest.raises(Trap, match="race|budget"):
        execute(text.replace(" glc", ""), threads=32, grid=(2,), second="inout")


def test_equal_values_from_two_workgroups_may_be_read_back():
    body = LOAD + "v_mov_b32 v2, 5\n" + """
    global_store_b32 v1, v2, s[6:7]
    s_waitcnt_vscnt null, 0x0
    global_load_b32 v3, v1, s[6:7]
    s_waitcnt vmcnt(0)
    s_endpgm
    """  # fmt: skip
    assert (execute(body, threads=32, grid=(2,))[:32] == 5).all()


def test_exp_and_log_are_within_half_an_ulp():
    """The document allows 1; numpy's vector code for float32 was up to 2.7 off."""
    x = np.linspace(0.01, 100, LANES * 40, dtype=np.float32).reshape(40, LANES)
    V, S = np.zeros((4, 40, LANES), np.uint32), np.zeros((SCALARS, 40, 1), np.uint32)
    V[1], S[126] = x.view(np.uint32), FULL
    g = selftest.execute("v_exp_f32 v2, v1\nv_log_f32 v3, v1", selftest.waves(V, S))
    for register, exact in ((2, np.exp2(x.astype(float))), (3, np.log2(x.astype(float)))):
        ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(float)
        assert (np.abs(g.F[register] - exact) <= 0.501 * ulp).all()


def test_a_mode_from_a_register_is_the_one_that_the_kernel_began_with():
    """What MODE is depends on the code alone here: a register that says otherwise traps."""
    text = "s_denorm_mode 0\ns_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s2\nv_add_f32 v1, v0, v0"
    g = run(text, scalars={2: 15}, v0=LANE * 0 + 3)
    assert (g.V[1, 0] == 6).all()
    with pytest.raises(Trap, match="sets a mode that the kernel did not begin with"):
        run(text, scalars={2: 3}, v0=LANE * 0 + 3)


def test_waves_say_where_they_run():
    """HW_ID1, of which HIP's __smid() takes engine, array and processor."""
    registers = np.zeros((4, 6, LANES), np.uint32), np.zeros((SCALARS, 6, 1), np.uint32)
    waves = selftest.waves(*registers)
    waves.workgroup = np.array([0, 0, 1, 2, 4, 20])
    waves.wave = np.array([0, 5, 0, 0, 0, 0])
    g = selftest.execute("s_getreg_b32 s1, hwreg(HW_REG_HW_ID1)", waves)
    assert g.S[1, :, 0].tolist() == [0, 1 | 1 << 8, 1 << 16, 1 << 18, 1 << 10, 0]
    g = selftest.execute("s_getreg_b32 s1, hwreg(HW_REG_HW_ID1, 18, 3)", waves)
    assert g.S[1, :, 0].tolist() == [0, 0, 0, 1, 0, 0]

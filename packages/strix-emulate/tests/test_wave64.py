# SPDX-License-Identifier: BSD-3-Clause
"""A wave of 64 lanes equals two waves of 32 lanes, unless the lanes exchange data.

Separate tests cover exchanges of data.
"""

import random

import numpy as np
import operands
import pytest
import selftest
import test_checks
from strix_emulate.code.decode import EXEC, VCC
from strix_emulate.errors import Trap
from strix_emulate.memory.waves import SCALARS, Waves
from test_checks import EXCHANGE, GOOD, LOAD, STORE

MASKS = (operands.MASK_IN, operands.MASK_OUT, VCC, EXEC)
LANE = np.arange(64, dtype=np.uint32)


def execute(text: str, V, S) -> Waves:
    """Run straight-line assembly on the registers of a wave64."""
    return selftest.execute(text, selftest.waves(V, S), width=64)


def registers(seed: int = 0, exec_: int = 2**64 - 1):
    """Return random vector and scalar registers of one wave, whose EXEC is `exec_`."""
    rng = np.random.default_rng(seed)
    V = rng.integers(1 << 32, size=(operands.REGISTERS, 1, 64), dtype=np.uint32)
    S = rng.integers(1 << 32, size=(SCALARS, 1, 1), dtype=np.uint32)
    S[EXEC : EXEC + 2, 0, 0] = exec_ & 0xFFFFFFFF, exec_ >> 32
    return V, S


def halves(V, S):
    """Return the registers of the two waves of 32 lanes that equal a wave of 64."""
    narrow = np.repeat(S, 2, axis=1)
    for mask in MASKS:
        narrow[mask] = S[mask : mask + 2, 0]
    return V.reshape(len(V), 2, 32), narrow


def find_differing(texts: list[str], seed: int = 0) -> list[str]:
    """Return the instructions whose effects on one wave64 and on two wave32 differ."""
    rng = random.Random(seed)
    differences = []
    wide = [operands.widen(text) for text in texts]
    both = (selftest.steps("\n".join(t), width) for t, width in ((texts, 32), (wide, 64)))
    for number, (text, narrow, wide) in enumerate(zip(texts, *both, strict=True)):
        exec_ = rng.choice((2**64 - 1, rng.getrandbits(64), 1 << 40, 2**32 - 1))
        V, S = registers(number, exec_)
        expected = selftest.waves(*halves(V, S))
        got = selftest.waves(V, S)
        with np.errstate(all="ignore"):
            narrow.run(expected)
            wide.run(got)
        V, S = halves(got.V, got.S)
        # A mask of a wave32 has no second register. So this register is not compared.
        for mask in MASKS:
            S[mask + 1] = expected.S[mask + 1]
        if not (np.array_equal(V, expected.V) and np.array_equal(S, expected.S)):
            differences.append(text)
    return differences


def generate(seed: int) -> list[str]:
    """Return one instruction of each vector mnemonic whose lanes exchange no data."""
    rng = random.Random(seed)
    operations = [operands.operation(rng, *entry) for entry in selftest.tables() if entry[1] == "v"]
    return [o.text for o in operations if "mbcnt" not in o.mnemonic]


@pytest.mark.parametrize("seed", range(2))
def test_as_two_waves_of_32(seed):
    texts = generate(seed)
    assert len(texts) > 400
    assert find_differing(texts, seed) == []


def test_a_difference_is_seen():
    """The control is an instruction whose result depends on the lane's number in the wave."""
    assert find_differing(["v_mbcnt_hi_u32_b32 v1, -1, 0"] * 8)


def test_one_lane():
    V, S = registers(exec_=1 << 45 | 1 << 50)
    S[4] = 77  # V_READLANE uses only the low six bits as the number of the lane.
    g = execute(
        "v_readlane_b32 s5, v1, 40\nv_readlane_b32 s6, v1, s4\nv_readfirstlane_b32 s7, v2\n"
        "v_writelane_b32 v3, s4, 33",
        V,
        S,
    )
    assert [int(g.S[i, 0, 0]) for i in (5, 6, 7)] == [V[1, 0, 40], V[1, 0, 77 % 64], V[2, 0, 45]]
    assert (g.V[3, 0] == np.where(LANE == 33, 77, V[3, 0])).all()


def test_counts_of_lanes_below():
    V, S = registers(1)
    S[4:6] = 0xFFFFFFFF
    g = execute(
        "v_mbcnt_lo_u32_b32 v1, -1, 0\nv_mbcnt_hi_u32_b32 v1, -1, v1\n"
        "v_mbcnt_lo_u32_b32 v2, s6, 0\nv_mbcnt_hi_u32_b32 v2, s7, v2",
        V,
        S,
    )
    assert (g.V[1, 0] == LANE).all()
    mask = int(S[6, 0, 0]) | int(S[7, 0, 0]) << 32
    assert g.V[2, 0].tolist() == [(mask & (1 << lane) - 1).bit_count() for lane in range(64)]


def test_exchanges():
    V, S = registers(2)
    V[5] = np.arange(0, 256, 4, dtype=np.uint32)[::-1]
    g = execute(
        "v_permlane64_b32 v1, v2\nv_permlanex16_b32 v3, v2, s4, s5\n"
        "v_mov_b32_dpp v4, v2 row_shl:1 row_mask:0x9 bank_mask:0xf bound_ctrl:1\n"
        "ds_bpermute_b32 v6, v5, v2\nds_permute_b32 v7, v5, v2\n"
        "ds_swizzle_b32 v8, v2 offset:swizzle(REVERSE,32)",
        V,
        S,
    )
    x = V[2, 0]
    assert (g.V[1, 0] == np.roll(x, 32)).all()
    table = int(S[4, 0, 0]) | int(S[5, 0, 0]) << 32
    picked = np.array([table >> 4 * (lane % 16) & 15 for lane in range(64)])
    assert (g.V[3, 0] == x[(LANE // 16 * 16 ^ 16) + picked]).all()
    shifted = np.where(LANE % 16 < 15, x[(LANE + 1) % 64], 0)
    assert (g.V[4, 0] == np.where(np.isin(LANE // 16, (0, 3)), shifted, V[4, 0])).all()
    # RDNA3.5 ISA, DS_BPERMUTE_B32: "wave64 executes as if two independent wave32's"
    mirrored = x.reshape(2, 32)[:, ::-1].reshape(64)
    assert all((g.V[i, 0] == mirrored).all() for i in (6, 7, 8))


def test_masks_of_both_halves():
    V, S = registers(3)
    V[1] = LANE
    g = execute(
        "s_mov_b64 s[4:5], exec\nv_cmpx_gt_u32 40, v1\ns_mov_b64 s[6:7], exec\n"
        "s_and_saveexec_b64 s[10:11], s[4:5]\ns_or_not1_saveexec_b64 s[12:13], 0\n"
        "s_and_not1_wrexec_b64 s[8:9], -1",
        V,
        S,
    )
    pairs = {i: int(g.S[i, 0, 0]) | int(g.S[i + 1, 0, 0]) << 32 for i in (4, 6, 8, 10, 12, EXEC)}
    low = (1 << 40) - 1
    assert pairs == {4: 2**64 - 1, 6: low, 10: low, 12: low, 8: low, EXEC: low}
    assert g.mask.sum() == 40
    assert bool(g.scc[0, 0])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrices(kind):
    """Each register has four rows of the result, with sixteen lanes for each row."""
    V, S = registers(4)
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(-4, 5, (16, 16)).astype(np.float32) for _ in range(3))

    def packed(rows):
        bits = (
            rows.astype(np.float16).view(np.uint16)
            if kind == "f16"
            else (rows.view(np.uint32) >> 16).astype(np.uint16)
        )
        return np.ascontiguousarray(bits).view(np.uint32).T[:, None]

    V[0:8] = np.tile(packed(a), 4)
    V[8:16] = np.tile(packed(np.ascontiguousarray(b.T)), 4)
    V = np.concatenate([V, c.reshape(4, 1, 64).view(np.uint32)])
    name = f"v_wmma_f32_16x16x16_{kind} v[16:19], v[0:7], v[8:15], v[16:19]"
    g = execute(name, V, S)
    assert (g.F[16:20].reshape(16, 16) == a @ b + c).all()
    V[0, 0, 40] ^= 1
    with pytest.raises(Trap, match=r"lanes 16-63 of v\[0:7\] do not repeat lanes 0-15"):
        execute(name, V, S)


def run(body: str, threads: int, **more) -> np.ndarray:
    """Run a kernel for waves of 64 lanes, with one input and one output of 256 words."""
    return test_checks.execute(body, threads, 256, width=64, **more)


@pytest.mark.parametrize("threads", [1, 32, 63, 64, 96, 256])
def test_launches(threads):
    """In the last wave, only the lanes that have threads are active."""
    out = run(GOOD, threads)
    assert (out[:threads] == np.arange(threads)).all()
    assert not out[threads:].any()


def test_lds_and_barriers():
    far = EXCHANGE.replace("0x80", "0x100")
    assert (run(far, 128)[:128] == np.arange(128) ^ 64).all()
    with pytest.raises(Trap, match="race"):
        run(far.replace("s_barrier\n", ""), 128)
    # Within a wave, no barrier is needed.
    assert (run(EXCHANGE.replace("s_barrier\n", ""), 64)[:64] == np.arange(64) ^ 32).all()


BRANCHES = (
    LOAD
    + """
v_cmp_lt_u32 vcc, 39, v0
s_cbranch_vccz never
v_mov_b32 v2, 7
s_and_saveexec_b64 s[8:9], vcc
s_cbranch_execz skip
v_mov_b32 v2, 9
skip:
s_or_b64 exec, exec, s[8:9]
never:
"""
    + STORE
)


def test_branches_look_at_both_halves():
    """The branch depends on lanes of only the upper half, or on lanes of both halves."""
    assert run(BRANCHES, 64)[:64].tolist() == [7] * 40 + [9] * 24
    last = "v_and_b32 v3, 31, v0\nv_cmp_eq_u32 vcc, 31, v3"  # lane 31 of each half
    both = BRANCHES.replace("v_cmp_lt_u32 vcc, 39, v0", last)
    assert run(both, 64)[:64].tolist() == 2 * ([7] * 31 + [9])


def test_atomics_and_counters():
    add = LOAD + (
        "v_mov_b32 v2, 1\nv_mov_b32 v3, 0\nglobal_atomic_add_u32 v3, v2, s[6:7]\ns_endpgm\n"
    )
    assert run(add, 192)[0] == 192
    append = (
        LOAD + "v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nds_store_b32 v3, v3\ns_mov_b32 m0, 0\n"
        "s_waitcnt lgkmcnt(0)\nds_append v2\ns_waitcnt lgkmcnt(0)\nds_append v2\n"
        "s_waitcnt lgkmcnt(0)\n"
    ) + STORE
    assert (run(append, 64)[:64] == 64).all()


def test_scratch_of_every_lane():
    body = LOAD + (
        "scratch_store_b32 off, v0, off offset:4\ns_waitcnt_vscnt null, 0x0\n"
        "scratch_load_b32 v2, off, off offset:4\ns_waitcnt vmcnt(0)\n"
    )
    body += STORE
    assert (run(body, 128, scratch=16)[:128] == np.arange(128)).all()
    for offset in (-4, 16):
        with pytest.raises(Trap, match=f"scratch offset {offset} of 16 bytes"):
            run(body.replace("offset:4", f"offset:{offset}"), 64, scratch=16)


def test_a_missing_wait_is_found():
    with pytest.raises(Trap, match="pending"):
        run(GOOD.replace("s_waitcnt vmcnt(0)\n", ""), 64)

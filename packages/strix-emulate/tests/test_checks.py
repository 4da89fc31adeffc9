# SPDX-License-Identifier: BSD-3-Clause
"""Checks of faults that hardware does not report, each on a faulty kernel and a correct one."""

from dataclasses import replace

import numpy as np
import pytest
import selftest
from strix_emulate import Buffer, Options, launch
from strix_emulate.code.kernel import Argument
from strix_emulate.errors import EmulatorError, Trap
from strix_emulate.memory.findings import CHECKS, add_default_value, parse

LOAD = """
s_load_b128 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""
#: v1 is the byte offset of the thread, s[4:5] the input, s[6:7] the output.
STORE = "global_store_b32 v1, v2, s[6:7]\ns_endpgm\n"


def execute(
    body: str,
    threads: int = 64,
    size: int = 64,
    lds: int = 1024,
    grid=(1,),
    second: str = "out",
    notes: list | None = None,
    width: int = 32,
    scratch: int = 0,
    **options,
):
    """Run assembly with one input and one output of `size` words; return the output.

    The launch's notes are added to `notes`.
    """
    kernel = selftest.kernel(body, width=width, lds=lds, scratch=scratch)
    data = np.arange(size, dtype=np.uint32)
    out = np.zeros(size, np.uint32)
    done = launch(
        kernel,
        grid,
        [Buffer(data, "in"), Buffer(out, second)],
        threads=threads,
        options=Options(**{"budget": 10_000} | options),
    )
    if notes is not None:
        notes += done.notes
    return out


GOOD = LOAD + "global_load_b32 v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\n" + STORE


def test_counted_waits_are_in_order():
    two = (
        LOAD + "global_load_b32 v2, v1, s[4:5]\n"
        "global_load_b32 v3, v1, s[4:5] offset:4\ns_waitcnt vmcnt({})\n" + STORE
    )
    assert (
        execute(two.format(1), threads=32) == np.where(np.arange(64) < 32, np.arange(64), 0)
    ).all()
    with pytest.raises(Trap, match="pending"):
        execute(two.format(2), threads=32)


def test_halves_of_one_register_may_be_loaded_at_once():
    """Two loads that the same counter keeps in order need no wait between them.

    Code of newer LLVM versions and of hipBLASLt relies on this rule.
    """
    first = LOAD + "global_load_{} v2, v1, s[4:5]\n"
    body = first + "global_load_d16_hi_b16 v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\n" + STORE
    assert (execute(body.format("d16_b16")) == np.arange(64) * 0x10001).all()
    assert (execute(body.format("u16")) == np.arange(64) * 0x10001).all()
    lds = LOAD + "ds_store_b32 v1, v0\nds_load_u16 v2, v1\n{} v2, {}\ns_waitcnt {}\n" + STORE
    done = execute(lds.format("ds_load_u16_d16_hi", "v1", "lgkmcnt(0)"))
    assert (done == np.arange(64) * 0x10001).all()
    with pytest.raises(Trap, match="pending"):
        execute(lds.format("global_load_d16_hi_b16", "v1, s[4:5]", "vmcnt(0) lgkmcnt(0)"))


def test_the_other_half_of_a_register_that_is_loaded():
    """A vector operation on one half must wait for a load of the other half; a store need not.

    On GFX11, an access to one half may disturb the other half (LLVM's feature d16-write-vgpr32).
    """
    first = LOAD + "global_load_d16_b16 v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
    first += "global_load_d16_{}_b16 v2, v1, s[4:5]\n{}\ns_endpgm\n"
    hi = first.replace("{}", "hi", 1)
    lo = first.replace("d16_{}_", "d16_", 1)
    low = "global_store_b16 v1, v2, s[6:7]"
    high = "global_store_d16_hi_b16 v1, v2, s[6:7]"
    execute(hi.format(low))
    execute(hi.format("ds_store_b16 v1, v2"))
    execute(hi.format("ds_store_b8 v1, v2"))
    for body in (
        hi.format(high),
        lo.format(low),
        hi.format("v_cvt_f32_f16 v3, v2.l"),
        lo.format("v_cvt_f32_f16 v3, v2.h"),
        hi.format("v_mov_b16 v2.l, v1.l"),
        hi.format("global_store_b32 v1, v2, s[6:7]"),
        hi.format("ds_store_b16 v2, v2"),
        hi.format("ds_store_b16_d16_hi v1, v2"),
    ):
        with pytest.raises(Trap, match="pending: uses a register"):
            execute(body)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        "v_div_fmas_f32 v5, v1, v1, v1",
        "v_dual_cndmask_b32 v5, v1, v1 :: v_dual_mov_b32 v4, 0",
    ],
)
def test_a_load_into_the_mask_that_an_instruction_reads_without_naming_it(use, native):
    body = LOAD + "s_load_b32 vcc_lo, s[4:5], 0x0\n{}" + use + "\ns_endpgm\n"
    execute(body.format("s_waitcnt lgkmcnt(0)\n"), native=native)
    with pytest.raises(Trap, match="pending: uses a register"):
        execute(body.format(""), native=native)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("register", "use"),
    [
        ("vcc_lo", "s_cbranch_vccnz end"),
        ("vcc_lo", "s_cbranch_vccz end"),
        ("s8", "s_call_b64 s[8:9], end"),
        ("s8", "s_swappc_b64 s[10:11], s[8:9]"),
    ],
)
def test_a_load_into_a_register_that_a_jump_uses(register, use, native):
    body = LOAD + "s_getpc_b64 s[8:9]\ns_load_b32 {register}, s[4:5], 0x0\n"
    body = f"{body}{{wait}}{use}\nend: s_endpgm\n"
    with pytest.raises(Trap, match=rf"`{use.split()[0]} .*pending: uses a register"):
        execute(body.format(register=register, wait=""), native=native)
    if register == "vcc_lo":
        execute(body.format(register=register, wait="s_waitcnt lgkmcnt(0)\n"), native=native)
        # A branch of a wave of 32 lanes does not read VCC_HI.
        execute(body.format(register="vcc_hi", wait=""), native=native)
        with pytest.raises(Trap, match="pending"):
            execute(body.format(register="vcc_hi", wait=""), width=64, native=native)


def test_scalar_loads_come_in_any_order():
    with pytest.raises(Trap, match="pending"):
        execute(
            "s_load_b64 s[4:5], s[0:1], 0x0\n"
            "s_load_b64 s[6:7], s[0:1], 0x8\ns_waitcnt lgkmcnt(1)\n"
            "v_mov_b32 v1, s4\ns_endpgm\n"
        )


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "atomic",
    [
        "global_atomic_or_b32 v2, v0, s[6:7]",
        "global_atomic_or_b32 v3, v2, s[6:7]",
        "global_atomic_or_b32 v4, v2, v0, s[6:7] glc",
        "flat_atomic_or_b32 v[2:3], v0",
        "buffer_atomic_or_b32 v2, off, s[8:11], 0",
        "buffer_atomic_or_b32 v2, off, s[8:11], 0 glc",
        "ds_add_u32 v2, v0",
        "ds_add_u32 v3, v2",
        "ds_storexchg_rtn_b32 v4, v2, v0",
    ],
)
def test_an_atomic_waits_for_its_address_and_data(atomic, native):
    """The atomic has to wait even if it shares its counter with the load."""
    for load in ("global_load_b32 v2, v1, s[4:5]", "ds_load_b32 v2, v1"):
        text = f"{LOAD}ds_store_b32 v1, v1\ns_waitcnt lgkmcnt(0)\n{load}\n{atomic}\ns_endpgm\n"
        with pytest.raises(Trap, match="_atomic_.*pending|ds_.*pending"):
            execute(text, threads=32, native=native, second="inout")


@pytest.mark.parametrize("native", [False, True])
def test_atomics_that_return_in_order_may_write_the_same_register(native):
    swap = "ds_storexchg_rtn_b32 v2, v1, v0\n"
    text = f"{LOAD}ds_store_b32 v1, v0\n{swap}{swap}s_waitcnt lgkmcnt(0)\n{STORE}"
    assert (execute(text, native=native) == np.arange(64)).all()


EXCHANGE = (
    LOAD
    + """
v_xor_b32 v3, 0x80, v1
ds_store_b32 v1, v0
s_waitcnt lgkmcnt(0)
s_barrier
ds_load_b32 v2, v3
s_waitcnt lgkmcnt(0)
"""
    + STORE
)


@pytest.mark.parametrize("missing", ["s_barrier\n", "s_waitcnt lgkmcnt(0)\ns_barrier\n"])
def test_lds_race(missing):
    """The barrier is missing, or a wave has an outstanding store when it is at the barrier."""
    barrier = missing.removeprefix("s_waitcnt lgkmcnt(0)\n") if "wait" in missing else ""
    body = EXCHANGE.replace(missing, barrier)
    with pytest.raises(Trap, match="LDS"):
        execute(body)
    if "wait" in missing:
        assert (execute(body, barriers_wait=True) == np.arange(64) ^ 32).all()
    else:
        with pytest.raises(Trap, match="LDS"):
            execute(body, barriers_wait=True)


def test_lds_load_that_still_runs_at_a_barrier():
    """The load may read what another wave stores later: a barrier orders only completed loads."""
    wait = "s_waitcnt lgkmcnt(0)\n"
    again = "{}\ns_barrier\nds_store_b32 v1, v1\n" + wait + STORE
    body = EXCHANGE.removesuffix(wait + STORE) + again
    assert (execute(body.format(wait)) == np.arange(64) ^ 32).all()
    with pytest.raises(Trap, match="race.*a read"):
        execute(body.format(""))
    execute(body.format(""), barriers_wait=True)


def test_store_that_outlives_barriers_is_ordered_once_it_is_awaited():
    """The store is also ordered if waves took different branches meanwhile."""
    body = (
        LOAD
        + """
    v_xor_b32 v3, 0x80, v1
    v_readfirstlane_b32 s8, v0
    global_store_b32 v1, v0, s[6:7]
    s_barrier
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc1 there
    s_nop 0
    there:
    s_barrier
    s_barrier
    {}
    s_barrier
    global_load_b32 v2, v3, s[6:7]
    s_waitcnt vmcnt(0)
    s_barrier
    """
        + STORE
    )
    awaited = body.format("s_waitcnt_vscnt null, 0x0")
    assert (execute(awaited, second="inout") == np.arange(64) ^ 32).all()
    with pytest.raises(Trap, match=r"race.*a write"):
        execute(body.format(""), second="inout")


def test_lds_addresses_wrap_at_32_bits():
    body = EXCHANGE.replace("v_xor_b32 v3, 0x80, v1", "v_sub_nc_u32 v3, 0, v1")
    out = execute(body.replace("ds_load_b32 v2, v3", "ds_load_b32 v2, v3 offset:252"))
    assert (out == 63 - np.arange(64)).all()
    with pytest.raises(Trap, match="lds: LDS address 4294967"):
        execute(body)


def test_lds_write_after_read_race():
    again = EXCHANGE.replace(STORE, "ds_store_b32 v1, v2\n" + STORE)
    with pytest.raises(Trap, match=r"race.*a read"):
        execute(again)


def test_a_scalar_load_races_as_well():
    body = LOAD + "s_load_b32 s8, s[6:7], 0x4\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v2, s8\n"
    assert (execute(body + STORE, threads=32, second="inout") == 0).all()
    with pytest.raises(Trap, match=r"race.*a read by several waves"):
        execute(body + STORE, second="inout")
    late = LOAD + STORE.removesuffix("s_endpgm\n") + "s_load_b32 s8, s[6:7], 0x84\n"
    use = "s_waitcnt lgkmcnt(0)\nv_mov_b32 v2, s8\n"
    with pytest.raises(Trap, match=r"race.*a write by wave 1"):
        execute(late + use + STORE, second="inout")
    with pytest.raises(Trap, match=r"bounds: 4 bytes"):
        execute(LOAD + "s_load_b32 s8, s[6:7], 0x100\ns_endpgm\n")


SWAPS = (
    LOAD
    + """global_load_b32 v3, v1, s[6:7]
s_waitcnt vmcnt(0)
again:
v_add_nc_u32 v2, 1, v3
global_atomic_cmpswap_b32 v4, v1, v[2:3], s[6:7] glc
s_waitcnt vmcnt(0)
v_cmp_ne_u32 vcc_lo, v4, v3
v_mov_b32 v3, v4
s_cbranch_vccnz again
s_endpgm
"""
)


@pytest.mark.parametrize("native", [True, False])
def test_a_loop_of_swaps_begins_with_a_plain_load(native):
    """The plain load is no race, because the swap compares the loaded value.

    The swap's address is in a pair of scalar registers with an offset, or in vector registers.
    """
    kind = {"threads": 32, "size": 32, "grid": (20,), "batch": 8, "second": "inout"}
    wide = "v_add_co_u32 v5, s8, s6, v1\nv_add_co_ci_u32_e64 v6, null, s7, 0, s8\nagain:"
    with_address = SWAPS.replace("again:", wide).replace("v[2:3], s[6:7]", "v[2:3], off")
    for correct in (SWAPS, with_address.replace("v4, v1, v[2:3]", "v4, v[5:6], v[2:3]")):
        assert (execute(correct, native=native, **kind) == 20).all()
    for faulty in (
        # No swap compares the result of the load.
        SWAPS.replace("cmpswap_b32 v4, v1, v[2:3]", "add_u32 v4, v1, v2").replace("vccnz", "vccz"),
        # The swap compares another value than the loaded one.
        SWAPS.replace("again:", "again:\nv_and_b32 v3, v3, v3"),
        # Other waves store to the word.
        SWAPS.replace("s_endpgm", "global_store_b32 v1, v3, s[6:7]\ns_endpgm"),
    ):
        with pytest.raises(Trap, match="race"):
            execute(faulty, native=native, **kind)


#: Lanes whose value in v2 is not 0 set v5 to 1, and the other lanes set it to 2.
IF_ELSE = (
    "v_mov_b32 v5, 0\nv_cmp_ne_u32 s9, 0, v2\ns_and_saveexec_b32 s10, s9\n"
    "s_xor_b32 s9, exec_lo, s10\ns_cbranch_execz else\nv_mov_b32 v5, 1\n"
    "else: s_and_not1_saveexec_b32 s9, s9\ns_cbranch_execz endif\nv_mov_b32 v5, 2\n"
    "endif: s_or_b32 exec_lo, exec_lo, s9"
)
#: Each wave loads words into v2. In IN_PLACE, the first wave, whose s8 is 0, also stores the words
#: plus 1.
COPIES = (
    LOAD
    + """v_readfirstlane_b32 s8, v0
v_mov_b32 v7, v1
v_and_b32 v1, 0x7c, v1
global_load_b32 v2, v1, s[6:7]
s_waitcnt vmcnt(0)
"""
)
IN_PLACE = (
    COPIES
    + """v_add_nc_u32 v3, 1, v2
{used}
s_cmp_lg_u32 s8, 0
s_cbranch_scc1 end
global_store_b32 v1, v3, s[6:7]
end: {last}
s_endpgm
"""
)
#: Uses of the value that a wave of IN_PLACE has loaded, each as the texts `used` and `last`. Each
#: use turns the racing load into a trap.
USES = {
    "a store": ("", "global_store_b32 v7, v2, s[6:7] offset:128"),
    "an address": (
        "v_and_b32 v2, 0, v2\nv_add_nc_u32 v2, v2, v7",
        "global_store_b32 v2, v7, s[6:7] offset:128",
    ),
    "a copy": (
        "v_dual_mov_b32 v4, v3 :: v_dual_mov_b32 v5, 0",
        "v_perm_b32 v4, v4, v5, v5\nglobal_store_b32 v7, v4, s[6:7] offset:128",
    ),
    "a swap": ("v_swap_b32 v2, v5", "global_store_b32 v7, v5, s[6:7] offset:128"),
    "a swap of halves": (
        "v_swap_b16 v2.l, v5.l",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a flag": (
        "v_cmp_eq_u32 vcc_lo, 0, v2\nv_cndmask_b32 v5, 0, v1, vcc_lo",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "an atomic": ("", "global_atomic_add_u32 v7, v2, s[6:7] offset:128"),
    "LDS": ("", "ds_store_b32 v7, v2"),
    "a branch": ("v_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, 1\ns_cbranch_scc1 end", ""),
    "a branch around a barrier": (
        "",
        "v_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, 9\ns_cbranch_scc1 met\ns_barrier\nmet:",
    ),
    "a branch around a count": (
        "s_mov_b32 m0, 0",
        "v_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, 9\ns_cbranch_scc1 met\nds_append v5\nmet:",
    ),
    "a branch around a barrier of the grid": (
        "",
        "v_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, s9\ns_cbranch_scc1 met\n"
        "ds_gws_barrier v0 gds\nmet:",
    ),
    "counted lanes": ("s_mov_b32 m0, 0", "v_cmpx_gt_u32 9, v2\nds_append v5"),
    "the place of a count": ("v_readfirstlane_b32 s9, v2\ns_and_b32 m0, s9, 0", "ds_consume v5"),
    "a register of a branch": (
        "v_mov_b32 v5, 0\nv_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, 1\n"
        "s_cbranch_scc1 over\nv_mov_b32 v5, 1\nover:",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a register of lanes": (IF_ELSE, "global_store_b32 v7, v5, s[6:7] offset:128"),
    "a register of some lanes": (
        IF_ELSE.replace("endif: s_or_b32 exec_lo, exec_lo, s9", "endif:"),
        "global_store_b32 v7, v7, s[6:7] offset:128",
    ),
    "polling": (
        "poll: global_load_b32 v2, v1, s[6:7]\ns_waitcnt vmcnt(0)\nv_readfirstlane_b32 s9, v2\n"
        "s_cmp_eq_u32 s9, 9\ns_cbranch_scc1 poll",
        "",
    ),
    "lanes": (
        "v_cmpx_lt_u32 0, v2\nv_mov_b32 v5, 1\ns_mov_b32 exec_lo, -1",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a lane that was not active": (
        "s_mov_b32 exec_lo, 1\nv_mov_b32 v2, 7\ns_mov_b32 exec_lo, -1",
        "global_store_b32 v7, v2, s[6:7] offset:128",
    ),
    "a lane that is not active": (
        "s_mov_b32 exec_lo, 1\nv_mov_b32 v2, 7\nv_readlane_b32 s9, v2, 5\n"
        "s_mov_b32 exec_lo, -1\nv_mov_b32 v5, s9",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a neighbour that is not active": (
        "s_mov_b32 exec_lo, 1\nv_mov_b32 v2, 7\n"
        "v_mov_b32_dpp v5, v2 quad_perm:[1,1,1,1] row_mask:0xf bank_mask:0xf fi:1",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a scalar": (
        "v_readfirstlane_b32 s9, v2\ns_add_u32 s9, s9, 1\nv_mov_b32 v5, s9",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a scalar and a constant": (
        "v_readfirstlane_b32 s9, v2\ns_addk_i32 s9, 1\nv_mov_b32 v5, s9",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a bit of a scalar": (
        "v_readfirstlane_b32 s9, v2\ns_bitset1_b32 s9, 3\nv_mov_b32 v5, s9",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a sum of scalar floats": (
        "v_readfirstlane_b32 s9, v2\ns_fmac_f32 s9, s8, s8\nv_mov_b32 v5, s9",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a carry": (
        "v_add_co_u32 v5, vcc_lo, v2, v2\nv_add_co_ci_u32 v5, vcc_lo, 0, v7, vcc_lo",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a carry of a scalar": (
        "v_readfirstlane_b32 s9, v2\ns_addk_i32 s9, 1\ns_cselect_b32 s9, 1, 0\nv_mov_b32 v5, s9",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a mask that is implicit": (
        "v_cmp_eq_u32 vcc_lo, 0, v2\nv_dual_cndmask_b32 v5, v7, v1 :: v_dual_mov_b32 v4, 0",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "lanes that DPP does not write": (
        "v_mov_b32 v5, v2\nv_add_f32_e64_dpp v5, v7, v7 row_shl:1 row_mask:0xf bank_mask:0xf",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a register by its number": (
        "s_mov_b32 m0, 1\nv_mov_b32 v5, 0\nv_movreld_b32 v4, v2",
        "global_store_b32 v7, v5, s[6:7] offset:128",
    ),
    "a loop": (
        "s_mov_b32 s9, 3\nv_mov_b32 v5, 0\nagain: v_mov_b32 v6, v5\nv_mov_b32 v5, v2\n"
        "s_sub_u32 s9, s9, 1\ns_cmp_lg_u32 s9, 0\ns_cbranch_scc1 again",
        "global_store_b32 v7, v6, s[6:7] offset:128",
    ),
}


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_a_racing_load_that_reaches_no_store_is_a_note(native, lockstep):
    kind = {"threads": 128, "size": 256, "native": native, "lockstep": lockstep}
    kind |= {"second": "inout"}
    unused = "v_mov_b32 v2, 0\nglobal_store_b32 v1, v2, s[6:7] offset:128"
    # The value decides a branch, as in tanh. The branch changes only v5, which is not stored.
    branch = "v_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, 1\ns_cbranch_scc1 over\n"
    branch += "v_mov_b32 v5, v2\ns_branch met\nover: v_mov_b32 v5, 1\nmet:"
    harmless = [("", ""), ("", unused), ("", "v_cmpx_lt_u32 0, v2"), (branch, unused)]
    harmless += [(IF_ELSE, "global_store_b32 v7, v7, s[6:7] offset:128")]
    # All lanes become active again and overwrite v2, which then decides whether waves store.
    again = "v_cmpx_lt_u32 0, v2\ns_mov_b32 exec_lo, -1\nv_mov_b32 v2, 7\n"
    again += "v_readfirstlane_b32 s9, v2\ns_cmp_eq_u32 s9, 9\ns_cbranch_scc1 met"
    harmless += [(again, "global_store_b32 v7, v7, s[6:7] offset:128\nmet:")]
    for used, last in harmless:
        notes = []
        out = execute(IN_PLACE.format(used=used, last=last), notes=notes, **kind)
        assert (out[:32] == 1).all()
        assert {note.check for note in notes} == {"race"}
        assert "the loaded value reaches no store" in notes[0].message
    for used, last in USES.values():
        with pytest.raises(Trap, match="race: global memory"):
            execute(IN_PLACE.format(used=used, last=last), **kind)


def test_a_racing_load_of_waves_that_end_in_another_batch_is_judged():
    """All workgroups load words 0 to 31. The first one changes these words.

    The last workgroup stores the loaded values in other words.
    """
    body = IN_PLACE.replace("s_cmp_lg_u32 s8, 0", "s_cmp_lg_u32 s2, 0").format(
        used="s_add_u32 s9, s2, s8", last="{last}"
    )
    kind = {"threads": 32, "grid": (64,), "second": "inout", "batch": 8}
    notes = []
    execute(body.format(last=""), notes=notes, **kind)
    assert [note.check for note in notes] == ["race", "race"]
    last = "s_cmp_lg_u32 s2, 63\ns_cbranch_scc1 0\ns_cbranch_scc1 over\n"
    last += "global_store_b32 v1, v2, s[6:7] offset:128\nover:"
    with pytest.raises(Trap, match="race: global memory"):
        execute(body.format(last=last), **kind)
    execute(body.format(last=last), disabled_checks=frozenset({"race"}), **kind)
    notes = []
    execute(body.format(last=last), lenient=True, notes=notes, **kind)
    assert notes
    assert not any("reaches no store" in note.message for note in notes)


def test_same_value_from_several_waves_is_no_race():
    body = LOAD + "v_mov_b32 v1, 0\nv_mov_b32 v2, 5\n" + STORE
    assert execute(body)[0] == 5
    with pytest.raises(Trap, match="race"):
        execute(body.replace("v_mov_b32 v2, 5", "v_lshrrev_b32 v2, 5, v0"))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("address", ["v_and_b32 v3, 0x7c, v1", "v_mov_b32 v3, 0"])
def test_each_wave_that_stored_the_same_value_may_read_it_back(native, address):
    """The lanes of a wave store to a cell each, or all to the same cell."""
    body = (
        LOAD
        + f"""
    v_mov_b32 v2, 5
    v_cmp_gt_u32 vcc_lo, 32, v0
    {address}
    s_cbranch_vccz second
    global_store_b32 v3, v2, s[6:7]
    s_branch both
    second: global_store_b32 v3, v2, s[6:7]
    both: s_waitcnt_vscnt null, 0x0
    global_load_b32 v2, v3, s[6:7]
    s_waitcnt vmcnt(0)
    v_add_nc_u32 v1, 0x80, v1
    """
        + STORE
    )
    assert (execute(body, size=96, native=native)[32:] == 5).all()


def test_reads_of_what_nothing_wrote():
    """This test reads global memory that nothing wrote. A kernel of FINDINGS reads such LDS."""
    with pytest.raises(Trap, match="uninitialised"):
        execute(GOOD.replace("s[4:5]", "s[6:7]"))


@pytest.mark.parametrize("native", [False, True])
def test_what_was_written_before_a_barrier_of_the_grid_may_be_read(native):
    """Each of two workgroups writes 32 words, and then twice reads the words of the other one."""
    turn = "s_waitcnt_vscnt null, 0x0\nds_gws_barrier v0 gds\n"
    turn += "global_load_b32 v2, v4, s[6:7]\ns_waitcnt vmcnt(0)\nds_gws_barrier v0 gds\n"
    body = LOAD + "s_lshl_b32 s8, s2, 7\nv_add_nc_u32 v1, s8, v1\nv_xor_b32 v4, 0x80, v1\n"
    body += "v_add_nc_u32 v2, s8, v0\nglobal_store_b32 v1, v2, s[6:7]\n" + turn + turn + STORE
    kind = {"threads": 32, "grid": (2,), "cooperative": True, "native": native}
    out = execute(body, **kind)
    assert (out == np.concatenate([128 + np.arange(32), np.arange(32)])).all()
    with pytest.raises(Trap, match="uninitialised"):
        execute(body.replace("v_xor_b32 v4, 0x80", "v_or_b32 v4, 0x100"), size=128, **kind)


@pytest.mark.parametrize(
    ("size", "threads", "lane"), [(63, 64, "31 of wave 1"), (10, 32, "10 of wave 0")]
)
def test_out_of_bounds_names_the_address(size, threads, lane):
    place = rf"test at 0x[0-9a-f]+ `global_load_b32.*bounds.*at 0x2.*\(lane {lane} of workgroup 0\)"
    with pytest.raises(Trap, match=place):
        execute(GOOD, size=size, threads=threads)


def test_store_to_an_input():
    with pytest.raises(Trap, match="readonly"):
        execute(GOOD, second="in")


def test_barrier_that_not_all_living_waves_reach():
    """The barrier causes no trap if the kernel has only one wave, or if checks are off.

    FINDINGS has the kernel with two waves and with checks, which causes a trap.
    """
    two = FINDINGS["barrier"][0]
    assert execute(two, threads=32).sum() == 0
    assert execute(two, checks=False).sum() == 0


def test_waves_end_one_after_the_other():
    """As in a forward substitution, the living waves meet at a barrier in each turn.

    After the barrier, one of them reads the value of the wave that ended last, and then ends.
    """
    body = (
        LOAD
        + """
    v_readfirstlane_b32 s8, v0
    s_mov_b32 s9, 0
    v_mov_b32 v3, 0
    ds_store_b32 v3, v3
    again:
    s_waitcnt lgkmcnt(0)
    s_barrier
    s_cmp_eq_u32 s8, s9
    s_cbranch_scc1 last
    s_add_u32 s9, s9, 32
    s_branch again
    last:
    ds_load_b32 v2, v3
    s_waitcnt lgkmcnt(0)
    v_add_nc_u32 v2, 1, v2
    ds_store_b32 v3, v2
    """
        + STORE
    )
    assert (execute(body, threads=128, size=128) == np.arange(128) // 32 + 1).all()


def test_unknown_instruction_traps_when_reached():
    body = LOAD + "s_branch 2\nimage_bvh_intersect_ray v[2:5], v[2:12], s[4:7]\n"
    with pytest.raises(Trap, match=r"unknown.*cannot execute"):
        execute(body.replace("s_branch 2\n", "") + "s_endpgm\n")
    with pytest.raises(Trap, match="cannot execute `s_trap 1"):
        execute("s_trap 1\ns_endpgm\n")
    with pytest.raises(Trap, match=r"`s_trap 2`: abort: the kernel called abort"):
        execute("s_trap 2\ns_endpgm\n")
    execute("s_trap 3\ns_endpgm\n")


def test_arguments_that_do_not_fit():
    kernel = replace(selftest.kernel("s_endpgm\n", 1), arguments=(Argument("", 0, 4, "by_value"),))
    launch(kernel, (1,), [3], threads=32)
    for arguments, words in (([None], "4 bytes by value"), ([], "missing"), ([1, 2], "2 given")):
        with pytest.raises(EmulatorError, match=words):
            launch(kernel, (1,), arguments, threads=32)
    with pytest.raises(EmulatorError, match="cannot be launched"):
        launch(kernel, (0,), [3], threads=32)
    with pytest.raises(EmulatorError, match="LDS"):
        launch(kernel, (1,), [3], threads=32, lds=1 << 20)


#: For each check, a kernel that the check ends with a trap, and part of the trap's message.
FINDINGS = {
    "pending": (GOOD.replace("s_waitcnt vmcnt(0)\n", ""), "yet to write"),
    "race": (LOAD + "v_mov_b32 v1, 0\nv_mov_b32 v2, v0\n" + STORE, "global memory"),
    "stale": (
        LOAD + "v_mov_b32 v1, 0\nv_mov_b32 v3, 1\ns_cmp_eq_u32 s2, 0\ns_cbranch_scc0 readers\n"
        "global_store_b32 v1, v3, s[6:7] offset:128\ns_waitcnt_vscnt null, 0x0\n"
        "global_atomic_add_u32 v1, v3, s[6:7] offset:4\ns_endpgm\n"
        "readers:\nglobal_load_b32 v2, v1, s[6:7] offset:4 glc\ns_waitcnt vmcnt(0)\n"
        "v_cmp_ne_u32 vcc_lo, 0, v2\ns_cbranch_vccz readers\n"
        "global_load_b32 v2, v1, s[6:7] offset:128\ns_waitcnt vmcnt(0)\ns_endpgm\n",
        "without buffer_gl1_inv and buffer_gl0_inv",
    ),
    "uninitialised": (
        LOAD + "ds_load_b32 v2, v1\ns_waitcnt lgkmcnt(0)\n" + STORE,
        "LDS is read before",
    ),
    "lds": (
        LOAD + "v_add_nc_u32 v3, 0x400, v1\nds_store_b32 v3, v0\nds_load_b32 v2, v3\n"
        "s_waitcnt lgkmcnt(0)\n" + STORE,
        "LDS address 1276 of 1024 bytes",
    ),
    "barrier": (
        "v_readfirstlane_b32 s3, v0\ns_cmp_eq_u32 s3, 0\ns_cbranch_scc1 2\ns_barrier\ns_endpgm\n"
        "s_barrier\ns_endpgm\n",
        "not all living waves",
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_can_be_off_alone_or_note_its_findings(check):
    body, text = FINDINGS[check]
    other_checks = frozenset(CHECKS) - {check}
    kind = {"grid": (2,), "threads": 32, "second": "inout"} if check == "stale" else {}
    for off in (frozenset(), other_checks):
        with pytest.raises(Trap, match=f"{check}.*{text}"):
            execute(body, disabled_checks=off, **kind)
    notes = []
    execute(body, disabled_checks=frozenset({check}), notes=notes, **kind)
    assert notes == []
    execute(body, notes=notes, lenient=True, **kind)
    assert {note.check for note in notes} == {check}
    assert "`" in notes[0].place
    assert text in notes[0].message
    assert notes[0].count >= 1
    # An access that cannot be executed is not a finding, but always causes a trap.
    with pytest.raises(Trap, match="bounds"):
        execute(GOOD, size=63, lenient=True)


@pytest.mark.parametrize(
    "options", [{"disabled_checks": frozenset({"barrier"})}, {"lenient": True}]
)
def test_waves_at_a_barrier_of_the_grid_and_of_a_workgroup_wait_for_ever(options):
    """No wave can continue. This is a trap even if the check is off or only notes findings."""
    body = "v_readfirstlane_b32 s3, v0\ns_cmp_eq_u32 s3, 0\ns_cbranch_scc1 1f\ns_barrier\n1:\n"
    with pytest.raises(Trap, match="barrier.*living waves of its grid reach"):
        execute(body + "ds_gws_barrier v0 gds\ns_endpgm\n", cooperative=True, **options)


def test_a_kernel_that_goes_on_behind_its_end_is_told():
    with pytest.raises(Trap, match="bounds: jumps to 0x4, which is not an instruction"):
        execute("s_nop 0\n")


def test_hardware_reads_zero_outside_of_lds():
    body = LOAD + "v_mov_b32 v2, 7\n" + FINDINGS["lds"][0].removeprefix(LOAD)
    assert (execute(body, checks=False) == 0).all()


def test_names_of_checks():
    assert parse("pending,race") == {"pending", "race"}
    assert parse("all") == set(CHECKS)
    assert parse("") == set()
    with pytest.raises(EmulatorError, match="unknown check typo; the checks are pending, race"):
        parse("race,typo")
    assert add_default_value(["run", "--no-checks", "K.hsaco"]) == [
        "run",
        "--no-checks=all",
        "K.hsaco",
    ]
    same = ["device", "--no-checks", "pending,race", "--", "p", "--no-checks"]
    assert add_default_value(same) == same
    assert add_default_value(["device", "--no-checks", "--", "race"])[1] == "--no-checks=all"


@pytest.mark.parametrize("emptied", ["buffer_gl1_inv\nbuffer_gl0_inv\n", "buffer_gl0_inv\n", ""])
@pytest.mark.parametrize("native", [False, True])
def test_waves_that_wait_by_plain_loads_let_others_run(emptied, native):
    """Workgroup 0, whose code comes first, waits for a store of workgroup 1."""
    text = LOAD + (
        "v_mov_b32 v3, 0\nv_mov_b32 v2, 7\ns_cmp_eq_u32 s2, 1\ns_cbranch_scc1 store\n"
        f"spin: global_load_b32 v2, v3, s[6:7]\ns_waitcnt vmcnt(0)\n{emptied}"
        "v_cmp_ne_u32 vcc_lo, 7, v2\ns_cbranch_vccnz spin\n"
        "global_store_b32 v1, v2, s[6:7] offset:128\ns_endpgm\n"
        "store: global_store_b32 v3, v2, s[6:7]\ns_endpgm"
    )
    kind = {"threads": 32, "grid": (2,), "second": "inout", "checks": False, "native": native}
    out = execute(text, budget=10**5, **kind)
    assert out[0] == 7
    assert (out[32:] == 7).all()
    with pytest.raises(Trap, match=r"budget.*1 of 2 workgroups run at a time"):
        execute(text, batch=1, budget=10**4, **kind)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "atomic",
    [
        "global_atomic_add_u32 v1, v1, s[6:7]",
        "global_atomic_add_u64 v1, v[2:3], s[6:7]",
        "global_atomic_swap_b32 v4, v1, v2, s[6:7] glc",
        "ds_add_u32 v1, v2",
        "ds_add_rtn_u64 v[4:5], v1, v[2:3]",
    ],
)
@pytest.mark.parametrize("offset", [0, 2])
def test_atomics_have_to_be_aligned(native, atomic, offset):
    size = 8 if "u64" in atomic else 4
    text = LOAD + "v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nv_lshlrev_b32 v1, 3, v0\n"
    text += f"v_add_nc_u32 v1, {offset * size // 4}, v1\n{atomic}\ns_endpgm\n"
    kind = {"second": "inout", "native": native, "checks": False, "threads": 8}
    if offset == 0:
        execute(text, **kind)
        return
    with pytest.raises(Trap, match=f"misaligned: an atomic of {size} bytes"):
        execute(text, **kind)


@pytest.mark.parametrize(
    "second",
    [
        "s_round_mode 1",
        "s_denorm_mode 0",
        "s_getreg_b32 s9, hwreg(HW_REG_MODE)",
        "s_add_f32 s9, s8, s8",
    ],
)
def test_modes_behind_one_that_is_refused_are_refused(second):
    with pytest.raises(Trap, match="unknown: cannot execute `s_round_mode 0x1`"):
        execute(f"s_round_mode 1\n{second}\ns_endpgm")
    jump = "s_branch over\ns_round_mode 1\nover: s_cbranch_scc0 two\ns_round_mode 1\n"
    with pytest.raises(Trap, match="the value of the mode register is not known here"):
        execute(f"{jump}two: {second}\ns_endpgm")


@pytest.mark.parametrize("value", [1, 2, 4, 7, 8, 11, 13, 14])
def test_modes_that_flush_only_inputs_or_only_results_are_refused(value):
    for setting in (
        f"s_denorm_mode {value}",
        f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), {value}",
    ):
        with pytest.raises(Trap, match="flushes denormals only in inputs or only in results"):
            execute(f"{setting}\nv_add_f16 v2, v0, v0\ns_endpgm")


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
    """The waiting workgroup has the lower number and pc, but must let the storing one run."""
    text = FLAG.format(release="s_waitcnt_vscnt null, 0x0")
    out = execute(text, threads=32, grid=(2,), second="inout")
    assert out[:3].tolist() == [1, 77, 77]
    with pytest.raises(Trap, match="race"):
        execute(FLAG.format(release="s_nop 0"), threads=32, grid=(2,), second="inout")
    # A load from the wave's own cache orders nothing.
    with pytest.raises(Trap, match="race|budget"):
        execute(text.replace(" glc", ""), threads=32, grid=(2,), second="inout")
    # A load with GLC in place of the atomic does not release earlier stores.
    load = "global_load_b32 v2, v1, s[6:7] glc\ns_waitcnt vmcnt(0)"
    text = text.replace("s_cbranch_scc1 poll", "").replace("writer:", f"writer:\n{load}")
    with pytest.raises(Trap, match="race"):
        execute(
            text.replace("global_atomic_swap_b32 v1, v2, s[6:7]", load),
            threads=32,
            grid=(2,),
            second="inout",
        )


@pytest.mark.parametrize("native", [False, True])
def test_a_barrier_passes_on_what_one_wave_acquired(native):
    """Of the waiting workgroup, wave 0 polls the flag, and wave 1 waits for it at a barrier."""
    text = FLAG.format(release="s_waitcnt_vscnt null, 0x0\ns_barrier")
    text = text.replace("poll:", "v_cmp_lt_u32 vcc_lo, 31, v0\ns_cbranch_vccnz meet\npoll:")
    kind = {"grid": (2,), "second": "inout", "native": native}
    met = text.replace("buffer_gl0_inv", "meet: s_barrier\nbuffer_gl0_inv")
    assert execute(met, **kind)[:3].tolist() == [1, 77, 77]
    with pytest.raises(Trap, match="race"):
        execute(text.replace("buffer_gl0_inv", "meet: buffer_gl0_inv"), **kind)


WAIT = "s_waitcnt_vscnt null, 0x0"
DATA = "v_mov_b32 v2, 77\nglobal_store_b32 v1, v2, s[6:7] offset:4"
STORED_FLAG = "global_store_b32 v1, v2, s[6:7]\n"
SWAP_FLAG = "global_atomic_swap_b32 v1, v2, s[6:7]\n"
#: Like FLAG, but a plain store sets the flag, between the instructions `before` and `after`.
PLAIN_FLAG = (
    FLAG.partition("v_mov_b32 v2, 77")[0]
    + """{before}
v_mov_b32 v2, 1
global_store_b32 v1, v2, s[6:7]
{after}
s_endpgm
"""
)


@pytest.mark.parametrize("native", [False, True])
def test_a_plain_store_of_a_flag_releases_what_was_awaited(native):
    kind = {"threads": 32, "grid": (2,), "second": "inout", "native": native}
    # The second store of the data is also released if its wait comes only after a barrier.
    twice = f"{DATA}\n{WAIT}\n{DATA}\n{{}}"
    for before in (f"{DATA}\n{WAIT}", twice.format(WAIT), twice.format(f"s_barrier\n{WAIT}")):
        out = execute(PLAIN_FLAG.format(before=before, after=""), **kind)
        assert out[:3].tolist() == [1, 77, 77]
    other = "global_store_b32 v1, v1, s[6:7] offset:16"
    for before in (
        DATA,
        f"{DATA}\ns_waitcnt vmcnt(0) lgkmcnt(0)",
        f"{other}\n{WAIT}\n{DATA}",
        f"{DATA}\n{other}\ns_waitcnt_vscnt null, 0x2",
        f"{DATA}\ns_barrier",
        f"{other}\n{WAIT}\n{DATA}\ns_barrier",
    ):
        with pytest.raises(Trap, match="race"):
            execute(PLAIN_FLAG.format(before=before, after=""), **kind)
    # A wait that leaves one store outstanding awaits the first of two stores, which is the data's.
    text = PLAIN_FLAG.format(before=f"{DATA}\n{other}\ns_waitcnt_vscnt null, 0x1", after="")
    assert execute(text, **kind)[2] == 77


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("set_flag", [STORED_FLAG, SWAP_FLAG])
def test_a_flag_releases_an_atomic_that_was_awaited(set_flag, native):
    """Without a wait, the flag may be set before the atomic has changed its word."""
    kind = {"threads": 32, "grid": (2,), "second": "inout", "native": native}
    flag = PLAIN_FLAG.replace(STORED_FLAG, set_flag)
    flag = flag.replace("writer:", "writer:\nv_cmpx_eq_u32 0, v0")
    add = "v_mov_b32 v2, 77\n{} v1, v2, s[6:7] offset:4"
    data = add.format("global_atomic_add_u32")
    wide = "v_mov_b32 v4, s6\nv_mov_b32 v5, s7\n"
    flat = wide + data.replace("global", "flat").replace("v1, v2, s[6:7]", "v[4:5], v2")
    returned = add.format("global_atomic_add_u32 v3,") + " glc"
    loaded = "global_load_b32 v3, v1, s[6:7] offset:4 glc\ns_waitcnt vmcnt(0)"
    for before in (
        f"{data}\n{WAIT}",
        f"{flat}\n{WAIT}",
        f"{data}\ns_barrier\n{WAIT}",
        f"{data}\n{WAIT}\ns_barrier",
        f"{returned}\ns_waitcnt vmcnt(0)",
        f"{returned}\ns_barrier\ns_waitcnt vmcnt(0)",
        # The load with GLC shows that the atomic has changed its word.
        f"{data}\n{loaded}",
    ):
        out = execute(flag.format(before=before, after=""), **kind)
        assert out[:3].tolist() == [1, 77, 77]
    for before in (data, flat, f"{data}\ns_waitcnt vmcnt(0)", f"{data}\ns_barrier"):
        with pytest.raises(Trap, match="race"):
            execute(flag.format(before=before, after=""), **kind)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("atomic", ["ds_add_u32 v1, v0", "ds_add_rtn_u32 v5, v1, v0"])
def test_a_barrier_orders_an_atomic_of_lds_that_was_awaited(atomic, native):
    body = EXCHANGE.replace("s_barrier", f"s_barrier\n{atomic}\n{{}}\ns_barrier")
    out = execute(body.format("s_waitcnt lgkmcnt(0)"), native=native)
    assert (out == 2 * (np.arange(64) ^ 32)).all()
    with pytest.raises(Trap, match=r"ds_load_b32 .*race.*a write"):
        execute(body.format(""), native=native)


@pytest.mark.parametrize("native", [False, True])
def test_a_flag_does_not_release_what_is_stored_behind_it(native):
    kind = {"threads": 32, "grid": (2,), "second": "inout", "native": native}
    for after in (DATA, f"{WAIT}\n{DATA}\n{WAIT}"):
        with pytest.raises(Trap, match="race"):
            execute(PLAIN_FLAG.format(before="", after=after), **kind)
    with pytest.raises(Trap, match="race"):
        text = PLAIN_FLAG.replace(STORED_FLAG, SWAP_FLAG)
        execute(text.format(before="", after=DATA), **kind)


@pytest.mark.parametrize("native", [False, True])
def test_a_flag_may_be_reset_by_whoever_knows_that_it_was_read(native):
    """Workgroup 2 sets a flag, 1 reads it and sets another one, and 0 then resets the first one."""
    poll = (
        "{0}: global_load_b32 v2, v1, s[6:7] offset:{1} glc\ns_waitcnt vmcnt(0)\n"
        "v_cmp_eq_u32 vcc_lo, 0, v2\ns_cbranch_vccnz {0}\n"
    )
    body = (
        LOAD
        + "v_mov_b32 v1, 0\nv_mov_b32 v3, 1\ns_cmp_eq_u32 s2, 2\ns_cbranch_scc1 sets\n"
        + "s_cmp_eq_u32 s2, 1\ns_cbranch_scc1 passes\n"
        + poll.format("waits", 4)
        + "global_store_b32 v1, v1, s[6:7]\ns_endpgm\npasses:\n"
        + poll.format("polls", 0)
        + f"{WAIT}\nglobal_store_b32 v1, v3, s[6:7] offset:4\ns_endpgm\n"
        + "sets: global_store_b32 v1, v3, s[6:7]\ns_endpgm\n"
    )
    out = execute(body, threads=32, grid=(3,), second="inout", native=native)
    assert out[:2].tolist() == [0, 1]


def test_stores_of_a_workgroup_on_one_unit_stay_in_order():
    """In CU mode, LLVM before 22 places no wait before a flag for the same workgroup."""
    text = PLAIN_FLAG.replace(
        "s_cmp_eq_u32 s2, 1", "v_readfirstlane_b32 s8, v0\ns_cmp_lg_u32 s8, 0"
    )
    text = text.format(before=DATA, after="")
    for two_units in (False, True):
        kernel = selftest.kernel(text, two_units=two_units)
        buffers = [Buffer(np.zeros(64, np.uint32), "in"), Buffer(np.zeros(64, np.uint32))]
        if two_units:
            with pytest.raises(Trap, match="race"):
                launch(kernel, (1,), buffers, threads=64)
        else:
            launch(kernel, (1,), buffers, threads=64)


#: Each workgroup stores a value, reads it back, and stores it in a place of its own.
READ_BACK = """
global_store_b32 v1, v2, s[6:7]
s_waitcnt_vscnt null, 0x0
global_load_b32 v3, v1, s[6:7]
s_waitcnt vmcnt(0)
s_lshl_b32 s9, s2, 7
v_add_nc_u32 v4, s9, v1
global_store_b32 v4, v3, s[6:7] offset:128
"""


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("native", [False, True])
def test_equal_values_from_workgroups_may_be_read_back(groups, batch, native):
    """The workgroups run together, or one after the other."""
    body = LOAD + "v_mov_b32 v2, 5\n" + READ_BACK + "s_endpgm\n"
    out = execute(body, threads=32, size=128, grid=(groups,), batch=batch, native=native)
    assert (out[: 32 + 32 * groups] == 5).all()


@pytest.mark.parametrize("value", ["v_mov_b32 v2, s8", "v_add_nc_u32 v2, s8, v0"])
def test_other_values_than_a_workgroup_read_back_are_a_race(value):
    body = LOAD + value + READ_BACK + "s_endpgm\n"
    body = body.replace("s_load_b128", "s_mov_b32 s8, s2\ns_load_b128")
    with pytest.raises(Trap, match="race"):
        execute(body, threads=32, size=128, grid=(2,), batch=1)


def test_a_value_that_another_workgroup_only_read_is_a_race():
    """The first workgroup reads a 0, and the second one stores a 0 in the same word."""
    body = (
        LOAD
        + """
    v_mov_b32 v2, 0
    s_cmp_eq_u32 s2, 0
    s_cbranch_scc1 reads
    global_store_b32 v1, v2, s[6:7]
    s_endpgm
    reads: global_load_b32 v3, v1, s[6:7]
    s_waitcnt vmcnt(0)
    v_add_nc_u32 v1, 0x80, v1
    global_store_b32 v1, v3, s[6:7]
    s_endpgm
    """
    )
    with pytest.raises(Trap, match="race"):
        execute(body, threads=32, grid=(2,), batch=1, second="inout")

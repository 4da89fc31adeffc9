# SPDX-License-Identifier: BSD-3-Clause
"""Workgroups on two cores give the results of one core. Some launches stay on one core."""

import os

import fixtures
import numpy as np
import pytest
import selftest
from strix_emulate import Buffer, Options, launch, statistics
from strix_emulate.errors import Trap
from strix_emulate.run import parallel

#: s[4:5] is the array. v1 is 4 times the workgroup's number, and v2 is 4 times the number of its
#: pair. Workgroup 0 is alone in pair 0. Workgroups 1 and 2 are pair 1, and so on.
START = """
s_load_b64 s[4:5], s[0:1], 0x0
s_lshl_b32 s6, s2, 2
v_mov_b32 v1, s6
s_add_i32 s7, s2, 1
s_lshr_b32 s7, s7, 1
s_lshl_b32 s7, s7, 2
v_mov_b32 v2, s7
v_mov_b32 v3, 7
v_mov_b32 v4, s2
s_mov_b32 exec_lo, 1
s_waitcnt lgkmcnt(0)
"""
COUNT = """
global_load_b32 v5, v1, s[4:5] offset:64
s_waitcnt vmcnt(0)
v_add_nc_u32 v5, 1, v5
global_store_b32 v1, v5, s[4:5] offset:64
"""
END = "s_endpgm\n"


@pytest.fixture(autouse=True)
def small_kernels_are_worth_it(monkeypatch):
    monkeypatch.setattr(parallel, "WORTH", 1)


def execute(body: str, cores: int, words: int = 32, checks: bool = True, budget: int = 10_000):
    """Run nine workgroups of one wave, one at a time; return the array and the launch."""
    kernel = selftest.kernel(START + body + END, pointers=1)
    data = np.zeros(words, np.uint32)
    options = Options(budget=budget, batch=1, cores=cores, checks=checks)
    return data, launch(kernel, (9,), [Buffer(data)], threads=32, options=options)


def trap(body: str, cores: int, **more) -> str:
    with pytest.raises(Trap) as raised:
        execute(body, cores, **more)
    return str(raised.value)


@pytest.mark.parametrize("checks", [False, True])
def test_results_and_counts_are_those_of_one_core(checks):
    case = fixtures.attention_case(True, 127)
    results = []
    for cores in (1, 2):
        options = Options(checks=checks, cores=cores, batch=1)
        outs, done = fixtures.run_attention(True, case, options=options)
        entered = {
            address: block.entered for address, block in done.blocks.items() if block.entered
        }
        results.append(([x.tobytes() for x in outs], done.executed, entered))
        assert done.cores == cores
        assert not done.one_core_reason
        assert statistics.describe_launch(done)["cores"] == cores
    assert results[0] == results[1]


def test_stores_next_to_each_other_are_no_race():
    for checks in (False, True):
        data, done = execute(COUNT, 2, checks=checks)
        assert done.cores == 2
        assert (data[16:25] == 1).all()
        assert data.sum() == 9
        # If all workgroups load the same word, that is no race.
        both = "v_mov_b32 v2, 0\nglobal_load_b32 v5, v2, s[4:5]\n"
        assert execute(both, 2, checks=checks)[1].cores == 2


def test_a_race_between_processes_is_the_trap_of_one_core(monkeypatch):
    # Workgroups 1 and 2 write the same word. Workgroup 0, which runs before the processes start,
    # writes another one.
    body = "global_store_b32 v2, v4, s[4:5]\n"
    text = trap(body, 1)
    assert "race" in text
    assert "workgroup 1" in text
    assert trap(body, 2) == text
    # This is the control: without the comparison, no race is found.
    monkeypatch.setattr(parallel, "_has_conflict", lambda _rows: False)
    assert execute(body, 2)[1].cores == 2


def test_reads_of_what_another_process_writes_are_a_race():
    # Workgroup 2 reads a word that workgroup 1 writes.
    body = "global_load_b32 v5, v2, s[4:5]\ns_waitcnt vmcnt(0)\ns_cmp_eq_u32 s2, 1\n"
    body += "s_cbranch_scc0 1f\nglobal_store_b32 v1, v4, s[4:5]\n1:\n"
    used = body + "global_store_b32 v1, v5, s[4:5] offset:64\n"
    assert "race" in trap(used, 1)
    assert trap(used, 2) == trap(used, 1)
    # Here the loaded value reaches no store, so that the race is only noted.
    for cores in (1, 2):
        _, done = execute(body, cores)
        assert done.cores == 1
        assert [note.check for note in done.notes] == ["race"]


def test_what_processes_did_is_undone_before_one_core_does_it():
    # Two stores of the same value are no race, but only a launch on one core can decide that.
    body = COUNT + "global_store_b32 v2, v3, s[4:5]\n"
    on_one_core, _ = execute(body, 1)
    data, done = execute(body, 2)
    assert done.cores == 1
    assert not done.one_core_reason
    assert (data == on_one_core).all()
    assert (data[16:25] == 1).all()
    assert (data[:5] == 7).all()


@pytest.mark.parametrize("checks", [False, True])
def test_other_traps_are_those_of_one_core(checks):
    # The last two workgroups access words beyond the end of the array.
    text = trap(COUNT, 1, words=23, checks=checks)
    assert "bounds" in text
    assert "workgroup 7" in text
    assert trap(COUNT, 2, words=23, checks=checks) == text
    # In the first launch, one workgroup never ends. In the last one, only all workgroups together
    # exceed the budget.
    loop = "1:\ns_cmp_eq_u32 s2, 6\ns_cbranch_scc1 1b\n"
    assert "budget" in trap(loop, 2, checks=checks)
    count = execute(COUNT, 1)[1].executed
    assert execute(COUNT, 2, budget=count)[1].cores == 2
    assert "budget" in trap(COUNT, 2, budget=count - 1)


def test_a_block_that_one_process_finds_is_counted():
    """The last five workgroups jump over the first instruction of a block."""
    jump = "s_getpc_b64 s[8:9]\ns_add_u32 s8, s8, 20\ns_cmp_lt_u32 s2, 4\ns_cbranch_scc1 1f\n"
    body = f"{jump}s_setpc_b64 s[8:9]\n1:\nv_mov_b32 v3, 9\n{COUNT}"
    counts = []
    for cores in (2, 1):  # The second launch reuses the blocks that the first one found.
        _, done = execute(body, cores)
        counts.append({address: block.entered for address, block in done.blocks.items()})
        assert done.cores == cores
    assert counts[0] == counts[1]
    assert 5 in counts[0].values()


def test_a_process_that_ends_early_is_made_up_for(monkeypatch):
    monkeypatch.setattr(parallel, "_record_touches", lambda *_: os._exit(0))
    data, done = execute(COUNT, 2)
    assert done.cores == 1
    assert (data[16:25] == 1).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "global_atomic_add_u32 v1, v3, s[4:5]",
        "global_load_b32 v5, v1, s[4:5] glc",
        "buffer_gl1_inv",
    ],
)
def test_workgroups_that_may_wait_for_others_stay_on_one_core(instruction):
    done = execute(instruction + "\n", 2)[1]
    assert done.cores == 1
    assert instruction.split()[0] in statistics.describe_launch(done)["one_core"]


def test_little_work_stays_on_one_core(monkeypatch):
    monkeypatch.setattr(parallel, "WORTH", 10_000)
    done = execute(COUNT, 2)[1]
    assert done.cores == 1
    assert not done.one_core_reason

# SPDX-License-Identifier: BSD-3-Clause
"""Waves that wait for other waves: how many instructions they execute, and waits that never end."""

import numpy as np
import pytest
import zoo
from device_support import HIP_PROGRAMS, compile_device_code, load_builder
from strix_emulate import Buffer, Kernel, Options, Trap, launch
from strix_emulate.code import loader
from strix_emulate.memory import happens_before, waits
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.shadow import Memory
from test_checks import LOAD, execute


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, Kernel]:
    load_builder()  # the programs include declarations of the runtime's sources
    path = tmp_path_factory.mktemp("waits") / "waits.hsaco"
    compile_device_code(HIP_PROGRAMS / "waits.hip", path)
    return loader.parse_module(path.read_bytes(), "waits").kernels


def run(kernel: Kernel, groups: int, threads: int = 32, **options) -> tuple[int, int]:
    """Launch a kernel; return word 32 of its array, and the number of wave-instructions."""
    data = np.zeros(64 + 2 * max(64, groups), np.int32)
    data[1] = groups
    options = {"budget": 10_000_000} | options
    done = launch(kernel, (groups,), [Buffer(data)], threads=threads, options=Options(**options))
    assert done.notes == []
    return int(data[32]), done.executed


#: Kernels of waits.hip: threads, and the maximum wave-instructions for each workgroup.
WAITS = {
    "compared_lock": (32, 100),
    "swapped_lock": (32, 100),
    "polite_lock": (32, 100),
    "ticket_lock": (32, 120),
    "reader_lock": (32, 150),
    "grid_barrier": (32, 320),
    "in_turn": (32, 80),
    "by_volatile": (32, 100),
    "with_barriers": (128, 360),
    "lock_of_lds": (128, 390),
}


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_waiting_costs_each_workgroup_the_same(kernels, name, native, checks) -> None:
    threads, max_instructions = WAITS[name]
    for groups in (2, 16, 60):
        kind = {"native": native, "checks": checks, "batch": groups * threads // 32}
        count, executed = run(kernels[name], groups, threads, **kind)
        assert count == groups * (threads // 32 if name == "lock_of_lds" else 1)
        assert executed <= max_instructions * groups, (groups, executed / groups)


@pytest.mark.parametrize("name", WAITS)
def test_waves_that_run_one_by_one_wait_as_well(kernels, name) -> None:
    threads, max_instructions = WAITS[name]
    count, executed = run(kernels[name], 16, threads, lockstep=False, batch=16 * threads // 32)
    assert count == 16 * (threads // 32 if name == "lock_of_lds" else 1)
    assert executed <= 2 * max_instructions * 16


@pytest.mark.parametrize("name", ["gives_up", "gives_up_by_memory", "gives_up_by_lds"])
def test_waves_that_count_their_turns_give_up(kernels, name) -> None:
    assert run(kernels[name], 3)[0] == 3


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("name", "waves"),
    [("no_one_writes", 4), ("not_given_back", 3), ("two_locks", 4), ("waits_at_a_barrier", 4)],
)
def test_waves_that_wait_for_ever_are_a_trap(kernels, name, waves, native) -> None:
    threads = 64 if name == "waits_at_a_barrier" else 32
    text = rf"budget: {waves} waves wait for memory that no wave changes any more; wave 0 of"
    with pytest.raises(Trap, match=text):
        run(kernels[name], 4, threads, native=native, budget=1_000_000)


def test_waves_that_wait_for_later_workgroups_are_told_so(kernels) -> None:
    with pytest.raises(Trap, match=r"2 of 8 workgroups run at a time: a workgroup that waits"):
        run(kernels["for_a_later_one"], 8, batch=2, budget=1_000_000)


def test_what_others_may_write_is_waited_for(kernels, monkeypatch) -> None:
    """If not only the kernel's waves can change memory, waves wait until the budget is spent."""
    monkeypatch.setattr(
        Arena, "peers", property(lambda _: True, lambda _a, _b: None), raising=False
    )
    text = "budget: more than 100000 wave-instructions, and all waves wait for memory that none of"
    with pytest.raises(Trap, match=text):
        run(kernels["no_one_writes"], 4, budget=100_000)


def test_a_lock_of_many_workgroups_costs_each_the_same(monkeypatch) -> None:
    """More workgroups do not cost each of them more instructions or vector-clock comparisons."""
    steps = []
    later = happens_before._later

    def count_and_compare(a, b):
        steps.append(len(b))
        return later(a, b)

    monkeypatch.setattr(happens_before, "_later", count_and_compare)
    costs = []
    for parts in (64, 256):
        steps.clear()
        x = np.ones(32 * parts, np.float32)
        lock = np.zeros(1, np.int32)
        count = np.zeros(1, np.int32)
        total = np.zeros(1, np.float32)
        done = zoo.run(
            zoo.locked,
            (parts,),
            {"BLOCK": 32},
            Buffer(lock),
            Buffer(total),
            Buffer(count),
            Buffer(x, "in"),
        )
        assert count == parts
        assert total == x.sum()
        assert done.executed < 360 * parts
        costs.append(sum(steps) / parts)
    assert costs[1] < 1.5 * costs[0]


def test_stores_that_are_not_awaited_cost_each_barrier_the_same(monkeypatch) -> None:
    """A wave has at most 63 outstanding stores, because its counter counts no further."""
    calls = []
    postpone = Memory.postpone

    def count_and_postpone(*arguments):
        calls.append(1)
        return postpone(*arguments)

    monkeypatch.setattr(Memory, "postpone", count_and_postpone)
    body = (
        LOAD
        + """s_mov_b32 s8, {turns}
    again: global_store_b32 v1, v0, s[6:7]
    ds_store_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    s_sub_u32 s8, s8, 1
    s_cmp_lg_u32 s8, 0
    s_cbranch_scc1 again
    s_endpgm
    """
    )
    counts = []
    for turns in (200, 400):
        calls.clear()
        execute(body.format(turns=turns), budget=100_000)
        counts.append(len(calls))
    assert counts[1] - counts[0] <= 200 * 63


@pytest.mark.parametrize("native", [False, True])
def test_outstanding_atomics_cost_later_atomics_nothing(monkeypatch, native) -> None:
    """A release does not postpone atomics, so it need not look at up to 63 of them."""
    calls = []
    postpone = waits._postpone

    def count(*arguments, **keywords):
        calls.append(arguments)
        postpone(*arguments, **keywords)

    monkeypatch.setattr(waits, "_postpone", count)
    atomics = 70 * "global_atomic_add_u32 v1, v0, s[6:7]\n" + 70 * "ds_add_u32 v1, v0\n"
    head = LOAD + "ds_store_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n"
    execute(head + atomics + "s_endpgm\n", second="inout", native=native)
    assert calls == []

# SPDX-License-Identifier: BSD-3-Clause
"""Locks, and stores that a GPU's caches may hide. clang compiles the programs."""

import re

import numpy as np
import pytest
from device_support import HIP_PROGRAMS, compile_device_code, load_builder
from strix_emulate import Buffer, Kernel, Options, Trap, launch
from strix_emulate.code import loader
from strix_emulate.run.program import decode_kernel


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, Kernel]:
    load_builder()  # the programs include declarations of the runtime's sources
    code_object = tmp_path_factory.mktemp("model") / "model.hsaco"
    compile_device_code(HIP_PROGRAMS / "model.hip", code_object)
    return loader.parse_module(code_object.read_bytes(), "model").kernels


def run(kernel: Kernel, groups: int, threads: int, **options):
    """Launch a kernel on 256 zeroed words; return word 32 and the findings."""
    data = np.zeros(256, np.int32)
    done = launch(
        kernel,
        (groups,),
        [Buffer(data)],
        threads=threads,
        options=Options(budget=200_000, **options),
    )
    return data[32], done.notes


LOCKS = {
    "exchange_agent": (5, 64),
    "compare_agent": (5, 64),
    "exchange_workgroup": (1, 128),
    "compare_workgroup": (1, 128),
    "exchange_lds": (1, 128),
    "compare_lds": (1, 128),
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_a_store_gives_back_is_no_race(kernels, name) -> None:
    groups, threads = LOCKS[name]
    assert run(kernels[name], groups, threads) == (groups * threads // 32, [])


def test_without_the_lock_it_is_one(kernels) -> None:
    with pytest.raises(Trap, match="race"):
        run(kernels["no_lock"], 5, 64)


def test_a_message_that_is_acquired_is_right(kernels) -> None:
    assert run(kernels["right"], 2, 32) == (7, [])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["no_acquire", "small_scope", "old_line", "an_atomic"])
def test_what_a_cache_may_hide_is_found(kernels, name, native) -> None:
    """The trap names the load, and the last store to the same word."""
    store = "global_atomic_add_u32" if name == "an_atomic" else "global_store_b32"
    places = rf"global_load_b32 .*stale.* at 0x[\da-f]+ `{store} v.*without buffer_gl1_inv and "
    with pytest.raises(Trap, match=places) as trap:
        run(kernels[name], 2, 32, native=native)
    # The trap names the store of the data, and not the store of the flag.
    text = {ins.address: ins.text for ins in decode_kernel(kernels[name])}
    address, named = re.findall(r"at (0x[\da-f]+) `(.*?)`", str(trap.value))[-1]
    assert text[int(address, 16)] == named
    assert "offset:256" in named
    got, notes = run(kernels[name], 2, 32, lenient=True)
    assert got == 7
    assert [note.check for note in notes] == ["stale"]


@pytest.mark.parametrize("native", [False, True])
def test_a_relaxed_store_releases_nothing(kernels, native) -> None:
    """No wait separates the store of the data from the later store of the flag."""
    with pytest.raises(Trap, match=r"global_load_b32 .*race: global memory"):
        run(kernels["relaxed"], 2, 32, native=native)


def test_a_plain_load_of_lds_beside_atomics_is_a_race(kernels) -> None:
    with pytest.raises(Trap, match=r"ds_load_b32.*race: LDS"):
        run(kernels["lds_beside_atomics"], 1, 64)
    assert run(kernels["lds_beside_atomics"], 1, 32) == (0, [])


@pytest.mark.parametrize("native", [False, True])
def test_storage_of_two_reductions_needs_a_barrier_between(kernels, native) -> None:
    """HeCBench's radix top-k lacks a barrier. This is a race, and not a false alarm."""
    correct_kernel = kernels["storage_reused_behind_a_barrier"]
    assert run(correct_kernel, 1, 128, native=native) == (128 * 1000 + 256, [])
    with pytest.raises(Trap, match=r"ds_store_b32.*race: LDS cell .* after a read by"):
        run(kernels["storage_reused"], 1, 128, native=native)


@pytest.mark.parametrize("native", [False, True])
def test_a_search_without_a_bound_leaves_its_array(kernels, native) -> None:
    """HeCBench's merge has a search without a bound, which reads past the ends of short arrays."""
    data = np.zeros(256, np.int32)
    data[64:] = 1
    data[65:96] = 5
    options = Options(budget=200_000, native=native, warn_only=frozenset({"race"}))
    launch(kernels["search_bounded"], (1,), [Buffer(data)], threads=32, options=options)
    with pytest.raises(Trap, match=r"_load_b32.*bounds: 4 bytes at"):
        launch(kernels["search_unbounded"], (1,), [Buffer(data)], threads=32, options=options)


@pytest.fixture(scope="module")
def swaps(tmp_path_factory) -> dict[str, Kernel]:
    load_builder()
    path = tmp_path_factory.mktemp("swaps") / "swaps.hsaco"
    compile_device_code(HIP_PROGRAMS / "swaps.hip", path)
    return loader.parse_module(path.read_bytes(), "swaps").kernels


#: Kernels of swaps.hip whose swaps compare the result of a plain load.
SWAPS = [
    "uniform_word",
    "uniform_pair",
    "uniform_float",
    "builtin_double",
    "two_cells",
    "beside_constant",
    "folded_offsets",
    "chosen_cell",
    "each_lane",
    "each_lane_wide",
    "half_of_a_word",
    "in_lds",
]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", SWAPS)
def test_the_first_load_of_a_swap_loop_is_no_race(swaps, name, native) -> None:
    """The load may be a scalar load, and may load more words than the swap compares."""
    kind = {"native": native, "batch": 8}
    assert run(swaps[name], 12, 64, **kind) == (24, [])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["not_compared", "other_store", "other_word_stored"])
def test_a_load_that_no_swap_compares_is_a_race(swaps, name, native) -> None:
    with pytest.raises(Trap, match="race: global memory"):
        run(swaps[name], 12, 64, native=native, batch=8)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory) -> dict[str, Kernel]:
    load_builder()
    path = tmp_path_factory.mktemp("stack") / "stack.hsaco"
    compile_device_code(HIP_PROGRAMS / "stack.hip", path)
    return loader.parse_module(path.read_bytes(), "stack").kernels


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(
    "name", ["by_index", "by_negative_index", "by_recursion", "by_pointer", "by_length"]
)
def test_a_lane_that_leaves_its_stack_traps(stacks, name, checks, native) -> None:
    """The kernels are optimised. Their stacks have the size that the kernel or HIP requests."""

    def reach(distance: int) -> int:
        data = np.zeros(64, np.int32)
        data[1] = distance
        launch(
            stacks[name],
            (1,),
            [Buffer(data)],
            threads=32,
            options=Options(native=native, checks=checks),
        )
        return int(data[32])

    assert reach(3) == {"by_index": 7, "by_negative_index": 12, "by_pointer": 9}.get(name, 3)
    with pytest.raises(Trap, match=r"bounds: scratch offset \d+ of (80|1024) bytes"):
        reach(300)

# SPDX-License-Identifier: BSD-3-Clause
"""Compare C with numpy, on every operation and on whole kernels. Also test without C."""

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import replace

import fixtures
import native_check
import numpy as np
import pytest
import selftest_memory
import zoo
from strix_emulate import Buffer, Options
from strix_emulate.arithmetic import operations, translate
from strix_emulate.errors import Trap
from strix_emulate.native import generate, traces
from strix_emulate.native import library as native
from strix_emulate.run import program
from test_checks import LOAD, STORE, execute


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Use the installed libstrix-emulate, or compile one."""
    if native.load_library() is not None:
        yield
        return
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler.split()[0]) or native.processor_level() < 2:
        pytest.skip("no libstrix-emulate is installed, and none can be built")
    folder = tmp_path_factory.mktemp("native")
    generate.build(folder, compiler, (native.processor_level(),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRIX_EMULATE_NATIVE", str(folder))
        native.reload()
        yield
    native.reload()


@pytest.fixture
def library():
    """The library in use. An earlier test may have reloaded it."""
    return native.load_library()


def test_a_compiler_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "source", lambda: "")
    with pytest.raises(subprocess.CalledProcessError):
        generate.build(tmp_path, "false", (2,))


@pytest.mark.parametrize("width", [32, 64])
def test_every_operation_gives_what_numpy_gives(width):
    report = native_check.run(2400, width=width)
    assert report.differences == []
    assert len(report.compared) >= 400
    # numpy executes the following with at least some operands: comparisons with a constant result,
    # a few scalar operations, float16, float64 and dot products.
    comparisons = itertools.product(("v_cmp", "v_cmpx"), "ft", "fiu", (16, 32, 64))
    # In some modes, the results of these three depend on more than the flushing of denormals.
    by_mode = {"s_min_f32", "s_max_f32", "s_cvt_f16_f32"}
    scalar_names = ("cmov", "bitset0", "bitset1", "and_not0_wrexec", "and_not1_wrexec")
    allowed = {f"{compare}_{test}_{kind}{bits}" for compare, test, kind, bits in comparisons}
    allowed |= by_mode | {f"s_{name}_b32" for name in scalar_names}
    allowed |= {f"s_{name}_b64" for name in scalar_names}
    for name in report.numpy_only - allowed:
        assert name.endswith(("f16", "f64")) or name.startswith(("v_dot4", "v_dot8")), name


def test_a_wrong_operation_is_seen(library, monkeypatch):
    """As a control, one handler in C is replaced by that of another operation."""
    monkeypatch.setattr(program, "_TRAITS", {})
    monkeypatch.setitem(library.functions, "v_add_f32", library.functions["v_sub_f32"])
    assert any("v_add_f32" in text for text in native_check.run(2400, seed=2).differences)


#: Four lanes share each cell, and some are not active. Each lane stores its result separately.
_SHARED = """
v_and_b32 v1, 0x70, v1
v_add_co_u32 v2, vcc_lo, s6, v1
v_add_co_ci_u32 v3, vcc_lo, s7, 0, vcc_lo
s_mov_b32 exec_lo, 0xf3ff0f5a
"""
_APART = "s_mov_b32 exec_lo, -1\nv_lshlrev_b32 v1, 4, v0\n"


def test_a_zero_of_the_wrong_sign_is_seen(library, monkeypatch):
    """As a control, numpy returns +0 where C returns -0."""
    kind, kinds, add = operations.TABLE["v_add_f32"]
    monkeypatch.setattr(program, "_TRAITS", {})
    monkeypatch.setitem(
        operations.TABLE, "v_add_f32", (kind, kinds, lambda a, b: add(a, b) + np.float32(0))
    )
    assert any("v_add_f32" in text for text in native_check.run(2400, seed=2).differences)


def record_numpy_steps(patch, record):
    """Call record(mnemonic, waves) for each instruction that numpy executes."""
    execute_step = native_check.Step.execute

    def record_and_execute(self, group, checks):
        record(self.instruction.name, group)
        return execute_step(self, group, checks)

    patch.setattr(native_check.Step, "execute", record_and_execute)


def compare_accesses(checks: bool, names: str = "") -> tuple[list[str], set[str]]:
    """Compare loads, stores and atomics in C and numpy.

    Args:
        checks: Whether checks are on.
        names: A pattern of mnemonics.

    Returns:
        The mnemonics whose results differ, and those that numpy executed in C's place; "of LDS" is
        appended to flat accesses of LDS.
    """
    names_in_numpy = []
    by_numpy = set()
    differences = []
    cases = [case for case in selftest_memory.cases() if re.match(names, case.mnemonic)]
    # A load needs GLC to read words that other waves change.
    pattern = r"((global|buffer|flat)_load.*)"
    loads = [
        replace(case, body=re.sub(pattern, r"\1 glc", case.body))
        for case in cases
        if re.match(pattern, case.mnemonic)
    ]
    for case in (*cases, *loads):
        body = _SHARED + case.body + _APART
        suffix = " of LDS" * (selftest_memory.IN_LDS in body)
        names_in_numpy.clear()
        with pytest.MonkeyPatch.context() as patch:
            record_numpy_steps(patch, lambda name, group: names_in_numpy.append(name))
            in_c = selftest_memory.execute(body, case.data, case.cells + bytes(512), True, checks)
        by_numpy.update(name + suffix for name in names_in_numpy)
        if in_c != selftest_memory.execute(body, case.data, case.cells + bytes(512), False, checks):
            differences.append(case.mnemonic)
    return differences, by_numpy


@pytest.mark.parametrize("checks", [False, True])
def test_every_access_gives_what_numpy_gives(checks):
    differences, by_numpy = compare_accesses(checks)
    assert differences == []
    numpys = r"flat_atomic|flat_.* of LDS|s_buffer_|s_wait|ds_append|ds_consume"
    assert {name for name in by_numpy if not re.match(numpys, name)} == set()


def test_a_wrong_atomic_is_seen(library, monkeypatch):
    """As a control, one atomic in C is replaced by another atomic."""
    monkeypatch.setattr(program, "_TRAITS", {})
    monkeypatch.setitem(library.functions, "atomic_add_u32", library.functions["atomic_sub_u32"])
    assert compare_accesses(False, "(ds|global_atomic)_add_u32")[0] == ["ds_add_u32"] + 2 * [
        "global_atomic_add_u32"
    ]


@pytest.mark.parametrize("checks", [False, True])
def test_locks_and_counters_give_the_same_bits(checks):
    """Waves of several workgroups wait for each other, and the last one computes a sum."""
    results = []
    x = np.arange(8 * 128, dtype=np.int32)
    for in_c in (True, False):
        options = Options(checks=checks, native=in_c, budget=1_000_000)
        lock, total, count, out = (np.zeros(1, np.int32) for _ in range(4))
        done = [
            zoo.run(
                zoo.locked,
                (8,),
                {"BLOCK": 128},
                *map(Buffer, (lock, total, count, x)),
                options=options,
            ),
            zoo.run(
                zoo.last_block,
                (8,),
                {"BLOCK": 128, "PARTS": 8},
                *map(Buffer, (x, np.zeros(8, np.int32), np.zeros(1, np.int32), out)),
                options=options,
            ),
        ]
        assert total == out == x.sum()
        assert count == 8
        results.append([launch.executed for launch in done])
    assert results[0] == results[1]


@pytest.mark.parametrize("mirror", [False, True])
def test_what_several_waves_do_under_a_lock_is_checked_by_c(mirror, monkeypatch):
    """C checks accesses under a lock if the cells' addresses rise from each wave to the next.

    If numpy checked these accesses, this would take most of the time. Without the lock, both C and
    numpy find a race.
    """
    by_numpy = []
    record_numpy_steps(monkeypatch, lambda name, group: by_numpy.append(name))
    constants = {"LOCK": True, "MIRROR": mirror, "BLOCK": 128}
    for in_c in (True, False):
        by_numpy.clear()
        lock = np.zeros(1, np.int32)
        out = np.zeros(128, np.int32)
        arguments = Buffer(lock), Buffer(out)
        done = zoo.run(
            zoo.locked_tensor,
            (8,),
            constants,
            *arguments,
            options=Options(native=in_c, budget=1_000_000),
        )
        assert (out == 8).all()
        assert done.notes == []
        accesses = {name for name in by_numpy if name.startswith(("global_", "buffer_", "ds_"))}
        # If C runs without MIRROR, numpy executes none of these instructions, except cache
        # invalidations.
        assert (in_c and not mirror) == (accesses <= {"buffer_gl0_inv", "buffer_gl1_inv"})
        with pytest.raises(Trap, match="race"):
            zoo.run(
                zoo.locked_tensor,
                (8,),
                constants | {"LOCK": False},
                *arguments,
                options=Options(native=in_c),
            )


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_give_the_same_bits(causal, checks):
    case = fixtures.attention_case(causal, 100, heads=2)
    results = []
    for in_c in (True, False):
        outs, done = fixtures.run_attention(
            causal, case, options=Options(checks=checks, native=in_c)
        )
        results.append([*(x.tobytes() for x in outs), done.executed])
    assert results[0] == results[1]


def test_most_of_a_kernel_is_executed_by_c():
    """At most one in ten wave-instructions falls back to numpy."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        record_numpy_steps(patch, lambda name, group: calls.append(group.n))
        _, done = fixtures.run_attention(True, fixtures.attention_case(True, 100))
    assert sum(calls) < done.executed / 10


#: s8 counts the turns of the loop. The 15th turn branches to `late`.
_TURNS = (
    LOAD
    + """
v_xor_b32 v3, 0x80, v1
s_mov_b32 s8, 0
again:
s_add_u32 s8, s8, 1
s_cmp_eq_u32 s8, 15
s_cbranch_scc1 late
{}
join:
s_cmp_lt_u32 s8, 20
s_cbranch_scc1 again
{}
"""
    + STORE
)


@pytest.fixture
def traced(monkeypatch):
    """A list with the number of blocks that each execution of a trace went through."""
    entered = []
    execute_trace = traces.Trace.execute

    def execute_and_count(self, group, checks):
        entered.append(execute_trace(self, group, checks))
        return entered[-1]

    monkeypatch.setattr(traces.Trace, "execute", execute_and_count)
    return entered


def test_kernels_in_traces_give_the_same_bits(traced, monkeypatch):
    case = fixtures.attention_case(True, 400, heads=2)
    results = []
    monkeypatch.setattr(traces, "_ENTRIES_BEFORE_TRACE", 3)
    for _ in range(2):
        for checks in (True, False):
            outs, done = fixtures.run_attention(True, case, options=Options(checks=checks))
            results.append(
                (
                    *(x.tobytes() for x in outs),
                    done.executed,
                    {address: block.entered for address, block in done.blocks.items()},
                )
            )
        monkeypatch.setattr(traces, "find", lambda *_: None)
    assert results[:-1] == results[1:]
    assert len(traced) > 20
    assert max(traced) > 1


def test_what_a_trace_leaves_outstanding_is_a_race_behind_a_barrier(traced):
    """The store is in the last iteration of the loop, or in one that leaves the trace early."""
    store = """s_waitcnt lgkmcnt(0)
    s_lshl_b32 s9, s8, 8
    v_add_nc_u32 v6, s9, v1
    ds_store_b32 v6, v0"""
    exchange = """{}
    v_add_nc_u32 v7, s9, v3
    s_barrier
    ds_load_b32 v2, v7
    s_waitcnt lgkmcnt(0)"""
    last = f"s_branch over\nlate:\ns_branch join\nover:\n{exchange}"
    early = f"s_branch over\nlate:\n{store}\n{exchange}\ns_branch join\nover:"
    for end in (last, early):
        traced.clear()
        body = _TURNS.format(store, end.format("s_waitcnt lgkmcnt(0)"))
        assert (execute(body, lds=8192) == np.arange(64) ^ 32).all()
        assert max(traced) > 0
        with pytest.raises(Trap, match=r"race.*a write"):
            execute(_TURNS.format(store, end.format("")), lds=8192)
    # The 15th turn has no store, so that the stores are those of the previous turn.
    before = f"s_branch over\nlate:\n{exchange.format('')}\ns_branch join\nover:"
    with pytest.raises(Trap, match=r"race.*a write"):
        execute(_TURNS.format(store, before), lds=8192)


def test_what_waves_lack_in_one_turn_is_found_in_a_trace(traced):
    """Checks find a missing wait or an access out of bounds in one iteration of a traced loop.

    A traced loop also gives correct results if numpy executes a part of each iteration.
    """
    load = "global_load_b32 v2, v1, s[4:5]\ns_nop 0\ns_branch wait\nwait:\ns_waitcnt vmcnt(0)"
    late = "s_branch over\nlate:\n{}\nover:"
    for place, word in (
        ("global_load_b32 v2, v1, s[4:5]\nv_mov_b32 v4, v2\ns_branch join", "pending"),
        ("v_add_nc_u32 v1, 4, v1\ns_branch join", "bounds"),
    ):
        traced.clear()
        with pytest.raises(Trap, match=word):
            execute(_TURNS.format(load, late.format(place)))
        assert traced
    # Waves of several workgroups store the same values. numpy executes each of these stores.
    # In each iteration, the instruction after the store makes v5 equal to s8.
    store = load + "\nglobal_store_b32 v1, v2, s[6:7]\nv_mov_b32 v5, s8\ns_branch more\nmore:"
    store += "\nv_sub_nc_u32 v5, s8, v5\nv_add_nc_u32 v2, v2, v5"
    traced.clear()
    body = _TURNS.format(store, late.format("s_branch join"))
    assert (execute(body, grid=(3,), size=64) == np.arange(64)).all()
    assert traced


def test_a_load_that_a_branch_in_a_trace_does_not_await(traced, monkeypatch):
    """The load is in one iteration. The trace begins behind it and ends before its next use."""
    monkeypatch.setattr(traces, "_MAX_BLOCKS", 2)
    loop = """s_mov_b32 vcc_lo, 0
    s_mov_b32 s8, 0
    again: s_add_u32 s8, s8, 1
    s_cmp_lg_u32 s8, 20
    s_cbranch_scc1 skip
    s_load_b32 vcc_lo, s[4:5], 0x0
    {}
    skip: s_cbranch_vccnz end
    s_cmp_lt_u32 s8, 30
    s_cbranch_scc1 again
    end: s_endpgm
    """
    execute(LOAD + loop.format("s_waitcnt lgkmcnt(0)"))
    traced.clear()
    with pytest.raises(Trap, match=r"`s_cbranch_vccnz .*pending: uses a register"):
        execute(LOAD + loop.format(""))
    assert traced[-1] == -1


def test_a_library_of_another_version_is_refused(library, monkeypatch):
    monkeypatch.setattr(native, "digest", lambda: "another")
    with pytest.raises(OSError, match="another version"):
        native.Library(library.path)


def test_where_there_is_none_numpy_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "processor_level", lambda: 4)
    for folder, level in (("bad", 2), ("worse", 2), ("worse", 3)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"libstrix-emulate-v{level}.so").write_text("no library")
    for value, words in (
        ("off", "is off"),
        (str(tmp_path), "no libstrix-emulate is installed"),
        (str(tmp_path / "bad"), "bad/libstrix-emulate-v2"),
        (str(tmp_path / "worse"), "worse/libstrix-emulate-v3"),
    ):
        monkeypatch.setenv("STRIX_EMULATE_NATIVE", value)
        native.reload()
        assert native.describe().startswith("numpy alone: ")
        assert words in native.describe()
    fixtures.run_attention(False, fixtures.attention_case(False, 3))
    monkeypatch.undo()
    native.reload()


def test_translation():
    """A function is either translated to C that gives numpy's results, or refused."""
    text = translate.loop("f", lambda a, b: np.where(a > b, a, b + 1), ["u4"], ["u4", "u4"])
    assert "s0[l]" in text
    assert ">" in text
    assert "?" in text
    for function in (
        lambda a, b: np.asarray(a) + b,
        lambda a, b: a if (a > b) else b,
        lambda a, _b: a,
        lambda a, b: np.convolve(a, b),
    ):
        with pytest.raises(translate.Untranslatable):
            translate.loop("f", function, ["u4"], ["u4", "u4"])

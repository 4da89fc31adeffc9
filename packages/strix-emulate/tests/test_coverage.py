# SPDX-License-Identifier: BSD-3-Clause
"""Compare every mnemonic that the emulator executes with an oracle.

The oracles share no code with the emulator. They are the modules `oracle`, `oracle_floats` and
`oracle_parts` for one lane, `oracle_waves` for whole waves, `selftest_memory` for memory, and
`selftest_control` for control flow.
"""

import oracle
import oracle_waves
import pytest
import selftest
import selftest_control
import selftest_memory
import selftest_waves
from strix_emulate.instructions import atomics, crosslane, mnemonics
from strix_emulate.native import library as native
from strix_emulate.run import program

#: Mnemonics whose results cannot be compared, by the reason.
NOT_COMPARED = {
    "hints, and instructions for hazards and timing: the emulator has neither": {
        "s_nop",
        "s_delay_alu",
        "s_clause",
        "s_sleep",
        "s_waitcnt_depctr",
        "s_code_end",
        "s_set_inst_prefetch_distance",
        "s_setprio",
        "s_wait_idle",
        "s_wakeup",
        "s_sethalt",
        "s_incperflevel",
        "s_decperflevel",
        "s_ttracedata",
        "s_ttracedata_imm",
        "s_version",
        "s_wait_event",
    },
    "instructions that control caches: the emulator has no caches": {
        "buffer_gl0_inv",
        "buffer_gl1_inv",
        "s_dcache_inv",
        "s_gl1_inv",
        "s_icache_inv",
    },
    "waits: test_checks.py and mutate.py show that a missing wait is found": {
        "s_waitcnt",
        "s_waitcnt_vscnt",
        "s_waitcnt_vmcnt",
        "s_waitcnt_lgkmcnt",
    },
    "the message that releases registers at the end; other messages are refused": {"s_sendmsg"},
    "clocks, aborts and the grid's barrier, which test_device_features.py tests": {
        "s_sendmsg_rtn_b64",
        "s_trap",
        "ds_gws_barrier",
    },
}


def report() -> selftest.Report:
    """Compare each mnemonic with its oracle, three times or in each form; return the report."""
    total = selftest.run(programs=-(-3 * len(selftest.entries()) // 40), seed=3)
    parts = [selftest_waves.run(), selftest_control.run(), selftest_memory.run(native=False)]
    if native.load_library() is not None:
        parts.append(selftest_memory.run(native=True))
    for part in parts:
        total.compared += part.compared
        total.covered |= part.covered
        total.disagreements += part.disagreements
    return total


def list_uncompared(covered: set[str]) -> set[str]:
    """Return the supported mnemonics that were not compared."""
    return selftest.real_mnemonics(program.supported_mnemonics()) - covered


def test_every_supported_mnemonic_agrees_with_an_oracle(monkeypatch):
    done = report()
    explained = set().union(*NOT_COMPARED.values())
    assert done.disagreements == []
    assert done.compared > 2500
    assert list_uncompared(done.covered) == explained
    # A new mnemonic without an oracle is reported.
    supported = program.supported_mnemonics()
    monkeypatch.setattr(program, "supported_mnemonics", lambda: supported | {"v_mullit_f32"})
    assert list_uncompared(done.covered) - explained == {"v_mullit_f32"}


def test_comparison_of_lanes_can_fail(monkeypatch):
    wrong_table = {"v_add3_u32": ("u32", ("u32",) * 3, lambda a, b, c: a + b + c + 1)}
    monkeypatch.setattr(oracle, "vector_table", lambda: wrong_table)
    monkeypatch.setattr(oracle, "scalar_table", dict)
    assert "v_add3_u32" in selftest.run(programs=1, length=1).disagreements[0]


def test_a_second_result_is_a_disagreement(monkeypatch):
    """The instruction seems to change the other half of its destination."""
    before = selftest.operation

    def misled(rng, name, file, entry):
        operation = before(rng, name, file, entry)
        operation.target.high = not operation.target.high
        return operation

    entry = {"v_not_b16": ("u16", ("u16",), lambda a: ~a)}
    monkeypatch.setattr(oracle, "vector_table", lambda: entry)
    monkeypatch.setattr(oracle, "scalar_table", dict)
    monkeypatch.setattr(selftest, "operation", misled)
    assert "changes v" in selftest.run(programs=1, length=1).disagreements[0]


def test_what_traps_is_a_disagreement(monkeypatch):
    """A mnemonic is a disagreement if it is listed as supported, but causes a trap."""
    entry = {"v_mullit_f32": ("f32", ("f32",) * 3, lambda a, _b, _c: a)}
    monkeypatch.setattr(oracle, "vector_table", lambda: entry)
    monkeypatch.setattr(oracle, "scalar_table", dict)
    report = selftest.run(programs=1, length=2)
    assert len(report.disagreements) == 2
    assert "v_mullit_f32" in report.disagreements[0]


def test_comparison_of_waves_can_fail(monkeypatch):
    def wrong_case(_rng):
        return "v_mov_b32 v1, v2", lambda V, _S: V[1].__setitem__(slice(None), V[3])

    monkeypatch.setattr(oracle_waves, "CASES", {"v_mov_b32": wrong_case})
    monkeypatch.setattr(oracle_waves, "MATRICES", {})
    assert any("v1 lane" in text for text in selftest_waves.run(1).disagreements)


@pytest.mark.parametrize(("change", "count"), [(lambda x: x + 2.0**-10, 2), (lambda x: -x, 6)])
def test_comparison_of_matrices_can_fail(monkeypatch, change, count):
    """Sums beyond the error of 17 roundings are disagreements, and so are wrong integers."""
    correct_product = crosslane._product
    monkeypatch.setattr(crosslane, "_product", lambda *x: change(correct_product(*x)))
    monkeypatch.setattr(oracle_waves, "CASES", {})
    assert len(selftest_waves.run(1).disagreements) >= count


def test_comparison_of_memory_can_fail(monkeypatch):
    names = ("ds_sub_u32", "global_load_i8")
    cases = [case for case in selftest_memory.cases() if case.mnemonic in names]
    monkeypatch.setattr(selftest_memory, "cases", lambda: cases)
    monkeypatch.setitem(atomics._OPERATIONS, "sub", atomics._OPERATIONS["rsub"])
    unsigned = mnemonics.MEMORY["global_load_u8"]
    monkeypatch.setitem(mnemonics.MEMORY, "global_load_i8", unsigned)
    monkeypatch.setattr(program, "_TRAITS", {})
    disagreements = selftest_memory.run(native=False).disagreements
    assert [text.split(":")[0] for text in disagreements] == [*names]

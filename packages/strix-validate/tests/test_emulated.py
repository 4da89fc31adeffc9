# SPDX-License-Identifier: BSD-3-Clause
"""The tier `emulated`, with mock answers of a child process, and once with a real process."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from calls import need_disassembler, skip_without
from strix_validate.attention import flash_cases
from strix_validate.checks import CannotRun, RunOptions, State
from strix_validate.runner import run
from strix_validate.triton import call as triton_call
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.cases import make
from strix_validate.triton.modes import CallAnswer, CallAnswers, ChildError, ExecutedKernel

NAMES = ("d64-float16", "varlen")
DONE = (
    ExecutedKernel("attn_fwd", "0123abcd", 1000, 0.5),
    ExecutedKernel("attn_bwd", "4567cdef", 2000, 0.5),
)


def correct_answer(name: str) -> CallAnswer:
    _, expected = make(name, flash_cases.EMULATED[name])
    return CallAnswer(expected(torch.float16), executed=DONE)


@pytest.fixture
def answered(monkeypatch):
    """A function that runs the tier with mock answers or a mock exception of the child process."""
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: True)

    def install(*answers, error=None):
        def mock(calls, mode):
            assert mode == "emulate"
            assert len(calls) == len(NAMES)
            if error:
                raise error
            return CallAnswers("flash-attn's kernels: built-in", list(answers))

        monkeypatch.setattr(triton_modes, "run", mock)
        checks = run(["emulated"], RunOptions(), [f"emulated/{name}" for name in NAMES]).checks
        return {check.id.removeprefix("emulated/"): check for check in checks}

    return install


def test_right(answered):
    checks = answered(*map(correct_answer, NAMES))
    assert [check.state for check in checks.values()] == [State.PASSED] * 2
    measured = checks["varlen"].measured
    assert measured["dq"]["error"] <= measured["dq"]["bound"]
    assert measured["kernels"]["1-attn_bwd"] == {"code": "4567cdef", "wave_instructions": 2000}
    assert checks["varlen"].reason == "flash-attn's kernels: built-in, emulate."


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (CallAnswer(error=("Trap", "race at 0x10"), executed=DONE), "Trap: race at 0x10"),
        (replace(correct_answer("varlen"), executed=()), "no kernel was executed"),
    ],
)
def test_wrong(answered, spoilt, reason):
    checks = answered(correct_answer("d64-float16"), spoilt)
    assert checks["varlen"].state is State.FAILED
    assert reason in checks["varlen"].reason
    assert checks["d64-float16"].state is State.PASSED


RACE = "k at 0x1b04 `ds_store_b128 v45, v[0:3]`: race: LDS cell is touched by wave 0"


@pytest.mark.parametrize("name", ["varlen-empty-gqa", "varlen"])
def test_a_wait_that_llvm_dropped(monkeypatch, name):
    """A check with a known lost wait is skipped if its numbers are right with the wait restored."""
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: True)
    answer = replace(correct_answer(name), executed=(replace(DONE[0], lost_wait=RACE),))

    def run_check(answer):
        monkeypatch.setattr(triton_modes, "run", lambda *args: CallAnswers("built-in", [answer]))
        (check,) = run(["emulated"], RunOptions(), [f"emulated/{name}"]).checks
        return check.state, check.reason

    is_known = name == "varlen-empty-gqa"
    check_state, reason = run_check(answer)
    assert check_state is (State.SKIPPED if is_known else State.FAILED)
    assert ("pull/220357" if is_known else RACE) in reason
    wrong_tensors = {key: value + 1 for key, value in answer.tensors.items()}
    assert run_check(replace(answer, tensors=wrong_tensors))[0] is State.FAILED
    assert run_check(CallAnswer(error=("Trap", RACE)))[0] is State.FAILED


def test_broken_child(answered):
    checks = answered(error=ChildError("exit status 1: gone"))
    assert {check.state for check in checks.values()} == {State.FAILED}
    assert "gone" in checks["varlen"].reason


def test_without_a_disassembler_it_is_skipped(answered):
    """A new process searches, because the test's process may already have found a disassembler."""
    search = "from strix_emulate import find_disassembler; find_disassembler()"
    environment = os.environ | {"STRIX_EMULATE_LIBLLVM": "/nowhere"}
    command = [sys.executable, "-c", search]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    checks = answered(error=CannotRun(process.stderr.splitlines()[-1]))
    assert {check.state for check in checks.values()} == {State.SKIPPED}
    unexpected = answered(error=CannotRun("no idea"))
    assert {check.state for check in unexpected.values()} == {State.FAILED}


@skip_without("flash_attn")
def test_code_objects_are_executed(monkeypatch):
    need_disassembler()
    (check,) = run(["emulated"], RunOptions(), ["emulated/ragged"]).checks
    assert check.state is State.PASSED and len(check.measured["kernels"]) >= 3, check
    monkeypatch.setenv("STRIX_EMULATE_LIBLLVM", "/nowhere/libLLVM.so")
    (check,) = run(["emulated"], RunOptions(), ["emulated/ragged"]).checks
    assert check.state is State.SKIPPED, check

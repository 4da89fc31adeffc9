# SPDX-License-Identifier: BSD-3-Clause
"""The tier `emulated`, with mocks of what the child process answers, and once for real."""

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


def right(name: str) -> CallAnswer:
    _, expected = make(name, flash_cases.EMULATED[name])
    return CallAnswer(expected(torch.float16), executed=DONE)


@pytest.fixture
def answered(monkeypatch):
    """Runs the tier with these answers, or this exception, from the child process."""
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: True)

    def install(*answers, error=None):
        def mock(calls, mode):
            assert mode == "emulate" and len(calls) == len(NAMES)
            if error:
                raise error
            return CallAnswers("flash-attn's kernels: built-in", list(answers))

        monkeypatch.setattr(triton_modes, "run", mock)
        found = run(["emulated"], RunOptions(), [f"emulated/{name}" for name in NAMES]).checks
        return {check.id.removeprefix("emulated/"): check for check in found}

    return install


def test_right(answered):
    found = answered(*map(right, NAMES))
    assert [check.state for check in found.values()] == [State.PASSED] * 2
    measured = found["varlen"].measured
    assert measured["dq"]["error"] <= measured["dq"]["bound"]
    assert measured["kernels"]["1-attn_bwd"] == {"code": "4567cdef", "wave_instructions": 2000}
    assert found["varlen"].reason == "flash-attn's kernels: built-in, emulate."


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (CallAnswer(error=("Trap", "race at 0x10"), executed=DONE), "Trap: race at 0x10"),
        (replace(right("varlen"), executed=()), "no kernel was executed"),
    ],
)
def test_wrong(answered, spoilt, reason):
    found = answered(right("d64-float16"), spoilt)
    assert found["varlen"].state is State.FAILED and reason in found["varlen"].reason
    assert found["d64-float16"].state is State.PASSED


RACE = "k at 0x1b04 `ds_store_b128 v45, v[0:3]`: race: LDS cell is touched by wave 0"


@pytest.mark.parametrize("name", ["varlen-empty-gqa", "varlen"])
def test_a_wait_that_llvm_dropped(monkeypatch, name):
    """It is skipped where it is known, if the numbers are correct with it put back."""
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: True)
    answer = replace(right(name), executed=(replace(DONE[0], lost_wait=RACE),))

    def state(answer):
        monkeypatch.setattr(triton_modes, "run", lambda *asked: CallAnswers("built-in", [answer]))
        (check,) = run(["emulated"], RunOptions(), [f"emulated/{name}"]).checks
        return check.state, check.reason

    known, reason = state(answer)
    assert known is (State.SKIPPED if name == "varlen-empty-gqa" else State.FAILED)
    assert ("pull/220357" if known is State.SKIPPED else RACE) in reason
    wrong = {key: value + 1 for key, value in answer.tensors.items()}
    assert state(replace(answer, tensors=wrong))[0] is State.FAILED
    assert state(CallAnswer(error=("Trap", RACE)))[0] is State.FAILED


def test_broken_child(answered):
    found = answered(error=ChildError("exit status 1: gone"))
    assert {check.state for check in found.values()} == {State.FAILED}
    assert "gone" in found["varlen"].reason


def test_without_a_disassembler_it_is_skipped(answered):
    """In another process: here the disassembler may have been found already."""
    ask = "from strix_emulate import find_disassembler; find_disassembler()"
    environment = os.environ | {"STRIX_EMULATE_LIBLLVM": "/nowhere"}
    command = [sys.executable, "-c", ask]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = answered(error=CannotRun(said.stderr.splitlines()[-1]))
    assert {check.state for check in found.values()} == {State.SKIPPED}
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

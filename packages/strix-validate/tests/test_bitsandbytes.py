# SPDX-License-Identifier: BSD-3-Clause
"""The checks of bitsandbytes: correct results pass, and each kind of fault is caught."""

import sys

import pytest
from calls import skip_without
from mock_bitsandbytes import Mock
from strix_validate.checks import RunOptions, State
from strix_validate.libraries import bitsandbytes_numerics
from strix_validate.tiers import run_each

#: Faults, each with the check that must catch it.
FAULTS = {
    "another table of codes": "nf4-64-float16",
    "codes are one too small": "nf4-128-float32",
    "nibbles of a byte swapped": "nf4-64-bfloat16",
    "offset not subtracted from scales": "nf4-nested-64-float16",
    "offset not added to scales": "nf4-nested-128-bfloat16",
    "blocks of scales counted in each row": "nf4-rows-64-float16",
    "gradient not squared": "adamw8bit-float32",
    "step number stays 1": "adamw8bit-float32",
    "no weight decay": "adamw8bit-float32",
    "learning rate 0.05 % too large": "adamw8bit-float32",
    "last block of parameters not updated": "adamw8bit-bfloat16",
    "scales of the previous block used": "adamw8bit-float32",
}
#: The checks that the mock can answer.
NAMES = sorted({*FAULTS.values(), "nf4-rows-128-bfloat16", "nf4-nested-64-float32"})


def judge(monkeypatch, names, fault=""):
    module = Mock(fault)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", module)
    monkeypatch.setattr(bitsandbytes_numerics, "require_module", lambda name: None)
    checks = bitsandbytes_numerics.checks()
    chosen = [check for check in checks if check.id.removeprefix("bitsandbytes/") in names]
    assert len(chosen) == len(names)
    return list(run_each(chosen, RunOptions(), checks))


def test_what_is_right_passes(monkeypatch):
    results = judge(monkeypatch, NAMES)
    assert [
        (result.check.id, result.reason) for result in results if result.state is State.FAILED
    ] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault, monkeypatch):
    (result,) = judge(monkeypatch, [FAULTS[fault]], fault)
    assert result.state is State.FAILED, result
    assert "Error: " not in result.reason, result


def test_without_bitsandbytes_each_check_is_skipped(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    checks = bitsandbytes_numerics.checks()
    results = list(run_each(list(checks), RunOptions(), checks))
    assert {result.state for result in results} == {State.SKIPPED}
    assert results[0].reason == "bitsandbytes is not installed"


@skip_without("bitsandbytes")
def test_the_installed_one_is_right():
    """The checks nf4-rows are left out: with AVX-512, rows that end in a block need our patch."""
    checks = bitsandbytes_numerics.checks()
    chosen = [check for check in checks if "nf4-rows" not in check.id]
    for result in run_each(chosen, RunOptions(), checks):
        assert result.state is State.PASSED, result

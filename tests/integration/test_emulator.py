# SPDX-License-Identifier: BSD-3-Clause
"""The emulator in the installed stack; its own tests run inside its package, when that is built."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.project import driver, driver_environment


def run_emulator(
    stack: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run strix-emulate in the stack."""
    return subprocess.run(
        driver(stack, "run", "attention", "--", "strix-emulate", *arguments),
        env=driver_environment(stack) | environment, text=True, capture_output=True, check=False,
    )  # fmt: skip


def emulate(stack: Path, *arguments: str) -> str:
    """What strix-emulate prints; skips where this machine has no disassembler for gfx1151."""
    done = run_emulator(stack, *arguments)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["attention", "selftest"])
def test_without_a_disassembler_nothing_is_claimed(attention_stack: Path, command: str) -> None:
    """Recipe tests take exit code 3 for "not checked": a wrong number must not hide behind it."""
    done = run_emulator(attention_stack, command, STRIX_EMULATE_LIBLLVM="/nowhere/libLLVM.so")
    assert done.returncode == 3 and "no disassembler for gfx1151" in done.stderr
    assert not done.stdout.strip()


def test_machine_agrees_with_its_oracle(attention_stack: Path) -> None:
    report = json.loads(
        emulate(attention_stack, "selftest", "--programs", "20", "--seed", "5", "--json")
    )
    assert report["disagreements"] == 0 and report["instructions_compared"] == 800


def test_flash_attn_executes_under_emulation(attention_stack: Path) -> None:
    (case,) = json.loads(emulate(attention_stack, "attention", "--only", "gqa-causal", "--json"))
    assert case["passed"] and set(case["errors"]) == {"out", "dq", "dk", "dv"}
    assert len(case["kernels"]) >= 3

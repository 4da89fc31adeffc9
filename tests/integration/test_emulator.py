# SPDX-License-Identifier: BSD-3-Clause
"""The emulator in the installed stack; its own tests run inside its package, when that is built."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from support.project import CHECKOUT

pytestmark = pytest.mark.usefixtures("attention_stack")


def emulate(*arguments: str) -> str:
    """Runs strix-emulate in the stack; skips where this machine has no disassembler for gfx1151."""
    command = [CHECKOUT / "forge", "run", "attention", "--", "strix-emulate", *arguments]
    environment = os.environ | {"FORGE_BASE": "host", "FORGE_NO_PIXI": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["attention", "selftest"])
def test_without_a_disassembler_nothing_is_claimed(command: str) -> None:
    """Recipe tests take exit code 3 for "not checked": a wrong number must not hide behind it."""
    arguments = [CHECKOUT / "forge", "run", "attention", "--", "strix-emulate", command]
    environment = os.environ | {"FORGE_BASE": "host", "FORGE_NO_PIXI": "1"}
    environment["STRIX_EMULATE_LIBLLVM"] = "/nowhere/libLLVM.so"
    done = subprocess.run(arguments, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 3 and "no disassembler for gfx1151" in done.stderr
    assert not done.stdout.strip()


def test_machine_agrees_with_its_oracle() -> None:
    report = json.loads(emulate("selftest", "--programs", "20", "--seed", "5", "--json"))
    assert report["disagreements"] == 0 and report["instructions_compared"] == 800


def test_flash_attn_executes_under_emulation() -> None:
    (case,) = json.loads(emulate("attention", "--only", "gqa-causal", "--json"))
    assert case["passed"] and set(case["errors"]) == {"out", "dq", "dk", "dv"}
    assert len(case["kernels"]) >= 3

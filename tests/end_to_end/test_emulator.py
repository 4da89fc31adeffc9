# SPDX-License-Identifier: BSD-3-Clause
"""flash-attn under emulation in the installed stack; both products' own tests run with them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.project import driver, driver_environment


def emulate(stack: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = ["run", "attention", "--", "strix-validate", "emulated", "--json"]
    return subprocess.run(
        driver(stack, *words, "--only", f"emulated/{name}"),
        env=driver_environment(stack) | environment, text=True, capture_output=True, check=False,
    )  # fmt: skip


def test_without_a_disassembler_nothing_is_claimed(attention_stack: Path) -> None:
    """Recipe tests take exit status 3 for "not checked": a wrong number must not hide behind it."""
    done = emulate(attention_stack, "gqa-causal", STRIX_EMULATE_LIBLLVM="/nowhere/libLLVM.so")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["summary"]["skipped"] == 1


def test_flash_attn_executes_under_emulation(attention_stack: Path) -> None:
    done = emulate(attention_stack, "gqa-causal")
    if done.returncode == 3:
        pytest.skip(json.loads(done.stdout)["checks"][0]["reason"])
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(done.stdout)["checks"]
    assert {"out", "dq", "dk", "dv"} < set(check["measured"])
    assert len(check["measured"]["kernels"]) >= 3

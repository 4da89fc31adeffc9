# SPDX-License-Identifier: BSD-3-Clause
"""A PyPI package in an installed stack: pip keeps our torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.project import forge
from support.wheels import write_wheel

PYTHON = "build/stacks/attention/.pixi/envs/default/bin/python"


def pip(stack: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", stack / PYTHON, *words]
    return subprocess.run(command, text=True, capture_output=True, check=False)


@pytest.fixture
def stack(attention_stack: Path) -> Iterator[Path]:
    yield attention_stack
    pip(attention_stack, "uninstall", "-y", "probe")


def doctor(stack: Path) -> dict[str, str]:
    """What doctor measured of the environment's packages."""
    words = ["strix-validate", "doctor", "--only", "doctor/packages", "--json"]
    (finding,) = json.loads(forge("run", "attention", "--", *words, root=stack))["findings"]
    return finding["measured"]


def test_pip_keeps_our_torch(stack: Path, tmp_path: Path) -> None:
    before = doctor(stack)
    assert {"torch", "triton"} <= set(before)
    probe = write_wheel(tmp_path, "probe", requires=("torch>=2", "triton", "einops"))
    done = pip(stack, "install", "--no-index", probe)
    assert done.returncode == 0, done.stderr
    assert doctor(stack) == before
    probe = write_wheel(tmp_path, "probe", requires=("torch>=99",))
    refused = pip(stack, "install", "--no-index", "--upgrade", probe)
    assert refused.returncode == 1 and "torch>=99" in refused.stderr

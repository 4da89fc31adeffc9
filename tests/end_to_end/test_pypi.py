# SPDX-License-Identifier: BSD-3-Clause
"""pip keeps a stack's torch when it installs a package that requires torch."""

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


def measure_packages(stack: Path) -> dict[str, str]:
    """Return what `strix-validate doctor` measures of the environment's packages."""
    words = ["strix-validate", "doctor", "--only", "doctor/packages", "--json"]
    (finding,) = json.loads(forge("run", "attention", "--", *words, root=stack))["findings"]
    return finding["measured"]


def test_pip_keeps_our_torch(stack: Path, tmp_path: Path) -> None:
    before = measure_packages(stack)
    assert {"torch", "triton"} <= set(before)
    probe = write_wheel(tmp_path, "probe", requires=("torch>=2", "triton", "einops"))
    done = pip(stack, "install", "--no-index", probe)
    assert done.returncode == 0, done.stderr
    assert measure_packages(stack) == before
    probe = write_wheel(tmp_path, "probe", requires=("torch>=99",))
    done = pip(stack, "install", "--no-index", "--upgrade", probe)
    assert done.returncode == 1 and "torch>=99" in done.stderr

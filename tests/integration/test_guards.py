# SPDX-License-Identifier: BSD-3-Clause
"""Each guard behind SECURITY.md is removed, one at a time, and its test is seen to fail."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.guards import GUARDS, Guard
from support.project import CHECKOUT, copy_checkout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, host_base: None) -> Path:
    root = tmp_path_factory.mktemp("guards") / "checkout"
    copy_checkout(root, packages=False)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture(params=GUARDS, ids=str)
def removed(request: pytest.FixtureRequest, copy: Path) -> Iterator[Guard]:
    """A guard that is gone from the copy."""
    guard: Guard = request.param
    path = copy / guard.file
    text = path.read_text()
    assert text.count(guard.code) == 1, f"{guard.file} has it {text.count(guard.code)} times"
    path.write_text(text.replace(guard.code, guard.replacement))
    yield guard
    path.write_text(text)


def run(copy: Path, test: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=copy,
        env=kept | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


def test_a_removed_guard_is_noticed(removed: Guard, copy: Path) -> None:
    done = run(copy, removed.test)
    assert done.returncode == 1, f"{removed.test} says nothing:\n{done.stdout}{done.stderr}"
    assert "1 failed" in done.stdout and "NameError" not in done.stdout, done.stdout


def test_guards_are_in_the_checkout() -> None:
    for guard in GUARDS:
        assert (CHECKOUT / guard.file).read_text().count(guard.code) == 1, guard

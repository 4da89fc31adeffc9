# SPDX-License-Identifier: BSD-3-Clause
"""If a guard that SECURITY.md relies on is removed from the code, its test fails.

The tests remove one guard at a time, in a copy of the checkout.
"""

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
    """A copy of the checkout."""
    root = tmp_path_factory.mktemp("guards") / "checkout"
    copy_checkout(root, packages=False)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture(params=GUARDS, ids=str)
def removed_guard(request: pytest.FixtureRequest, copy: Path) -> Iterator[Guard]:
    """A guard that is removed from the copy during a test."""
    guard: Guard = request.param
    path = copy / guard.file
    text = path.read_text()
    count = text.count(guard.code)
    assert count == 1, f"{guard.file} must have the guard's code once, not {count} times"
    path.write_text(text.replace(guard.code, guard.replacement))
    yield guard
    path.write_text(text)


def run_test(copy: Path, test: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=copy,
        env=variables | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


def test_a_removed_guard_is_noticed(removed_guard: Guard, copy: Path) -> None:
    test = removed_guard.test
    done = run_test(copy, test)
    assert done.returncode == 1, f"{test} must fail:\n{done.stdout}{done.stderr}"
    assert "1 failed" in done.stdout and "NameError" not in done.stdout, done.stdout


def test_guards_are_in_the_checkout() -> None:
    for guard in GUARDS:
        assert (CHECKOUT / guard.file).read_text().count(guard.code) == 1, guard

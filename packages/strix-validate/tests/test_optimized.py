# SPDX-License-Identifier: BSD-3-Clause
"""Checks fail under `python -O` as well, which removes every assert statement."""

import ast
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from strix_validate.checks import CheckFailed, Options, State, require
from strix_validate.tiers import run_each

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("package", ["strix_validate", "strix_emulate"])
def test_nothing_is_judged_by_an_assertion(package):
    """The planted faults below can only show this for the checks that they are planted in."""
    for file in Path(str(files(package))).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = isinstance(node, ast.Name) and node.id == "AssertionError"
            assert not (isinstance(node, ast.Assert) or named), f"{file.name}:{node.lineno}"


def test_require():
    require("something", "fine")
    with pytest.raises(CheckFailed, match="nothing there"):
        require([], "nothing there")


def test_a_failed_verdict_fails_the_check():
    from strix_validate.checks import Check

    check = Check("x", "", "")
    bodies = {"x": lambda options: require(False, "wrong")}
    (result,) = run_each([check], Options(), bodies)
    assert (result.state, result.reason) == (State.FAILED, "wrong")


def test_planted_faults_are_caught_without_assertions():
    """pytest rewrites the assertions of test modules, so those still count."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_faults.py"],
        cwd=HERE,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "assertions removed: True" in done.stdout and "28 planted, 28 caught" in done.stdout

# SPDX-License-Identifier: BSD-3-Clause
"""Planted faults are found under PYTHONOPTIMIZE=1, where Python drops assert statements.

pytest rewrites assert statements of test modules, so they still hold; those of a check would not.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.project import CHECKOUT

FILES = [
    "tests/unit/test_package_checks.py",
    "tests/integration/test_binaries.py",
    "tests/integration/test_rocm_sdk.py",
]


def test_planted_faults_are_found_under_optimization() -> None:
    pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run(
        [*command, *FILES, "-k", "not test_packages"], cwd=CHECKOUT, text=True, check=False,
        capture_output=True, env=os.environ | {"PYTHONOPTIMIZE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout

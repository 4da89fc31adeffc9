# SPDX-License-Identifier: BSD-3-Clause
"""Tests that read the whole tree pass after pip has installed the products from a clone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import CHECKOUT, copy_checkout

PRODUCTS = ("strix-validate", "strix-emulate")
# Tests that read all files of the tree, or of a part of it.
TESTS = (
    "test_dependencies.py",
    "test_documented.py",
    "test_evidence.py",
    "test_optimized.py",
    "test_subpackages.py",
    "test_recipes.py::test_no_recipe_knows_its_base",
    "test_support.py::test_no_test_has_a_web_server_of_another_kind",
)


@pytest.fixture
def clone(tmp_path: Path, host_base: None) -> Path:
    """A clone in which pip has built the emulator and the validator, with local setuptools."""
    root = tmp_path / "clone"
    copy_checkout(root, packages=False)
    for words in ("init -q", "add -A"):
        subprocess.run(["git", *words.split()], cwd=root, check=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for wheel in CHECKOUT.glob("build/sources/*/setuptools-*.whl"):
        shutil.copy(wheel, wheels)
    options = ["-q", "--no-index", "--no-deps", "--disable-pip-version-check"]
    options += ["--find-links", str(wheels), "--target", str(tmp_path / "site")]
    products = [f"./packages/{name}" for name in PRODUCTS]
    command = [sys.executable, "-m", "pip", "install", *options, *products]
    subprocess.run(command, cwd=root, check=True)
    return root


def test_what_pip_leaves_is_no_part_of_the_tree(clone: Path) -> None:
    """The tests ignore the folders named `build` that pip leaves in the clone."""
    for name in PRODUCTS:
        assert list((clone / "packages" / name / "build").rglob("*.py")), (
            "pip must have left files here, or the test shows nothing"
        )
    tests = [f"tests/unit/{name}" for name in TESTS]
    command = [sys.executable, "src/forge", "test", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout

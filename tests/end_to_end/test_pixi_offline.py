# SPDX-License-Identifier: BSD-3-Clause
"""A clone on a machine with pixi and without a network: pixi cannot make its environment there."""

import sys
from pathlib import Path

import pytest
from support.pixi import require
from support.project import CHECKOUT, copy_checkout
from support.release import run
from support.stand_in import clean_environment

pytestmark = pytest.mark.pixi


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--help", "  build-all: Build every package"),
        ("--version", "strix-forge 0."),
        ("plan --base host", "   pytorch: provided by the base"),
        ("status", "strix-validate 0.1.0 hostbound_"),
        ("pixi run plan --base host", "   pytorch: provided by the base"),
        ("pixi run build --base host pytorch", ""),
        ("pixi run test --collect-only -q tests/unit/test_network.py", "tests collected"),
    ],
)
def test_without_a_network(host_base: None, tmp_path: Path, line: str, said: str) -> None:
    """The driver's own environment is there, as after any earlier command."""
    root = tmp_path / "checkout"
    copy_checkout(root)
    for environment in (CHECKOUT / "build").glob("venv-*"):
        (root / "build" / environment.name).symlink_to(environment)
    offline = [require("unshare"), "--net", "--map-root-user"]
    variables = clean_environment(tmp_path / "home") | {"FORGE_PYTHON_BIN": sys._base_executable}
    task = line.startswith("pixi")
    command = line.split() if task else [root / "forge", *line.split()]
    cwd = root / "docs" if task else tmp_path
    done = run([*offline, *command], variables, cwd=cwd, code=0 if said else 2)
    assert said in done.stdout
    if not line.startswith("--"):
        assert done.stderr.count("forge: going on without pixi") == 1

# SPDX-License-Identifier: BSD-3-Clause
"""A user with pixi works in a clone of this repository, with and without a network."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.pixi import Pixi, fit, require
from support.project import CHECKOUT, copy_checkout
from support.release import RECIPES, Release, run
from support.stand_in import clean_environment

pytestmark = pytest.mark.pixi


class Clone:
    """The release's clone of this repository, in which all packages are built.

    pixi locks the root workspace again, from the stand-in for conda-forge.
    """

    def __init__(self, release: Release) -> None:
        self.folder = release.checkout
        self.pixi = Pixi(release.home, release.mirrors)
        fit(self.folder / "pixi.toml")
        (self.folder / "pixi.lock").unlink()
        self.pixi("lock", cwd=self.folder)

    def run_task(self, *words: str) -> str:
        """Run a task of pixi.toml, require that it succeeds, and return what it printed."""
        return self.pixi("run", "--locked", *words, cwd=self.folder)

    def run_launcher(self, *words: str) -> str:
        """Run `./forge WORDS` with pixi on PATH, and return what it printed."""
        done = run([self.folder / "forge", *words], self.pixi.environment)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(release: Release) -> Clone:
    return Clone(release)


def test_tasks(clone: Clone) -> None:
    """`pixi run TASK` and `./forge` run the driver; test_launcher.py tests all tasks."""
    assert "Usage: forge build " in clone.run_task("build", "--help")
    assert "Usage: forge [OPTIONS] COMMAND" in clone.run_launcher("--help")


def test_build_all(clone: Clone) -> None:
    """In pixi's environment, built packages are up to date, and only a missing package is built."""
    plan = run([clone.folder / "forge", "plan", "--json"], clone.pixi.environment).stdout
    actions = {step["recipe"]: step["action"] for step in json.loads(plan)}
    assert actions == dict.fromkeys(RECIPES, "up-to-date")
    for file in clone.folder.glob("channel/*/strix-emulate-*"):
        file.unlink()
    printed = clone.run_task("build-all")
    assert len(re.findall(r"(?m)^[a-z]\S* .* built ", printed)) == 1
    assert len(list(clone.folder.glob("channel/noarch/strix-emulate-*.conda"))) == 1


def test_lock_install_run(clone: Clone) -> None:
    """The driver runs pixi in a copy of the stack in build/. The copy names the channels in use."""
    fit(clone.folder / "stacks" / "attention" / "pixi.toml")
    clone.run_task("lock", "attention")
    clone.run_task("install", "attention")
    printed = clone.run_launcher("run", "attention", "--", "strix-validate", "--version")
    assert "strix-validate 0." in printed
    copy = clone.folder / "build" / "stacks" / "attention"
    clone.pixi("lock", "--check", cwd=copy)
    printed = clone.pixi("run", "--locked", "strix-validate", "--version", cwd=copy)
    assert "strix-validate 0." in printed


def test_test(clone: Clone) -> None:
    assert "passed" in clone.run_task("test", "tests/unit/test_network.py", "-q")


# Command lines, each with a part of its output. An empty text means that the command is refused.
@pytest.mark.parametrize(
    ("line", "expected"),
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
def test_without_a_network(host_base: None, tmp_path: Path, line: str, expected: str) -> None:
    """Without a network the driver runs in the environment that an earlier command has made."""
    root = tmp_path / "checkout"
    copy_checkout(root)
    for environment in (CHECKOUT / "build").glob("venv-*"):
        (root / "build" / environment.name).symlink_to(environment)
    offline = [require("unshare"), "--net", "--map-root-user"]
    variables = clean_environment(tmp_path / "home") | {"FORGE_PYTHON_BIN": sys._base_executable}
    if line.startswith("pixi"):
        command = line.split()
        cwd = root / "docs"
    else:
        command = [root / "forge", *line.split()]
        cwd = tmp_path
    done = run([*offline, *command], variables, cwd=cwd, code=0 if expected else 2)
    assert expected in done.stdout
    if not line.startswith("--"):
        assert done.stderr.count("forge: continuing without pixi") == 1

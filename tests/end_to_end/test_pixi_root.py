# SPDX-License-Identifier: BSD-3-Clause
"""A clone of this repository in the hands of somebody who has pixi, with a network and without."""

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
    """The release's checkout: its packages are built, and pixi locks it from the stand-in."""

    def __init__(self, release: Release) -> None:
        self.folder, self.pixi = release.checkout, Pixi(release.home, release.mirrors)
        fit(self.folder / "pixi.toml")
        (self.folder / "pixi.lock").unlink()
        self.pixi("lock", cwd=self.folder)

    def task(self, *words: str, code: int = 0) -> str:
        return self.pixi("run", "--locked", *words, cwd=self.folder, code=code)

    def launcher(self, *words: str) -> str:
        """What `./forge WORDS` prints, with pixi on PATH."""
        done = run([self.folder / "forge", *words], self.pixi.environment)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(release: Release) -> Clone:
    return Clone(release)


def test_tasks(clone: Clone) -> None:
    """pixi runs one, in its own words and as `./forge`; test_launcher.py has them all."""
    assert "Usage: forge build " in clone.task("build", "--help")
    assert "Usage: forge [OPTIONS] COMMAND" in clone.launcher("--help")


def test_build_all(clone: Clone) -> None:
    """In pixi's environment what was built is up to date, and what is missing is built."""
    steps = json.loads(
        run([clone.folder / "forge", "plan", "--json"], clone.pixi.environment).stdout
    )
    assert {step["recipe"]: step["action"] for step in steps} == dict.fromkeys(
        RECIPES, "up-to-date"
    )
    for file in clone.folder.glob("channel/*/strix-emulate-*"):
        file.unlink()
    assert len(re.findall(r"(?m)^[a-z]\S* .* built ", clone.task("build-all"))) == 1
    assert len(list(clone.folder.glob("channel/noarch/strix-emulate-*.conda"))) == 1


def test_lock_install_run(clone: Clone) -> None:
    """The commands are pixi's, on a workspace of its own that names the channels in use."""
    fit(clone.folder / "stacks" / "attention" / "pixi.toml")
    clone.task("lock", "attention")
    clone.task("install", "attention")
    version = clone.launcher("run", "attention", "--", "strix-validate", "--version")
    assert "strix-validate 0." in version
    local = clone.folder / "build" / "stacks" / "attention"
    clone.pixi("lock", "--check", cwd=local)
    assert "strix-validate 0." in clone.pixi(
        "run", "--locked", "strix-validate", "--version", cwd=local
    )


def test_test(clone: Clone) -> None:
    assert "passed" in clone.task("test", "tests/unit/test_network.py", "-q")


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
        assert done.stderr.count("forge: continuing without pixi") == 1

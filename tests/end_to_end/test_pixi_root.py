# SPDX-License-Identifier: BSD-3-Clause
"""A clone of this repository in the hands of somebody who has pixi: tasks, launcher, builds."""

import json
import re
from pathlib import Path

import pytest
from support.pixi import Pixi, fit, require
from support.release import RECIPES, Release, run

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


def test_without_pixi_it_is_a_skip_or_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FORGE_REQUIRE_PIXI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="pixi is not on PATH"):
        require("pixi")
    monkeypatch.setenv("FORGE_REQUIRE_PIXI", "1")
    with pytest.raises(pytest.fail.Exception, match="FORGE_REQUIRE_PIXI is set"):
        require("pixi")

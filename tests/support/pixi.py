# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi: run as a user runs it, with a home folder of the test's own."""

import json
import os
import re
import shutil
import subprocess
import tomllib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from support.release import run
from support.stand_in import GPU, PYTHON, clean_environment, write_mirrors

REQUIRED = "FORGE_REQUIRE_PIXI"


def require(program: str) -> str:
    """The path of a program; without it the test is skipped, or fails where REQUIRED says so."""
    if path := shutil.which(program):
        return path
    missing = f"{program} is not on PATH"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{missing}, and {REQUIRED} is set", pytrace=False)
    pytest.skip(missing)


@cache
def version() -> Version:
    words = [require("pixi"), "--version"]
    return Version(subprocess.check_output(words, text=True).split()[-1])


class Pixi:
    """pixi in the home of one user; `mirrors` give addresses on this machine to public ones."""

    def __init__(self, home: Path, mirrors: dict[str, str]) -> None:
        self.home = home
        write_mirrors(home, mirrors)

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment(self.home) | GPU | {"NO_COLOR": "1", "COLUMNS": "200"}

    def __call__(
        self, *words: str | Path, cwd: Path, code: int | None = 0, **environment: str
    ) -> str:
        """Run `pixi WORDS`, require its exit code if it is not None; returns what it printed."""
        done = run([require("pixi"), *words], self.environment | environment, code, cwd=cwd)
        return done.stdout + done.stderr

    def data(self, *words: str | Path, cwd: Path) -> Any:
        """What `pixi WORDS` prints as JSON."""
        return json.loads(run([require("pixi"), *words], self.environment, cwd=cwd).stdout)


def fit(manifest: Path) -> Path:
    """Take out of a manifest what this pixi, or this Python, is too old for; says what."""
    text = manifest.read_text()
    data = tomllib.loads(text)
    data = data["tool"]["pixi"] if manifest.name == "pyproject.toml" else data
    wanted = data["workspace"].get("requires-pixi", "")
    if not SpecifierSet(wanted).contains(version()):
        old = '__amdgpu = "0", __amdgpu_arch = "11.5.1"'
        text = text.replace('amdgpu = "gfx1151"', old)
        text = re.sub(r"(?m)^requires-pixi = .*\n", "", text)
        note = f"pixi {version()} is older than {manifest.parent.name}/pixi.toml requires"
        warnings.warn(f"{note} ({wanted}): tested with {old} for amdgpu", stacklevel=2)
    text = text.replace('python = "3.12.*"', f'python = "{PYTHON}.*"')
    manifest.write_text(text)
    return manifest

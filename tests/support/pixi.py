# SPDX-License-Identifier: BSD-3-Clause
"""Run a real pixi as a user does, with a home folder that belongs to the test."""

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
    """Return the path of a program.

    If the program is missing, the test is skipped, or fails if FORGE_REQUIRE_PIXI is set.
    """
    path = shutil.which(program)
    if path:
        return path
    message = f"{program} is not on PATH"
    if os.environ.get(REQUIRED):
        pytest.fail(f"{message}, and {REQUIRED} is set", pytrace=False)
    pytest.skip(message)


@cache
def version() -> Version:
    words = [require("pixi"), "--version"]
    return Version(subprocess.check_output(words, text=True).split()[-1])


class Pixi:
    """pixi with the home folder of one user.

    Args:
        home: The home folder.
        mirrors: The URL that pixi uses in place of each public one.
    """

    def __init__(self, home: Path, mirrors: dict[str, str]) -> None:
        self.home = home
        write_mirrors(home, mirrors)

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment(self.home) | GPU | {"NO_COLOR": "1", "COLUMNS": "200"}

    def __call__(
        self, *words: str | Path, cwd: Path, code: int | None = 0, **environment: str
    ) -> str:
        """Run `pixi WORDS`, and return its output. Require the exit code unless it is None."""
        done = run([require("pixi"), *words], self.environment | environment, code, cwd=cwd)
        return done.stdout + done.stderr

    def data(self, *words: str | Path, cwd: Path) -> Any:
        """Run `pixi WORDS`, and return the data of the JSON that it prints."""
        return json.loads(run([require("pixi"), *words], self.environment, cwd=cwd).stdout)


def fit(manifest: Path) -> Path:
    """Change a manifest in place so that the installed pixi and the stand-in's Python can be used.

    A manifest may require a newer pixi. Then that requirement is removed, the GPU is stated by its
    virtual packages, and the test gets a warning. Python 3.12 is replaced by the stand-in's Python.
    """
    text = manifest.read_text()
    data = tomllib.loads(text)
    data = data["tool"]["pixi"] if manifest.name == "pyproject.toml" else data
    required = data["workspace"].get("requires-pixi", "")
    if not SpecifierSet(required).contains(version()):
        old = '__amdgpu = "0", __amdgpu_arch = "11.5.1"'
        text = text.replace('amdgpu = "gfx1151"', old)
        text = re.sub(r"(?m)^requires-pixi = .*\n", "", text)
        note = f"pixi {version()} is older than {manifest.parent.name}/pixi.toml requires"
        warnings.warn(f"{note} ({required}), so amdgpu is replaced by {old}", stacklevel=2)
    text = text.replace('python = "3.12.*"', f'python = "{PYTHON}.*"')
    manifest.write_text(text)
    return manifest

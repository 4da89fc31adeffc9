# SPDX-License-Identifier: BSD-3-Clause
"""The package checks of recipes/checks, as modules of the tests and as programs.

Importing this module makes `checks` importable, as in a package test. Tests of those that read ELF
files skip without pyelftools: `pytest.importorskip("elftools")`.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support.project import CHECKOUT, module

RECIPES = CHECKOUT / "recipes"
# a folder without __init__.py, so that no setup.py takes it for a package to install
checks = ModuleType("checks")
checks.__path__ = [str(RECIPES / "checks")]
sys.modules["checks"] = checks


def load(recipe: str, name: str) -> ModuleType:
    """A recipe's own program as a module."""
    return module(RECIPES / recipe / f"{name}.py")


def run(*arguments: str | Path, path: Path | None = None, **environment: str | Path):
    """Run Python with `checks`, and what lies in `path`, importable; returns the ended process."""
    folders = os.pathsep.join(str(folder) for folder in (path, RECIPES) if folder)
    return subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": folders} | {k: str(v) for k, v in environment.items()},
    )  # fmt: skip

# SPDX-License-Identifier: BSD-3-Clause
"""The package checks of recipes/checks, as modules of the tests and as programs.

Importing this module makes `checks` importable, as in a package test. Tests of those that read ELF
files skip without pyelftools: `pytest.importorskip("elftools")`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support.project import CHECKOUT

RECIPES = CHECKOUT / "recipes"
# a folder without __init__.py, so that no setup.py takes it for a package to install
checks = ModuleType("checks")
checks.__path__ = [str(RECIPES / "checks")]
sys.modules["checks"] = checks


def load(recipe: str, name: str) -> ModuleType:
    """A recipe's own program as a module."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / recipe / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str | Path, path: Path | None = None, **environment: str | Path):
    """Run Python with `checks`, and what lies in `path`, importable; returns the ended process."""
    folders = os.pathsep.join(str(folder) for folder in (path, RECIPES) if folder)
    return subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": folders} | {k: str(v) for k, v in environment.items()},
    )  # fmt: skip

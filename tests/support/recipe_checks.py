# SPDX-License-Identifier: BSD-3-Clause
"""Use the package checks of recipes/checks as modules and as programs.

Importing this module makes `checks` importable, as in a package test. Some checks read ELF files.
Their tests call `pytest.importorskip("elftools")`, which skips them if pyelftools is missing.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support.project import CHECKOUT, module

RECIPES = CHECKOUT / "recipes"
# The folder has no __init__.py, because a setup.py might take it for a package to install.
# Therefore `checks` is registered as a module here.
checks = ModuleType("checks")
checks.__path__ = [str(RECIPES / "checks")]
sys.modules["checks"] = checks


def load(recipe: str, name: str) -> ModuleType:
    """Import a program of a recipe as a module."""
    return module(RECIPES / recipe / f"{name}.py")


def run(*arguments: str | Path, path: Path | None = None, **environment: str | Path):
    """Run Python and return the completed process.

    Args:
        arguments: The command line of Python.
        path: A folder whose modules can be imported, in addition to `checks`.
        environment: Further variables of the environment.
    """
    folders = [str(folder) for folder in (path, RECIPES) if folder]
    variables = {name: str(value) for name, value in environment.items()}
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
    return subprocess.run(
        [sys.executable, *arguments],
        text=True,
        capture_output=True,
        check=False,
        env=variables,
    )

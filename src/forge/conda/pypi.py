# SPDX-License-Identifier: BSD-3-Clause
"""The names that conda packages have on PyPI. They keep pixi from installing a package twice.

pixi assumes equal names only for packages of conda-forge. For other channels, it reads the name on
PyPI from `purls` in the channel's index, or from `conda-pypi-map` in the workspace. Our recipes
state the name in `extra.pypi`.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from packageurl import PackageURL

from forge.errors import ForgeError
from forge.files import read_text

# The table in a published channel, in the format of conda-pypi-map: {"pytorch": "torch", "x": null}
TABLE = "pypi-names.json"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
# Maps the name of a conda package to its name on PyPI, or to None if it is not on PyPI.
Names = dict[str, str | None]


def parse(text: bytes | None, where: object) -> Names:
    """Parse the table of a published channel.

    Args:
        text: The table; None for a channel that has none yet.
        where: The path of the table, for error messages.

    Raises:
        ForgeError: The text is not such a table.
    """
    if text is None:
        return {}
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    return _require_names(names, where)


def read_names(recipes: Path) -> Names:
    """Collect `extra.pypi` of each recipe in a folder. Raise ForgeError if it is malformed."""
    names: Names = {}
    for path in sorted(recipes.glob("*/recipe.yaml")):
        try:
            extra = yaml.safe_load(read_text(path)).get("extra") or {}
            stated = extra.get("pypi", {})
        except (yaml.YAMLError, AttributeError, ForgeError):
            # Skip a recipe that cannot be read: RecipeSet reports it, and the other recipes can
            # still be built.
            continue
        names |= _require_names(stated, f"{path}: extra.pypi")
    return names


def _require_names(names: Any, where: object) -> Names:
    """Return `names` if it is a table of names. Raise ForgeError otherwise."""
    is_table = isinstance(names, dict)
    if is_table:
        is_table = all(_is_entry(conda_name, name) for conda_name, name in names.items())
    if not is_table:
        raise ForgeError(f"{where} is not a name table; expected {{CONDA-NAME: PYPI-NAME or null}}")
    return names


def _is_entry(conda_name: Any, pypi_name: Any) -> bool:
    """Return whether the two values can be an entry of a table of names."""
    if not isinstance(conda_name, str):
        return False
    if pypi_name is None:
        return True
    return isinstance(pypi_name, str) and NAME.fullmatch(pypi_name) is not None


def purls(file: str, names: Names) -> list[str]:
    """Return the `purls` of a record: the package URL of the package on PyPI, if it is there.

    Args:
        file: The package file, NAME-VERSION-BUILD.conda.
        names: The names on PyPI.
    """
    parts = file.rsplit("-", 2)
    if len(parts) < 3:
        return []
    name, version, _ = parts
    pypi_name = names.get(name)
    if not pypi_name:
        return []
    return [str(PackageURL("pypi", None, pypi_name, version))]

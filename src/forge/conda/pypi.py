# SPDX-License-Identifier: BSD-3-Clause
"""Names of conda packages on PyPI, so that pixi does not install the same package from there too.

pixi assumes equal names for conda-forge alone. In any other channel a record states the name in
`purls`, or a workspace does in `conda-pypi-map`. Our recipes state it in `extra.pypi`.
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
        where: Its place, for the message of an error.

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
    """Collect `extra.pypi` of each recipe in a folder. Raises ForgeError for a malformed one."""
    names: Names = {}
    for path in sorted(recipes.glob("*/recipe.yaml")):
        try:
            extra = yaml.safe_load(read_text(path)).get("extra") or {}
            stated = extra.get("pypi", {})
        except (yaml.YAMLError, AttributeError, ForgeError):
            # RecipeSet reports a recipe that cannot be read, and the others are still built.
            continue
        names |= _require_names(stated, f"{path}: extra.pypi")
    return names


def _require_names(names: Any, where: object) -> Names:
    """Return `names` if it is a name table. Raises ForgeError otherwise."""
    is_table = isinstance(names, dict)
    if is_table:
        is_table = all(_is_entry(conda_name, name) for conda_name, name in names.items())
    if not is_table:
        raise ForgeError(f"{where} is not a name table; expected {{CONDA-NAME: PYPI-NAME or null}}")
    return names


def _is_entry(conda_name: Any, pypi_name: Any) -> bool:
    """Return whether a name table may map one name to the other."""
    if not isinstance(conda_name, str):
        return False
    if pypi_name is None:
        return True
    return isinstance(pypi_name, str) and NAME.fullmatch(pypi_name) is not None


def purls(file: str, names: Names) -> list[str]:
    """Return the `purls` of a record: package URLs that say what its package is on PyPI.

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

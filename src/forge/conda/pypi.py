# SPDX-License-Identifier: BSD-3-Clause
"""What conda packages are called on PyPI, so that pixi takes none of them from there as well.

pixi assumes equal names for conda-forge alone. In any other channel a record says it by `purls`, or
a workspace by `conda-pypi-map`, whose format is that of our table: {"pytorch": "torch", "x": null}.
"""

import json
import re

from packageurl import PackageURL

from forge.errors import ForgeError

TABLE = "pypi-names.json"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
# conda name -> name on PyPI, or None for what is not there
Names = dict[str, str | None]


def parse(text: bytes | None, where: object) -> Names:
    """Parse a table from its file; without one it is empty. Raises ForgeError for anything else."""
    try:
        names = {} if text is None else json.loads(text)
        whole = all(name is None or NAME.fullmatch(name) for name in names.values())
    except (ValueError, AttributeError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ForgeError(f"{where} is not a name table; expected {{CONDA-NAME: PYPI-NAME or null}}")
    return names


def purls(file: str, names: Names) -> list[str]:
    """Return the `purls` of a package file NAME-VERSION-BUILD.conda."""
    name, version, _ = [*file.rsplit("-", 2), "", ""][:3]
    known = names.get(name)
    return [str(PackageURL("pypi", None, known, version))] if known else []

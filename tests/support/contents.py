# SPDX-License-Identifier: BSD-3-Clause
"""Check the files in the packages of a channel against the recipes.

`MiniProject.forge` and the fixture `built` call the function `check` after each build.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forge.conda.package import Package

#: The part of a module's path that a noarch package does not have: the folder of one Python.
SITE = re.compile(r"^lib/python3\.\d+t?/(?=site-packages/)")


def check(channel: Path) -> None:
    """Require that no package has a fault, and that no two have the same file.

    Packages with the same name, and the files of package tests, are not compared.

    Raises:
        AssertionError: There are faults. The message lists all of them.
    """
    faults: list[str] = []
    owners: dict[str, str] = {}
    for file in sorted(channel.glob("*/*.conda")):
        package = Package(file)
        name = package.index["name"]
        files = {n for n in package.payload if not n.startswith(f"etc/conda/test-files/{name}/")}
        recipe = package.rendered["recipe"]
        faults += [f"{file.name}: {fault}" for fault in find_faults(package, recipe, files)]
        for path in sorted(SITE.sub("", n) for n in files):
            if owners.setdefault(path, name) != name:
                faults.append(f"{file.name}: {path} is in package {owners[path]} too")
    assert not faults, "\n".join(faults)


def find_faults(package: Package, recipe: dict[str, Any], files: set[str]) -> list[str]:
    """Return the faults of a package. `files` are its files, without those of its tests."""
    build = recipe.get("build", {})
    faults = []
    has_script = (
        build.get("script") or "inherits_from" in recipe or "recipe/build.sh" in package.info
    )
    if files and not has_script:
        faults.append(f"no script makes its {len(files)} files, such as {min(files)}")
    patterns = build.get("files") or []
    if isinstance(patterns, list):
        patterns = {"include": patterns}
    include = expand(patterns.get("include") or ["**"])
    exclude = expand(patterns.get("exclude") or [])
    for name in sorted(files):
        is_included = any(fnmatchcase(name, glob) for glob in include)
        if not is_included or any(fnmatchcase(name, glob) for glob in exclude):
            faults.append(f"{name} is not among its `files`")
    bound = sorted(name for name in files if SITE.match(name))
    if build.get("noarch") and bound:
        faults.append(f"{bound[0]} is for one Python, but the package is noarch")
    return faults


def expand(globs: list[str]) -> list[str]:
    """Replace each glob that has {a,b} by one glob per alternative.

    Each glob is followed by one that matches the content of a folder of that name.
    """
    result: list[str] = []
    for glob in globs:
        braces = re.search(r"\{([^}]*)\}", glob)
        if braces:
            head = glob[: braces.start()]
            tail = glob[braces.end() :]
            result += expand([f"{head}{part}{tail}" for part in braces[1].split(",")])
        else:
            result += [glob, f"{glob.rstrip('/')}/*"]
    return result

# SPDX-License-Identifier: BSD-3-Clause
"""What the packages of a channel hold, against what their recipes say.

`MiniProject.forge` and the fixture `built` ask for it after each build: so every package that the
suite builds is opened.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forge.conda.package import Package

#: A noarch package's modules lie here, and others' below the Python that they are for.
SITE = re.compile(r"^lib/python3\.\d+t?/(?=site-packages/)")


def check(channel: Path) -> None:
    """Open every package of a channel. Raises AssertionError that lists all faults."""
    faults, owners = [], dict[str, str]()
    for file in sorted(channel.glob("*/*.conda")):
        package = Package(file)
        name = package.index["name"]
        files = {n for n in package.payload if not n.startswith(f"etc/conda/test-files/{name}/")}
        recipe = package.rendered["recipe"]
        faults += [f"{file.name}: {fault}" for fault in faults_of(package, recipe, files)]
        for path in sorted(SITE.sub("", n) for n in files):
            if owners.setdefault(path, name) != name:
                faults.append(f"{file.name}: {path} is {owners[path]}'s as well")
    assert not faults, "\n".join(faults)


def faults_of(package: Package, recipe: dict[str, Any], files: set[str]) -> list[str]:
    """What is wrong with one package's `files`."""
    build, faults = recipe.get("build", {}), []
    makes = build.get("script") or "inherits_from" in recipe or "recipe/build.sh" in package.info
    if files and not makes:
        faults.append(f"nothing makes its {len(files)} files, such as {min(files)}")
    chosen = build.get("files") or []
    if isinstance(chosen, list):
        chosen = {"include": chosen}
    include, exclude = expand(chosen.get("include") or ["**"]), expand(chosen.get("exclude") or [])
    for name in sorted(files):
        wanted = any(fnmatchcase(name, glob) for glob in include)
        if not wanted or any(fnmatchcase(name, glob) for glob in exclude):
            faults.append(f"{name} is not among its `files`")
    if build.get("noarch") and (own := sorted(name for name in files if SITE.match(name))):
        faults.append(f"{own[0]} is one Python's, and the package is noarch")
    return faults


def expand(globs: list[str]) -> list[str]:
    """Globs without {a,b}; what names a folder means all that is in it."""
    found = list[str]()
    for glob in globs:
        if braces := re.search(r"\{([^}]*)\}", glob):
            head, tail = glob[: braces.start()], glob[braces.end() :]
            found += expand([f"{head}{part}{tail}" for part in braces[1].split(",")])
        else:
            found += [glob, f"{glob.rstrip('/')}/*"]
    return found

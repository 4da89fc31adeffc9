# SPDX-License-Identifier: BSD-3-Clause
"""From a wheel to what a conda package holds: files laid out, requirements as match specs."""

from __future__ import annotations

import compileall
import sys
from dataclasses import dataclass
from pathlib import Path

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from forge.sources.cache import Source

# PyPI names that conda-forge spells differently, as far as recipes and stacks meet them.
CONDA_NAMES = {
    # conda-forge's matplotlib adds a GUI toolkit
    "matplotlib": "matplotlib-base",
    "torch": "pytorch",
    "msgpack": "msgpack-python",
    "typing-extensions": "typing_extensions",
}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Console scripts find their Python beside themselves, wherever the prefix is.
PLACEHOLDER = "/host-base/bin/python"
SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""
MANY_FILES = 300


@dataclass
class Wheel:
    """One resolved wheel: its file, and the metadata inside it once it is here.

    `tag` comes first in the build string: what a local version says, such as `cpu_`.
    """

    source: Source
    version: Version
    tag: str = ""
    metadata: Metadata | None = None

    @property
    def name(self) -> str:
        return canonicalize_name(self.source.purl.name)


def unpack_wheel(file: Path, prefix: Path) -> None:
    """Lay a wheel out as conda packages are: scripts in bin, modules in lib/pythonX.Y.

    Console scripts and `.data` trees go where PEP 427 says; byte code is made here once, because
    every environment would otherwise make it again at first import.
    """
    modules = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    scheme = {
        "purelib": str(modules),
        "platlib": str(modules),
        "scripts": str(prefix / "bin"),
        "data": str(prefix),
        "headers": str(prefix / "include" / f"python{PYTHON}"),
    }
    destination = SchemeDictionaryDestination(scheme, interpreter=PLACEHOLDER, script_kind="posix")
    with WheelFile.open(file) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"conda"})
    for script in (prefix / "bin").glob("*"):
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(f"#!{PLACEHOLDER}".encode()):
            script.write_bytes(SHEBANG + rest)
            script.chmod(0o755)
    # more than one process pays only for large wheels
    many = sum(1 for _ in modules.rglob("*.py")) > MANY_FILES
    compileall.compile_dir(
        modules, quiet=2, workers=0 if many else 1, stripdir=str(prefix),
        invalidation_mode=compileall.py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def depends(metadata: Metadata, wheels: dict[str, Wheel]) -> list[str]:
    """Requires-Dist as conda match specs: markers evaluated here, extras spelled out.

    conda knows no extras, so `name[extra]` becomes `name` plus what that extra asks for.
    """
    specs: set[str] = set()
    todo = [(r, "") for r in metadata.requires_dist or []]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        specs.add(match_spec(requirement))
        name = canonicalize_name(requirement.name)
        for wanted in requirement.extras:
            if (name, wanted) not in seen and name in wheels:
                seen.add((name, wanted))
                inner = wheels[name].metadata.requires_dist or []
                todo += [(r, wanted) for r in inner if r.marker and "extra" in str(r.marker)]
    return sorted(specs)


def match_spec(requirement: Requirement) -> str:
    """A PEP 508 requirement (without its marker) as a conda match spec."""
    name = canonicalize_name(requirement.name)
    parts = sorted(str(part).replace("===", "==") for part in requirement.specifier)
    return " ".join([CONDA_NAMES.get(name, name), ",".join(parts)]).strip()

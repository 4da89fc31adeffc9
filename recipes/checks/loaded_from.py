# SPDX-License-Identifier: BSD-3-Clause
"""Import modules, and check that all shared libraries were loaded from this environment.

    python -m checks.loaded_from MODULE...

The check fails, for example, if a library of the machine's own ROCm was loaded, or a library that
only the build machine has. Only glibc may come from the machine.
"""

import importlib
import re
import sys
from pathlib import Path

from checks.verdict import require

GLIBC = re.compile(
    r"(ld-linux-x86-64|lib(c|m|mvec|dl|pthread|rt|util|resolv|nss_\w+))(-[\d.]+)?\.so(\.\d+)?"
)


def is_glibc(name: str) -> bool:
    """Return whether the file name of a shared library is that of a glibc library."""
    return GLIBC.fullmatch(name) is not None


def libraries(maps: str) -> list[Path]:
    """Return the shared libraries that the text of a /proc/PID/maps names."""
    files = set()
    for line in maps.splitlines():
        if "/" in line:
            files.add(line.split(maxsplit=5)[5])
    return [Path(file) for file in sorted(files) if re.search(r"\.so(\.|$)", file)]


def loaded() -> list[Path]:
    """Return the shared libraries that this process has loaded."""
    return libraries(Path("/proc/self/maps").read_text())


def foreign(files: list[Path], prefix: Path) -> list[Path]:
    """Return the libraries that are neither inside a prefix nor part of glibc."""
    root = prefix.resolve()
    outside = []
    for file in files:
        if not file.resolve().is_relative_to(root) and not is_glibc(file.name):
            outside.append(file)
    return outside


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    outside = foreign(loaded(), Path(sys.prefix))
    require(not outside, "\n".join(f"loaded from outside: {file}" for file in outside))
    print(f"{', '.join(modules)}: every library except glibc is from this environment")


if __name__ == "__main__":
    main(sys.argv[1:])

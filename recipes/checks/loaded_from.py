# SPDX-License-Identifier: BSD-3-Clause
"""Import modules and check that every library the loader brought in is from this environment.

    python -m checks.loaded_from MODULE...

A library of the machine's own ROCm, or one that only the build machine has, fails the check. Only
glibc comes from the machine by design.
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
    """Whether a shared library's file name is one of glibc's."""
    return GLIBC.fullmatch(name) is not None


def libraries(maps: str) -> list[Path]:
    """The shared libraries in the text of a /proc/PID/maps."""
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line}
    return [Path(file) for file in sorted(files) if re.search(r"\.so(\.|$)", file)]


def loaded() -> list[Path]:
    """The shared libraries that this process has loaded."""
    return libraries(Path("/proc/self/maps").read_text())


def foreign(files: list[Path], prefix: Path) -> list[Path]:
    """Those of `files` that are neither below `prefix` nor glibc's."""
    home = prefix.resolve()
    return [f for f in files if not (f.resolve().is_relative_to(home) or is_glibc(f.name))]


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    outside = foreign(loaded(), Path(sys.prefix))
    require(not outside, "\n".join(f"loaded from outside: {file}" for file in outside))
    print(f"{', '.join(modules)}: every library is from this environment")


if __name__ == "__main__":
    main(sys.argv[1:])

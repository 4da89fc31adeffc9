# SPDX-License-Identifier: BSD-3-Clause
"""Imports modules and checks that what the loader brought in is of this environment.

    python loaded_from.py MODULE...

A library of the machine's own ROCm, or any other that only the build machine has, fails it. The C
library alone is the machine's by design.
"""

import importlib
import re
import sys
from pathlib import Path

C_LIBRARY = re.compile(
    r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|util|resolv|nss_\w+))(-[\d.]+)?\.so"
)


def foreign(maps: str, prefix: Path) -> list[str]:
    """The shared libraries in a /proc/PID/maps text that are neither below `prefix` nor glibc's."""
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line}
    return sorted(
        file
        for file in files
        if re.search(r"\.so(\.|$)", file)
        and not Path(file).resolve().is_relative_to(prefix.resolve())
        and not C_LIBRARY.match(Path(file).name)
    )


def main(modules: list[str]) -> int:
    for module in modules:
        importlib.import_module(module)
    wrong = foreign(Path("/proc/self/maps").read_text(), Path(sys.prefix))
    print(f"{', '.join(modules)}: loaded", *(f"from outside: {file}" for file in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: BSD-3-Clause
"""Package test: the installed files are AMD's, byte for byte, and what they load is there."""

import os
import re
import sys
from pathlib import Path

from tree import ROOT, RUNTIME_LINKS, SUMS, files_below, needed, part_of, sha256

# what glibc itself gives
GLIBC = re.compile(r"(ld-linux-x86-64|lib(c|m|dl|rt|pthread|util|resolv))\.so\.\d+$")
PARTS = {"core": 1, "libraries": 2, "devel": 3, "all": 3}


def main() -> None:
    """The argument is what is installed: core, libraries (and core), devel or all (everything)."""
    prefix = Path(os.environ["PREFIX"])
    tree = prefix / ROOT
    here = files_below(tree)
    parts = ("core", "libraries", "devel")[: PARTS[sys.argv[1]]]
    sums = dict(reversed(line.split("  ", 1)) for line in (tree / SUMS).read_text().splitlines())
    wanted = {name for name in sums if part_of(name, False) in parts}
    present = {n for n, p in here.items() if not p.is_symlink()} - {SUMS}
    assert present == wanted, f"missing {wanted - present}, unexpected {present - wanted}"
    for name in sorted(wanted):
        assert sha256(here[name]) == sums[name], f"{name} is not the file that was staged"
    for name in RUNTIME_LINKS:
        assert (tree / name).is_file(), f"{name} leads nowhere"
    libraries = {path.name for path in here.values() if ".so" in path.name}
    for name in sorted(wanted):
        for library in sorted(needed(here[name])):
            found = (
                library in libraries or GLIBC.match(library) or (prefix / "lib" / library).exists()
            )
            assert found, f"{name} needs {library}, which is not installed"
    links = [name for name, path in here.items() if path.is_symlink() and not path.exists()]
    assert not links, f"links that lead nowhere: {links}"
    print(f"{len(wanted)} files as staged, {len(libraries)} libraries, nothing missing")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: BSD-3-Clause
"""Package test: the installed files are unchanged, and the libraries that they need are installed.

usage: check_package.py core|libraries|devel|all
"""

import os
import sys
from pathlib import Path

from tree import ROOT, RUNTIME_LINKS, SUMS, find_part, list_files, require_loadable, sha256

from checks.verdict import require

PARTS = {"core": 1, "libraries": 2, "devel": 3, "all": 3}


def main() -> None:
    """Check the package that the argument names, together with the packages that it needs."""
    prefix = Path(os.environ["PREFIX"])
    tree = prefix / ROOT
    files = list_files(tree)
    parts = ("core", "libraries", "devel")[: PARTS[sys.argv[1]]]
    sums = {}
    for line in (tree / SUMS).read_text().splitlines():
        digest, name = line.split("  ", 1)
        sums[name] = digest
    expected = {name for name in sums if find_part(name, False) in parts}
    present = {name for name, path in files.items() if not path.is_symlink()} - {SUMS}
    differences = f"missing {expected - present}, unexpected {present - expected}"
    require(present == expected, differences)
    for name in sorted(expected):
        require(sha256(files[name]) == sums[name], f"{name} is not the file that was staged")
    for name in RUNTIME_LINKS:
        require((tree / name).is_file(), f"{name} is a dangling link")
    warnings = require_loadable(files)
    links = [name for name, path in files.items() if path.is_symlink() and not path.exists()]
    require(not links, f"dangling links: {links}")
    print(*warnings, f"{len(expected)} files as staged, nothing missing", sep="\n")


if __name__ == "__main__":
    main()

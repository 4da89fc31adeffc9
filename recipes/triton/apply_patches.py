# SPDX-License-Identifier: BSD-3-Clause
"""Applies patches to installed files: ``python apply_patches.py FOLDER PATCH...``

Without fuzz or offset: the lines that a hunk names must be what it expects. Files are changed, not
made, renamed or removed.
"""

import re
import sys
from pathlib import Path

FILE = re.compile(r"^--- a/(\S+)\n\+\+\+ b/\1\n", re.M)
HUNK = re.compile(r"^@@ -(\d+)\S* \+\S+ @@.*\n((?:[ +-].*\n)+)", re.M)


def apply(folder: Path, patch: str) -> None:
    """Raises ValueError for a hunk that does not apply."""
    _, *parts = FILE.split(patch)
    for name, hunks in zip(parts[::2], parts[1::2], strict=True):
        lines = (folder / name).read_text().splitlines(keepends=True)
        for start, body in reversed(HUNK.findall(hunks)):  # from the end: line numbers stay right
            changes = body.splitlines(keepends=True)
            old = [line[1:] for line in changes if line[0] in " -"]
            place = slice(int(start) - 1, int(start) - 1 + len(old))
            if lines[place] != old:
                raise ValueError(f"{name}: the hunk at line {start} does not apply")
            lines[place] = [line[1:] for line in changes if line[0] in " +"]
        (folder / name).write_text("".join(lines))


if __name__ == "__main__":
    for file in sys.argv[2:]:
        apply(Path(sys.argv[1]), Path(file).read_text())
        print(f"applied {file}")

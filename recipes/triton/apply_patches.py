# SPDX-License-Identifier: BSD-3-Clause
"""Apply patches to installed files: ``python apply_patches.py FOLDER PATCH...``

Fuzz and offsets are not allowed: the lines of a hunk must be in the file at exactly its line
number. A patch can only change files; it cannot add, rename or remove them.
"""

import re
import sys
from pathlib import Path

FILE = re.compile(r"^--- a/(\S+)\n\+\+\+ b/\1\n", re.M)
HUNK = re.compile(r"^@@ -(\d+)\S* \+\S+ @@.*\n((?:[ +-].*\n)+)", re.M)


def apply(folder: Path, patch: str) -> None:
    """Apply a patch to the files in a folder. Raise ValueError if a hunk does not apply.

    Args:
        folder: The folder.
        patch: The text of the patch.
    """
    _, *parts = FILE.split(patch)
    for name, hunks in zip(parts[::2], parts[1::2], strict=True):
        file = folder / name
        lines = file.read_text().splitlines(keepends=True)
        # Apply the last hunk first, so that the line numbers of the others stay right.
        for number, body in reversed(HUNK.findall(hunks)):
            changes = body.splitlines(keepends=True)
            old = [line[1:] for line in changes if line[0] in " -"]
            new = [line[1:] for line in changes if line[0] in " +"]
            start = int(number) - 1
            end = start + len(old)
            if lines[start:end] != old:
                raise ValueError(f"{name}: the hunk at line {number} does not apply")
            lines[start:end] = new
        file.write_text("".join(lines))


if __name__ == "__main__":
    for file in sys.argv[2:]:
        apply(Path(sys.argv[1]), Path(file).read_text())
        print(f"applied {file}")

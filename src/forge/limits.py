# SPDX-License-Identifier: BSD-3-Clause
"""How much of each kind of foreign input is read, and the readers that keep to it."""

import os
from pathlib import Path
from typing import Any

from forge.errors import Failed, ForgeError

# Bytes of a text: a manifest, lock, recipe, patch or note.
TEXT = 1 << 26
# Bytes of an index, also unpacked; conda-forge's has less than half of it.
INDEX = 1 << 29
# Bytes of a page of pip's index, unpacked.
PAGE = 1 << 28
# Bytes of a source; AMD's SDK has some GiB.
SOURCE = 1 << 36
# Bytes at the end of a log that are shown.
LOG = 1 << 16
# Bytes of a package's `info`, which is kept in memory, and its files.
INFO, FILES = 1 << 28, 1_000_000
# Values in a rendered recipe.
VALUES = 10_000
# Sources shrink to a tenth, so one that grows beyond both is made to fill a disk.
ARCHIVE_RATIO, ARCHIVE = 100, 256 << 20


def read_bytes(path: Path, limit: int = 0) -> bytes:
    """Read a file. Raises ForgeError for one with more bytes than the limit, or than TEXT."""
    limit = limit or TEXT
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ForgeError(f"{path} has more than {limit} bytes, which no such file has: look at it")
    return data


def last_lines(path: Path, number: int) -> list[str]:
    """Return the last lines of a log, of its last LOG bytes; none where there is no log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG))
        return file.read(LOG).decode(errors="replace").splitlines()[-number:]


class Limited:
    """Writes no more than `size` bytes to `out`: a server may send without an end."""

    def __init__(self, out: Any, size: int, excess: str) -> None:
        self.out, self.left, self.excess = out, size, excess

    def write(self, data: bytes) -> int:
        """Write; raises Failed, with `excess` as its message, if that is too much."""
        self.left -= len(data)
        if self.left < 0:
            raise Failed(self.excess)
        self.out.write(data)
        return len(data)

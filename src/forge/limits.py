# SPDX-License-Identifier: BSD-3-Clause
"""Limits on what is read from files and servers that others made, and readers that keep to them."""

import os
from pathlib import Path
from typing import Any

from forge.errors import Failed, ForgeError

# Bytes of a text: a manifest, lock, recipe, patch or note.
TEXT = 1 << 26
# Bytes of an index, packed or unpacked. conda-forge's has less than half of that.
INDEX = 1 << 29
# Bytes of a page of pip's index, unpacked.
PAGE = 1 << 28
# Bytes of a source. AMD's SDK has some GiB.
SOURCE = 1 << 36
# Bytes at the end of a log that are read to show its last lines.
LOG = 1 << 16
# Bytes of a package's folder `info`, which is kept in memory.
INFO = 1 << 28
# Files in a package.
FILES = 1_000_000
# Values in a rendered recipe.
VALUES = 10_000
# An archive may unpack to ARCHIVE bytes, or to ARCHIVE_RATIO times its size if that is more.
# Sources shrink to a tenth, so an archive that grows beyond both was made to fill a disk.
ARCHIVE = 256 << 20
ARCHIVE_RATIO = 100


def read_bytes(path: Path, limit: int = 0) -> bytes:
    """Read a file.

    Args:
        path: The file.
        limit: The most bytes that it may have; 0 stands for TEXT.

    Raises:
        ForgeError: The file has more bytes.
    """
    limit = limit or TEXT
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ForgeError(f"{path} has more than {limit} bytes, which no such file has: look at it")
    return data


def last_lines(path: Path, number: int) -> list[str]:
    """Return the last lines of a log; none if it does not exist. Only its last LOG bytes count."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG))
        text = file.read(LOG).decode(errors="replace")
    return text.splitlines()[-number:]


class Limited:
    """A writer that takes a limited number of bytes, because a server may send without an end."""

    def __init__(self, out: Any, size: int, excess: str) -> None:
        """Limit a writer.

        Args:
            out: Where the bytes are written.
            size: The most bytes that are written.
            excess: The message of the error for more bytes.
        """
        self.out = out
        self.remaining = size
        self.excess = excess

    def write(self, data: bytes) -> int:
        """Write `data` and return its length. Raises Failed if that exceeds the limit."""
        self.remaining -= len(data)
        if self.remaining < 0:
            raise Failed(self.excess)
        self.out.write(data)
        return len(data)

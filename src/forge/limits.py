# SPDX-License-Identifier: BSD-3-Clause
"""Limits on the size of files and responses that are not trusted, and code that applies them."""

import os
from pathlib import Path
from typing import Any

from forge.errors import Failed, ForgeError

# Maximum bytes of a text file: a manifest, lock, recipe, patch or note.
TEXT = 1 << 26
# Maximum bytes of a repodata.json, and of a run_exports.json, compressed or not.
INDEX = 1 << 29
# Maximum bytes of a page of pip's index, decompressed.
PAGE = 1 << 28
# Maximum bytes of a source. AMD's SDK has some GiB.
SOURCE = 1 << 36
# Number of bytes at the end of a log that are read to show its last lines.
LOG = 1 << 16
# Maximum bytes of a package's folder `info`, which is kept in memory.
INFO = 1 << 28
# Maximum number of files in a package.
FILES = 1_000_000
# Maximum number of values in a rendered recipe.
VALUES = 10_000
# An archive may unpack to ARCHIVE bytes, or to ARCHIVE_RATIO times its size if that is more.
# Compression shrinks usual sources to a tenth. An archive beyond both limits is assumed to be
# meant to fill the disk.
ARCHIVE = 256 << 20
ARCHIVE_RATIO = 100


def read_bytes(path: Path, limit: int = 0) -> bytes:
    """Read a file.

    Args:
        path: The file.
        limit: The maximum number of bytes; 0 stands for TEXT.

    Raises:
        ForgeError: The file has more bytes.
    """
    limit = limit or TEXT
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ForgeError(f"{path} has more than {limit} bytes, too many for such a file: check it")
    return data


def last_lines(path: Path, number: int) -> list[str]:
    """Return the last lines of a log, from its last LOG bytes; none if it does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG))
        text = file.read(LOG).decode(errors="replace")
    return text.splitlines()[-number:]


class Limited:
    """A writer that accepts a limited number of bytes, because a server may send endlessly."""

    def __init__(self, out: Any, size: int, excess: str) -> None:
        """Limit a writer.

        Args:
            out: The object whose method `write` is called with the bytes.
            size: The maximum number of bytes.
            excess: The error message if there are more bytes.
        """
        self.out = out
        self.remaining = size
        self.excess = excess

    def write(self, data: bytes) -> int:
        """Write `data` and return its length. Raise Failed if all data so far exceed the limit."""
        self.remaining -= len(data)
        if self.remaining < 0:
            raise Failed(self.excess)
        self.out.write(data)
        return len(data)

# SPDX-License-Identifier: BSD-3-Clause
"""Limits of files of code: those that exceed them are made to fill memory or time.

The largest known files are rocBLAS's: 10 MiB of kernels, hundreds of notes.
"""

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from strix_emulate.errors import LoadError

#: Bytes of a file of code.
FILE = 1 << 30
#: Bytes of the note that Triton writes beside a file of code.
NOTE = 1 << 20
#: Bytes of an array for an argument.
ARRAY = 1 << 33
#: Bytes that any file may unpack to, images and code included.
ALLOWED = 1 << 28
#: Bytes that a file may unpack to, by its own size. Packed code has a tenth of its size.
RATIO = 200
#: Bytes that an xz stream's dictionary may take; that of `xz -9` has 64 MiB.
XZ_MEMORY = 1 << 28
#: Bytes of a name.
NAME = 1 << 14
#: Bytes of an ELF file's metadata. Python's objects for it take a hundred times as much.
METADATA = 1 << 24
#: Number of parts of each kind. Entries are those of a pack or a bundle.
COUNTS = {
    "entries": 1 << 14,
    "kernels": 1 << 14,
    "segments": 1 << 8,
    "sections": 1 << 10,
    "notes": 1 << 12,
    "symbols": 1 << 17,
    "relocations": 1 << 18,
}


def read_file(file: Path, limit: int = 0) -> bytes:
    """Read a file. Raise LoadError for one with more bytes than the limit, or than FILE."""
    limit = limit or FILE
    with file.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise LoadError(f"{file}: has more than {limit} bytes, the limit for such a file")
    return data


@dataclass
class Budget:
    """What one file may still take.

    Attributes:
        origin: Name of the file.
        size: Bytes of the file.
        left: Bytes that may still be unpacked from it.
        counted: Number of parts so far, by kind.
    """

    origin: str
    size: int
    left: int = field(init=False)
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remaining = max(ALLOWED, RATIO * self.size)

    def take(self, size: int) -> None:
        """Take bytes from the budget. Raise LoadError if it has no more of them."""
        self.remaining -= size
        if self.remaining < 0:
            limit = max(ALLOWED, RATIO * self.size)
            raise LoadError(
                f"{self.origin}: {self.size} bytes that would grow to more than {limit}: damaged, "
                "or made to fill the memory"
            )

    def count(self, kind: str, number: int = 1) -> int:
        """Count parts of a kind; return the number. Raise LoadError if the file has too many."""
        self.counted[kind] = self.counted.get(kind, 0) + number
        if self.counted[kind] > COUNTS[kind]:
            raise LoadError(
                f"{self.origin}: more than {COUNTS[kind]} {kind}: damaged, or made to take time"
            )
        return number


def require_modest_array(file: Path) -> None:
    """Raise LoadError for a file of arrays, packed or not, that has more bytes than ARRAY."""
    size = file.stat().st_size
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
    if size > ARRAY:
        raise LoadError(f"{file}: holds {size} bytes, at most {ARRAY} are read")

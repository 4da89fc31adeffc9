# SPDX-License-Identifier: BSD-3-Clause
"""Limits of the size of input files. They stop files that were made to use up memory or time.

No known file exceeds them. The largest known code object is RCCL's, with 88 million bytes. The code
objects of rocBLAS have 10 MiB of kernels and hundreds of notes.
"""

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from strix_emulate.errors import LoadError

#: Maximum bytes of a file that contains code.
FILE = 1 << 30
#: Maximum bytes of the JSON file that Triton writes beside a code object.
NOTE = 1 << 20
#: Maximum bytes of an array for an argument.
ARRAY = 1 << 33
#: A file of any size may unpack to this many bytes. The loader's copies of the file's code and
#: memory image count too.
ALLOWED = 1 << 28
#: A file may also unpack to this many times its own size, if that is more than ALLOWED. Compressed
#: code has about a tenth of the bytes that it unpacks to.
RATIO = 200
#: Maximum bytes of memory for decompressing an xz stream. The dictionary of `xz -9` has 64 MiB.
XZ_MEMORY = 1 << 28
#: Maximum bytes of a symbol's name.
NAME = 1 << 14
#: Maximum bytes of an ELF file's metadata. As Python objects it takes a hundred times as much.
METADATA = 1 << 24
#: Maximum number of parts of a file, by kind. Entries are the members of a pack, a zip or a bundle.
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
    """Read a file. Raise LoadError if it is larger than `limit`, or than FILE if `limit` is 0."""
    limit = limit or FILE
    with file.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise LoadError(f"{file}: has more than {limit} bytes, the limit for such a file")
    return data


@dataclass
class Budget:
    """How much of the limits one file has used, and how much it may still use.

    Attributes:
        origin: Name of the file.
        size: Bytes of the file.
        remaining: Bytes that may still be unpacked from the file.
        counted: Number of parts so far, by kind.
    """

    origin: str
    size: int
    remaining: int = field(init=False)
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remaining = max(ALLOWED, RATIO * self.size)

    def take(self, size: int) -> None:
        """Take bytes from the budget. Raise LoadError if fewer bytes remain."""
        self.remaining -= size
        if self.remaining < 0:
            limit = max(ALLOWED, RATIO * self.size)
            raise LoadError(
                f"{self.origin}: its {self.size} bytes would grow to more than {limit} bytes: "
                "the file is damaged, or was made to fill the memory"
            )

    def count(self, kind: str, number: int = 1) -> int:
        """Count parts of a kind. Return `number`. Raise LoadError if the file has too many."""
        self.counted[kind] = self.counted.get(kind, 0) + number
        if self.counted[kind] > COUNTS[kind]:
            raise LoadError(
                f"{self.origin}: more than {COUNTS[kind]} {kind}: the file is damaged, or was made "
                "to take time"
            )
        return number


def require_modest_array(file: Path) -> None:
    """Raise LoadError if the arrays in an .npy or .npz file have more bytes than ARRAY."""
    size = file.stat().st_size
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
    if size > ARRAY:
        raise LoadError(f"{file}: holds {size} bytes, more than {ARRAY}, the limit for arrays")

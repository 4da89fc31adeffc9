# SPDX-License-Identifier: BSD-3-Clause
"""Unpack a package by rattler, once every reader of its archive would read the same."""

import os
import struct
import zipfile
from pathlib import Path

from rattler.package_streaming import extract

from forge.errors import Failed, Refused


def stem(package: Path) -> str:
    """Return NAME-VERSION-BUILD of a .conda or .tar.bz2 file."""
    return package.name.removesuffix(".conda").removesuffix(".tar.bz2")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a package with rattler into a new folder.

    Raises Failed if it is damaged, Refused if readers could differ in what it holds.
    """
    try:
        if archive.name.endswith(".conda"):
            _require_one_reading(archive)
        extract(archive, folder)
    except Refused as error:
        raise Refused(f"{archive} holds {error}: install nothing of it") from None
    except Exception as error:  # zipfile's, struct's, and what the bindings raise
        says = "; ".join(str(error).splitlines()) or "truncated"
        raise Failed(f"{archive} cannot be read: {says:.500}") from None


def _require_one_reading(archive: Path) -> None:
    """Raise Refused unless a .conda is what its name says, stored, in order, and nothing else.

    Some readers take the central directory, others the headers before each member.
    """
    names = ["metadata.json", *(f"{kind}-{stem(archive)}.tar.zst" for kind in ("info", "pkg"))]
    with archive.open("rb") as file, zipfile.ZipFile(file) as listing:
        members, end = listing.infolist(), 0
        if sorted(member.filename for member in members) != sorted(names):
            raise Refused(
                "other members than metadata.json and two archives of its name; was it renamed?"
            )
        for member in members:
            file.seek(end)
            header = struct.unpack("<4s2xHH4xIIIHH", file.read(30))
            signature, flags, method, crc, packed, size, name, extra = header
            says, more = file.read(name), file.read(extra)
            if extra and size == packed == 0xFFFFFFFF:  # more than 32 bits of size
                size, packed = struct.unpack("<4xQQ", more[:20])
            fields = (signature, flags, method, crc, says.decode(), packed, size)
            if (end, *fields) != (
                member.header_offset, b"PK\3\4", member.flag_bits, member.compress_type, member.CRC,
                member.filename, member.compress_size, member.file_size,
            ) or (flags, method) != (0, zipfile.ZIP_STORED):  # fmt: skip
                raise Refused("a member that is not stored, or headers that differ")
            end += 30 + name + extra + size
        file.seek(-22, os.SEEK_END)  # where the last record of a zip archive is
        if end != listing.start_dir or listing.comment or file.read(4) != b"PK\5\6":
            raise Refused("data beside the members of its zip archive")

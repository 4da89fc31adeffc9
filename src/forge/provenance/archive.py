# SPDX-License-Identifier: BSD-3-Clause
"""The files of a conda package, read without unpacking it, and never more than an installer sees.

By hand: py-rattler's PackageArchive holds whole files in memory, and most processes that read
through it abort when they exit.
"""

import bz2
import hashlib
import io
import posixpath
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import zstandard

from forge.errors import BuildFailed, Refused

INFO_LIMIT = 1 << 28  # bytes of `info`, which is kept in memory
PLAIN = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)


class Entry(NamedTuple):
    """One file of a package. `link` is where a symbolic one leads; `content` is kept of `info`."""

    sha256: str
    link: str | None
    content: bytes


class Member(tarfile.TarInfo):
    """A member of a tar archive. tarfile ends at a damaged one; an installer may go on."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise ValueError(f"its tar archive: {error}") from None


def stem(package: Path) -> str:
    """NAME-VERSION-BUILD of a .conda or .tar.bz2 file."""
    return package.name.removesuffix(".conda").removesuffix(".tar.bz2")


def read(package: Path, section: str) -> dict[str, Entry]:
    """Name -> Entry of every file in `info` or `pkg`.

    Raises BuildFailed if the package is damaged, Refused if it holds what no package may.
    """
    single = package.name.endswith(".tar.bz2")
    entries: dict[str, Entry] = {}
    kept = 0
    try:
        with package.open("rb") as file:
            packed: Any = bz2.BZ2File(file) if single else _inner(file, section, stem(package))
            with tarfile.open(fileobj=packed, mode="r|", bufsize=1 << 20, tarinfo=Member) as tar:
                for member in tar:
                    if single and section != _section(member.name):
                        continue
                    kept += member.size
                    if section == "info" and kept > INFO_LIMIT:
                        raise Refused(f"more than {INFO_LIMIT} bytes in info")
                    _add(tar, member, section, entries)
                while rest := tar.fileobj.read(1 << 20):
                    if rest.strip(b"\0"):
                        raise Refused("data after the end of an archive")
    except Refused as error:
        raise Refused(f"{package} holds {error}: install nothing of it") from None
    except Exception as error:  # each layer has its own errors, and zipfile wrong ones too
        raise BuildFailed(f"{package} cannot be read: {error or 'truncated'}") from None
    return entries


def _inner(file: IO[bytes], section: str, stem: str) -> Any:
    """The tar archive of a .conda's section, unpacked.

    rattler unpacks while a package arrives: every archive that it meets, listed or not. So there
    are exactly two, and nothing between or after them.
    """
    archive, inner = zipfile.ZipFile(file), f"{section}-{stem}.tar.zst"
    members = archive.infolist()
    names = sorted(member.filename for member in members)
    if inner not in names:
        raise BuildFailed(f"it holds no {inner}; was it renamed?")
    if names != sorted(["metadata.json", f"info-{stem}.tar.zst", f"pkg-{stem}.tar.zst"]):
        raise Refused("other members than metadata.json and two archives")
    end = 0
    for member in members:
        file.seek(end)
        flags, size, name, extra = struct.unpack("<6xH10xI4x2H", file.read(30))
        if extra:  # sizes of 64 bits
            (size,) = struct.unpack("<12xQ", file.read(name + extra)[name:])
        if flags & 8 or (end, size) != (member.header_offset, member.compress_size):
            raise Refused("data between the members of its zip archive")
        end += 30 + name + extra + size
    if end != archive.start_dir:
        raise Refused("data after the members of its zip archive")
    unzstd = zstandard.ZstdDecompressor()
    return unzstd.stream_reader(archive.open(inner), read_across_frames=True)


def _section(name: str) -> str:
    return "info" if name.split("/")[0] == "info" else "pkg"


def _add(
    tar: tarfile.TarFile, member: tarfile.TarInfo, section: str, entries: dict[str, Entry]
) -> None:
    """Add a member that a package may hold. Raises Refused, in words of what is held."""
    name, shown = member.name, ascii(member.name)[:200]
    if not is_plain(name) and name != ".":
        raise Refused(f"{shown}, which is no plain path below a prefix")
    # GNU's sparse files have two names, and readers differ in which they take
    if member.type not in PLAIN or any("GNU.sparse" in key for key in member.pax_headers):
        raise Refused(f"{shown}, which is no file, folder or link")
    if member.isdir():
        return
    if name in entries:
        raise Refused(f"{shown} twice")
    if section != _section(name):
        raise Refused(f"{shown} in the archive {section}")
    if section == "info" and not member.isreg():
        raise Refused(f"{shown}, which is a link")
    if member.islnk():
        if member.linkname not in entries:
            raise Refused(f"{shown}, a hard link to no file before it")
        entries[name] = entries[member.linkname]
        return
    stream: Any = (
        io.BytesIO(member.linkname.encode()) if member.issym() else tar.extractfile(member)
    )
    content = b""
    if section == "info":
        content = stream.read()
        stream = io.BytesIO(content)
    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    entries[name] = Entry(sha256, member.linkname if member.issym() else None, content)


def is_plain(name: str) -> bool:
    """Whether a name is a relative path in its shortest form that does not lead upwards."""
    plain = posixpath.normpath(name) == name and "\0" not in name
    return plain and name != "." and not f"{name}/".startswith(("/", "../"))

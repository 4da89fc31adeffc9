# SPDX-License-Identifier: BSD-3-Clause
"""Archives, unpacked into a folder and nowhere else."""
# ruff: noqa: C901 (inner functions count with the one around them)

import lzma
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from forge import limits
from forge.errors import Refused

ARCHIVES = tuple(ext for _, extensions, _ in shutil.get_unpack_formats() for ext in extensions)
# What Python's readers raise for damaged archives and for names that no file can have.
DAMAGED = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, NotImplementedError, struct.error,
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip

if hasattr(tarfile, "tar_filter"):  # since CPython 3.11.4
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.tar_filter)


def unpack(archive: Path, target: Path, only: Collection[str] | None = None) -> None:
    """Unpack as rattler-build does: a single top folder is dropped.

    Of regular files those whose path is in `only`, with or without that folder, or all. Raises
    Refused for a damaged archive, and for one that holds a device, writes outside the folder, also
    through its own links, or grows out of all proportion.
    """
    folder = target.with_suffix(".unpacking")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    left = max(limits.ARCHIVE, limits.ARCHIVE_RATIO * archive.stat().st_size)
    inside = os.path.realpath(folder)
    linked, tops = False, set[str]()

    def asked(name: str) -> bool:
        parts = Path(name).parts  # none of `./`
        tops.update(parts[:1])
        return only is None or not {"/".join(parts), "/".join(parts[1:])}.isdisjoint(only)

    def check(size: int, *names: str) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise ValueError(f"its content is more than {limits.ARCHIVE_RATIO} times its own size")
        for name in names:
            place = Path(inside, name)
            if linked:
                place = Path(os.path.realpath(place))
            if ".." in Path(name).parts or not place.is_relative_to(inside):
                raise ValueError(f"{name!r:.200} leads out of the folder")

    def checked(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        nonlocal linked
        for member in tar:  # once what came before it is unpacked: a link may lead anywhere
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                raise ValueError(f"{member.name!r:.200} is not a file, directory or link")
            linked = linked or not (member.isreg() or member.isdir())
            check(member.size, member.name, member.linkname if member.islnk() else "")
            member.uname = member.gname = ""  # root would look up both for every file
            if asked(member.name) or not member.isreg():  # a path may lead through links
                yield member

    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for info in opened.infolist():
                    check(info.file_size, info.filename)
                opened.extractall(folder, [name for name in opened.namelist() if asked(name)])
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, members=checked(tar))
        single = folder / tops.pop() if len(tops) == 1 else folder
        (single if single.is_dir() else folder).replace(target)
    except DAMAGED as error:
        raise Refused(f"{archive} cannot be unpacked: {error!s:.300}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)

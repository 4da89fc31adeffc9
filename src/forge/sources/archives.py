# SPDX-License-Identifier: BSD-3-Clause
"""Archives, unpacked into a folder and nowhere else."""

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


def _list_extensions() -> tuple[str, ...]:
    extensions = []
    for _, format_extensions, _ in shutil.get_unpack_formats():
        extensions += format_extensions
    return tuple(extensions)


ARCHIVES = _list_extensions()
# What Python's readers raise for damaged archives and for names that no file can have.
DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)

if hasattr(tarfile, "tar_filter"):  # since CPython 3.11.4
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.tar_filter)


def unpack(archive: Path, target: Path, only: Collection[str] | None = None) -> None:
    """Unpack an archive as rattler-build does: a single top folder is dropped.

    Args:
        archive: A tar or zip file.
        target: The folder to make.
        only: The paths of the regular files to unpack, without the top folder or with it; None for
            all.

    Raises:
        Refused: The archive is damaged, holds a device, grows out of all proportion, or would write
            outside the folder, be it through its own links.
    """
    folder = target.with_suffix(".unpacking")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    limit = max(limits.ARCHIVE, limits.ARCHIVE_RATIO * archive.stat().st_size)
    members = _Members(folder, limit, only)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zip_file:
                zip_file.extractall(folder, members.check_zip(zip_file))
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, members=members.check_tar(tar))
        root = folder
        if len(members.tops) == 1:
            top = folder / members.tops.pop()
            if top.is_dir():
                root = top
        root.replace(target)
    except DAMAGED as error:
        raise Refused(f"{archive} cannot be unpacked: {error!s:.300}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Members:
    """The members of an archive, checked before they are unpacked.

    Attributes:
        tops: The names at the top of the archive.
    """

    def __init__(self, folder: Path, limit: int, only: Collection[str] | None) -> None:
        """Prepare to check members.

        Args:
            folder: The folder that they are unpacked to.
            limit: The most bytes that they may have together.
            only: The paths of the regular files to unpack; None for all.
        """
        self.tops = set[str]()
        self._folder = os.path.realpath(folder)
        self._remaining = limit
        self._only = only
        self._has_links = False

    def check_zip(self, archive: zipfile.ZipFile) -> list[str]:
        """Return the names of the members to unpack. Raises ValueError for a hostile one."""
        selected = []
        for info in archive.infolist():
            self._check(info.file_size, info.filename)
            if self._is_selected(info.filename):
                selected.append(info.filename)
        return selected

    def check_tar(self, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        """Yield each member to unpack when those before it are unpacked.

        Then links in its path are in the folder, and can be followed. Raises ValueError for a
        hostile member.
        """
        for member in archive:
            is_link = member.issym() or member.islnk()
            is_plain = member.isreg() or member.isdir()
            if not (is_plain or is_link):
                raise ValueError(f"{member.name!r:.200} is not a file, directory or link")
            self._has_links = self._has_links or is_link
            hard_link = member.linkname if member.islnk() else ""
            self._check(member.size, member.name, hard_link)
            # tarfile, as root, would look up both names for every file
            member.uname = ""
            member.gname = ""
            is_selected = self._is_selected(member.name)
            if is_selected or not member.isreg():  # the path of a file may lead through links
                yield member

    def _is_selected(self, name: str) -> bool:
        """Return whether a regular file is to be unpacked; notes its top folder."""
        parts = Path(name).parts  # without `.`
        self.tops.update(parts[:1])
        if self._only is None:
            return True
        return "/".join(parts) in self._only or "/".join(parts[1:]) in self._only

    def _check(self, size: int, *names: str) -> None:
        """Raise ValueError for a member that is too large, or would be outside of the folder."""
        self._remaining -= size
        if self._remaining < 0:
            raise ValueError(f"its content is more than {limits.ARCHIVE_RATIO} times its own size")
        for name in names:
            path = Path(self._folder, name)
            if self._has_links:
                path = Path(os.path.realpath(path))
            if ".." in Path(name).parts or not path.is_relative_to(self._folder):
                raise ValueError(f"{name!r:.200} leads out of the folder")

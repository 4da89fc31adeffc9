# SPDX-License-Identifier: BSD-3-Clause
"""Unpack archives without writing outside of the target folder."""

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
# The exceptions of Python's readers for damaged archives and for impossible file names.
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

if hasattr(tarfile, "tar_filter"):
    # CPython has this filter since 3.11.4.
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.tar_filter)


def unpack(archive: Path, target: Path, only: Collection[str] | None = None) -> None:
    """Unpack an archive as rattler-build does: a single top folder is left out of all paths.

    Args:
        archive: A tar or zip file.
        target: The folder to make.
        only: The paths of the regular files to unpack, without or with the top folder; None for
            all files.

    Raises:
        Refused: The archive is damaged, contains a device, unpacks to too many bytes, or would
            write outside the folder, directly or through links in the archive.
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
            folder: The folder that the members are unpacked to.
            limit: Maximum number of bytes of all members together.
            only: The paths of the regular files to unpack; None for all files.
        """
        self.tops = set[str]()
        self._folder = os.path.realpath(folder)
        self._remaining = limit
        self._only = only
        self._has_links = False

    def check_zip(self, archive: zipfile.ZipFile) -> list[str]:
        """Return the names of the members to unpack. Raise ValueError if any member is unsafe."""
        selected = []
        for info in archive.infolist():
            self._check(info.file_size, info.filename)
            if self._is_selected(info.filename):
                selected.append(info.filename)
        return selected

    def check_tar(self, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        """Yield each member to unpack, after the previous ones have been unpacked.

        At that time, links in the path of the member exist in the folder, so that they can be
        followed. Raise ValueError if a member is unsafe.
        """
        for member in archive:
            is_link = member.issym() or member.islnk()
            is_plain = member.isreg() or member.isdir()
            if not (is_plain or is_link):
                raise ValueError(f"{member.name!r:.200} is not a file, directory or link")
            self._has_links = self._has_links or is_link
            hard_link = member.linkname if member.islnk() else ""
            self._check(member.size, member.name, hard_link)
            # Clear these names. Otherwise, if root runs tarfile, it would look up the user and the
            # group of every file.
            member.uname = ""
            member.gname = ""
            is_selected = self._is_selected(member.name)
            if is_selected or not member.isreg():
                # Links and folders may lead to a selected file.
                yield member

    def _is_selected(self, name: str) -> bool:
        """Add the first part of a member's path to `tops`; return whether `only` selects it."""
        # `parts` leaves out `.`.
        parts = Path(name).parts
        self.tops.update(parts[:1])
        if self._only is None:
            return True
        return "/".join(parts) in self._only or "/".join(parts[1:]) in self._only

    def _check(self, size: int, *names: str) -> None:
        """Raise ValueError if a member leads out of the folder or exceeds the remaining bytes."""
        self._remaining -= size
        if self._remaining < 0:
            raise ValueError(f"it unpacks to more than {limits.ARCHIVE_RATIO} times its size")
        for name in names:
            path = Path(self._folder, name)
            if self._has_links:
                path = Path(os.path.realpath(path))
            if ".." in Path(name).parts or not path.is_relative_to(self._folder):
                raise ValueError(f"{name!r:.200} leads out of the folder")

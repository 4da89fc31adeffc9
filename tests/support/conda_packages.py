# SPDX-License-Identifier: BSD-3-Clause
"""Write conda packages and source archives member by member, to test hostile content."""

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zstandard

# A member of a tar archive: its header and its content.
Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"x") -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def special(name: str, kind: bytes, target: str = "") -> Member:
    """Return a member without content: a link (tarfile.SYMTYPE, LNKTYPE), a folder or a device."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def link(name: str, target: str) -> Member:
    return special(name, tarfile.SYMTYPE, target)


def list_entries(members: Iterable[Member]) -> list[dict[str, Any]]:
    """Return the entries of a correct info/paths.json for these members."""
    members = list(members)
    contents = {info.name: content for info, content in members}
    entries = []
    for info, content in members:
        if info.isdir():
            continue
        if info.islnk():
            content = contents.get(info.linkname, b"")
        entries.append(
            {
                "_path": info.name,
                "path_type": "softlink" if info.issym() else "hardlink",
                "sha256": hashlib.sha256(content).hexdigest(),
                "size_in_bytes": len(content),
            }
        )
    return entries


def tar(members: Iterable[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tarball(*members: Member) -> bytes:
    """Return a .tar.gz without a time, so that equal members give equal bytes."""
    return gzip.compress(tar(members), mtime=0)


def package(
    folder: Path,
    members: Iterable[Member],
    name: str = "a",
    paths: list[dict[str, Any]] | None = None,
    info: Iterable[Member] = (),
    single: bool = False,
    dist: str = "",
    **index: Any,
) -> Path:
    """Write a package into a folder and return its file.

    Args:
        folder: The folder.
        members: The members of the package.
        name: The name of the package. Its version is 1 and its build string 0.
        paths: The entries of info/paths.json; by default the correct ones.
        info: Further members of the info section.
        single: Whether to write a .tar.bz2 in place of a .conda.
        dist: The file name without its extension; by default NAME-1-0.
        index: Fields of info/index.json that replace the default ones.
    """
    members = list(members)
    if paths is None:
        paths = list_entries(members)
    fields = {"name": name, "version": "1", "build": "0", "build_number": 0, "depends": []}
    texts = {
        "index.json": fields | {"subdir": "noarch", "noarch": "generic"} | index,
        "paths.json": {"paths": paths, "paths_version": 1},
    }
    about = [file(f"info/{name}", json.dumps(text).encode()) for name, text in texts.items()]
    dist = dist or f"{name}-1-0"
    folder.mkdir(parents=True, exist_ok=True)
    if single:
        target = folder / f"{dist}.tar.bz2"
        with tarfile.open(target, "w:bz2") as archive:
            for header, content in [*about, *info, *members]:
                archive.addfile(header, io.BytesIO(content))
        return target
    target = folder / f"{dist}.conda"
    with zipfile.ZipFile(target, "w") as new:
        new.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
        new.writestr(f"pkg-{dist}.tar.zst", zstandard.compress(tar(members)))
        new.writestr(f"info-{dist}.tar.zst", zstandard.compress(tar([*about, *info])))
    return target


def repack(package: Path, target: Path, change: Callable[[str, str, bytes], bytes | None]) -> Path:
    """Copy a .conda to `target`, with some of its files changed or left out.

    Hashes are not updated.

    Args:
        package: The .conda.
        target: The copy. It may be the same file.
        change: Returns the new content of a file, or None to leave it out. Its arguments are the
            archive (`info` or `pkg-`), the file's name and its content.
    """
    with zipfile.ZipFile(package) as old:
        archives = {item: old.read(item) for item in old.namelist()}
    with zipfile.ZipFile(target, "w") as new:
        for item, data in archives.items():
            if item.endswith(".tar.zst"):
                data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
                members = []
                with tarfile.open(fileobj=io.BytesIO(data)) as source:
                    for member in source:
                        stream = source.extractfile(member) if member.isreg() else None
                        content = stream.read() if stream else b""
                        if stream:
                            content = change(item[:4], member.name, content)
                        if content is not None:
                            member.size = len(content)
                            members.append((member, content))
                data = zstandard.compress(tar(members))
            new.writestr(item, data)
    return target

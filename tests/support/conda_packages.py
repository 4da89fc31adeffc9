# SPDX-License-Identifier: BSD-3-Clause
"""Archives by hand: conda packages with members that no well-meaning tool makes, and sources."""

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

# a member of a tar archive: its header, and its content
Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"x") -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def special(name: str, kind: bytes, target: str = "") -> Member:
    """A link (tarfile.SYMTYPE, LNKTYPE), a folder, a device."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def link(name: str, target: str) -> Member:
    return special(name, tarfile.SYMTYPE, target)


def listed(members: Iterable[Member]) -> list[dict[str, Any]]:
    """The entries of an honest info/paths.json."""
    members = list(members)
    held = {info.name: content for info, content in members}
    members = [(i, held.get(i.linkname, b"") if i.islnk() else content) for i, content in members]
    return [
        {
            "_path": info.name,
            "path_type": "softlink" if info.issym() else "hardlink",
            "sha256": hashlib.sha256(content).hexdigest(),
            "size_in_bytes": len(content),
        }
        for info, content in members
        if not info.isdir()
    ]


def tar(members: Iterable[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tarball(*members: Member) -> bytes:
    """A .tar.gz, the same at any time."""
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
    """A package NAME-1-0, or `dist`, of some members, in FOLDER.

    `paths` is its info/paths.json if not honest, `info` are more members of its info; `single`
    makes a .tar.bz2.
    """
    members = list(members)
    says = {"name": name, "version": "1", "build": "0", "build_number": 0, "depends": []}
    texts = {
        "index.json": says | {"subdir": "noarch", "noarch": "generic"} | index,
        "paths.json": {"paths": listed(members) if paths is None else paths, "paths_version": 1},
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


def repacked(
    package: Path, target: Path, change: Callable[[str, str, bytes], bytes | None]
) -> Path:
    """A copy of a .conda with its files' contents changed, or left out; hashes are not updated.

    `change` is given the archive (`info` or `pkg-`), the file's name and its content.
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
                        kept = change(item[:4], member.name, content) if stream else content
                        if kept is not None:
                            member.size = len(kept)
                            members.append((member, kept))
                data = zstandard.compress(tar(members))
            new.writestr(item, data)
    return target

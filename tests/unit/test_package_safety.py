# SPDX-License-Identifier: BSD-3-Clause
"""Packages that would write outside the prefix, or show an installer more than a checker."""

from __future__ import annotations

import bz2
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from support.conda_packages import Member, file, link, listed, package, special, tar

from forge.errors import BuildFailed, ForgeError
from forge.provenance.package import Package

GOOD = [
    special("lib", tarfile.DIRTYPE),
    file("lib/deep/libx.so.1"),
    link("lib/libx.so", "deep/libx.so.1"),
    link("lib64", "lib"),
    link("lib/up", "../share/./zone"),
    link("lib/system", "/usr/share/zoneinfo"),  # nothing is written through it
    special("bin/hard", tarfile.LNKTYPE, "lib/deep/libx.so.1"),
]
OUT = r"leads out of the prefix through a link"
PLAIN = "no plain path below a prefix"


def sparse(name: str) -> Member:
    info, content = file("innocent")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.name": name}
    return info, content


HOSTILE: dict[str, tuple[list[Member], str]] = {
    "upwards": ([file("../../x")], PLAIN),
    "absolute": ([file("/etc/x")], PLAIN),
    "through a folder": ([file("lib/../../x")], PLAIN),
    "not shortest": ([file("lib//x")], PLAIN),
    "folder upwards": ([special("../x", tarfile.DIRTYPE)], PLAIN),
    "twice": ([file("x"), file("x", b"y")], "twice"),
    "device": ([special("null", tarfile.CHRTYPE)], "no file, folder or link"),
    "block device": ([special("sda", tarfile.BLKTYPE)], "no file, folder or link"),
    "pipe": ([special("pipe", tarfile.FIFOTYPE)], "no file, folder or link"),
    "sparse": ([sparse("info/paths.json")], "no file, folder or link"),
    "hard link out": ([special("x", tarfile.LNKTYPE, "../../etc/passwd")], "hard link"),
    "hard link to what comes later": ([special("x", tarfile.LNKTYPE, "y"), file("y")], "hard link"),
    "link out": ([link("lib/x", "../../etc")], OUT),
    "below an absolute link": ([link("x", "/etc"), file("x/y")], OUT),
    "link to itself": ([link("x", "x")], OUT),
    "links that lead out together": (
        [link("a/b/up", "../.."), link("x", "a/b/up/../etc")], OUT,
    ),
    "below a link out": ([link("x", ".."), file("x/y")], OUT),
    "info in the payload": ([file("info/paths.json")], "in the archive pkg"),
    "info is a link": ([link("info", "lib")], "in the archive pkg"),
}  # fmt: skip


@pytest.mark.parametrize("single", [False, True])
def test_good_package_is_safe(tmp_path: Path, single: bool) -> None:
    Package(package(tmp_path, GOOD, single=single)).require_safe()


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_member(case: str, single: bool, tmp_path: Path) -> None:
    """One line that names the package and the member, in both formats."""
    members, message = HOSTILE[case]
    if single and "info" in case:
        message = "info"  # there it is the package's own info, twice or a link
    built = package(tmp_path, [*GOOD, *members], single=single)
    with pytest.raises(ForgeError, match=message) as error:
        Package(built).require_safe()
    assert built.name in str(error.value) and "\n" not in str(error.value)


LISTS: dict[str, tuple[Callable[[list[dict]], object], str]] = {
    "upwards": (lambda p: p[0].update(_path="../../x"), PLAIN),
    "absolute": (lambda p: p[0].update(_path="/etc/x"), PLAIN),
    "info": (lambda p: p[0].update(_path="info/index.json"), PLAIN),
    "folder upwards": (lambda p: p.append({"_path": "../x", "path_type": "directory"}), PLAIN),
    "twice": (lambda p: p.append(p[0]), "twice"),
    "not all": (lambda p: p.pop(), "not in info/paths.json"),
    "more": (lambda p: p.append(p[0] | {"_path": "more"}), "only in info/paths.json"),
    "a link as a file": (lambda p: p[1].update(path_type="hardlink"), "not both"),
    "another shape": (lambda p: p.append([]), "is no list"),
}


@pytest.mark.parametrize("case", LISTS)
def test_list_that_is_not_of_the_members(case: str, tmp_path: Path) -> None:
    change, message = LISTS[case]
    paths = listed(GOOD)
    change(paths)
    with pytest.raises(ForgeError, match=message):
        Package(package(tmp_path, GOOD, paths=paths)).require_safe()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([link("info/x", "../lib")], "which is a link"),
        ([file("info/index.json", b"{}")], "twice"),
        ([file("lib/x")], "in the archive info"),
        ([file("info/../../x")], PLAIN),
    ],
)
def test_hostile_info(more: list[Member], message: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=message):
        Package(package(tmp_path, GOOD, info=more)).require_safe()


@pytest.mark.parametrize("script", ["../../x", "/x", "a/b", "..", ""])
def test_console_script_outside_of_bin(script: str, tmp_path: Path) -> None:
    """An installer makes it from info/link.json alone."""
    text = {"noarch": {"type": "python", "entry_points": [f"{script} = a:main"]}}
    built = package(tmp_path, GOOD, info=[file("info/link.json", json.dumps(text).encode())])
    with pytest.raises(ForgeError, match="console script"):
        Package(built).require_safe()
    text["noarch"]["entry_points"] = ["a-1.b = a:main"]
    built = package(tmp_path, GOOD, info=[file("info/link.json", json.dumps(text).encode())])
    Package(built).require_safe()


def test_package_of_another_name(tmp_path: Path) -> None:
    built = package(tmp_path, GOOD, version="2")
    with pytest.raises(BuildFailed, match="calls itself 'a-2-0'; was it renamed"):
        Package(built).require_safe()


def hidden_member(built: Path, where: str) -> None:
    """An archive more, where zipfile does not look and an installer that streams does."""
    evil = zstandard.compress(tar([file("info/paths.json", b"{}")]))
    local = struct.pack(
        "<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, zipfile.crc32(evil), len(evil), len(evil), 12, 0
    )
    whole, entry = built.read_bytes(), local + b"evil.tar.zst" + evil
    start = zipfile.ZipFile(built).start_dir if where == "end" else 0
    end = bytearray(whole[start:])
    if where == "end":  # the central directory is found by its offset, in the last 6th byte
        end[-6:-2] = struct.pack("<I", start + len(entry))
    built.write_bytes(whole[:start] + entry + bytes(end))


def more_listed(built: Path) -> None:
    with zipfile.ZipFile(built, "a") as archive:
        archive.writestr("more.tar.zst", zstandard.compress(tar([file("x")])))


def second_frame(built: Path) -> None:
    """A second zstd frame with another archive: some readers stop at the first frame."""
    with zipfile.ZipFile(built) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["pkg-a-1-0.tar.zst"] += zstandard.compress(tar([file("info/paths.json", b"{}")]))
    with zipfile.ZipFile(built, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def damaged_header(built: Path) -> None:
    """A user's id that is no number: tarfile takes it for the end, installers do not read it."""
    archive = tar(GOOD)
    more = bytearray(tar([link("info/paths.json", "x")])[:512])
    more[108:116] = b"zzzzzzz\0"
    more[148:156] = b"%06o\0 " % sum(more[:148] + b" " * 8 + more[156:])
    end = archive.rstrip(b"\0")
    content = end + bytes(-len(end) % 512) + bytes(more) + bytes(1024)
    with zipfile.ZipFile(built) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    parts["pkg-a-1-0.tar.zst"] = zstandard.compress(content)
    with zipfile.ZipFile(built, "w") as new:
        for name, data in parts.items():
            new.writestr(name, data)


@pytest.mark.parametrize(
    ("hide", "message"),
    [
        (lambda p: hidden_member(p, "start"), "data between the members"),
        (lambda p: hidden_member(p, "end"), "data after the members"),
        (more_listed, "other members than"),
        (second_frame, "data after the end of an archive"),
        (damaged_header, "cannot be read"),
    ],
)
def test_what_only_an_installer_would_see(
    hide: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    built = package(tmp_path, GOOD)
    hide(built)
    with pytest.raises(ForgeError, match=message):
        Package(built).require_safe()


def test_second_stream_of_bz2(tmp_path: Path) -> None:
    built = package(tmp_path, GOOD, single=True)
    more = io.BytesIO(tar([file("info/paths.json", b"{}")]))
    built.write_bytes(built.read_bytes() + bz2.compress(more.getvalue()))
    with pytest.raises(ForgeError, match="data after the end of an archive"):
        Package(built).require_safe()

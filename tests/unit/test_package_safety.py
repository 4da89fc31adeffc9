# SPDX-License-Identifier: BSD-3-Clause
"""A package that would write outside the prefix is refused.

integration/test_header_lies.py tests archives with false headers.
"""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.conda_packages import Member, file, link, list_entries, package, special

from forge.conda.package import Package
from forge.errors import Failed, ForgeError

GOOD = [
    special("lib", tarfile.DIRTYPE),
    file("lib/deep/libx.so.1"),
    link("lib/libx.so", "deep/libx.so.1"),
    link("lib64", "lib"),
    link("lib/up", "../share/./zone"),
    # This link leads out of the prefix, but no file is written through it.
    link("lib/system", "/usr/share/zoneinfo"),
    special("bin/hard", tarfile.LNKTYPE, "lib/deep/libx.so.1"),
]
OUT = r"leads out of the prefix through a link"
PLAIN = "not a plain path inside a prefix"


def sparse(name: str) -> Member:
    """Return a sparse member. Its extended header gives it the name `name`."""
    info, content = file("innocent")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.name": name}
    return info, content


# For each case: the members that are added to GOOD, and a pattern that the error message matches.
# rattler refuses some of these packages when it unpacks them. Our own checks refuse the others.
HOSTILE: dict[str, tuple[list[Member], str]] = {
    "upwards": ([file("../../x")], PLAIN),
    "absolute": ([file("/etc/x")], PLAIN),
    "through a folder": ([file("lib/../../x")], PLAIN),
    "twice": ([file("x"), file("x", b"y")], "twice"),
    "hard link out": ([special("x", tarfile.LNKTYPE, "../../etc/passwd")], "cannot be read"),
    "hard link to a later member": (
        [special("x", tarfile.LNKTYPE, "y"), file("y")],
        "cannot be read",
    ),
    "link out": ([link("lib/x", "../../etc")], OUT),
    "below an absolute link": ([link("x", "/etc"), file("x/y")], "outside of destination"),
    "link to itself": ([link("x", "x")], OUT),
    "links that lead out together": (
        [link("a/b/up", "../.."), link("x", "a/b/up/../etc")],
        OUT,
    ),
    "below a link out": ([link("x", ".."), file("x/y")], "outside of destination"),
    "info in the payload": ([file("info/paths.json")], "info"),
    "info is a link": ([link("info", "lib")], "info"),
}
# rattler unpacks these members as ordinary files or not at all. So packages with them are accepted.
HARMLESS: dict[str, Member] = {
    "not shortest": file("lib//x"),
    "folder upwards": special("../x", tarfile.DIRTYPE),
    "device": special("null", tarfile.CHRTYPE),
    "block device": special("sda", tarfile.BLKTYPE),
    "pipe": special("pipe", tarfile.FIFOTYPE),
    "sparse": sparse("info/paths.json"),
}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_member(case: str, single: bool, tmp_path: Path) -> None:
    """The package is refused with one line that names it, in both formats of packages."""
    members, message = HOSTILE[case]
    built = package(tmp_path, [*GOOD, *members], single=single)
    with pytest.raises(ForgeError, match=message) as error:
        Package(built).require_safe()
    assert built.name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_member(case: str, single: bool, tmp_path: Path) -> None:
    """The unpacked files are those in info/paths.json, and no file is outside of the folder."""
    archive = Package(package(tmp_path, [*GOOD, HARMLESS[case]], single=single))
    archive.require_safe()
    assert archive.payload.keys() == archive.listed.keys()
    assert archive.digests == archive.listed
    assert {path.name for path in archive.folder.parent.iterdir()} == {".lock", "package"}


LISTS: dict[str, tuple[Callable[[list[dict]], object], str]] = {
    "upwards": (lambda paths: paths[0].update(_path="../../x"), PLAIN),
    "absolute": (lambda paths: paths[0].update(_path="/etc/x"), PLAIN),
    "info": (lambda paths: paths[0].update(_path="info/index.json"), PLAIN),
    "folder upwards": (
        lambda paths: paths.append({"_path": "../x", "path_type": "directory"}),
        PLAIN,
    ),
    "twice": (lambda paths: paths.append(paths[0]), "twice"),
    "not all": (lambda paths: paths.pop(), "not in info/paths.json"),
    "more": (lambda paths: paths.append(paths[0] | {"_path": "more"}), "only in info/paths.json"),
    "a link as a file": (lambda paths: paths[1].update(path_type="hardlink"), "or the reverse"),
    "another shape": (lambda paths: paths.append([]), "is not a list"),
    "another content": (lambda paths: paths[0].update(sha256="0" * 64), "another sha256"),
}


@pytest.mark.parametrize("case", LISTS)
def test_list_that_is_not_of_the_members(case: str, tmp_path: Path) -> None:
    change, message = LISTS[case]
    paths = list_entries(GOOD)
    change(paths)
    with pytest.raises(ForgeError, match=message):
        Package(package(tmp_path, GOOD, paths=paths)).require_safe()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([link("info/x", "../lib")], "'info/x' is a link"),
        ([file("info/index.json", b"{}")], "index.json"),
        ([file("lib/x")], "'lib/x' is not in info/paths.json"),
    ],
)
def test_hostile_info(members: list[Member], message: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=message):
        Package(package(tmp_path, GOOD, info=members)).require_safe()


@pytest.mark.parametrize("script", ["../../x", "/x", "a/b", "..", ""])
def test_console_script_outside_of_bin(script: str, tmp_path: Path) -> None:
    """A console script with a path is refused.

    An installer would make the script at that path, which only info/link.json names.
    """
    text = {"noarch": {"type": "python", "entry_points": [f"{script} = a:main"]}}
    built = package(tmp_path, GOOD, info=[file("info/link.json", json.dumps(text).encode())])
    with pytest.raises(ForgeError, match="console script"):
        Package(built).require_safe()
    text["noarch"]["entry_points"] = ["a-1.b = a:main"]
    built = package(tmp_path, GOOD, info=[file("info/link.json", json.dumps(text).encode())])
    Package(built).require_safe()


def test_package_of_another_name(tmp_path: Path) -> None:
    built = package(tmp_path, GOOD, version="2")
    with pytest.raises(Failed, match="calls itself 'a-2-0'; was it renamed"):
        Package(built).require_safe()

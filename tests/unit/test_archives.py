# SPDX-License-Identifier: BSD-3-Clause
"""A source archive is unpacked completely and inside its folder, or refused with one message."""

import copy
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.conda_packages import Member, file, tarball
from support.mutants import Tally, texts

from forge import limits
from forge.errors import Refused
from forge.sources.archives import unpack


def member(name: str, text: str = "", **fields: object) -> Member:
    """Return a member of a tar archive, with further fields of its TarInfo."""
    info, content = file(name, text.encode())
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def write_archive(folder: Path, *members: Member) -> Path:
    """Write an archive of these members and return its path."""
    path = folder / "demo-1.0.tar.gz"
    path.write_bytes(tarball(*members))
    return path


def list_other_files(folder: Path) -> set[str]:
    """Return the paths below a test's folder, except the archive and its unpacked folder `got`."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return {name for name in names if not name.startswith(("demo-1.0.", "got"))}


LINK = tarfile.SYMTYPE
HARD = tarfile.LNKTYPE
DEVICE = tarfile.CHRTYPE
PIPE = tarfile.FIFOTYPE
HOSTILE = {
    "parent": [member("demo/../../out", "x")],
    "absolute": [member("FOLDER/absolute", "x")],
    "device": [member("demo/null", type=DEVICE, devmajor=1, devminor=3)],
    "pipe": [member("demo/pipe", type=PIPE)],
    "through a link": [member("demo/l", type=LINK, linkname="../.."), member("demo/l/out", "x")],
    "over a link": [member("demo/l", type=LINK, linkname="../../out"), member("demo/l", "x")],
    "hard link": [member("demo/l", type=HARD, linkname="../secret")],
    "hard link to a link": [
        member("demo/a", type=LINK, linkname="../../secret"),
        member("demo/b", type=HARD, linkname="demo/a"),
        member("demo/b", "x"),
    ],
}


def replace_folder(entry: Member, folder: Path) -> Member:
    """Return a copy of a member with FOLDER in its name replaced by a folder of the test.

    A reader that wrongly unpacks the member then writes into that folder.
    """
    info, content = entry
    info = copy.copy(info)
    info.name = info.name.replace("FOLDER", str(folder))
    return info, content


# tarfile filters hostile members itself, but not in CPython before 3.11.4.
@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members(
    tmp_path: Path, case: str, has_filter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filter:
        trusting = staticmethod(lambda member, _folder: member)
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", trusting, raising=False)
    (tmp_path / "secret").write_text("secret")
    members = [replace_folder(entry, tmp_path) for entry in HOSTILE[case]]
    archive = write_archive(tmp_path, *members)
    with pytest.raises(Refused, match="cannot be unpacked") as refused:
        unpack(archive, tmp_path / "got")
    assert str(archive) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list_other_files(tmp_path) == {"secret"}
    assert not (tmp_path / "got").exists()
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.skipif(not hasattr(tarfile, "tar_filter"), reason="needs CPython 3.11.4")
def test_nobody_else_may_write_what_is_unpacked(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, member("demo/tool", mode=0o4777), member("demo/more"))
    unpack(archive, tmp_path / "got")
    assert (tmp_path / "got/tool").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("form", ["tar", "zip"])
@pytest.mark.parametrize("top", ["", "demo-1.0/"])
def test_the_files_asked_for(tmp_path: Path, form: str, top: str) -> None:
    """Only the requested file is unpacked, whether or not the archive has a single top folder."""
    names = [f"{top}{name}" for name in ("setup.py", "demo/one.py", "demo/two.py", "more/one.py")]
    path = write_archive(tmp_path, *(member(name, "text") for name in names))
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "text")
    unpack(path, tmp_path / "got", {"demo/one.py", "absent.py"})
    files = {path for path in (tmp_path / "got").rglob("*") if path.is_file()}
    assert files == {tmp_path / "got" / "demo" / "one.py"}


@pytest.mark.parametrize("only", [None, {"one.py"}])
def test_names_that_begin_with_a_dot(tmp_path: Path, only: set[str] | None) -> None:
    """Names may begin with `./`, and the folder itself may be a member, as with `tar -c .`."""
    folder = member("./", type=tarfile.DIRTYPE)
    unpack(write_archive(tmp_path, folder, member("./demo/one.py", "text")), tmp_path / "got", only)
    assert (tmp_path / "got" / "one.py").read_text() == "text"


def test_a_file_asked_for_behind_a_link(tmp_path: Path) -> None:
    link = member("demo/now", type=tarfile.SYMTYPE, linkname="v1")
    path = write_archive(tmp_path, member("demo/v1/one.py", "text"), link, member("demo/two.py"))
    unpack(path, tmp_path / "got", {"v1/one.py"})
    assert (tmp_path / "got" / "now" / "one.py").read_text() == "text"
    bad = write_archive(tmp_path, member("demo/one.py", "text"), member("../out", "text"))
    with pytest.raises(Refused, match="leads out"):
        unpack(bad, tmp_path / "other", {"one.py"})


def test_links_inside_are_kept(tmp_path: Path) -> None:
    archive = write_archive(
        tmp_path,
        member("demo/text", "x"),
        member("demo/soft", type=LINK, linkname="text"),
        member("demo/hard", type=HARD, linkname="demo/text"),
    )
    unpack(archive, tmp_path / "got")
    texts_by_name = {path.name: path.read_text() for path in (tmp_path / "got").iterdir()}
    assert texts_by_name == {"text": "x", "soft": "x", "hard": "x"}


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_content_out_of_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    zeros = "\0" * (4 << 20)
    archive = tmp_path / f"demo-1.0.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
            writer.writestr("zeros", zeros)
    else:
        write_archive(tmp_path, member("zeros", zeros))
    monkeypatch.setattr(limits, "ARCHIVE", 1 << 20)
    with pytest.raises(Refused, match="more than 100 times"):
        unpack(archive, tmp_path / "got")
    assert list_other_files(tmp_path) == set()
    monkeypatch.setattr(limits, "ARCHIVE", 8 << 20)
    unpack(archive, tmp_path / "got")


def test_only_a_single_top_folder_is_dropped(tmp_path: Path) -> None:
    unpack(write_archive(tmp_path, member("a/x", "1"), member("b/y", "2")), tmp_path / "got")
    assert {path.name for path in (tmp_path / "got").iterdir()} == {"a", "b"}


def test_a_large_archive_may_grow_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARCHIVE", 0)
    text = "".join(f"{n * n} " for n in range(1000))
    unpack(write_archive(tmp_path, member("demo/numbers", text)), tmp_path / "got")
    assert (tmp_path / "got/numbers").read_text() == text


def test_what_shrinks_well_is_no_bomb(tmp_path: Path) -> None:
    """Eight MiB of zeros, whose archive is a thousand times smaller, are still accepted."""
    unpack(write_archive(tmp_path, member("demo/zeros", "\0" * (8 << 20))), tmp_path / "got")
    assert (tmp_path / "got/zeros").stat().st_size == 8 << 20


def test_names_of_a_zip_are_not_mended_in_silence(tmp_path: Path) -> None:
    """A name with `..` is refused. zipfile would remove the `..`, and shutil would skip the member.

    A name that only contains two dots is accepted.
    """
    archive = tmp_path / "demo-1.0.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("demo/text", "x")
        writer.writestr("demo/../../out", "x")
    with pytest.raises(Refused, match="leads out"):
        unpack(archive, tmp_path / "got")
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("demo/a..b", "x")
    unpack(archive, tmp_path / "got")
    assert (tmp_path / "got" / "a..b").exists()


def tar(folder: Path, compression: str) -> bytes:
    """Return a valid tar archive."""
    members = [
        member("demo/text", "one\ntwo\n" * 9),
        member("demo/l", type=LINK, linkname="text"),
        member("demo/sub/more", "x" * 700),
        member("demo/h", type=HARD, linkname="demo/text"),
    ]
    path = folder / "valid"
    with tarfile.open(path, f"w:{compression}") as writer:
        for info, data in members:
            writer.addfile(info, io.BytesIO(data))
    return path.read_bytes()


def zipped(folder: Path, _: str) -> bytes:
    """Return a valid zip archive."""
    path = folder / "valid"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("demo/text", "one\ntwo\n" * 9)
        writer.writestr("demo/sub/more", bytes(range(99)))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "make_valid", "compression", "count"),
    [
        ("tar", tar, "", 120),
        ("tar.gz", tar, "gz", 60),
        ("tar.xz", tar, "xz", 40),
        ("zip", zipped, "", 80),
    ],
)
def test_mutants(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    name: str,
    make_valid: Callable[[Path, str], bytes],
    compression: str,
    count: int,
) -> None:
    """A damaged archive is refused, or unpacked inside its folder only.

    unpack() need not detect the damage, because the sha256 of a source is checked elsewhere.
    """
    tally = Tally(f"archive {name}", record_property)
    (tmp_path / "space").mkdir()
    archive = tmp_path / f"demo-1.0.{name}"
    got = tmp_path / "space" / "got"
    for data in texts(make_valid(tmp_path, compression), 14, count):
        archive.write_bytes(data)
        if got.is_dir():
            for path in sorted(got.rglob("*"), reverse=True):
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
            got.rmdir()
        tally.give(
            lambda: unpack(archive, got),
            lambda _: {path.name for path in (tmp_path / "space").iterdir()} == {"got"},
            data,
        )
        assert {path.name for path in tmp_path.iterdir()} == {"space", "valid", archive.name}
    assert tally.outcomes["refused"]

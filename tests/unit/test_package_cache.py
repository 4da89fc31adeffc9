# SPDX-License-Identifier: BSD-3-Clause
"""The driver fills rattler's package cache if it can, and removes leftovers from it."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rattler import RepoDataRecord
from support import conda_packages
from support.conda_packages import file
from support.project import CHECKOUT, python_files
from support.small_channel import workspace

from forge.conda import cache
from forge.conda.package import Package
from forge.conda.scratch import cache_folder, scratch
from forge.errors import Failed
from forge.files import sha256_file
from forge.sources import patching


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that the driver treats as a large one. rattler's cache is empty."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LARGE", 0)
    return conda_packages.package(tmp_path, [file("share/a", b"text")])


def test_offered(archive: Path) -> None:
    """A package replaces another package of its name in the cache.

    The new package has the mark by which rattler recognizes it.
    """
    folder = cache_folder() / "a-1-0"
    folder.mkdir(parents=True)
    (folder / "other").touch()
    cache.offer(archive)
    assert {path.name for path in folder.iterdir()} == {"info", "share"}
    assert (folder / "share" / "a").read_text() == "text"
    mark = folder.with_name("a-1-0.lock")
    assert mark.read_bytes() == bytes(8) + bytes.fromhex(sha256_file(archive))
    assert not list(cache_folder().glob(".forge-*"))


def test_what_cannot_be_removed_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a command cannot remove its temporary folder, the command does not fail.

    The next command removes the folder.
    """

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "a failing disk")

    with scratch(tmp_path) as folder:
        monkeypatch.setattr(os, "rmdir", fails)
    monkeypatch.undo()
    assert Path(folder).is_dir()
    with scratch(tmp_path):
        assert not Path(folder).exists()


def test_what_a_killed_process_left_goes(archive: Path) -> None:
    """The temporary folder of a killed process is removed. That of a running one is not."""
    script = "import sys; from forge.conda.scratch import *; folder = scratch(cache_folder())"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{script}; print(folder.name, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT / "src")},
    )
    folder_of_child = Path(child.stdout.readline().strip())
    Package(archive).require_safe()
    assert folder_of_child.is_dir()
    child.kill()
    child.communicate()
    assert folder_of_child.is_dir()
    Package(archive).require_safe()
    assert not folder_of_child.exists()


def test_what_a_killed_check_of_patches_left_goes(archive: Path, tmp_path: Path) -> None:
    """Applying patches also removes the temporary folders that a killed process left.

    Only scratch.py, wheels.py and engine.py make temporary folders. Those of the last two files are
    inside the folder of a job.
    """
    leftover = cache_folder() / ".forge-left"
    leftover.mkdir(parents=True)
    assert patching.apply(tmp_path, []) == ""
    assert not leftover.exists()
    pattern = re.compile(r"TemporaryDirectory[\[(]|mkdtemp")
    names = {file.name for file in python_files("src") if pattern.search(file.read_text())}
    assert names == {"scratch.py", "wheels.py", "engine.py"}


def test_what_is_there_is_not_unpacked_again(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in the cache is not unpacked again.

    Otherwise each test of a package could take gigabytes of disk space.
    """
    cache.offer(archive)
    monkeypatch.setattr(cache, "unpack", lambda *_: pytest.fail("unpacked"))
    cache.offer(archive)


def test_small_packages_are_not_offered(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LARGE", archive.stat().st_size + 1)
    cache.offer(archive)
    assert not cache_folder().exists()


@pytest.mark.parametrize("fault", ["no room", "damaged"])
def test_what_cannot_be_offered(archive: Path, fault: str) -> None:
    """If a package cannot be put into the cache, no command fails: its channel still has it."""
    if fault == "damaged":
        archive.write_bytes(b"no package")
    else:
        Path(os.environ["RATTLER_CACHE_DIR"]).write_text("a file")
    cache.offer(archive)
    assert not (cache_folder() / "a-1-0").exists()


@pytest.fixture
def record(channel: Path, tmp_path: Path) -> RepoDataRecord:
    """The record of a package in a channel in a local folder."""
    app = workspace(tmp_path / "local", channel.as_uri())
    app.lock()
    return next(each for each in app.locked("default") if each.name.normalized == "alpha")


def test_what_lies_in_the_cache_is_taken_as_it_is(record: RepoDataRecord, tmp_path: Path) -> None:
    """A valid package in the cache is not unpacked again.

    If its mark has another sha256, it is unpacked again, whether that sha256 is greater or smaller.
    """
    folder = tmp_path / "cache/alpha-1.0-h1234567_0"
    mark = Path(f"{folder}.lock")
    cache.fill(tmp_path / "cache", [record])
    inode = folder.stat().st_ino
    cache.fill(tmp_path / "cache", [record])
    assert folder.stat().st_ino == inode
    valid_mark = mark.read_bytes()
    for digest in (bytes(32), b"\xff" * 32):
        before = folder.stat().st_ino
        mark.write_bytes(valid_mark[:8] + digest)
        cache.fill(tmp_path / "cache", [record])
        assert mark.read_bytes() == valid_mark
        assert folder.stat().st_ino != before


def test_a_changed_package_is_not_taken(record: RepoDataRecord, tmp_path: Path) -> None:
    """A file of the channel that differs from its record, or is missing, is refused.

    This holds whichever sha256 is greater, and even if the cache has the original package.
    """
    cache.fill(tmp_path / "filled", [record])
    file = tmp_path / "channel/noarch" / record.file_name
    content = file.read_bytes()
    wrong_contents = [content[:-1] + bytes([content[-1] ^ 1 << bit]) for bit in range(8)]
    wrong_contents += [content[:-1], content + b"x"]
    for wrong_content in wrong_contents:
        file.write_bytes(wrong_content)
        for folder in ("cache", "filled"):
            with pytest.raises(Failed, match=r"alpha-1\.0.*differs from its lock"):
                cache.fill(tmp_path / folder, [record])
    file.unlink()
    with pytest.raises(Failed, match="is locked but missing"):
        cache.fill(tmp_path / "cache", [record])
    assert not (tmp_path / "cache/alpha-1.0-h1234567_0").exists()


def test_what_the_bindings_raise_names_the_package(
    record: RepoDataRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("rattler\nsays no")

    monkeypatch.setattr(cache, "_put", fails)
    with pytest.raises(Failed, match=r"noarch/alpha-1\.0.*: rattler; says no"):
        cache.fill(tmp_path / "cache", [record])


def test_what_rattler_writes_after_its_error_is_left_to_the_next(
    record: RepoDataRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a folder cannot be removed after an error of rattler, the next call of `fill` removes it.

    After the error, a thread of rattler may still write into the folder, which is then not empty.
    """

    def fails(*_: object) -> None:
        raise RuntimeError("rattler says no")

    def is_not_empty(*_: object, **__: object) -> None:
        raise OSError(39, "Directory not empty")

    with monkeypatch.context() as patched:
        patched.setattr("forge.conda.package.extract", fails)
        patched.setattr(os, "rmdir", is_not_empty)
        with pytest.raises(Failed, match="rattler says no"):
            cache.fill(tmp_path / "cache", [record])
    assert [*(tmp_path / "cache").glob(".forge-*")]
    cache.fill(tmp_path / "cache", [record])
    assert not [*(tmp_path / "cache").glob(".forge-*")]


@pytest.mark.parametrize("noarch", ["python", "generic", "zope"])
def test_only_files_for_every_python_are_moved(noarch: str, tmp_path: Path) -> None:
    """Files are moved into the folder of a Python only if the package has `noarch: python`."""
    folder = tmp_path / "a-1-0"
    for name in ("site-packages/a.py", "python-scripts/a", "share/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "info").mkdir()
    index = {"name": "a", "version": "1", "build": "0", "noarch": noarch}
    (folder / "info/index.json").write_text(json.dumps(index))
    places = Package(tmp_path / "a-1-0.conda", folder).places
    targets = places.map_targets("lib/python3.13/site-packages")
    expected = {"site-packages/a.py", "python-scripts/a", "share/a"}
    if noarch == "python":
        expected = {"lib/python3.13/site-packages/a.py", "bin/a", "share/a"}
    assert targets.keys() == expected

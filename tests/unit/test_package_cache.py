# SPDX-License-Identifier: BSD-3-Clause
"""rattler's package cache: what is offered to it."""

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
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that counts as a large one, and an empty cache of rattler's."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LARGE", 0)
    return conda_packages.package(tmp_path, [file("share/a", b"text")])


def test_offered(made: Path) -> None:
    """In the place of another package of that name; with the mark by which rattler knows it."""
    folder = cache_folder() / "a-1-0"
    folder.mkdir(parents=True)
    (folder / "other").touch()
    cache.offer(made)
    assert {p.name for p in folder.iterdir()} == {"info", "share"}
    assert (folder / "share" / "a").read_text() == "text"
    mark = folder.with_name("a-1-0.lock")
    assert mark.read_bytes() == bytes(8) + bytes.fromhex(sha256_file(made))
    assert not list(cache_folder().glob(".forge-*"))


def test_what_cannot_be_removed_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one that unpacks removes it."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "a failing disk")

    with scratch(tmp_path) as folder:
        monkeypatch.setattr(os, "rmdir", fails)
    monkeypatch.undo()
    assert Path(folder).is_dir()
    with scratch(tmp_path):
        assert not Path(folder).exists()


def test_what_a_killed_process_left_goes(made: Path) -> None:
    """At once, but not what a live one is at work in."""
    script = "import sys; from forge.conda.scratch import *; made = scratch(cache_folder())"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{script}; print(made.name, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT / "src")},
    )  # fmt: skip
    theirs = Path(child.stdout.readline().strip())
    Package(made).require_safe()
    assert theirs.is_dir()
    child.kill()
    child.communicate()
    assert theirs.is_dir()
    Package(made).require_safe()
    assert not theirs.exists()


def test_what_a_killed_check_of_patches_left_goes(made: Path, tmp_path: Path) -> None:
    """There is one kind of temporary folder; those of wheels.py and engine.py are in a job's."""
    (left := cache_folder() / ".forge-left").mkdir(parents=True)
    assert patching.apply(tmp_path, []) == "" and not left.exists()
    makers = re.compile(r"TemporaryDirectory[\[(]|mkdtemp")
    files = python_files("src")
    found = {f.name for f in files if makers.search(f.read_text())}
    assert found == {"scratch.py", "wheels.py", "engine.py"}


def test_what_is_there_is_not_unpacked_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of a channel's package would, gigabytes of it."""
    cache.offer(made)
    monkeypatch.setattr(cache, "unpack", lambda *_: pytest.fail("unpacked"))
    cache.offer(made)


def test_small_packages_are_not_offered(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LARGE", made.stat().st_size + 1)
    cache.offer(made)
    assert not cache_folder().exists()


@pytest.mark.parametrize("fault", ["no room", "damaged"])
def test_what_cannot_be_offered(made: Path, fault: str) -> None:
    """Nothing fails for it: the package is in its channel."""
    if fault == "damaged":
        made.write_bytes(b"no package")
    else:
        Path(os.environ["RATTLER_CACHE_DIR"]).write_text("a file")
    cache.offer(made)
    assert not (cache_folder() / "a-1-0").exists()


@pytest.fixture
def record(channel: Path, tmp_path: Path) -> RepoDataRecord:
    """Of one package in a channel that is a folder."""
    app = workspace(tmp_path / "local", channel.as_uri())
    app.lock()
    return next(r for r in app.locked("default") if r.name.normalized == "alpha")


def test_what_lies_in_the_cache_is_taken_as_it_is(record: RepoDataRecord, tmp_path: Path) -> None:
    """And unpacked anew where its mark is of other bytes, greater or smaller."""
    folder = tmp_path / "cache/alpha-1.0-h1234567_0"
    mark = Path(f"{folder}.lock")
    cache.fill(tmp_path / "cache", [record])
    inode = folder.stat().st_ino
    cache.fill(tmp_path / "cache", [record])
    assert folder.stat().st_ino == inode
    right = mark.read_bytes()
    for other in (bytes(32), b"\xff" * 32):
        before = folder.stat().st_ino
        mark.write_bytes(right[:8] + other)
        cache.fill(tmp_path / "cache", [record])
        assert mark.read_bytes() == right and folder.stat().st_ino != before


def test_a_changed_package_is_not_taken(record: RepoDataRecord, tmp_path: Path) -> None:
    """Whichever hash is greater; nor is one that is gone, or longer; even if the cache has it."""
    cache.fill(tmp_path / "filled", [record])
    file = tmp_path / "channel/noarch" / record.file_name
    whole = file.read_bytes()
    changed = [whole[:-1] + bytes([whole[-1] ^ 1 << bit]) for bit in range(8)]
    for content in [*changed, whole[:-1], whole + b"x"]:
        file.write_bytes(content)
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
    """Its thread writes on in a folder that is being removed, which then is not empty."""

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
    """By the record of the Python that they are for."""
    folder = tmp_path / "a-1-0"
    for name in ("site-packages/a.py", "python-scripts/a", "share/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "info").mkdir()
    index = {"name": "a", "version": "1", "build": "0", "noarch": noarch}
    (folder / "info/index.json").write_text(json.dumps(index))
    placed = Package(tmp_path / "a-1-0.conda", folder).places.map_targets(
        "lib/python3.13/site-packages"
    )
    moved = {"lib/python3.13/site-packages/a.py", "bin/a", "share/a"}
    stay = {"site-packages/a.py", "python-scripts/a", "share/a"}
    assert placed.keys() == (moved if noarch == "python" else stay)

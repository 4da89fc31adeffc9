# SPDX-License-Identifier: BSD-3-Clause
"""rattler's package cache: what is offered to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.conda_packages import file, package

from forge.conda.package import cache_folder
from forge.envs import cache
from forge.files import sha256_file


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that counts as a large one, and an empty cache of rattler's."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LARGE", 0)
    return package(tmp_path, [file("share/a", b"text")])


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

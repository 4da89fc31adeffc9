# SPDX-License-Identifier: BSD-3-Clause
"""Reading from foreign files and servers ends at a limit of bytes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rattler import RepoDataRecord
from support.servers import QuietHandler, served
from support.small_channel import workspace

from forge import limits
from forge.conda import cache
from forge.conda.local import LocalChannel
from forge.envs import lockfile
from forge.envs.manifest import Manifest
from forge.errors import Failed, ForgeError, NotAttempted
from forge.files import read_text
from forge.sources import download
from forge.sources.patching import apply

CHUNK = b"[" * (1 << 16)


class Endless(QuietHandler):
    """A handler that sends up to 1 GiB, as long as the client reads.

    Attributes:
        sent: The number of bytes sent so far.
        kind: The Content-Type.
    """

    sent = 0
    kind = "application/octet-stream"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", self.kind)
        self.end_headers()
        while Endless.sent < 1 << 30:
            Endless.sent += self.wfile.write(CHUNK)


class Page(Endless):
    kind = "text/html"


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Endless, "sent", 0)
    for name in ("INDEX", "PAGE", "SOURCE", "TEXT"):
        monkeypatch.setattr(limits, name, 1 << 20)
    with served(tmp_path, Page) as url:
        yield url
    # More than the limit of 1 MiB may have been sent, since buffers of the network hold some.
    assert Endless.sent < 1 << 26


def test_a_package(endless: str, channel: Path, tmp_path: Path) -> None:
    """The download of a package ends when it is larger than its record states."""
    app = workspace(tmp_path / "local", channel.as_uri())
    app.lock()
    locked = app.locked("default")
    records: list[RepoDataRecord] = [r for r in locked if r.name.normalized == "alpha"]
    records[0].url = f"{endless}/noarch/{records[0].file_name}"
    with pytest.raises(Failed, match=r"127\.0\.0\.1.*is larger than its record says"):
        cache.fill(tmp_path / "pkgs", records)
    assert not [*(tmp_path / "pkgs").glob("alpha*")]


def test_a_source(endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "pip_settings", dict)
    downloader = download.Downloader()
    link = downloader.locate(f"{endless}/a.tar.gz", None)
    with pytest.raises(NotAttempted, match=r"127\.0\.0\.1.* sent more than 1048576 bytes"):
        downloader.download(link, tmp_path / "partial", lambda *_: None)


def test_a_page_of_an_index(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "pip_settings", lambda: {"index-url": endless})
    with pytest.raises(NotAttempted, match=r"127\.0\.0\.1:\d+ sent more than 1048576 bytes"):
        download.Downloader().files_of("demo")


def large_index(folder: Path) -> None:
    (folder / "noarch").mkdir()
    (folder / "noarch/repodata.json").write_bytes(b" " * (2 << 20))
    LocalChannel(folder).records()


def large_lock(folder: Path) -> None:
    (folder / "pixi.lock").write_bytes(b"#" * (2 << 20))
    lockfile.read(folder / "pixi.lock")


def large_manifest(folder: Path) -> None:
    (folder / "pixi.toml").write_bytes(b"#" * (2 << 20))
    Manifest.load(folder / "pixi.toml")


def large_patch(folder: Path) -> None:
    (folder / "0001-a.patch").write_bytes(b"#" * (2 << 20))
    apply(folder, [folder / "0001-a.patch"])


def large_text(folder: Path) -> None:
    (folder / "note").write_bytes(b"#" * (2 << 20))
    read_text(folder / "note")


READERS = [large_index, large_lock, large_manifest, large_patch, large_text]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_files(
    read: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is larger than its limit is refused, with a message that has the limit."""
    for name in ("INDEX", "TEXT"):
        monkeypatch.setattr(limits, name, 1 << 20)
    with pytest.raises(ForgeError, match="has more than 1048576 bytes"):
        read(tmp_path)


def test_a_note_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEXT", 100)
    (tmp_path / "note").write_text(json.dumps({"a": "b" * 100}))
    with pytest.raises(ForgeError, match="note has more than 100 bytes"):
        limits.read_bytes(tmp_path / "note")
    assert limits.read_bytes(tmp_path / "note", 200)


def test_the_end_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    assert limits.last_lines(log, 3) == []
    log.write_bytes(b"x" * (1 << 20) + b"\nlast\nbut \xff one\n")
    monkeypatch.setattr(limits, "LOG", 40)
    lines = limits.last_lines(log, 3)
    assert lines[1:] == ["last", "but \ufffd one"] and len(lines[0]) < 40
    assert limits.last_lines(log, 1) == ["but \ufffd one"]

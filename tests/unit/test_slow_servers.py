# SPDX-License-Identifier: BSD-3-Clause
"""Each request ends, even if a server sends nothing or one byte per second.

The servers never close a connection, so a request without a time limit would block its test. The
server `silent` sends nothing, `trickle` sends its whole answer slowly, and `slow` only the body.
"""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packageurl import PackageURL
from support.small_channel import read, workspace

from forge import network
from forge.conda.location import Location
from forge.errors import ForgeError, NotAttempted
from forge.project import Project
from forge.sources.cache import Source, SourceCache
from forge.sources.download import Downloader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000000\r\n\r\n"
# The first bytes are those of a zstd file.
BODY = b"\x28\xb5\x2f\xfd" + bytes(1000)
# The value of FORGE_TIMEOUT.
SECONDS = 1


@pytest.fixture(params=["silent", "slow", "trickle"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a channel on a slow server."""
    monkeypatch.setenv("FORGE_TIMEOUT", str(SECONDS))
    stop = threading.Event()

    def answer(client: socket.socket) -> None:
        with client:
            sent = len(HEAD) if request.param == "slow" else 0
            client.sendall(HEAD[:sent])
            for number in itertools.count(sent):
                if stop.wait(1):
                    return
                if request.param != "silent":
                    client.sendall((HEAD + BODY)[number : number + 1])

    def accept(server: socket.socket) -> None:
        while not stop.is_set():
            try:
                client = server.accept()[0]
            except OSError:
                return
            threading.Thread(target=_ignore_errors, args=(answer, client), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/channel"
        stop.set()


def _ignore_errors(answer: Callable[[socket.socket], None], client: socket.socket) -> None:
    # The client closes the connection, as the test expects.
    with contextlib.suppress(OSError):
        answer(client)


def fetch_source(tmp_path: Path, url: str) -> None:
    project = Project(tmp_path, tmp_path / "channel", tmp_path / "build")
    SourceCache(project).fetch(Source(f"{url}/a.tar.gz", "0" * 64, None), lambda *_: None)


def read_page(tmp_path: Path, url: str) -> None:
    downloader = Downloader()
    downloader._indexes = [{"type": "index", "url": url}]
    # Only the first of these requests waits: a server that was too slow is not asked again.
    for name in "abcdefghijklmnopqrstuvwxyz":
        with pytest.raises(NotAttempted, match="127"):
            downloader.files_of(name)
    downloader.locate("a.whl", PackageURL("pypi", None, "alpha", "1"))


def fetch_commit(tmp_path: Path, url: str) -> None:
    project = Project(tmp_path, tmp_path / "channel", tmp_path / "build")
    SourceCache(project).fetch(Source(url, "", commit="0" * 40), lambda *_: None)


REQUESTS: dict[str, Callable[[Path, str], object]] = {
    "a file of a channel": lambda _, url: read(Location(url), "noarch/repodata.json"),
    "a solve": lambda tmp_path, url: workspace(tmp_path, url).lock(),
    "a source": fetch_source,
    "pages of pip's index": read_page,
    "a commit": fetch_commit,
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_each_request_ends(request_: str, url: str, tmp_path: Path) -> None:
    with pytest.raises(NotAttempted, match=r"127\.0\.0\.1") as raised:
        REQUESTS[request_](tmp_path, url)
    assert raised.value.exit_code == 3


def test_a_file_that_comes_fast_enough_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(network.time, "monotonic", lambda: next(clock))
    pace = network.Pace("https://host.invalid/x")
    for _ in range(30):
        pace.bytes += network.LOWEST_RATE * 11
        assert not pace.check()
    assert "host.invalid sent 0 bytes" in [pace.check() for _ in range(10)][-1]
    silent = network.Pace("https://host.invalid/x")
    *before, message = [silent.check() for _ in range(6)]
    assert not any(before)
    assert message.startswith("host.invalid sent 0 bytes in 60 s; FORGE_TIMEOUT=")


@pytest.mark.parametrize(
    "text", ["0", "-1", "soon", "1.5", "²", "9" * 5000], ids=lambda text: ascii(text)[:9]
)
def test_patience_is_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_TIMEOUT", text)
    with pytest.raises(ForgeError, match="FORGE_TIMEOUT"):
        network.patience()

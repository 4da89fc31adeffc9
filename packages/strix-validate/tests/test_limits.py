# SPDX-License-Identifier: BSD-3-Clause
"""Reading a foreign file or a server's answer stops at a limit."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from strix_validate import limits
from strix_validate.checks import CheckFailed
from strix_validate.json_file import read_json_object, read_small_text
from strix_validate.serving.endpoint import Endpoint

LIMIT = 1 << 20


class Endless(BaseHTTPRequestHandler):
    """Sends `piece` as long as the client reads; `sent` counts the bytes."""

    piece = b""
    status = 200
    sent = 0

    def do_POST(self) -> None:
        self.send_response(Endless.status)
        self.end_headers()
        while Endless.sent < 1 << 30:
            Endless.sent += self.wfile.write(Endless.piece)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        pass  # the client hangs up


@contextmanager
def endless(piece: bytes, status: int = 200) -> Iterator[Endpoint]:
    Endless.piece = piece
    Endless.status = status
    Endless.sent = 0
    with Server(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", "model")
        server.shutdown()
    assert Endless.sent < 1 << 26  # more than the client's limit, because buffers fill too


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FILE", "RESPONSE", "EVENT", "STREAM", "ERROR", "LOG", "TAIL"):
        monkeypatch.setattr(limits, name, LIMIT if name != "STREAM" else 4 * LIMIT)


def test_an_answer() -> None:
    words = r"127\.0\.0\.1:\d+ sent more than 1048576 bytes"
    with endless(b" " * 65536) as server, pytest.raises(CheckFailed, match=words):
        server.ask("/v1/completions", {})
    with endless(b"[" * 65536) as server, pytest.raises(CheckFailed, match=words):
        server.context()


def test_an_error() -> None:
    """The message shows only a part of the error."""
    with endless(b"x" * 65536, 500) as server, pytest.raises(CheckFailed) as failed:
        server.ask("/v1/completions", {})
    assert str(failed.value) == f"HTTP 500: {'x' * 300}"


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (b"x" * 65536, "an event of more than 1048576"),
        (b"data: " + b"x" * 6553, "an event of more than 1048576"),
        (b"data: x\n" * 6553, "an event of more than 1048576"),
        (b"data: {}\n\n" * 6553, "a stream of more than 4194304"),
        (b": ping\n\n" * 6553, "a stream of more than 4194304"),
        (b"\n" * 65536, "a stream of more than 4194304"),
    ],
    ids=["line", "data", "lines of data", "events", "comments", "empty lines"],
)
def test_a_stream(piece: bytes, words: str) -> None:
    with (
        endless(piece) as server,
        pytest.raises(CheckFailed, match=rf"127\.0\.0\.1:\d+ sent {words}"),
    ):
        server.stream("prompt")


def test_a_deep_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has so many nested brackets that they exhaust the parser's stack."""

    def answer(handler: Endless) -> None:
        # A server that closes before it has read the request resets the connection.
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * (LIMIT - 1))

    monkeypatch.setattr(Endless, "do_POST", answer)
    with endless(b"") as server, pytest.raises(CheckFailed, match="is not JSON"):
        server.ask("/v1/completions", {})


def test_lines_are_those_of_the_stream() -> None:
    """Lines are split at any line ending."""
    text = io.TextIOWrapper(io.BytesIO(b"data: a\r\n\r\ndata: b\rdata: c\n\n"), "utf-8")
    assert [*limits.read_lines(text, "server")] == [
        "data: a\n",
        "\n",
        "data: b\n",
        "data: c\n",
        "\n",
    ]


def test_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        out.write(b"first line\n")
        out.seek(1 << 34)  # the file is sparse: 16 GiB, of which the disk has two pages
        out.write(b"\nlast\nbut \xff one\n")
    assert limits.read_last_lines(log, 2) == "last | but \ufffd one"
    assert limits.read_log(log).startswith("first line\n")
    assert len(limits.read_log(log)) == LIMIT


def test_files(tmp_path: Path) -> None:
    """A file of /proc has size 0, but can be read."""
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": "' + b"b" * LIMIT + b'"}')
    with pytest.raises(ValueError, match=r"config\.json: it has more than 1048576 bytes"):
        read_json_object(file)
    assert read_small_text(file) is None
    assert read_small_text(Path("/proc/self/status")).startswith("Name:")

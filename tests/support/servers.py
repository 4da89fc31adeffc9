# SPDX-License-Identifier: BSD-3-Clause
"""Web servers on loopback, each at an address that no other one has or had.

rattler keeps an index by its address in the cache of the home folder, and ports come again: of one
used before it would take what another test served there.
"""

import contextlib
import functools
import http.server
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder as any static host does, without a line per request."""

    server: "Server"

    def parse_request(self) -> bool:
        """Read a request; its path is then what follows the server's address."""
        read = super().parse_request()
        if read:
            self.path = self.path.replace(self.server.place, "", 1) or "/"
        return read

    def log_message(self, *_: object) -> None:
        pass


class Revalidating(QuietHandler):
    """Serves files with an ETag, and answers 304 to those who have them, as real hosts do."""

    protocol_version = "HTTP/1.1"

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return None
        state = path.stat()
        # the inode: a file may be replaced within a tick of the clock by one of the same size
        tag = f'"{state.st_ino:x}-{state.st_mtime_ns:x}-{state.st_size:x}"'
        known = self.headers.get("If-None-Match") == tag
        self.send_response(304 if known else 200)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        if not known:
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(state.st_size))
        self.end_headers()
        return None if known else path.open("rb")


class Server(http.server.ThreadingHTTPServer):
    """Many clients may wait at a time: of more than five, one's connection is sometimes reset."""

    request_queue_size = 128

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.place = f"/{uuid4().hex}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a client that a test kills hangs up, and its traceback stood among the dots
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(
    folder: Path, handler: type[QuietHandler] = QuietHandler, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve `folder` on a free port of this machine; yields its URL."""
    with Server(functools.partial(handler, directory=str(folder))) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        # the default looks for shutdown() every half second
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}{server.place}"
        server.shutdown()

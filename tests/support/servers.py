# SPDX-License-Identifier: BSD-3-Clause
"""Web servers on loopback, each with a URL that no other server has or had.

rattler caches an index by its URL in the home folder, and the system gives the same port to several
servers in turn. With the port alone as the URL, rattler could read the index of another test.
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
    """A handler that serves a folder like a static web server, and writes no log."""

    server: "Server"

    def parse_request(self) -> bool:
        """Read a request, and remove the server's own prefix from its path."""
        is_valid = super().parse_request()
        if is_valid:
            self.path = self.path.replace(self.server.place, "", 1) or "/"
        return is_valid

    def log_message(self, *_: object) -> None:
        pass


class Revalidating(QuietHandler):
    """A handler that sends an ETag with each file, and answers 304 to a client that has the file.

    Real servers do the same.
    """

    protocol_version = "HTTP/1.1"

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return None
        state = path.stat()
        # The time and the size do not suffice, because a file may be replaced by another file of
        # the same size within a tick of the clock. In that case, only the inode differs.
        tag = f'"{state.st_ino:x}-{state.st_mtime_ns:x}-{state.st_size:x}"'
        client_has_file = self.headers.get("If-None-Match") == tag
        self.send_response(304 if client_has_file else 200)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        if not client_has_file:
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(state.st_size))
        self.end_headers()
        return None if client_has_file else path.open("rb")


class Server(http.server.ThreadingHTTPServer):
    """A server on a free port.

    Attributes:
        place: The first part of the path of each URL, which no other server has.
    """

    # With the default of 5, a connection is sometimes reset when more clients wait.
    request_queue_size = 128

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.place = f"/{uuid4().hex}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that a test kills closes its connection. A traceback of this would only be noise.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(
    folder: Path, handler: type[QuietHandler] = QuietHandler, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve `folder` on a free port of this machine, and yield its URL."""
    with Server(functools.partial(handler, directory=str(folder))) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        # By default, the thread would check for shutdown() only every half second.
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}{server.place}"
        server.shutdown()

# SPDX-License-Identifier: BSD-3-Clause
"""Web servers on loopback."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder as any static host does, without a line per request."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(
    folder: Path, handler: type[http.server.BaseHTTPRequestHandler] = QuietHandler
) -> Iterator[str]:
    """Serve `folder` on a free port of this machine; yields its URL."""
    make = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        # the default looks for shutdown() every half second
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

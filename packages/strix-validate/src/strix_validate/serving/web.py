# SPDX-License-Identifier: BSD-3-Clause
"""The one way in which a server is asked: over HTTP alone, and a key stays with its server."""

import urllib.request
from http.client import HTTPMessage
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request

#: Headers that another server than the one that was asked may see.
_PUBLIC = {"Accept", "Accept-encoding", "Content-type", "User-agent"}
_PORTS = {"http": 80, "https": 443}


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another scheme, host or port without keys, cookies and the like."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Return the next request. Raise HTTPError for a URL that is not of HTTP."""
        if urlsplit(newurl).scheme not in _PORTS:
            raise HTTPError(req.full_url, code, f"leads to {newurl:.80}, not HTTP", headers, fp)
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made and origin(made.full_url) != origin(req.full_url):
            made.headers = {k: v for k, v in made.headers.items() if k in _PUBLIC}
        return made


def _opener() -> urllib.request.OpenerDirector:
    made = urllib.request.OpenerDirector()  # no files, no FTP, no data: URLs
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        Redirects,
    ):
        made.add_handler(handler())
    return made


def open_url(request: Request | str, seconds: float):
    """Return the open answer of a server. Raise URLError and HTTPError as urllib does."""
    return _opener().open(request, timeout=seconds)

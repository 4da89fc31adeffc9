# SPDX-License-Identifier: BSD-3-Clause
"""Send requests to a server, by HTTP or HTTPS only, and never pass its key on to another server."""

import urllib.request
from http.client import HTTPMessage
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request

#: Headers that a redirect to another server may carry.
_PUBLIC = {"Accept", "Accept-encoding", "Content-type", "User-agent"}
_PORTS = {"http": 80, "https": 443}
_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.UnknownHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
)


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme)
    return parts.scheme, parts.hostname, port


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another scheme, host or port without keys, cookies and the like."""

    def redirect_request(
        self,
        req: Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> Request | None:
        """Return the next request.

        Raises:
            HTTPError: The new URL is neither an HTTP nor an HTTPS URL.
        """
        if urlsplit(newurl).scheme not in _PORTS:
            raise HTTPError(
                req.full_url,
                code,
                f"leads to {newurl:.80}, not HTTP",
                headers,
                fp,
            )
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected and origin(redirected.full_url) != origin(req.full_url):
            public = {k: v for k, v in redirected.headers.items() if k in _PUBLIC}
            redirected.headers = public
        return redirected


def is_local(url: str) -> bool:
    """Return whether a URL points to this machine. A proxy elsewhere cannot reach such a URL."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def _opener(url: str) -> urllib.request.OpenerDirector:
    # build_opener() would add handlers for files, FTP and data: URLs
    opener = urllib.request.OpenerDirector()
    for handler in (*_HANDLERS, Redirects):
        if handler is urllib.request.ProxyHandler and is_local(url):
            continue
        opener.add_handler(handler())
    return opener


def open_url(request: Request | str, seconds: float):
    """Send a request, and return the server's open response.

    The proxy that a variable such as http_proxy names is not used for URLs of this machine.

    Args:
        request: A request or its URL.
        seconds: Time limit of each wait for the server.

    Raises:
        urllib.error.URLError: No server answers.
        urllib.error.HTTPError: The server answers with an error.
    """
    url = request if isinstance(request, str) else request.full_url
    return _opener(url).open(request, timeout=seconds)

# SPDX-License-Identifier: BSD-3-Clause
"""A key is sent only to its own server, and not to another one to which that server redirects."""

import importlib.util
import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError
from urllib.request import Request

import pytest
from strix_validate.checks import CheckFailed
from strix_validate.serving import web
from strix_validate.serving.endpoint import Endpoint
from support.project import CHECKOUT
from support.servers import QuietHandler, served

from forge.sources import download

KEY = "s3cr3t-key"
CODES = [301, 302, 303, 307, 308]
SENSITIVE = ("Authorization", "Cookie", "X-Api-Key", "Proxy-Authorization", "Referer")
SECRET_HEADERS = {"Authorization": f"Bearer {KEY}", "Cookie": f"a={KEY}", "X-API-Key": KEY}


def import_links() -> ModuleType:
    """Import tools/upstream_links.py."""
    spec = importlib.util.spec_from_file_location("links", CHECKOUT / "tools/upstream_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Web:
    """Two servers.

    Attributes:
        urls: The URLs of the servers.
        requests: The number of the server, the path and the secret headers of each request.
        redirects: The status code and the target of each redirect, by path.
    """

    urls: list[str] = field(default_factory=list)
    requests: list[tuple[int, str, set[str]]] = field(default_factory=list)
    redirects: dict[str, tuple[int, str]] = field(default_factory=dict)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Web]:
    """Two servers that record their requests, and redirect as `redirects` states."""
    web_servers = Web()

    def handler(number: int) -> type[QuietHandler]:
        class Handler(QuietHandler):
            def do_GET(self) -> None:
                secrets = {name for name in SENSITIVE if KEY in self.headers.get(name, "")}
                secrets |= {"Referer"} & set(self.headers)
                web_servers.requests.append((number, self.path, secrets))
                if self.path in web_servers.redirects:
                    code, target = web_servers.redirects[self.path]
                    self.send_response(code)
                    self.send_header("Location", target)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                body = json.dumps({"data": []}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

        return Handler

    with ExitStack() as stack:
        web_servers.urls = [
            stack.enter_context(served(tmp_path, handler(number))) for number in (0, 1)
        ]
        yield web_servers


def ask_links(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GH_TOKEN", KEY)
    monkeypatch.setenv("GITHUB_API_URL", url)
    import_links().request_api("start")


def ask_endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    Endpoint(f"{url}/repos", "model")._open("/start", 10).close()


def ask_with_all_headers(url: str, _: pytest.MonkeyPatch) -> None:
    web.open_url(Request(f"{url}/repos/start", headers=SECRET_HEADERS), 10).close()


def ask_index(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a request to pip's index, whose password is in its URL."""
    index = url.replace("//", f"//user:{KEY}@")
    monkeypatch.setattr(download, "pip_settings", lambda: {"index-url": f"{index}/repos"})
    client = download.Downloader().client
    client.get(f"{index}/repos/start", headers={"X-API-Key": ""}).read()


ASKERS: list[Callable[[str, pytest.MonkeyPatch], None]] = [
    ask_links,
    ask_endpoint,
    ask_with_all_headers,
]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("ask", [*ASKERS, ask_index], ids=lambda ask: ask.__name__)
def test_another_server_gets_no_key(
    ask: Callable[[str, pytest.MonkeyPatch], None],
    code: int,
    servers: Web,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request after a redirect to another server has the key.

    The other server has another port on the same machine, and redirects back to the first server.
    Only pip's index may then get its own password again.
    """
    servers.redirects = {
        "/repos/start": (code, f"{servers.urls[1]}/there"),
        "/there": (code, f"{servers.urls[0]}/back"),
    }
    ask(servers.urls[0], monkeypatch)
    (first, start, secrets_of_start), *others = servers.requests[-3:]
    assert (first, start) == (0, "/repos/start")
    assert secrets_of_start or ask is ask_index, "the first request must have the key"
    expected = [(1, "/there", set()), (0, "/back", set())]
    if ask is ask_index:
        # The first server may get its own password again.
        others = [request for request in others if request[0] == 1]
        expected = expected[:1]
    assert others == expected


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("target", ["/there", "there", "URL/there"])
@pytest.mark.parametrize("ask", ASKERS, ids=lambda ask: ask.__name__)
def test_the_same_server_keeps_it(
    ask: Callable[[str, pytest.MonkeyPatch], None],
    target: str,
    code: int,
    servers: Web,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A redirect to the same server keeps the key.

    After a repository was renamed, GitHub redirects to a URL on its own server. Without a token,
    GitHub soon answers 403.
    """
    url = servers.urls[0]
    prefix = f"/{url.rpartition('/')[2]}"
    targets = {"/there": f"{prefix}/there", "URL/there": f"{url}/there"}
    servers.redirects = {"/repos/start": (code, targets.get(target, target))}
    ask(url, monkeypatch)
    (_, _, first_secrets), (number, path, second_secrets) = servers.requests
    assert number == 0
    assert path == ("/repos/there" if target == "there" else "/there")
    assert second_secrets == first_secrets - {"Referer"}
    assert second_secrets


@pytest.mark.parametrize("code", CODES)
def test_a_question_that_is_sent_elsewhere(
    code: int, servers: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect of a POST never sends the key to another server.

    The status codes 301, 302 and 303 turn the POST into a GET. 307 and 308 are an error.
    """
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    servers.redirects = {"/v1/completions": (code, f"{servers.urls[1]}/there")}
    if code < 307:
        Endpoint(servers.urls[0], "model").ask("/v1/completions", {})
        assert servers.requests[1:] == [(1, "/there", set())]
    else:
        with pytest.raises(CheckFailed, match=f"HTTP {code}"):
            Endpoint(servers.urls[0], "model").ask("/v1/completions", {})
        assert len(servers.requests) == 1


HANDLERS = [web.Redirects, import_links().Redirects]


@pytest.mark.parametrize("handler", HANDLERS, ids=["validator", "links"])
@pytest.mark.parametrize(
    ("before", "after", "is_same_server"),
    [
        ("https://h.invalid/a", "http://h.invalid/a", False),
        ("http://h.invalid/a", "https://h.invalid/a", False),
        ("https://h.invalid/a", "https://h.invalid:8443/a", False),
        ("https://h.invalid/a", "https://x.h.invalid/a", False),
        ("https://h.invalid/a", "https://h.invalid.x/a", False),
        ("https://h.invalid/a", "https://h.invalid@x.invalid/a", False),
        ("https://h.invalid/a", "https://h.invalid/b", True),
        ("https://h.invalid/a", "https://H.INVALID:443/b", True),
    ],
)
def test_what_is_another_server(
    handler: type[urllib.request.HTTPRedirectHandler], before: str, after: str, is_same_server: bool
) -> None:
    request = Request(before, headers=SECRET_HEADERS | {"Accept": "x"})
    redirected = handler().redirect_request(request, None, 302, "Found", Message(), after)
    assert redirected.get_header("Accept") == "x"
    assert not redirected.has_header("Referer")
    headers = [redirected.get_header(name.capitalize()) for name in SECRET_HEADERS]
    if is_same_server:
        assert headers == [*SECRET_HEADERS.values()]
    else:
        assert headers == [None] * 3


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://h.invalid/a", "data:,x"])
def test_nothing_but_http_is_asked(url: str, servers: Web) -> None:
    """A URL with another scheme than http or https is refused, even after a redirect."""
    with pytest.raises(OSError, match=r"unknown url type|no host given"):
        web.open_url(url, 10)
    servers.redirects = {"/repos/start": (302, url)}
    with pytest.raises(HTTPError):
        web.open_url(f"{servers.urls[0]}/repos/start", 10)
    assert len(servers.requests) == 1


def test_links_says_which_server_is_endless(servers: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    links = import_links()
    monkeypatch.setattr(links, "API", servers.urls[0])
    monkeypatch.setattr(links, "LIMIT", 10)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1.* sent more than 10 bytes"):
        links.request_api("start")

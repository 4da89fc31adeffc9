# SPDX-License-Identifier: BSD-3-Clause
"""Publishing to prefix.dev and anaconda.org: rattler-build's uploaders against a local server."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rattler_build import upload_package_to_anaconda, upload_package_to_prefix
from support.project import CHECKOUT
from support.servers import served
from support.static_channel import BUILD, Source

from forge.channel import uploads
from forge.channel.location import Unreadable
from forge.channel.uploads import destination
from forge.errors import BuildFailed, ForgeError

TOKEN = "pfx-s3cr3t-t0k3n-0123456789"


# what anaconda.org is asked to do before it is sent a file
STEPS = ("/package/", "/release/")


class Server(http.server.BaseHTTPRequestHandler):
    """The parts of both services that the uploaders use, and the channel that they then serve."""

    records: dict[str, Any] = {}
    requests: list[tuple[str, str]] = []
    status = 200
    private = False

    def __init__(self, *arguments: Any, directory: str) -> None:
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"{}") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.private and TOKEN not in self.headers.get("Authorization", ""):
            self.answer(401)
        elif self.path.endswith("/noarch/repodata.json"):
            index = {"packages": {}, "packages.conda": self.records}
            self.answer(200, json.dumps(index).encode())
        else:
            failing = self.path.startswith("/package/") and self.status in (401, 500)
            self.answer(self.status if failing else 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        cls = type(self)
        cls.requests.append((self.path, self.headers.get("Authorization", "")))
        if cls.status != 200 and (cls.status == 403 or not self.path.startswith(STEPS)):
            self.answer(cls.status, b"no")
        elif self.path.startswith("/stage/"):
            port = self.server.server_address[1]
            url = f"http://127.0.0.1:{port}/store"
            self.answer(
                200, json.dumps({"post_url": url, "form_data": {}, "dist_id": "1"}).encode()
            )
        else:
            for found in re.findall(rb'filename="([^"]+)"', body):
                cls.records = cls.records | {found.decode(): {"sha256": "?", "size": len(body)}}
            self.answer(200)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """A fresh server that stands for both services, and no credential anywhere."""

    class Fresh(Server):
        records, requests = {}, []

    with served(tmp_path, Fresh) as url:
        for host, (_, variable) in uploads.SERVERS.items():
            monkeypatch.setitem(uploads.SERVERS, host, (url, variable))
            monkeypatch.delenv(variable, raising=False)

        def to_prefix(files: list[str], _: str, channel: str, **options: Any) -> None:
            upload_package_to_prefix(files, url, channel, **options)

        monkeypatch.setattr(uploads, "upload_package_to_prefix", to_prefix)
        to_anaconda = functools.partial(upload_package_to_anaconda, url=url)
        monkeypatch.setattr(uploads, "upload_package_to_anaconda", to_anaconda)
        monkeypatch.delenv("RATTLER_AUTH_FILE", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        yield Fresh


@pytest.fixture
def source(tmp_path: Path) -> Source:
    made = Source(tmp_path / "channel")
    made.make("alpha")
    made.make("beta")
    return made


@pytest.mark.parametrize(
    ("to", "key", "path", "header"),
    [
        ("https://prefix.dev/demo", "PREFIX_API_KEY", "/api/v1/upload/demo", f"Bearer {TOKEN}"),
        ("https://anaconda.org/demo", "ANACONDA_API_KEY", "/stage/demo/", f"token {TOKEN}"),
    ],
    ids=["prefix.dev", "anaconda.org"],
)
def test_upload(
    to: str, key: str, path: str, header: str, source: Source, server: type[Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is not there yet is uploaded, with the credential of the environment."""
    monkeypatch.setenv(key, TOKEN)
    assert destination(to).publish(source) == (2, 2)
    sent = [(where, auth) for where, auth in server.requests if where.startswith(path)]
    assert len(sent) == 2 and {auth for _, auth in sent} == {header}
    server.records = {f"{r.dist}.conda": {"sha256": r.sha256} for r in source.records()}
    source.make("gamma")
    assert destination(to).publish(source) == (1, 3)
    server.records |= {f"gamma-1.0-{BUILD}.conda": {"sha256": "0" * 64}}
    with pytest.raises(ForgeError, match="gamma.*already published with other content"):
        destination(to).publish(source)


def test_auth_file(
    source: Source, server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable the credential is the one in rattler's store."""
    file = tmp_path / "auth.json"
    file.write_text(json.dumps({"127.0.0.1": {"BearerToken": TOKEN}}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(file))
    assert destination("https://prefix.dev/demo").publish(source) == (2, 2)
    assert {auth for _, auth in server.requests} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("to", ["https://prefix.dev/demo", "https://anaconda.org/demo"])
@pytest.mark.parametrize("status", [401, 403, 409, 500])
def test_refused_upload(
    to: str, status: int, source: Source, server: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message with the file, the reason and the variable of the credential."""
    monkeypatch.setenv("PREFIX_API_KEY", TOKEN)
    monkeypatch.setenv("ANACONDA_API_KEY", TOKEN)
    server.status = status
    with pytest.raises(BuildFailed, match=r"noarch/alpha-1.0-.* was not uploaded: .*API_KEY") as e:
        destination(to).publish(source)
    assert TOKEN not in str(e.value)


def test_private_channel(
    source: Source, server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server has is read first, and that takes the store's credential."""
    server.private = True
    monkeypatch.setenv("PREFIX_API_KEY", TOKEN)
    with pytest.raises(Unreadable, match="401"):
        destination("https://prefix.dev/demo").publish(source)
    (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"BearerToken": TOKEN}}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
    assert destination("https://prefix.dev/demo").publish(source) == (2, 2)


def test_no_credential(source: Source, server: type[Server]) -> None:
    for to, variable in (("prefix.dev", "PREFIX_API_KEY"), ("anaconda.org", "ANACONDA_API_KEY")):
        with pytest.raises(BuildFailed, match=variable):
            destination(f"https://{to}/demo").publish(source)
    assert server.requests == []


def test_gate_stands_before_every_upload(source: Source, server: type[Server]) -> None:
    source.make("bad", tests=0)
    for to in ("https://prefix.dev/demo", "https://anaconda.org/demo"):
        with pytest.raises(ForgeError, match="bad.*has no tests"):
            destination(to).publish(source)
    assert server.requests == []


def test_interrupted_upload(source: Source, tmp_path: Path) -> None:
    """Ctrl-C ends an upload to a server that never answers, and no handler of Python's can."""
    asked = threading.Event()
    end = threading.Event()

    class Silent(Server):
        def do_POST(self) -> None:
            asked.set()
            end.wait(60)

    script = """
import functools, sys
from pathlib import Path
from forge.channel import uploads
from forge.channel.local import Channel
url, folder = sys.argv[1:]
upload = uploads.upload_package_to_prefix
uploads.SERVERS["prefix.dev"] = (url, "PREFIX_API_KEY")
uploads.upload_package_to_prefix = lambda files, _, *rest, **more: upload(files, url, *rest, **more)
uploads.ServerChannel("prefix.dev", "demo").publish(Channel(Path(folder)))
"""
    environment = os.environ | {"PREFIX_API_KEY": TOKEN, "PYTHONPATH": str(CHECKOUT / "src")}
    with served(tmp_path, Silent) as url:
        child = subprocess.Popen(
            [sys.executable, "-c", script, url, str(source.folder)], env=environment
        )
        try:
            assert asked.wait(60)
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == -signal.SIGINT
        finally:
            end.set()
            child.kill()


@pytest.mark.parametrize("status", [200, 401])
def test_no_secret_is_written(
    status: int, source: Source, server: type[Server], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither the output nor any file holds the credential, whether or not the upload works."""
    monkeypatch.setenv("PREFIX_API_KEY", TOKEN)
    server.status = status
    told = ""
    try:
        destination("https://prefix.dev/demo").publish(source)
    except BuildFailed as error:
        told = str(error)
    assert (status == 401) == bool(told)
    assert {auth for _, auth in server.requests} == {f"Bearer {TOKEN}"}
    assert TOKEN not in told + "".join(capfd.readouterr())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not [file for file in files if TOKEN.encode() in file.read_bytes()]

# SPDX-License-Identifier: BSD-3-Clause
"""Publishing to prefix.dev and anaconda.org: rattler-build's uploaders against a local server."""

from __future__ import annotations

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
from typing import Any, ClassVar

import pytest
from support.project import CHECKOUT
from support.servers import served
from support.static_channel import BUILD, Source

TOKEN = "pfx-s3cr3t-t0k3n-0123456789"


# what anaconda.org is asked to do before it is sent a file
STEPS = ("/package/", "/release/")


def said(file: str, sha256: str) -> dict[str, Any]:
    """What a server's index says of a package file."""
    name, version, build = file.removesuffix(".conda").rsplit("-", 2)
    return {"name": name, "version": version, "build": build, "sha256": sha256, "size": 1}


class Server(http.server.BaseHTTPRequestHandler):
    """The parts of both services that the uploaders use, and the channel that they then serve."""

    records: ClassVar[dict[str, Any]] = {}
    requests: ClassVar[list[tuple[str, str]]] = []
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
                cls.records = cls.records | {found.decode(): said(found.decode(), "f" * 64)}
            self.answer(200)


# Publishes a channel to the test's server in place of both services. A process of its own, because
# the uploader holds the GIL, which the server needs.
SCRIPT = """
import functools, os, sys
from pathlib import Path
from forge.channel import uploads
from forge.conda.local import Channel
from forge.errors import ForgeError
url, folder, to = sys.argv[1:]
prefix = uploads.upload_package_to_prefix
uploads.upload_package_to_prefix = lambda files, _, *rest, **more: prefix(files, url, *rest, **more)
uploads.upload_package_to_anaconda = functools.partial(uploads.upload_package_to_anaconda, url=url)
uploads.SERVERS = {host: (url, key) for host, (_, key) in uploads.SERVERS.items()}
try:
    print(uploads.destination(to).publish(Channel(Path(folder))), flush=True)
except ForgeError as error:
    print(error, flush=True)
    os._exit(error.exit_code)
os._exit(0)
"""
PREFIX, ANACONDA = "https://prefix.dev/demo", "https://anaconda.org/demo"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[type[Server]]:
    """A fresh server that stands for both services."""

    class Fresh(Server):
        records: ClassVar = {}
        requests: ClassVar = []

    with served(tmp_path, Fresh) as url:
        Fresh.url = url
        yield Fresh


@pytest.fixture
def source(tmp_path: Path) -> Source:
    made = Source(tmp_path / "channel")
    made.make("alpha")
    made.make("beta")
    return made


def start(url: str, source: Source, to: str, **environment: str) -> subprocess.Popen[str]:
    """Begin to publish, with no credential but those given."""
    command = [sys.executable, "-c", SCRIPT, url, str(source.folder), to]
    known = {"PREFIX_API_KEY", "ANACONDA_API_KEY", "RATTLER_AUTH_FILE"}
    inherited = {name: value for name, value in os.environ.items() if name not in known}
    home = {"HOME": str(source.folder.parent / "home"), "PYTHONPATH": str(CHECKOUT / "src")}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=inherited | home | environment, stdout=pipe, stderr=pipe, text=True
    )


def publish(server: type[Server], source: Source, to: str, code: int = 0, **given: str) -> str:
    """Publish and require an exit code; returns all that it printed."""
    child = start(server.url, source, to, **given)
    said = "".join(child.communicate(timeout=120))
    assert child.returncode == code, said
    return said


@pytest.mark.parametrize(
    ("to", "key", "path", "header"),
    [
        (PREFIX, "PREFIX_API_KEY", "/api/v1/upload/demo", f"Bearer {TOKEN}"),
        (ANACONDA, "ANACONDA_API_KEY", "/stage/demo/", f"token {TOKEN}"),
    ],
    ids=["prefix.dev", "anaconda.org"],
)
def test_upload(
    to: str, key: str, path: str, header: str, source: Source, server: type[Server]
) -> None:
    """What is not there yet is uploaded, with the credential of the environment."""
    assert "(2, 2)" in publish(server, source, to, **{key: TOKEN})
    sent = [(where, auth) for where, auth in server.requests if where.startswith(path)]
    assert len(sent) == 2 and {auth for _, auth in sent} == {header}
    server.records = {r.file_name: said(r.file_name, r.sha256) for r in source.records()}
    source.make("gamma")
    assert "(1, 3)" in publish(server, source, to, **{key: TOKEN})
    gamma = f"gamma-1.0-{BUILD}.conda"
    server.records |= {gamma: said(gamma, "0" * 64)}
    assert "already published with other content" in publish(server, source, to, code=2)


def test_private_channel(source: Source, server: type[Server], tmp_path: Path) -> None:
    """Without the variable the credential is rattler's; what is there is always read with that."""
    server.private = True
    assert "401" in publish(server, source, PREFIX, code=3, PREFIX_API_KEY=TOKEN)
    (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"BearerToken": TOKEN}}))
    said = publish(server, source, PREFIX, RATTLER_AUTH_FILE=str(tmp_path / "auth.json"))
    assert "(2, 2)" in said and {auth for _, auth in server.requests} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("to", [PREFIX, ANACONDA])
@pytest.mark.parametrize("status", [401, 403, 409, 500])
def test_refused_upload(to: str, status: int, source: Source, server: type[Server]) -> None:
    """One message with the file, the reason and the variable of the credential, and no secret."""
    server.status = status
    keys = {"PREFIX_API_KEY": TOKEN, "ANACONDA_API_KEY": TOKEN}
    said = publish(server, source, to, code=1, **keys)
    assert f"noarch/alpha-1.0-{BUILD}.conda was not uploaded" in said and "_API_KEY" in said
    assert TOKEN not in said


@pytest.mark.parametrize("to", [PREFIX, ANACONDA])
def test_no_credential(to: str, source: Source, server: type[Server]) -> None:
    assert "_API_KEY" in publish(server, source, to, code=1)
    assert server.requests == []


@pytest.mark.parametrize("to", [PREFIX, ANACONDA])
def test_gate_stands_before_every_upload(to: str, source: Source, server: type[Server]) -> None:
    source.make("bad", tests=0)
    assert "has no tests" in publish(server, source, to, code=2, PREFIX_API_KEY=TOKEN)
    assert server.requests == []


def test_no_secret_is_written(source: Source, server: type[Server], tmp_path: Path) -> None:
    """Neither the output, with all its traces, nor any file holds the credential."""
    written = {"RATTLER_CACHE_DIR": str(tmp_path / "rattler"), "RUST_LOG": "trace"}
    assert TOKEN not in publish(server, source, PREFIX, PREFIX_API_KEY=TOKEN, **written)
    assert {auth for _, auth in server.requests} == {f"Bearer {TOKEN}"}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not [file for file in files if TOKEN.encode() in file.read_bytes()]


def test_interrupted_upload(source: Source, tmp_path: Path) -> None:
    """Ctrl-C ends an upload although its server does not answer and no handler can run."""
    asked, end = threading.Event(), threading.Event()

    class Silent(Server):
        def do_POST(self) -> None:
            asked.set()
            end.wait(60)

    with served(tmp_path, Silent) as url:
        child = start(url, source, PREFIX, PREFIX_API_KEY=TOKEN)
        try:
            assert asked.wait(60)
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == -signal.SIGINT
        finally:
            end.set()
            child.kill()
            child.communicate()

# SPDX-License-Identifier: BSD-3-Clause
"""Publishing to prefix.dev and anaconda.org: rattler-build's uploaders against a local server."""

from __future__ import annotations

import http.server
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.project import CHECKOUT, MiniProject
from support.servers import served
from support.static_channel import BUILD, Source

from forge.channel import places, uploads
from forge.channel.local import Channel
from forge.channel.uploads import destination
from forge.errors import BuildFailed, ForgeError

TOKEN = "pfx-s3cr3t-t0k3n-0123456789"


# what anaconda.org is asked to do before it is sent a file
STEPS = ("/package/", "/release/")


class Server(http.server.BaseHTTPRequestHandler):
    """The parts of both services that the uploaders use, and the channel that they then serve."""

    records: dict[str, Any] = {}
    requests: list[tuple[str, str]] = []
    arguments = ""
    status = 200
    private = False

    def __init__(self, *arguments: Any, directory: str) -> None:  # noqa: ARG002
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
        cls.arguments += command_lines()
        if cls.status != 200 and (cls.status == 403 or not self.path.startswith(STEPS)):
            # the worst that a server can do: it repeats what it was sent
            self.answer(cls.status, f"no: {self.headers.get('Authorization')}".encode())
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


def command_lines() -> str:
    """The arguments of every process that can be seen."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """A fresh server that stands for both services, and no credential anywhere."""

    class Fresh(Server):
        records, requests = {}, []

    with served(tmp_path, Fresh) as url:
        for name in ("PREFIX", "ANACONDA"):
            monkeypatch.setenv(f"{name}_SERVER_URL", url)
            monkeypatch.delenv(f"{name}_API_KEY", raising=False)
        monkeypatch.delenv("RATTLER_AUTH_FILE", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PYTHONPATH", str(CHECKOUT / "src"))
        Fresh.url = url
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


REFUSALS = [
    ("https://prefix.dev/demo", 401, "authentication failed (HTTP 401)"),
    ("https://prefix.dev/demo", 403, "(HTTP 403)"),
    ("https://prefix.dev/demo", 409, "(HTTP 409)"),
    ("https://prefix.dev/demo", 422, "(HTTP 422): no: Bearer ***"),
    ("https://prefix.dev/demo", 500, "after retries (HTTP 500)"),
    ("https://anaconda.org/demo", 401, "(HTTP 401)"),
    ("https://anaconda.org/demo", 403, "failed to create or update package. is ANACONDA_API_KEY"),
    ("https://anaconda.org/demo", 409, "already exists. a file of that name"),
    ("https://anaconda.org/demo", 500, "(HTTP 500)"),
]


@pytest.mark.parametrize(("to", "status", "reason"), REFUSALS)
def test_refused_upload(
    to: str, status: int, reason: str, source: Source, server: type[Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One line that names file and reason, and not the credential that the server repeats."""
    monkeypatch.setenv("PREFIX_API_KEY", TOKEN)
    monkeypatch.setenv("ANACONDA_API_KEY", TOKEN)
    server.status = status
    with pytest.raises(BuildFailed) as error:
        destination(to).publish(source)
    message = str(error.value)
    print(message)
    assert f"noarch/alpha-1.0-{BUILD}.conda was not uploaded (0 of 2 were)" in message
    assert reason in message and (status == 403 or uploads.MEANING.get(status, "") in message)
    assert TOKEN not in message and "\n" not in message


def test_private_channel(
    source: Source, server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there has to be read first, and that takes the store's credential."""
    server.private = True
    monkeypatch.setenv("PREFIX_API_KEY", TOKEN)
    with pytest.raises(places.Unreadable, match="401.*rattler's store.*not with PREFIX_API_KEY"):
        destination("https://prefix.dev/demo").publish(source)
    (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"BearerToken": TOKEN}}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
    assert destination("https://prefix.dev/demo").publish(source) == (2, 2)


def test_no_credential(source: Source, server: type[Server]) -> None:
    for to, variable in (("prefix.dev", "PREFIX_API_KEY"), ("anaconda.org", "ANACONDA_API_KEY")):
        with pytest.raises(BuildFailed, match=f"set {variable}"):
            destination(f"https://{to}/demo").publish(source)
    assert server.requests == []


def test_answer_is_withheld_where_the_credential_is_unknown(
    source: Source, server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file that pixi auth login writes, which is not read here, as with a keyring."""
    server.status = 422
    store = tmp_path / "home/.rattler/credentials.json"
    store.parent.mkdir(parents=True)
    store.write_text(json.dumps({"127.0.0.1": {"BearerToken": TOKEN}}))
    with pytest.raises(BuildFailed, match="were\\): HTTP 422$") as error:
        destination("https://prefix.dev/demo").publish(source)
    assert TOKEN not in str(error.value)
    assert {auth for _, auth in server.requests} == {f"Bearer {TOKEN}"}
    # the file named by the variable comes first, and is known
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(store))
    with pytest.raises(BuildFailed, match="no: Bearer \\*\\*\\*"):
        destination("https://prefix.dev/demo").publish(source)


def test_every_part_of_a_stored_credential_is_blotted_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole: a name may be the beginning of its password. An empty one is no text to replace."""
    stored = {"BasicHTTP": {"username": "me", "password": f"me{TOKEN}"}, "other": ""}
    (tmp_path / "auth.json").write_text(json.dumps({"h.invalid": stored}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
    service = uploads.SERVICES["prefix.dev"]
    said = uploads._explain(f"HTTP 403: key me{TOKEN} of me", service, "https://h.invalid")
    assert said == f"HTTP 403: key *** of ***. {uploads.MEANING[403]}"
    (tmp_path / "auth.json").write_text("[]")
    assert uploads.secrets(service, "https://h.invalid") == set()


def test_gate_stands_before_every_upload(source: Source, server: type[Server]) -> None:
    source.make("bad", tests=0)
    for to in ("https://prefix.dev/demo", "https://anaconda.org/demo"):
        with pytest.raises(ForgeError, match="bad.*has no tests"):
            destination(to).publish(source)
    assert server.requests == []


@pytest.mark.parametrize(
    "to",
    [
        f"https://user:{TOKEN}@prefix.dev/demo",
        f"https://{TOKEN}@anaconda.org/demo",
        f"https://anaconda.org/t/{TOKEN}/demo",
        f"https://prefix.dev/demo?token={TOKEN}",
        f"s3://key:{TOKEN}@bucket/prefix",
    ],
    ids=["password", "user", "conda token", "query", "s3"],  # pytest would show the token
)
def test_credentials_in_urls(to: str) -> None:
    """Refused wherever a channel is named, in words that do not repeat them."""
    for reader in (destination, places.parse):
        with pytest.raises(ForgeError, match="carries a credential") as error:
            reader(to)
        assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    "to",
    ["http://[::1/x", "https://h:99999/x", f"https://me:{TOKEN}/x"],
    ids=["bracket", "port", "password"],
)
def test_damaged_urls(to: str) -> None:
    """The last one has lost its host, so that the password stands where a port would."""
    for reader in (destination, places.parse):
        with pytest.raises(ForgeError, match="looks like a URL, and is none") as error:
            reader(to)
        assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("", "is empty"),
        ("https://prefix.dev", "none of"),
        ("https://prefix.dev/a/b", "none of"),
        ("https://example.org/channel", "none of"),
        ("http://prefix.dev/channel", "none of"),
        ("ftp://example.org/channel", "none of"),
        ("s3://bucket/channel", "aws s3 sync"),
    ],
)
def test_other_destinations(to: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        destination(to)


@pytest.mark.parametrize("by", ["variable", "auth file"])
def test_no_secret_is_written(
    by: str, project: MiniProject, server: type[Server], tmp_path: Path
) -> None:
    """Neither the output nor any file nor a command line holds the credential, failing or not."""
    Source.make(Source(project.channel), "alpha")
    outside = tmp_path.parent / f"{tmp_path.name}-auth.json"
    outside.write_text(json.dumps({"127.0.0.1": {"BearerToken": TOKEN}}))
    secret = {"PREFIX_API_KEY": TOKEN} if by == "variable" else {"RATTLER_AUTH_FILE": str(outside)}
    (tmp_path / "tmp").mkdir()
    # all that could be written lies below tmp_path, HOME too, and all that can be told is told
    written = {"RATTLER_CACHE_DIR": str(tmp_path / "rattler"), "TMPDIR": str(tmp_path / "tmp")}
    secret |= written | {"RUST_LOG": "trace"}
    told = ""
    for status, code in ((401, 1), (200, 0)):
        server.status = status
        done = project.forge("publish", "--to", "https://prefix.dev/demo", code=code, **secret)
        told += done.stdout + done.stderr
    refused = project.forge("publish", "--to", f"https://u:{TOKEN}@prefix.dev/demo", code=2)
    told += refused.stdout + refused.stderr
    assert "HTTP 401" in told and "1 packages uploaded" in told
    assert {auth for _, auth in server.requests} == {f"Bearer {TOKEN}"}
    assert "publish" in server.arguments
    assert leaks(tmp_path, told, server.arguments) == []

    # and the search does find what is there
    (tmp_path / "planted.log").write_bytes(b"\0Authorization: Bearer " + TOKEN.encode())
    assert leaks(tmp_path, f"key {TOKEN}", "") == ["output", str(tmp_path / "planted.log")]


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where the token stands: in a text, or in any file below a folder."""
    found = ["output" for text in texts if TOKEN in text]
    files = (f for f in folder.rglob("*") if f.is_file())
    return found + [str(file) for file in files if TOKEN.encode() in file.read_bytes()]


def test_real_hosts_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PREFIX_SERVER_URL", "ANACONDA_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    prefix, anaconda = destination("https://prefix.dev/a"), destination("https://anaconda.org/b")
    assert prefix.service.api == "https://prefix.dev" and prefix.name == "a"
    assert anaconda.service.files == "https://conda.anaconda.org" and anaconda.name == "b"
    assert destination("out") == Path(os.getcwd()) / "out"
    assert isinstance(Channel(Path("x")), Channel)


@pytest.mark.parametrize(
    ("key", "identity", "attested"),
    [(None, "token", True), ("key", "token", False), (None, None, False)],
)
def test_attestation_where_there_is_an_identity(
    monkeypatch: pytest.MonkeyPatch, key: str | None, identity: str | None, attested: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        uploads, "upload_package_to_prefix", lambda *_, **options: asked.update(options)
    )
    monkeypatch.delenv(uploads.IDENTITY, raising=False)
    if identity:
        monkeypatch.setenv(uploads.IDENTITY, identity)
    uploads.SERVICES["prefix.dev"].send(Path("a.conda"), "https://prefix.dev", "mine", key)
    assert asked["generate_attestation"] == attested

# SPDX-License-Identifier: BSD-3-Clause
"""`forge channel verify` finds each planted damage, and the next publish mends index files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zstandard
from support.servers import QuietHandler, served
from support.static_channel import BUILD, Source, findings, flip, lock_of, tree

from forge.channel import places, revisions, verify
from forge.channel.publish import StaticChannel
from forge.errors import BuildFailed, ForgeError


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    source = Source(root / "channel")
    source.make("alpha", depends=["beta"])
    source.make("beta", subdir="linux-64")
    StaticChannel(root / "out").publish(source)
    return root / "out"


@pytest.fixture(scope="module")
def published_url(published: Path) -> Iterator[str]:
    with served(published) as url:
        yield url


@pytest.fixture
def damaged(published: Path) -> Iterator[Path]:
    """The published channel, given back as it was."""
    before = tree(published)
    yield published
    for name in tree(published).keys() - before.keys():
        (published / name).unlink()
    for name, data in before.items():
        (published / name).write_bytes(data)


ALPHA = f"noarch/alpha-1.0-{BUILD}.conda"


def edit(path: Path, change: Callable[[dict], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def shard_of(channel: Path) -> Path:
    """The shard of noarch that the index names."""
    (name,) = verify.shard_files(places.Folder(channel), "noarch")
    return channel / "noarch/shards" / name


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda c: flip(c / ALPHA, 100), f"{ALPHA}: has sha256"),
    "truncated": (lambda c: (c / ALPHA).write_bytes(b"PK"), f"{ALPHA}: 2 bytes"),
    "missing": (lambda c: (c / ALPHA).unlink(), f"{ALPHA}: missing"),
    "orphan": (
        lambda c: (c / "noarch/x-1-0.conda").write_bytes(b"x"), "noarch/x-1-0.conda: orphan",
    ),
    "md5": (
        lambda c: edit(
            c / "noarch/repodata.json",
            lambda d: d["packages.conda"][ALPHA[7:]].update(md5="0" * 32),
        ),
        f"{ALPHA}: has sha256",
    ),
    "json": (
        lambda c: edit(
            c / "noarch/repodata.json",
            lambda d: d["packages.conda"][ALPHA[7:]].update(depends=[]),
        ),
        "noarch/repodata.json.zst: disagrees",
    ),
    "no sha256": (
        lambda c: edit(
            c / "noarch/repodata.json", lambda d: d["packages.conda"][ALPHA[7:]].pop("sha256")
        ),
        f"{ALPHA}: its record has no sha256",
    ),
    "json cut": (
        lambda c: (c / "noarch/repodata.json").write_text('{"packages.conda": {'),
        "noarch/repodata.json: missing or damaged",
    ),
    "zst": (lambda c: flip(c / "noarch/repodata.json.zst", 40), "noarch/repodata.json.zst: d"),
    "no zst": (
        lambda c: (c / "noarch/repodata.json.zst").unlink(), "noarch/repodata.json.zst: missing",
    ),
    "shard": (lambda c: flip(shard_of(c)), "damaged (shard of alpha)"),
    "no shard": (lambda c: shard_of(c).unlink(), "missing (shard of alpha)"),
    "shard index": (
        lambda c: (c / "noarch" / verify.SHARDS).write_bytes(
            (c / "linux-64" / verify.SHARDS).read_bytes()
        ),
        "missing (shard of beta)",
    ),
    "shards of another time": (
        lambda c: (c / "noarch" / verify.SHARDS).write_bytes(
            zstandard.compress(msgpack.packb({"info": {}, "shards": {}}))
        ),
        f"noarch/{verify.SHARDS}: disagrees",
    ),
    "run exports": (
        lambda c: edit(c / "noarch/run_exports.json", lambda d: d["packages.conda"].clear()),
        "noarch/run_exports.json: names other files",
    ),
    "log": (
        lambda c: (c / "revisions/log.json").write_text(
            revisions.dump([revisions.Revision(1, added=[ALPHA])])
        ),
        "revision 1 is not what the index holds",
    ),
    "revision": (
        lambda c: (c / "revisions/1/noarch/repodata.json.zst").unlink(),
        "revisions/1/noarch/repodata.json.zst: missing or damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_verify_finds(case: str, damaged: Path, published_url: str) -> None:
    """Each planted damage, in the folder and over HTTP (where no orphan can be seen)."""
    damage, message = DAMAGES[case]
    assert findings(damaged) == []
    damage(damaged)
    assert any(message in line for line in findings(damaged)), findings(damaged)
    over_http = verify.channel(places.Web(published_url, retries=0), [])[1]
    assert any(message in line for line in over_http) == (case != "orphan"), over_http


def test_publish_mends_the_index(damaged: Path) -> None:
    """What verify finds in index files is written anew from the packages."""
    forms = ("json", "json cut", "zst", "shard", "no shard", "run exports", "revision")
    for case in ("no sha256", *forms):
        DAMAGES[case][0](damaged)
        assert findings(damaged), case
        assert StaticChannel(damaged).publish(None) is None
        assert findings(damaged) == [], case
    (damaged / ALPHA).unlink()
    with pytest.raises(BuildFailed, match="published but not there"):
        StaticChannel(damaged).publish(None)


def test_publish_indexes_no_changed_package(damaged: Path, tmp_path: Path) -> None:
    """Where the index is made anew, a package does not get the hash of what it has become."""
    Source(tmp_path / "other").make("alpha", depends=["beta"], text="changed")
    (damaged / ALPHA).write_bytes((tmp_path / "other" / ALPHA).read_bytes())
    DAMAGES["no zst"][0](damaged)
    before = tree(damaged)
    with pytest.raises(BuildFailed, match=f"{ALPHA} has sha256 .* take it back from a copy"):
        StaticChannel(damaged).publish(None)
    assert {k: v for k, v in tree(damaged).items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }


def test_verify_locks(published: Path, tmp_path: Path) -> None:
    """A lock installs only if each of its packages is there with its hash."""
    with served(published) as url:
        lock = lock_of(url, tmp_path / "pixi.lock", "alpha")
        assert verify.channel(places.Web(url), [lock])[1] == []
        assert findings(published, lock) == []
        sha256 = verify.read_index(places.Web(url)).records[ALPHA]["sha256"]
    text = lock.read_text()
    lock.write_text(text.replace(sha256, "0" * 64))
    assert any(f"locks {ALPHA} with sha256 000" in line for line in findings(published, lock))
    lock.write_text(text.replace("alpha-1.0", "alpha-1.1"))
    assert any("which the index does not name" in line for line in findings(published, lock))
    lock.write_text(text)
    nothing = findings(published, lock, url="https://example.org/other")
    assert any("locks no package of https://example.org/other" in line for line in nothing)
    lock.write_text("version: 7\nnonsense")
    with pytest.raises(ForgeError, match="is not a lock file"):
        findings(published, lock)


def test_verify_of_what_fails_midway(published: Path) -> None:
    """A server that breaks off or refuses a file is a finding; one that is not there is exit 3."""

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            if self.path.endswith("beta-1.0-h1234567_0.conda"):
                self.send_error(503)
            elif self.path.endswith(".conda"):
                self.send_response(200)
                self.send_header("Content-Length", "5000")
                self.end_headers()
                self.wfile.write(b"PK")
            else:
                super().do_GET()

    with served(published, Refusing) as url:
        found = verify.channel(places.Web(url, retries=0), [])[1]
        assert len(found) == 2 and "503" in str(found) and ALPHA in str(found)
        with pytest.raises(places.Unreadable, match="nothing was checked"):
            verify.channel(places.Web(f"{url}/elsewhere", retries=0), [])
    with pytest.raises(places.Unreadable, match="cannot be read") as error:
        verify.channel(places.Web(url, retries=0), [])
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "403 for url (https://h.invalid/t/TOKEN/c/x.conda)",
            "(https://h.invalid/t/***/c/x.conda)",
        ),
        ("403 for url (https://h.invalid/t/TOKEN)", "403 for url (https://h.invalid/t/***)"),
        ("for url (https://me:TOKEN@h.invalid/c)", "for url (https://h.invalid/c)"),
        ("for url (https://cdn.invalid/c?sig=TOKEN&x=1)", "for url (https://cdn.invalid/c)"),
    ],
)
def test_credentials_in_what_a_client_says(said: str, shown: str) -> None:
    assert places.redacted(said).endswith(shown) and "TOKEN" not in places.redacted(said)


def test_token_of_the_store_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rattler's client sends a conda token in the URL, and names that URL in its errors."""

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            assert "/t/s3cr3t/" in self.path
            self.send_error(403)

    (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"CondaToken": "s3cr3t"}}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
    with served(tmp_path, Refusing) as url, pytest.raises(places.Unreadable, match="403") as error:
        places.Web(url, retries=0).read("noarch/repodata.json")
    assert "s3cr3t" not in str(error.value)


def test_what_looks_like_a_url() -> None:
    with pytest.raises(ForgeError, match="looks like a URL, and is none"):
        places.parse("https://[x/channel")


def test_folder_as_a_url(tmp_path: Path) -> None:
    folder = tmp_path / "a channel"
    assert places.parse(folder.as_uri()).path == folder == places.parse(str(folder)).path

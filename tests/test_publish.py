# SPDX-License-Identifier: BSD-3-Clause
"""Publishing to a folder: what may go, what a client sees at every moment, what can be undone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import rattler
import zstandard
from conftest import MiniProject, QuietHandler, served
from rattler import Channel as ChannelName
from rattler import Gateway, LockFile, SourceConfig, VirtualPackage
from rattler.lock import LockChannel, LockPlatform
from rattler_build import assemble_package
from typer.testing import CliRunner

from forge_publish import places, revisions, static, verify
from forge_publish.static import StaticChannel
from forge_store.channel import Channel
from forge_store.project import SUBDIRS, BuildFailed, ForgeError
from strix_forge.commands import distribution

BUILD = "h1234567_0"


class Source(Channel):
    """A channel as the driver leaves it, with packages that are bound to no host."""

    def make(
        self,
        name: str,
        version: str = "1.0",
        subdir: str = "noarch",
        tests: int = 1,
        licensed: bool = True,
        build: str = BUILD,
        text: str = "",
        **more: object,
    ) -> str:
        """Build a package of one file and add it; returns NAME-VERSION-BUILD."""
        work = self.folder.parent / "work"
        (work / subdir).mkdir(parents=True, exist_ok=True)
        (work / "files").mkdir(exist_ok=True)
        (work / "files" / name).write_text(text or name)
        (work / "LICENSE").write_text("Permission is hereby granted\n")
        about = {"license": "MIT", "license_files": [work / "LICENSE"]} if licensed else {}
        package = assemble_package(
            name, version, subdir, build, work / subdir, files_dir=work / "files",
            noarch="generic" if subdir == "noarch" else None, **about | more,
        )  # fmt: skip
        self.add({package.path: tests}, {"content": name})
        (work / "files" / name).unlink()
        return f"{name}-{version}-{build}"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "channel")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


def findings(target: Path, *locks: Path, url: str | None = None) -> list[str]:
    return verify.channel(places.Folder(target), list(locks), url)[1]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def view(url: str) -> int:
    """One look of a client: the index in its three forms, and every file that each names.

    Returns how many files it read; raises for anything that is missing, half there or different.
    """
    count = 0
    for subdir in SUBDIRS:
        base = f"{url}/{subdir}"
        forms = [json.loads(fetch(f"{base}/repodata.json"))["packages.conda"]]
        forms += [json.loads(unzstd(fetch(f"{base}/repodata.json.zst")))["packages.conda"]]
        shards = msgpack.unpackb(unzstd(fetch(f"{base}/repodata_shards.msgpack.zst")))
        forms += [{}]
        for digest in shards["shards"].values():
            raw = fetch(f"{base}/shards/{digest.hex()}.msgpack.zst")
            assert hashlib.sha256(raw).digest() == digest
            forms[2] |= msgpack.unpackb(unzstd(raw))["packages.conda"]
        exports = json.loads(fetch(f"{base}/run_exports.json"))["packages.conda"]
        named = {(n, r["sha256"]) for f in forms[:2] for n, r in f.items()}
        named |= {(n, r["sha256"].hex()) for n, r in forms[2].items()}
        for name, sha256 in named:
            assert hashlib.sha256(fetch(f"{base}/{name}")).hexdigest() == sha256, name
            count += 1
        for name in exports.keys() - {name for name, _ in named}:
            fetch(f"{base}/{name}")
    return count


def solve(url: str, cache: Path, *specs: str, sharded: bool = True, zst: bool = True) -> set[str]:
    """What rattler takes for `specs` from a channel, through one form of its index."""
    config = SourceConfig(sharded_enabled=sharded, zstd_enabled=zst, cache_action="no-cache")
    gateway = Gateway(cache_dir=cache, default_config=config)
    records = asyncio.run(
        rattler.solve(
            [ChannelName(url)], list(specs), gateway=gateway, platforms=["linux-64", "noarch"],
            virtual_packages=VirtualPackage.detect(),
        )
    )  # fmt: skip
    return {record.file_name.removesuffix(".conda") for record in records}


def lock_of(url: str, path: Path, *specs: str) -> Path:
    """A lock of `specs` from one channel."""
    platform = LockPlatform("linux-64")
    lock = LockFile([platform])
    lock.set_channels("default", [LockChannel(f"{url}/")])
    for record in asyncio.run(rattler.solve([url], list(specs), platforms=["linux-64", "noarch"])):
        lock.add_conda_package("default", platform, record)
    lock.to_path(path)
    return path


def test_folder(source: Source, target: Path) -> None:
    """All forms of the index, modes for a web server, revisions; no change makes no revision."""
    source.make("alpha")
    source.make("beta", subdir="linux-64", depends=["alpha"])
    (source.folder / "forge" / f"alpha-1.0-{BUILD}.provenance.json").write_text("{}")
    (source.folder / "forge" / f"alpha-1.0-{BUILD}.cdx.json").write_text("{}")
    before = os.umask(0o077)
    try:
        first = StaticChannel(target).publish(source)
    finally:
        os.umask(before)
    assert first and str(first) == "revision 1: 2 added"
    for path in [target, *target.rglob("*")]:
        if path.name != ".lock":
            assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    assert findings(target) == []
    assert {p.name for p in (target / "forge").iterdir()} == {
        f"alpha-1.0-{BUILD}.provenance.json", f"alpha-1.0-{BUILD}.cdx.json",
    }  # fmt: skip
    unchanged = tree(target)
    assert StaticChannel(target).publish(source) is None and tree(target) == unchanged

    source.make("alpha", "2.0")
    second = StaticChannel(target).publish(source)
    assert second and second.added == [f"noarch/alpha-2.0-{BUILD}.conda"]
    log = json.loads((target / "revisions/log.json").read_text())
    assert [entry["revision"] for entry in log] == [1, 2]
    assert set(log[0]) == {"revision", "time", "added", "yanked", "restored"}
    assert log[0]["time"].endswith("+00:00") and findings(target) == []
    old = json.loads(unzstd((target / "revisions/1/noarch/repodata.json.zst").read_bytes()))
    assert list(old["packages.conda"]) == [f"alpha-1.0-{BUILD}.conda"]


def test_run_exports(source: Source, target: Path, project: MiniProject) -> None:
    """run_exports.json (CEP 12) says what the packages themselves say."""
    (exporter,) = (project.root / "build/embedded/linux-64").glob("python-3*.conda")
    for subdir in SUBDIRS:
        (target / subdir).mkdir(parents=True)
    os.link(exporter, target / "linux-64" / exporter.name)
    Channel(target).index()
    source.make("alpha")
    StaticChannel(target).publish(source)
    exports = json.loads((target / "linux-64/run_exports.json").read_text())["packages.conda"]
    assert exports[exporter.name]["run_exports"]["noarch"] == ["python"]
    raw = unzstd((target / "linux-64/run_exports.json.zst").read_bytes())
    assert json.loads(raw)["packages.conda"] == exports
    empty = json.loads((target / "noarch/run_exports.json").read_text())["packages.conda"]
    assert empty == {f"alpha-1.0-{BUILD}.conda": {"run_exports": {}}}


def test_channel_from_before(source: Source, target: Path) -> None:
    """A channel without a log is taken over: its packages are the first revision's, too."""
    source.make("alpha")
    Source.make(older := Source(target), "omega")
    older.index()
    revision = StaticChannel(target).publish(source)
    assert revision and len(revision.added) == 2 and findings(target) == []


GATES: dict[str, tuple[Callable[[Source], object], str]] = {
    "host-bound": (lambda s: s.make("bad", build=f"hostbound_{BUILD}"), "is host-bound"),
    "no tests": (lambda s: s.make("bad", tests=0), "has no tests"),
    "no licence": (lambda s: s.make("bad", licensed=False), "says 'nothing' for its licence"),
    "no licence text": (lambda s: s.make("bad", license_files=[]), "has no licence text"),
    "proprietary": (lambda s: s.make("bad", license="Proprietary"), "says 'Proprietary'"),
    "private": (lambda s: s.make("bad", license="LicenseRef-EULA"), "says 'LicenseRef-EULA'"),
}


@pytest.mark.parametrize("case", GATES)
def test_gate(case: str, source: Source, target: Path) -> None:
    """One package that is unfit keeps all of them back, and nothing is written."""
    source.make("good")
    break_it, message = GATES[case]
    break_it(source)
    with pytest.raises(ForgeError, match="nothing is published") as error:
        StaticChannel(target).publish(source)
    assert message in str(error.value) and "bad-1.0" in str(error.value)
    assert "good-1.0" not in str(error.value) and not list(target.glob("*/*"))


def test_gate_holds_packages_against_their_notes(source: Source, target: Path) -> None:
    """A file that differs from its record, one that was not tested, a note of before."""
    dist = source.make("alpha")
    note, package = source.folder / f"forge/{dist}.json", source.folder / f"noarch/{dist}.conda"
    original = note.read_text()
    (record,) = source.records()
    assert source.digest_of(record) == {"content": "alpha"} and source.tests_of(record) == 1
    for text in ('{"content": "alpha"}', "{", original.replace(record.sha256, "0" * 64)):
        note.write_text(text)
        with pytest.raises(ForgeError, match="no note of passed tests.*forge rebuild alpha"):
            StaticChannel(target).publish(source)
    note.write_text('{"content": "alpha"}')
    assert source.digest_of(record) is None
    note.write_text(original)
    whole = package.read_bytes()
    package.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ForgeError, match="differs from its record"):
        StaticChannel(target).publish(source)
    package.unlink()
    with pytest.raises(ForgeError, match="not there"):
        StaticChannel(target).publish(source)
    package.write_bytes(whole)
    assert StaticChannel(target).publish(source)


def test_published_name_keeps_its_bytes(source: Source, target: Path, tmp_path: Path) -> None:
    """Also where the first publish was killed before its index named the file."""
    source.make("alpha", text="one")
    StaticChannel(target).publish(source)
    before = tree(target)
    other = Source(tmp_path / "elsewhere" / "channel")
    other.make("alpha", text="two")
    with pytest.raises(ForgeError, match="already published with other content"):
        StaticChannel(target).publish(other)
    assert tree(target) == before
    unnamed = tmp_path / "fresh" / "noarch" / f"alpha-1.0-{BUILD}.conda"
    unnamed.parent.mkdir(parents=True)
    unnamed.write_bytes(b"somebody's")
    with pytest.raises(ForgeError, match="already published with other content"):
        StaticChannel(tmp_path / "fresh").publish(source)
    assert unnamed.read_bytes() == b"somebody's"


def test_yank(source: Source, target: Path, tmp_path: Path) -> None:
    """New solves avoid a yanked build, old locks install it, and it can be restored."""
    old, new = source.make("alpha"), source.make("alpha", "2.0")
    source.make("beta", depends=["alpha"])
    StaticChannel(target).publish(source)
    forms = [{}, {"sharded": False}, {"sharded": False, "zst": False}]
    with served(target) as url:
        lock = lock_of(url, tmp_path / "pixi.lock", "alpha >=2")
        revision = StaticChannel(target).publish(None, [new])
        assert revision and revision.yanked == [f"noarch/{new}.conda"]
        for form in forms:
            assert old in solve(url, tmp_path / "cache", "beta", **form)
            with pytest.raises(Exception, match="alpha"):
                solve(url, tmp_path / "cache", "alpha >=2", **form)
        assert findings(target, lock, url=url) == []
        locked = LockFile.from_path(lock).environment("default")
        assert locked
        records = locked.conda_repodata_records_for_platform(locked.platforms()[0])
        prefix = tmp_path / "prefix"
        asyncio.run(rattler.install(records, prefix, cache_dir=tmp_path / "c", show_progress=False))
        assert (prefix / "alpha").read_text() == "alpha"

        # solvers that know nothing of `removed` are kept off by what the record depends on
        data = json.loads((target / "noarch/repodata.json").read_text())
        assert data["packages.conda"][f"{new}.conda"]["depends"] == [static.REVOKED]
        assert data["removed"] == [f"{new}.conda"]

        assert StaticChannel(target).publish(source, [new]) is None
        source.make("gamma")
        assert StaticChannel(target).publish(source) and findings(target) == []
        assert old in solve(url, tmp_path / "cache", "alpha")
        revision = StaticChannel(target).publish(None, (), [new])
        assert revision and revision.restored == [f"noarch/{new}.conda"]
        for form in forms:
            assert new in solve(url, tmp_path / "cache", "beta", **form)
    assert findings(target) == []
    for arguments in ((["nosuch-1-0"], ()), ((), ["nosuch-1-0"])):
        with pytest.raises(ForgeError, match="no such build"):
            StaticChannel(target).publish(None, *arguments)
    assert StaticChannel(target).publish(None, (), [old]) is None


def test_fix_and_yank_are_one_revision(source: Source, target: Path) -> None:
    broken = source.make("alpha")
    StaticChannel(target).publish(source)
    source.make("alpha", "1.1")
    revision = StaticChannel(target).publish(source, [broken])
    assert str(revision) == "revision 2: 1 added, 1 yanked"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the publisher runs after it."""


def test_killed_at_every_step(
    source: Source, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each of its renames in turn: views stay whole, the next runs complete it."""
    first = source.make("alpha")
    StaticChannel(target).publish(source)
    real, steps = static._move, 0

    def move(origin: str | Path, destination: Path) -> None:
        nonlocal steps
        if steps == 0:
            monkeypatch.setattr(StaticChannel, "_clean", lambda _: None)
            raise Killed
        steps -= 1
        real(origin, destination)

    clean = StaticChannel._clean
    for at in range(100):
        source.make("beta", f"{at}.0")
        yank = ((), [first]) if at % 2 else ([first], ())
        steps = at
        monkeypatch.setattr(static, "_move", move)
        with contextlib.suppress(Killed):
            StaticChannel(target).publish(source, *yank)
        finished, steps = steps > 0, 0
        monkeypatch.setattr(static, "_move", real)
        monkeypatch.setattr(StaticChannel, "_clean", clean)
        view(target.as_uri())
        if finished:
            break
        if at % 4 == 3:  # otherwise the next one has two killed publishes to complete
            StaticChannel(target).publish(source, *yank)
            assert findings(target) == [] and not (target / ".staging").exists()
            assert not verify.read_index(places.Folder(target)).removed
    assert findings(target) == [] and not (target / ".staging").exists()
    assert 15 < at < 40, "a publish of one package has some twenty renames"


def publish_elsewhere(source: str, target: str) -> None:
    """What the killed child runs."""
    StaticChannel(Path(target)).publish(Channel(Path(source)))
    os._exit(0)  # py-rattler sometimes aborts while Python shuts down


def test_killed_at_random_moments(source: Source, target: Path, tmp_path: Path) -> None:
    """SIGKILL at 20 moments while a client looks all the time and never sees anything but whole."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forge_publish.static"])
    arguments = (str(source.folder), str(target))
    dice, killed, views, broken = random.Random(5), 0, 0, []
    source.make("alpha")
    for _ in range(2):  # the second time measures, without the fork server's start
        source.make("alpha", f"{_}.5")
        start = time.monotonic()
        child = context.Process(target=publish_elsewhere, args=arguments)
        child.start()
        child.join()
        seconds = time.monotonic() - start
    stop = threading.Event()

    def look(url: str) -> None:
        nonlocal views
        forms = [{}, {"sharded": False}, {"sharded": False, "zst": False}]
        while not stop.is_set():
            try:
                view(url)
                solve(url, tmp_path / "cache", "alpha", **forms[views % 3])
                views += 1
            except Exception as error:
                broken.append(error)

    with served(target) as url:
        client = threading.Thread(target=look, args=(url,))
        client.start()
        for round_ in range(20):
            source.make("beta", f"{round_}.0", subdir=SUBDIRS[round_ % 2])
            child = context.Process(target=publish_elsewhere, args=arguments)
            child.start()
            time.sleep(dice.uniform(0, seconds))
            child.kill()
            child.join()
            killed += child.exitcode == -signal.SIGKILL
        stop.set()
        client.join()
        assert broken == [] and views >= 10
        assert killed >= 10
        StaticChannel(target).publish(source)
        assert findings(target) == [] and view(url) >= 22
        assert not (target / ".staging").exists() and not list(target.rglob(".partial*"))

        # the client does notice what it is there to notice
        (target / "noarch" / f"alpha-1.0-{BUILD}.conda").unlink()
        with pytest.raises(urllib.error.HTTPError):
            view(url)


def test_commands(project: MiniProject, target: Path) -> None:
    """publish, and channel log, yank and verify: what they print and how they exit."""
    source = Source(project.channel)
    dist = source.make("alpha")
    assert "revision 1: 1 added" in project.forge("publish", "--to", str(target)).stdout
    again = project.forge("publish", "--to", target.as_uri()).stdout
    assert "nothing new" in again

    def channel(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(distribution.channel_app, arguments)
        if isinstance(done.exception, ForgeError):
            assert done.exception.exit_code == code
            return str(done.exception)
        assert done.exit_code == code, done.output
        return done.output

    assert "no channel folder" in channel("yank", str(target.parent), dist, code=2)
    assert "revision 2: 1 yanked" in channel("yank", str(target), dist)
    assert "nothing new" in channel("yank", str(target), dist)
    assert "revision 3: 1 restored" in channel("yank", str(target), dist, "--restore")
    printed = channel("log", str(target))
    assert printed.index("revision 3") < printed.index(f"- noarch/{dist}.conda")
    assert json.loads(channel("log", str(target), "--json"))[0]["revision"] == 1
    assert "has no revisions/log.json" in channel("log", str(target.parent), code=2)
    assert "1 packages, 0 findings" in channel("verify", str(target))
    with served(target) as url:
        assert "orphans cannot be seen" in channel("verify", url)
        assert channel("log", url) == printed
    flip(target / f"noarch/{dist}.conda")
    assert f"noarch/{dist}.conda: has sha256" in channel("verify", str(target), code=1)
    assert "nothing was checked" in channel("verify", str(target.parent), code=3)


def test_one_publisher_at_a_time(source: Source, target: Path) -> None:
    from forge_store.project import hold

    source.make("alpha")
    with hold(target, "publishing to"), pytest.raises(ForgeError, match="is publishing to"):
        StaticChannel(target).publish(source)
    assert StaticChannel(target).publish(source)


def test_full_disk(
    source: Source, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message, clients keep what they had, and the same command completes it."""
    source.make("alpha")
    StaticChannel(target).publish(source)
    before = tree(target)
    source.make("beta")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildFailed, match="No space left on device") as error:
        StaticChannel(target).publish(source)
    assert "\n" not in str(error.value)
    assert {k: v for k, v in tree(target).items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }
    monkeypatch.undo()
    assert StaticChannel(target).publish(source) and findings(target) == []
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ForgeError, match="cannot write"):
        StaticChannel(tmp_path / "file" / "out").publish(source)


def test_old_shards_stay_a_week(source: Source, target: Path) -> None:
    """A client that holds the index of before still finds the shards that it names."""
    source.make("alpha")
    StaticChannel(target).publish(source)
    (shard,) = (target / "noarch/shards").iterdir()
    long_ago = time.time() - 30 * 86400
    os.utime(shard, (long_ago, long_ago))
    source.make("alpha", "2.0")
    StaticChannel(target).publish(source)
    assert shard.exists()
    os.utime(shard, (long_ago, long_ago))
    source.make("alpha", "3.0")
    StaticChannel(target).publish(source)
    assert not shard.exists() and findings(target) == []


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


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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
    for case in ("json", "json cut", "zst", "shard", "no shard", "run exports", "revision"):
        DAMAGES[case][0](damaged)
        assert findings(damaged), case
        assert StaticChannel(damaged).publish(None) is None
        assert findings(damaged) == [], case
    (damaged / ALPHA).unlink()
    with pytest.raises(BuildFailed, match="published but not there"):
        StaticChannel(damaged).publish(None)


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

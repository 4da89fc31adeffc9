# SPDX-License-Identifier: BSD-3-Clause
"""Publishing to a folder: what may go, what a client sees at every moment, what can be undone."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rattler
from rattler import LockFile
from support.project import MiniProject
from support.servers import served
from support.static_channel import BUILD, Source, findings, flip, lock_of, solve, tree, unzstd
from typer.testing import CliRunner

from forge.channel import publish as static
from forge.channel.publish import StaticChannel
from forge.cli import publishing
from forge.errors import BuildFailed, ForgeError


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "channel")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


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


def test_run_exports(source: Source, target: Path) -> None:
    """run_exports.json (CEP 12) says what the packages themselves say."""
    exporter = source.make("alpha", exports={"weak": ["alpha >=1"], "noarch": ["python"]})
    plain = source.make("beta")
    StaticChannel(target).publish(source)
    found = json.loads((target / "noarch/run_exports.json").read_text())["packages.conda"]
    assert found == {
        f"{exporter}.conda": {"run_exports": {"weak": ["alpha >=1"], "noarch": ["python"]}},
        f"{plain}.conda": {"run_exports": {}},
    }
    raw = unzstd((target / "noarch/run_exports.json.zst").read_bytes())
    assert json.loads(raw)["packages.conda"] == found


def test_channel_from_before(source: Source, target: Path, tmp_path: Path) -> None:
    """A channel without a log is taken over whole, or not at all."""
    source.make("alpha")
    older = Source(target)
    omega = older.make("omega")
    index = target / "noarch/repodata.json"
    text = index.read_text()
    index.write_text(text.replace(omega, "other-1.0-0"))
    with pytest.raises(ForgeError, match=f"{omega}.conda is in no index"):
        StaticChannel(target).publish(source)
    index.write_text(text)
    revision = StaticChannel(target).publish(source)
    assert revision and len(revision.added) == 2 and findings(target) == []

    Source(tmp_path / "bound").make("psi", build=f"hostbound_{BUILD}")
    with pytest.raises(ForgeError, match="no folder to publish to"):
        StaticChannel(tmp_path / "bound").publish(source)
    with pytest.raises(ForgeError, match="is what builds go to"):
        StaticChannel(source.folder).publish(source)
    before = tree(source.folder).keys()
    with pytest.raises(ForgeError, match="has no revisions/log.json"):
        StaticChannel(source.folder).publish(None, [f"alpha-1.0-{BUILD}"])
    assert tree(source.folder).keys() - {".lock"} == before - {".lock"}


def test_yank_outlives_a_lost_log(source: Source, target: Path) -> None:
    """The index knows it, too: the log that is begun anew must not undo it."""
    alpha = source.make("alpha")
    StaticChannel(target).publish(source, [alpha])
    (target / "revisions/log.json").unlink()
    revision = StaticChannel(target).publish(source)
    assert revision and revision.yanked == [f"noarch/{alpha}.conda"]
    assert findings(target) == [] and StaticChannel(target).publish(source) is None


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


def test_nothing_to_publish(source: Source, target: Path) -> None:
    with pytest.raises(ForgeError, match="holds no packages. Run ./forge build-all"):
        StaticChannel(target).publish(source)


def test_folder_of_something_else_is_left_alone(source: Source, target: Path) -> None:
    source.make("alpha")
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ForgeError, match="is no channel: it holds thesis.tex"):
        StaticChannel(target).publish(source)
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_published_file_that_was_cut_is_told(source: Source, target: Path) -> None:
    source.make("alpha")
    StaticChannel(target).publish(source)
    (file,) = target.glob("noarch/*.conda")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BuildFailed, match="not there, or cut off"):
        StaticChannel(target).publish(source)


def test_gate_holds_packages_against_their_notes(source: Source, target: Path) -> None:
    """A file that differs from its record, one that was not tested, a note of before."""
    dist = source.make("alpha")
    note, package = source.folder / f"forge/{dist}.json", source.folder / f"noarch/{dist}.conda"
    original = note.read_text()
    (record,) = source.records()
    assert source.digest_of(record) == {"content": "alpha"} and source.tests_of(record) == 1
    for text in ('{"content": "alpha"}', "{", original.replace(record.sha256, "0" * 64)):
        note.write_text(text)
        with pytest.raises(ForgeError, match="alpha.*no note of passed tests"):
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


def test_commands(project: MiniProject, target: Path) -> None:
    """publish, and channel log, yank and verify: what they print and how they exit."""
    source = Source(project.channel)
    dist = source.make("alpha")
    assert "revision 1: 1 added" in project.forge("publish", "--to", str(target)).stdout
    again = project.forge("publish", "--to", target.as_uri()).stdout
    assert "nothing new" in again

    elsewhere = ["publish", "--to", "https://prefix.dev/demo", "--yank", dist]
    refused = CliRunner().invoke(publishing.app, elsewhere).exception
    assert isinstance(refused, ForgeError) and "only a folder's builds" in str(refused)

    def channel(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(publishing.channel_app, arguments)
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
    from forge.locks import hold

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

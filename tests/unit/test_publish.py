# SPDX-License-Identifier: BSD-3-Clause
"""Publishing: what may go, what clients see at every moment, what can be undone, what is said."""

import contextlib
import json
import os
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.project import MiniProject
from support.servers import served
from support.small_channel import workspace
from support.static_channel import BUILD, Source, findings, flip, solve, tree, unzstd, view
from typer.testing import CliRunner

from forge.channel import publish as static
from forge.channel import revisions, verify
from forge.channel.publish import StaticChannel
from forge.cli import main
from forge.conda import provenance
from forge.conda.location import Location
from forge.errors import ForgeError


def test_folder(source: Source, target: Path) -> None:
    """All forms of the index, modes for a web server, revisions; no change makes no revision."""
    source.make("alpha")
    source.make("beta", subdir="linux-64", depends=["alpha"])
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
        f"alpha-1.0-{BUILD}.provenance.json",
        f"beta-1.0-{BUILD}.provenance.json",
    }  # fmt: skip
    unchanged = tree(target)
    assert StaticChannel(target).publish(source) is None and tree(target) == unchanged

    source.make("alpha", "2.0")
    second = StaticChannel(target).publish(source)
    assert second and second.added == [f"noarch/alpha-2.0-{BUILD}.conda"]
    log = json.loads((target / "revisions/log.json").read_text())
    assert [entry["revision"] for entry in log["revisions"]] == [1, 2]
    assert set(log["revisions"][0]) == {"revision", "time", "added", "yanked", "restored"}
    assert log["revisions"][0]["time"].endswith("+00:00") and findings(target) == []
    assert log["serial"] == 4 and not log["before"]
    assert len(log["index"]) == 12  # six forms of two indexes
    old = json.loads(unzstd((target / "revisions/1/noarch/repodata.json.zst").read_bytes()))
    assert list(old["packages.conda"]) == [f"alpha-1.0-{BUILD}.conda"]


def test_revision_is_a_channel(source: Source, target: Path, tmp_path: Path) -> None:
    """Locked from it is what the channel had then, and the files come from where they are."""
    old = source.make("alpha")
    source.make("beta")
    StaticChannel(target).publish(source)
    StaticChannel(target).publish(source, [old])
    source.make("alpha", "2.0")
    StaticChannel(target).publish(source)
    revision = target / "revisions/1"
    for subdir in ("noarch", "linux-64"):
        plain = json.loads((revision / subdir / "repodata.json").read_bytes())
        assert json.loads(unzstd((revision / subdir / "repodata.json.zst").read_bytes())) == plain
    with served(target) as url:
        app = workspace(tmp_path / "app", f"{url}/revisions/1")
        assert app.lock() == {"default": 2}
        assert f"- conda: {url}/noarch/{old}.conda" in app.lock_file.read_text()
        assert app.install("default", tmp_path / "cache") == 2


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


GATES: dict[str, tuple[Callable[[Source], object], str]] = {
    "host-bound": (lambda s: s.make("bad", build=f"hostbound_{BUILD}"), "is host-bound"),
    "no tests": (lambda s: s.make("bad", tests=0), "has no tests"),
    "no licence": (lambda s: s.make("bad", licensed=False), "has the licence 'nothing'"),
    "rehearsed": (
        lambda s: s.make("bad", build="rehearsal_rocm100_gfx1151_py314h1234567_0"),
        "was made by a rehearsal, so it is never published",
    ),
    "no licence text": (lambda s: s.make("bad", license_files=[]), "has no licence text"),
    "proprietary": (
        lambda s: s.make("bad", license="Proprietary"),
        "the licence 'Proprietary'",
    ),
    "private": (
        lambda s: s.make("bad", license="LicenseRef-EULA"),
        "the licence 'LicenseRef-EULA'",
    ),
    "a GPL library": (
        lambda s: s.make("bad", file="lib/libcholmod.so.5", license="LGPL-2.1-or-later"),
        "has lib/libcholmod.so.5, which is under the GPL, and the licence 'LGPL-2.1-or-later'",
    ),
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


def test_a_gpl_library_under_its_licence_is_admitted(source: Source, target: Path) -> None:
    source.make("good", file="lib/libcholmod.so.5", license="MIT AND GPL-2.0-or-later")
    assert StaticChannel(target).publish(source)


def test_nothing_to_publish(source: Source, target: Path) -> None:
    with pytest.raises(ForgeError, match="holds no packages"):
        StaticChannel(target).publish(source)


@pytest.mark.parametrize("held", ["thesis.tex", "noarch/omega-1.0-0.conda"])
def test_folder_of_something_else_is_left_alone(held: str, source: Source, target: Path) -> None:
    """A folder without a log is not a published channel: not the one that builds go to either."""
    source.make("alpha")
    (target / held).parent.mkdir(parents=True)
    (target / held).write_text("years of work")
    for arguments in ((source,), (None, ["alpha-1.0-0"])):
        with pytest.raises(ForgeError, match=r"is not a published .* but (thesis|noarch)"):
            StaticChannel(target).publish(*arguments)
        with pytest.raises(ForgeError, match=r"is not a published .* but forge"):
            StaticChannel(source.folder).publish(*arguments)
    assert list(tree(target)) == [held] and not (source.folder / ".lock").exists()


def test_lost_log_is_not_begun_anew(source: Source, target: Path) -> None:
    """It would forget what is yanked."""
    StaticChannel(target).publish(source, [source.make("alpha")])
    (target / "revisions/log.json").unlink()
    with pytest.raises(ForgeError, match="has no revisions/log"):
        StaticChannel(target).publish(source)


def test_yank_of_nothing_makes_no_channel(target: Path) -> None:
    with pytest.raises(ForgeError, match="is not a published channel"):
        StaticChannel(target).publish(None, ["alpha-1.0-0"])
    assert not target.exists()


def test_yank(source: Source, target: Path, tmp_path: Path) -> None:
    """Whatever form of the index they read, solvers avoid the build until it is restored.

    Its file stays: a lock of before is installed.
    """
    old, new = source.make("alpha"), source.make("alpha", "2.0")
    source.make("beta", depends=["alpha"])
    StaticChannel(target).publish(source)
    forms = [{}, {"sharded": False}, {"sharded": False, "zst": False}]
    with served(target) as url:
        app = workspace(tmp_path / "app", url)
        app.lock()
        revision = StaticChannel(target).publish(None, [new])
        for form in forms:
            assert old in solve(url, tmp_path / "cache", "beta", **form)
            with pytest.raises(Exception, match="alpha"):
                solve(url, tmp_path / "cache", "alpha >=2", **form)
        assert f"/noarch/{new}.conda" in app.lock_file.read_text()
        assert app.install("default", tmp_path / "installed") == 2
    assert revision and revision.yanked == [f"noarch/{new}.conda"] and findings(target) == []
    data = json.loads((target / "noarch/repodata.json").read_text())
    # solvers that do not know `removed` are kept off by what the record depends on
    assert data["packages.conda"][f"{new}.conda"]["depends"] == [static.REVOKED]
    assert data["removed"] == [f"{new}.conda"]
    assert StaticChannel(target).publish(source, [new]) is None
    source.make("gamma")
    assert StaticChannel(target).publish(source) and findings(target) == []
    assert json.loads((target / "noarch/repodata.json").read_text())["removed"] == data["removed"]
    revision = StaticChannel(target).publish(None, (), [new])
    assert revision and revision.restored == [f"noarch/{new}.conda"] and findings(target) == []
    with served(target) as url:
        assert all(new in solve(url, tmp_path / "again", "beta", **form) for form in forms)
    for arguments in ((["nosuch-1-0"], ()), ((), ["nosuch-1-0"])):
        with pytest.raises(ForgeError, match="no such build"):
            StaticChannel(target).publish(None, *arguments)
    assert StaticChannel(target).publish(None, (), [old]) is None


def test_gate_holds_packages_against_their_notes(source: Source, target: Path) -> None:
    """A file that differs from its record, one that was not tested, a note of before."""
    dist = source.make("alpha")
    note, package = source.folder / f"forge/{dist}.json", source.folder / f"noarch/{dist}.conda"
    original = note.read_text()
    (record,) = source.records()
    assert source.digest_of(record) == {"content": "alpha"} and source.tests_of(record) == 1
    for text in ('{"content": "alpha"}', "{", original.replace(record.sha256, "0" * 64)):
        note.write_text(text)
        with pytest.raises(ForgeError, match=r"alpha.*no note of passed tests"):
            StaticChannel(target).publish(source)
    note.write_text('{"content": "alpha"}')
    assert source.digest_of(record) is None
    note.write_text(original)
    whole = package.read_bytes()
    for bit in range(8):  # its sha256 is then above or below the right one
        package.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1 << bit]))
        with pytest.raises(ForgeError, match="differs from its record"):
            StaticChannel(target).publish(source)
    package.unlink()
    with pytest.raises(ForgeError, match="is missing or differs"):
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
    with pytest.raises(ForgeError, match=r"alpha.*already published with other content"):
        StaticChannel(target).publish(other)
    assert tree(target) == before
    gamma = other.make("gamma", text="one")
    (target / f"noarch/{gamma}.conda").write_bytes(b"of a killed publish")
    with pytest.raises(ForgeError, match=r"gamma.*already published with other content"):
        StaticChannel(target).publish(other)


def test_fix_and_yank_are_one_revision(source: Source, target: Path) -> None:
    broken = source.make("alpha")
    StaticChannel(target).publish(source)
    source.make("alpha", "1.1")
    revision = StaticChannel(target).publish(source, [broken])
    assert str(revision) == "revision 2: 1 added, 1 yanked"


def test_one_publisher_at_a_time(source: Source, target: Path) -> None:
    from forge.files import hold

    source.make("alpha")
    with hold(target, "publishing to"), pytest.raises(ForgeError, match="is publishing to"):
        StaticChannel(target).publish(source)
    assert StaticChannel(target).publish(source)


def test_a_target_that_cannot_be_written(source: Source, tmp_path: Path) -> None:
    """test_faults.py has a disk that is full."""
    source.make("alpha")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ForgeError, match="cannot write"):
        StaticChannel(tmp_path / "file" / "out").publish(source)


@pytest.mark.parametrize("record", ["none", "garbage", "another's", "two"])
def test_only_what_has_its_own_record(source: Source, target: Path, record: str) -> None:
    source.make("alpha")
    source.make("beta")
    folder, name = source.folder / "forge", f"-1.0-{BUILD}.provenance.json"
    own = folder / f"alpha{name}"
    says = "is not what its provenance says"
    if record == "none":
        own.unlink()
    elif record == "garbage":
        own.write_text("[]")
    elif record == "another's":
        own.write_text((folder / f"beta{name}").read_text())
    else:
        (source.folder / "noarch" / own.name).write_text((folder / f"beta{name}").read_text())
        says = "differ: delete the wrong one"
    with pytest.raises(ForgeError, match=says) as error:
        StaticChannel(target).publish(source)
    assert "alpha-1.0" in str(error.value) and not list(target.glob("noarch/*"))


def leaves(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where the values of a tree are that are no tables and no lists."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*at, key))
    else:
        yield at


def test_every_value_of_a_record_counts(source: Source) -> None:
    """Edited, each makes the package differ, or is named as what only the record says."""
    source.make("alpha")
    (package,) = source.folder.glob("noarch/*.conda")
    honest = provenance.of(package)
    assert honest and provenance.verify(package, honest).wrong == []
    named = set(provenance.verify(package, honest).unchecked)
    assert named == {"recipe", "strix-forge"}
    own = ["builder", "version", "strix-forge"]  # the recipe's name is that of its files as well
    for at in leaves(honest):
        edited = json.loads(json.dumps(honest))
        inner = edited
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = "edited"
        path = package.with_suffix(".json")
        path.write_text(json.dumps(edited))
        try:
            wrong = provenance.verify(package, provenance.read(path)).wrong
        except ForgeError as error:
            wrong = [str(error)]
        assert bool(wrong) != (list(at[-3:]) == own), (at, wrong)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the publisher runs after it."""


@contextlib.contextmanager
def killed_before(rename: int) -> Iterator[None]:
    """A publish is killed before one of its renames, if it has so many."""
    real, left = static._move, rename
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):

        def move(origin: Path, destination: Path) -> None:
            nonlocal left
            if left == 0:
                patch.setattr(TemporaryDirectory, "_rmtree", lambda *_, **__: None)
                raise Killed
            left -= 1
            real(origin, destination)

        patch.setattr(static, "_move", move)
        yield


def test_killed_at_every_step(source: Source, target: Path, tmp_path: Path) -> None:
    """Stopped before each of its renames in turn: views stay whole, the next runs complete it."""
    first, seen, finished = source.make("alpha"), set(), None
    StaticChannel(target).publish(source)
    for at in range(100):
        source.make("beta", f"{at}.0")
        yank = ((), [first]) if at % 2 else ([first], ())
        with killed_before(at):
            finished = StaticChannel(target).publish(source, *yank)
        view(target.as_uri())
        for memory in (tmp_path / "kept.json", tmp_path / f"{at}.json"):
            revisions.require_current(Location(target), memory)  # its log and index are a pair
        seen |= set(verify.read_index(Location(target)).records)
        if finished:
            break
        if at % 4 == 3:  # otherwise the next one has more than one killed publish to complete
            StaticChannel(target).publish(None)  # takes nothing in, so what was copied is orphan
            assert all("not in the index" in finding for finding in findings(target))
        assert seen <= set(verify.read_index(Location(target)).records), "never taken back"
    assert findings(target) == [] and not [*target.glob(".forge-*")]
    assert 15 < at < 40, "a publish of one package has some twenty renames"

    # the client does notice what it is there to notice
    (target / "noarch" / f"{first}.conda").unlink()
    with pytest.raises(urllib.error.URLError):
        view(target.as_uri())


@pytest.mark.parametrize("at", range(4))
def test_first_publish_killed(at: int, source: Source, target: Path) -> None:
    """A folder that has no index yet is known again."""
    source.make("alpha")
    with killed_before(at):
        StaticChannel(target).publish(source)
        pytest.fail("it was not killed")
    assert StaticChannel(target).publish(source) and findings(target) == []


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """publish, and channel yank and verify: what they print and how they exit."""
    project, target = MiniProject(tmp_path / "project"), tmp_path / "out"
    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    dist = Source(project.channel).make("alpha")

    def said(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(main.app, words)
        if isinstance(done.exception, ForgeError):
            assert done.exception.exit_code == code
            return str(done.exception)
        assert done.exit_code == code, done.output
        return done.output

    def publish(to: str = str(target), code: int = 0) -> str:
        return said("publish", "--to", to, code=code)

    assert "revision 1: 1 added" in publish()
    assert "nothing new" in publish(target.as_uri())
    page = project.root / "docs/channel_page.py"  # publish and yank run it
    page.parent.mkdir()
    page.write_text('import sys\nopen(sys.argv[1] + "/index.html", "a").write("line\\n")\n')
    publish()
    assert len((target / "index.html").read_text().splitlines()) == 1
    page.write_text('raise SystemExit("no page, because")\n')
    assert f"{target} is published, but its page is not" in publish(code=1)
    assert "no page, because" in capfd.readouterr().err
    page.unlink()

    def channel(*words: str, code: int = 0) -> str:
        return said("channel", *words, code=code)

    assert "is not a published channel" in channel("yank", str(target.parent), dist, code=2)
    assert "revision 2: 1 yanked" in channel("yank", str(target), dist)
    assert "nothing new" in channel("yank", str(target), dist)
    assert "revision 3: 1 restored" in channel("yank", str(target), dist, "--restore")
    assert "1 packages, 0 findings" in channel("verify", str(target))
    with served(target) as url:
        assert "does not list files" in channel("verify", url)
    flip(target / f"noarch/{dist}.conda")
    assert f"noarch/{dist}.conda: has sha256" in channel("verify", str(target), code=1)
    assert "nothing was checked" in channel("verify", str(target.parent), code=3)

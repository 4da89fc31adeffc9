# SPDX-License-Identifier: BSD-3-Clause
"""Publishing: the gate, the channel that clients see at each moment, withdrawals, and messages."""

import contextlib
import json
import os
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.conda_packages import file, link, package
from support.kills import needs_time
from support.project import MiniProject
from support.servers import served
from support.small_channel import workspace
from support.static_channel import BUILD, Source, flip, require_whole, solve, tree, view
from typer.testing import CliRunner

from forge.channel import publish as static
from forge.channel import read_validated
from forge.channel.publish import PublishedChannel
from forge.cli import main
from forge.errors import Failed, ForgeError, Refused
from forge.files import hold


def test_folder(source: Source, target: Path) -> None:
    """A published channel has every form of the index, and modes with which a server can read it.

    Publishing again does not change packages.
    """
    source.make("alpha")
    source.make("beta", subdir="linux-64", depends=["alpha"])
    before = os.umask(0o077)
    try:
        first = PublishedChannel(target).publish(source)
    finally:
        os.umask(before)
    assert first == [f"linux-64/beta-1.0-{BUILD}.conda", f"noarch/alpha-1.0-{BUILD}.conda"]
    for path in [target, *target.rglob("*")]:
        if path.name != ".lock":
            expected_mode = 0o755 if path.is_dir() else 0o644
            assert path.stat().st_mode & 0o777 == expected_mode, path
    require_whole(target)
    unchanged = tree(target)
    assert PublishedChannel(target).publish(source) == []
    changed = {name for name, data in tree(target).items() if unchanged.get(name) != data}
    assert changed <= {f"{subdir}/{static.FORMS[0]}" for subdir in ("noarch", "linux-64")}, (
        "only the time in the sharded index may change"
    )
    source.make("alpha", "2.0")
    assert PublishedChannel(target).publish(source) == [f"noarch/alpha-2.0-{BUILD}.conda"]
    require_whole(target)
    packages = {name: data for name, data in unchanged.items() if name.endswith(".conda")}
    assert tree(target).items() >= packages.items()


def make_unsafe(source: Source) -> None:
    """Add a package that would write outside the prefix, as if its tests had passed."""
    built = package(
        source.folder.parent / "unsafe/noarch",
        [link("lib/x", "../../etc")],
        name="bad",
        dist="bad-1.0-0",
        info=[file("info/licenses/LICENSE", b"text")],
        version="1.0",
        license="MIT",
    )
    source.add({built: 1}, {"content": "bad"})


GATES: dict[str, tuple[Callable[[Source], object], str]] = {
    "host-bound": (
        lambda source: source.make("bad", build=f"hostbound_{BUILD}", licensed=False),
        "is host-bound",
    ),
    "no tests": (lambda source: source.make("bad", tests=0), "has no tests"),
    "no licence": (lambda source: source.make("bad", licensed=False), "has the licence 'nothing'"),
    "rehearsed": (
        lambda source: source.make(
            "bad",
            build="rehearsal_rocm100_gfx1151_py314h1234567_0",
            licensed=False,
        ),
        "was made by a rehearsal, so it is never published",
    ),
    "no licence text": (lambda source: source.make("bad", license_files=[]), "has no licence text"),
    "proprietary": (
        lambda source: source.make("bad", license="Proprietary"),
        "the licence 'Proprietary'",
    ),
    "private": (
        lambda source: source.make("bad", license="LicenseRef-EULA"),
        "the licence 'LicenseRef-EULA'",
    ),
    "unsafe": (make_unsafe, "is not fit to be installed: "),
    "a GPL library": (
        lambda source: source.make("bad", file="lib/libcholmod.so.5", license="LGPL-2.1-or-later"),
        "has lib/libcholmod.so.5, which is under the GPL, and the licence 'LGPL-2.1-or-later'",
    ),
}


@pytest.mark.parametrize("case", GATES)
def test_gate(case: str, source: Source, target: Path) -> None:
    """If one package is refused, nothing is published."""
    source.make("good")
    add_bad_package, message = GATES[case]
    add_bad_package(source)
    with pytest.raises(ForgeError, match="nothing is published") as error:
        PublishedChannel(target).publish(source)
    assert message in str(error.value)
    assert "bad-1.0" in str(error.value)
    if case in ("host-bound", "rehearsed"):
        assert "licence" not in str(error.value), (
            "the message must ask for no licence, because the package is never published"
        )
    assert "good-1.0" not in str(error.value)
    assert not list(target.glob("*/*"))


def test_only_validated_files_are_published(source: Source, target: Path) -> None:
    """The sha256 decides: a file that was validated with other bytes is not published."""
    for name in ("alpha", "beta"):
        source.make(name)
    digests = {record.sha256 for record in source.records()}
    for validated in (set(), {min(digests)}, {"0" * 64}):
        with pytest.raises(ForgeError, match="is not a validated file") as error:
            PublishedChannel(target).publish(source, validated)
        count = len(digests - validated)
        assert str(error.value).count("is not a validated file") == count
        assert not list(target.glob("*/*"))
    assert len(PublishedChannel(target).publish(source, digests)) == 2


DAMAGED = {
    "absent": (None, "cannot read --validated"),
    "empty": ("", "names no file"),
    "a word": ("passed\n", "line 1 is not in sha256sum's format: 'passed'"),
    "short": (f"{'0' * 64}  a\n{'0' * 63}  b\n", "line 2 is not in sha256sum's format"),
    "no name": (f"{'0' * 64}\n", "line 1 is not in sha256sum's format"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_list_of_validated_files(case: str, tmp_path: Path) -> None:
    text, message = DAMAGED[case]
    path = tmp_path / "validated.sha256"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ForgeError, match=message):
        read_validated(path)


def test_list_of_validated_files(tmp_path: Path) -> None:
    path = tmp_path / "validated.sha256"
    path.write_text(f"{'0' * 64}  channel/noarch/a b.conda\n{'1' * 64} *c.conda\n")
    assert read_validated(path) == {"0" * 64, "1" * 64}


def test_an_untested_channel_is_called_so(project: MiniProject, source: Source) -> None:
    """The folder of an untested channel must have `untested` in its name.

    With another name, or with contradicting options, nothing is written.
    """
    source.make("alpha")
    project.recipe("alpha")
    assert source.folder == project.channel
    variables = {"FORGE_BASE": "conda-forge"}
    stable = project.root / "stable"
    untested = project.root / "strix-untested"
    done = project.forge("publish", "--untested", "--to", str(stable), code=1, **variables)
    assert "'stable' does not say that its packages are untested" in done.stderr
    options = ["--untested", "--validated", "x"]
    done = project.forge("publish", *options, "--to", str(untested), code=2, **variables)
    assert "give only one of --untested, --validated and --withdraw" in done.stderr
    assert not stable.exists()
    assert not untested.exists()
    for index in project.channel.glob("*/repodata.json"):
        # Packages that were built on other machines have no index.
        index.unlink()
    done = project.forge("publish", "--untested", "--to", str(untested), **variables)
    assert "1 packages added, untested: no GPU ran them" in done.stdout
    require_whole(untested)
    indexes = {path: path.read_bytes() for path in project.channel.glob("*/repodata.json")}
    source.make("beta")
    for path, index in indexes.items():
        path.write_bytes(index)
    done = project.forge("publish", "--untested", "--to", str(untested), **variables)
    assert "1 packages added" in done.stdout and "beta-1.0" in done.stdout


def test_a_gpl_library_under_its_licence_is_admitted(source: Source, target: Path) -> None:
    source.make("good", file="lib/libcholmod.so.5", license="MIT AND GPL-2.0-or-later")
    assert PublishedChannel(target).publish(source)


def test_nothing_to_publish(source: Source, target: Path) -> None:
    with pytest.raises(ForgeError, match="holds no packages"):
        PublishedChannel(target).publish(source)


@pytest.mark.parametrize("name", ["thesis.tex", "noarch/omega-1.0-0.conda"])
def test_folder_of_something_else_is_left_alone(name: str, source: Source, target: Path) -> None:
    """Nothing is published into a folder with other files, or into the local channel.

    Only a folder with withdrawn.json is a published channel.
    """
    dist = source.make("alpha")
    (target / name).parent.mkdir(parents=True)
    (target / name).write_text("years of work")
    for folder, names in ((target, "thesis|noarch"), (source.folder, "forge")):
        channel = PublishedChannel(folder)
        with pytest.raises(ForgeError, match=f"is not a published .* but ({names})"):
            channel.publish(source)
        with pytest.raises(ForgeError, match=f"is not a published .* but ({names})"):
            channel.withdraw([dist], "broken")
    assert list(tree(target)) == [name]
    assert not (source.folder / ".lock").exists()


def link_to_elsewhere(path: Path) -> None:
    """Replace a file of a subdir by a link to a file beside the channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(path.parents[2] / "elsewhere")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


STRANGERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a link for the index": ("noarch/repodata.json", link_to_elsewhere, "is a link"),
    "a link for a package": (f"noarch/alpha-1.0-{BUILD}.conda", link_to_elsewhere, "is a link"),
    "a link for the list": ("withdrawn.json", link_to_elsewhere, "is a link|is not a published"),
    "a link for the lock": (".lock", link_to_elsewhere, "is a link"),
    "a link to a folder": ("linux-64/shards", lambda path: path.symlink_to("/"), "is a link"),
    "a pipe": ("pypi-names.json", replace_by_pipe, "is a pipe or a device"),
    "a pipe for a new package": ("noarch/x-1-0.conda", os.mkfifo, "is a pipe or a device"),
    "another's page": (
        "index.html",
        lambda path: path.write_text("<p>mine"),
        "was not written by this program",
    ),
    "a folder for the page": ("index.html", Path.mkdir, "was not written by this program"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_is_no_plain_file_is_refused(case: str, source: Source, target: Path) -> None:
    """A link, a pipe or another's page in the channel is refused.

    Publishing would follow the link, wait for the pipe, or replace the page.
    """
    dist = source.make("alpha")
    PublishedChannel(target).publish(source)
    elsewhere = target.parent / "elsewhere"
    elsewhere.write_text("of somebody else")
    name, replace, message = STRANGERS[case]
    (target / "linux-64/shards").mkdir(exist_ok=True)
    if name == "linux-64/shards":
        (target / name).rmdir()
    replace(target / name)
    source.make("beta")
    for change in (
        lambda: PublishedChannel(target).publish(source),
        lambda: PublishedChannel(target).withdraw([dist], "broken"),
    ):
        with pytest.raises(ForgeError, match=message) as error:
            change()
        assert name in str(error.value)
    assert elsewhere.read_text() == "of somebody else"
    assert not list(target.glob("noarch/beta*"))


def test_a_page_of_ours_is_written_anew(source: Source, target: Path) -> None:
    source.make("alpha")
    PublishedChannel(target).publish(source)
    (target / static.PAGE).write_text(static.GENERATOR)
    assert PublishedChannel(target).publish(source) == []


def test_withdraw(source: Source, target: Path, tmp_path: Path) -> None:
    """A withdrawn build is in no form of the index any more.

    With an older lock, the build can be installed if it is in a package cache. If it is not, the
    error names the missing file.
    """
    old = source.make("alpha")
    new = source.make("alpha", "2.0")
    source.make("beta", depends=["alpha"])
    channel = PublishedChannel(target)
    channel.publish(source)
    forms = [{}, {"sharded": False}, {"sharded": False, "zst": False}]
    with served(target) as url:
        app = workspace(tmp_path / "app", url)
        app.lock()
        assert f"/noarch/{new}.conda" in app.lock_file.read_text()
        assert app.install("default", tmp_path / "cached") == 2
        assert channel.withdraw([new], "wrong <numbers>") == [f"noarch/{new}.conda"]
        for form in forms:
            assert old in solve(url, tmp_path / "cache", "beta", **form)
            with pytest.raises(Exception, match="alpha"):
                solve(url, tmp_path / "cache", "alpha >=2", **form)
        with pytest.raises(Failed, match=rf"/noarch/{new}\.conda: .*404"):
            app.install("default", tmp_path / "empty")
        assert app.install("default", tmp_path / "cached") == 2
    require_whole(target)
    assert (channel.withdrawn_folder / f"noarch/{new}.conda").exists()
    (entry,) = channel.withdrawals()
    assert entry.file == f"noarch/{new}.conda"
    assert entry.reason == "wrong <numbers>"


def test_a_withdrawn_build_stays_out(source: Source, target: Path, tmp_path: Path) -> None:
    """A withdrawn build is not published again.

    The local channel may still have it, somebody may copy it back, or there may be a file of the
    same name with other content.
    """
    dist = source.make("alpha", text="one")
    channel = PublishedChannel(target)
    channel.publish(source)
    channel.withdraw([dist], "broken")
    source.make("beta")
    assert channel.publish(source) == [f"noarch/beta-1.0-{BUILD}.conda"]
    withdrawn = channel.withdrawn_folder / f"noarch/{dist}.conda"
    (target / f"noarch/{dist}.conda").write_bytes(withdrawn.read_bytes())
    assert channel.publish(source) == []
    require_whole(target)
    other_source = Source(tmp_path / "elsewhere" / "channel")
    other_source.make("alpha", text="two")
    assert channel.publish(other_source) == []
    require_whole(target)
    assert len(channel.withdrawals()) == 1
    assert not list(target.glob("noarch/alpha*"))


def test_withdrawn_packages_replace_nothing(source: Source, target: Path) -> None:
    """A withdrawn package replaces neither another's file nor an earlier withdrawn package.

    Links are not followed.
    """
    dist = source.make("alpha")
    channel = PublishedChannel(target)
    channel.publish(source)
    package = target / f"noarch/{dist}.conda"
    withdrawn = channel.withdrawn_folder / f"noarch/{dist}.conda"
    withdrawn.parent.mkdir(parents=True)
    withdrawn.write_text("of somebody else")
    before = tree(target)
    with pytest.raises(Refused, match=rf"{package} and the withdrawn {withdrawn} differ"):
        channel.withdraw([dist], "broken")
    assert tree(target) == before
    assert withdrawn.read_text() == "of somebody else"
    withdrawn.unlink()
    channel.withdraw([dist], "broken")
    content = withdrawn.read_bytes()
    package.write_text("put back, with other bytes")
    with pytest.raises(Refused, match="nothing was written"):
        channel.publish(source)
    assert withdrawn.read_bytes() == content
    assert package.exists()
    package.unlink()
    beta = source.make("beta")
    channel.publish(source)
    elsewhere = channel.withdrawn_folder.rename(target.parent / "elsewhere")
    channel.withdrawn_folder.symlink_to(elsewhere)
    with pytest.raises(Refused, match="out-withdrawn is a link; nothing was written"):
        channel.withdraw([beta], "broken")
    assert list(tree(elsewhere)) == [f"noarch/{dist}.conda"]


def test_a_build_is_withdrawn_from_both_folders(
    source: Source, target: Path, tmp_path: Path
) -> None:
    """A build is withdrawn from noarch and from linux-64, if two checkouts published it there."""
    dist = source.make("alpha")
    other_source = Source(tmp_path / "elsewhere" / "channel")
    other_source.make("alpha", subdir="linux-64")
    channel = PublishedChannel(target)
    channel.publish(source)
    channel.publish(other_source)
    files = [f"linux-64/{dist}.conda", f"noarch/{dist}.conda"]
    assert channel.withdraw([dist], "broken") == files
    assert [withdrawal.file for withdrawal in channel.withdrawals()] == files
    require_whole(target)


@pytest.mark.parametrize("builds", [["nosuch-1-0"], [f"alpha-1.0-{BUILD}", "nosuch-1-0"], ["../x"]])
def test_withdraw_of_what_is_not_there(builds: list[str], source: Source, target: Path) -> None:
    source.make("alpha")
    PublishedChannel(target).publish(source)
    before = tree(target)
    with pytest.raises(ForgeError, match=f"no such build .*; there are: alpha-1.0-{BUILD}"):
        PublishedChannel(target).withdraw(builds, "broken")
    assert tree(target) == before


def test_withdraw_from_nothing_makes_no_channel(target: Path) -> None:
    with pytest.raises(ForgeError, match="is not a published channel"):
        PublishedChannel(target).withdraw(["alpha-1.0-0"], "broken")
    assert not target.exists()


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_published_file_that_is_lost(damage: str, source: Source, target: Path) -> None:
    """A published file that is missing or changed is an error, and nothing is changed.

    After the file is withdrawn, publishing succeeds.
    """
    dist = source.make("alpha")
    source.make("beta")
    PublishedChannel(target).publish(source)
    path = target / f"noarch/{dist}.conda"
    if damage == "changed":
        flip(path)
    else:
        path.unlink()
    source.make("gamma")
    before = tree(target)
    with pytest.raises(Failed, match=r"alpha.*(restore|withdraw)"):
        PublishedChannel(target).publish(source)
    assert tree(target) == before
    PublishedChannel(target).withdraw([dist], "lost")
    assert PublishedChannel(target).publish(source) == [f"noarch/gamma-1.0-{BUILD}.conda"]
    require_whole(target)


def test_a_damaged_index_is_made_anew(source: Source, target: Path) -> None:
    source.make("alpha")
    PublishedChannel(target).publish(source)
    content = (target / "noarch/repodata.json").read_bytes()
    for text in (b"", b"{", b"[]", content[:-20]):
        (target / "noarch/repodata.json").write_bytes(text)
        assert PublishedChannel(target).publish(source) == []
        require_whole(target)


def test_an_index_that_names_what_is_outside(source: Source, target: Path) -> None:
    """A file outside of the channel is never withdrawn, even if the index and the user name it.

    The next publication writes a correct index.
    """
    source.make("alpha")
    PublishedChannel(target).publish(source)
    elsewhere = target.parent / "elsewhere.conda"
    elsewhere.write_text("of somebody else")
    path = target / "noarch/repodata.json"
    data = json.loads(path.read_text())
    data["packages.conda"]["../../elsewhere.conda"] = {"sha256": "0" * 64, "size": 1}
    path.write_text(json.dumps(data))
    with pytest.raises(ForgeError, match=f"no such build .*; there are: alpha-1.0-{BUILD}$"):
        PublishedChannel(target).withdraw(["../../elsewhere"], "broken")
    assert elsewhere.read_text() == "of somebody else"
    assert PublishedChannel(target).publish(source) == []
    require_whole(target)


LISTS = [
    "",
    "{",
    "[]",
    "{}",
    '{"withdrawn": [{}]}',
    '{"withdrawn": [1]}',
    '{"withdrawn": [{"file": "noarch/../../x.conda", "sha256": "", "reason": "", "date": ""}]}',
    '{"withdrawn": [{"file": "/etc/x.conda", "sha256": "", "reason": "", "date": ""}]}',
    '{"withdrawn": [{"file": "noarch/x-1-0.conda", "sha256": 1, "reason": "", "date": ""}]}',
]


@pytest.mark.parametrize("text", LISTS)
def test_a_damaged_list_of_withdrawals(text: str, source: Source, target: Path) -> None:
    """A damaged list is an error. It is not read as empty, and no name in it is used as a path."""
    dist = source.make("alpha")
    PublishedChannel(target).publish(source)
    (target / static.WITHDRAWN).write_text(text)
    before = tree(target)
    for change in (
        lambda: PublishedChannel(target).publish(source),
        lambda: PublishedChannel(target).withdraw([dist], "broken"),
    ):
        with pytest.raises(ForgeError, match=r"withdrawn.json is damaged; restore it"):
            change()
    assert tree(target) == before


@pytest.mark.parametrize("name", ["\udc80", " ", "/", "", 5])
def test_a_table_of_names_that_pypi_cannot_have(name: object, source: Source, target: Path) -> None:
    source.make("alpha")
    PublishedChannel(target).publish(source)
    (target / "pypi-names.json").write_text(json.dumps({"alpha": name}))
    with pytest.raises(ForgeError, match="pypi-names.json is not a name table"):
        PublishedChannel(target).publish(source)
    require_whole(target)


def test_two_checkouts_publish_what_only_together_leads_out(target: Path, tmp_path: Path) -> None:
    """The gate checks the packages of the whole channel together.

    Each of the two packages is safe by itself. Together they lead out of the prefix, so the gate
    refuses the one that is published second.
    """
    text = file("info/licenses/LICENSE", b"text")
    members = {
        "linked": link("share/data", "/var/elsewhere"),
        "escaped": file("share/data/escaped"),
    }
    sources = []
    for name, member in members.items():
        folder = tmp_path / name
        built = package(folder / "noarch", [member], name=name, info=[text], license="MIT")
        source = Source(folder / "channel")
        source.add({built: 1}, {"content": name})
        sources.append(source)
    for number, (first, second) in enumerate((sources, sources[::-1])):
        channel = PublishedChannel(target / str(number))
        assert len(channel.publish(first)) == 1
        with pytest.raises(Refused, match="'share/data/escaped' leads out of the prefix"):
            channel.publish(second)
        require_whole(channel.folder)


def test_gate_holds_packages_against_their_notes(source: Source, target: Path) -> None:
    """The gate refuses changed files, untested files and notes without a record of tests."""
    dist = source.make("alpha")
    note = source.folder / f"forge/{dist}.json"
    package = source.folder / f"noarch/{dist}.conda"
    original = note.read_text()
    (record,) = source.records()
    assert source.read_digest(record) == {"content": "alpha"}
    assert source.read_test_count(record) == 1
    for text in ('{"content": "alpha"}', "{", original.replace(record.sha256, "0" * 64)):
        note.write_text(text)
        with pytest.raises(ForgeError, match=r"alpha.*no note of passed tests"):
            PublishedChannel(target).publish(source)
    note.write_text('{"content": "alpha"}')
    assert source.read_digest(record) is None
    note.write_text(original)
    content = package.read_bytes()
    # The sha256 of the changed file is sometimes above and sometimes below the right one.
    for bit in range(8):
        package.write_bytes(content[:-1] + bytes([content[-1] ^ 1 << bit]))
        with pytest.raises(ForgeError, match="differs from its record"):
            PublishedChannel(target).publish(source)
    package.unlink()
    with pytest.raises(ForgeError, match="is missing or differs"):
        PublishedChannel(target).publish(source)
    package.write_bytes(content)
    assert PublishedChannel(target).publish(source)


def test_published_name_keeps_its_bytes(source: Source, target: Path, tmp_path: Path) -> None:
    """Once a name is published, a file of that name with other content is refused.

    This also holds if the first publication was killed before its index had the file.
    """
    source.make("alpha", text="one")
    PublishedChannel(target).publish(source)
    before = tree(target)
    other_source = Source(tmp_path / "elsewhere" / "channel")
    other_source.make("alpha", text="two")
    with pytest.raises(ForgeError, match=r"alpha.*already published with other content"):
        PublishedChannel(target).publish(other_source)
    assert tree(target) == before
    gamma = other_source.make("gamma", text="one")
    (target / f"noarch/{gamma}.conda").write_bytes(b"of a killed publish")
    with pytest.raises(ForgeError, match=r"gamma.*already published with other content"):
        PublishedChannel(target).publish(other_source)


def test_one_publisher_at_a_time(source: Source, target: Path) -> None:
    source.make("alpha")
    with hold(target, "publishing to"), pytest.raises(ForgeError, match="is publishing to"):
        PublishedChannel(target).publish(source)
    assert PublishedChannel(target).publish(source)


def test_a_target_that_cannot_be_written(source: Source, tmp_path: Path) -> None:
    """A target that cannot be written is an error. test_faults.py has the case of a full disk."""
    source.make("alpha")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ForgeError, match="cannot write"):
        PublishedChannel(tmp_path / "file" / "out").publish(source)


class Killed(BaseException):
    """An exception that stands for SIGKILL."""


@contextlib.contextmanager
def kill_before(rename: int) -> Iterator[None]:
    """Kill a publication before its rename with the number `rename`, counted from 0."""
    rename_file = static._rename
    remaining = rename
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):

        def move(origin: Path, destination: Path) -> None:
            nonlocal remaining
            if remaining == 0:
                patch.setattr(TemporaryDirectory, "_rmtree", lambda *_, **__: None)
                raise Killed
            remaining -= 1
            rename_file(origin, destination)

        patch.setattr(static, "_rename", move)
        yield


@needs_time
def test_killed_at_every_step(source: Source, target: Path) -> None:
    """A publication is killed before each of its renames in turn.

    Clients always see a complete channel, and later runs complete the publication.
    """
    first = source.make("alpha")
    channel = PublishedChannel(target)
    channel.publish(source)
    for number in range(60):
        dist = source.make("beta", f"{number}.0")
        is_completed = False
        with kill_before(number):
            if number % 2:
                channel.publish(source)
                channel.withdraw([dist], "broken")
            else:
                channel.publish(source)
            is_completed = True
        view(target.as_uri())
        if is_completed and number % 2:
            break
        # Complete the publication only after every fourth kill, so that a run sometimes has to
        # complete several killed publications.
        if number % 4 == 3:
            channel.publish(source)
            require_whole(target)
    assert 15 < number < 50, "a publication and a withdrawal must have about twenty renames"
    channel.publish(source)
    require_whole(target)
    assert not [*target.glob(".forge-*")]

    # This shows that the client of this test notices a missing file.
    (target / "noarch" / f"{first}.conda").unlink()
    with pytest.raises(urllib.error.URLError):
        view(target.as_uri())


@pytest.mark.parametrize("number", range(4))
def test_first_publish_killed(number: int, source: Source, target: Path) -> None:
    """After a killed first publication, the next one accepts the folder without an index."""
    source.make("alpha")
    with kill_before(number):
        PublishedChannel(target).publish(source)
        pytest.fail("the publication was not killed")
    assert PublishedChannel(target).publish(source) in ([], [f"noarch/alpha-1.0-{BUILD}.conda"])
    require_whole(target)


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The output and the exit codes of `publish` and `publish --withdraw`."""
    project = MiniProject(tmp_path / "project")
    target = tmp_path / "out"
    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    dist = Source(project.channel).make("alpha")

    def publish(*words: str, to: str = str(target), code: int = 0) -> str:
        done = CliRunner().invoke(main.app, ["publish", "--to", to, *words])
        if isinstance(done.exception, ForgeError):
            assert done.exception.exit_code == code
            return str(done.exception)
        assert done.exit_code == code, done.output
        return done.output

    assert "is not a directory" in publish(to="https://host/channel", code=2)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert "cannot be a path" in publish(to=str(circle), code=2)
    output = publish()
    assert f"added noarch/{dist}.conda" in output
    assert "1 packages added" in output
    assert "0 packages added" in publish(to=target.as_uri())
    # `publish` and `publish --withdraw` run this program.
    page = project.root / "tools/channel_page.py"
    page.parent.mkdir()
    mark = static.GENERATOR
    page.write_text(f"import sys\nopen(sys.argv[1] + '/index.html', 'a').write('{mark}\\n')\n")
    publish()
    assert len((target / "index.html").read_text().splitlines()) == 1
    page.write_text('raise SystemExit("no page, because")\n')
    assert f"{target} is published, but its page could not be written" in publish(code=1)
    assert "no page, because" in capfd.readouterr().err
    page.unlink()
    for words in (["--withdraw", dist], ["--reason", "x"], ["--withdraw", dist, "--reason", " "]):
        assert "--withdraw and --reason go together" in publish(*words, code=2)
    for odd in ("\udcff", "\x1b[2J", "\u202e"):
        assert "cannot be printed" in publish("--withdraw", dist, "--reason", odd, code=2)
    assert "no such build" in publish("--withdraw", "x-1-0", "--reason", "x", code=2)
    assert f"withdrew noarch/{dist}.conda" in publish("--withdraw", dist, "--reason", "bad\n sums")
    (entry,) = json.loads((target / static.WITHDRAWN).read_text())["withdrawn"]
    assert entry["reason"] == "bad sums"
    assert "withdrew" in publish("--withdraw", dist, "--reason", "x")
    assert "bad sums" in (target / static.WITHDRAWN).read_text()

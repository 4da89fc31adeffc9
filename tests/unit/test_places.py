# SPDX-License-Identifier: BSD-3-Clause
"""Hostile packages, which try to write outside of the prefix (support/places.py).

The driver refuses to install any of them, and changes nothing outside of the prefix. `verify`
reports each. end_to_end/test_pixi_places.py tests which ones pixi installs.
"""

from pathlib import Path

import pytest
from support.places import CASES, LET_THROUGH, Case, Machine
from support.small_channel import workspace
from support.static_channel import Source, tree
from typer.testing import CliRunner

from forge.channel import PublishedChannel
from forge.cli.main import app
from forge.conda.package import OUTSIDE, Places, follow_links, require_confined
from forge.errors import Failed, ForgeError, Refused
from forge.files import write_text


@pytest.mark.parametrize("name", CASES)
def test_installed_by_us(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses the package, or rattler reports it as damaged. Nothing outside changes.

    `verify` reports the fault from the packages alone.
    """
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "own"))
    machine = Machine(CASES[name], tmp_path)
    machine.app.lock()
    before = tree(machine.out)
    with pytest.raises(ForgeError) as error:
        machine.app.install("default", machine.cache)
    assert isinstance(error.value, Refused | Failed)
    assert "\n" not in str(error.value)
    assert "-0.conda: " in str(error.value)
    verified = CliRunner().invoke(app, ["verify", *map(str, machine.files)])
    assert verified.exit_code == 1
    output = f"{verified.exception} {verified.output}"
    assert "do not install" in output or "cannot be read" in output
    assert tree(machine.out) == before
    assert not machine.app.prefix("default").exists()


def test_what_two_packages_do_together_is_not_published(tmp_path: Path) -> None:
    """A package is not published if it would lead out of the prefix together with another one.

    Two builds of the same name are no such pair, because they are never installed together.
    """
    source = Source(tmp_path / "channel")
    files = tmp_path / "work/files"
    for version in ("1.0", "2.0"):
        files.mkdir(parents=True)
        (files / "share").symlink_to("/usr/share")
        source.make("alpha", version)
    source.make("alpha", "3.0", file="share/zone")
    PublishedChannel(tmp_path / "apart").publish(source)
    source.make("beta", file="share/zone")
    with pytest.raises(Refused, match=r"beta-1.0.*'share/zone' leads out of the prefix"):
        PublishedChannel(tmp_path / "together").publish(source)


def test_links_of_two_packages() -> None:
    """Links that stay inside the prefix for each package are refused if they lead out together."""
    links = {"alpha": {"lib/p": "q/../.."}, "beta": {"lib/q": ".."}}
    all_places = []
    for name, contents in links.items():
        places = Places(Path(f"{name}.conda"), name, False, contents, [])
        require_confined([places])
        all_places.append(places)
    with pytest.raises(Refused, match="alpha.*'lib/p' leads out of the prefix"):
        require_confined(all_places)


def test_a_link_of_the_lock_before(tmp_path: Path) -> None:
    """A link of an old package is removed before the files of the next lock are written."""
    links = {"share": "{out}", "bin/x": "{out}/victim"}
    (tmp_path / "new").mkdir()
    old = Machine(Case("", links), tmp_path)
    new = Machine(Case("", {}, ("share/victim",), ("x",), apart=True), tmp_path / "new")
    old.app.lock()
    old.app.install("default", old.cache)
    before = tree(old.out)
    prefix = old.app.prefix("default")
    assert (prefix / "share").is_symlink()
    assert (prefix / "bin/x").is_symlink()
    app = workspace(old.app.folder, new.channel.as_uri(), 'python = "*"\n')
    app.lock()
    app.install("default", old.cache)
    assert tree(old.out) == before
    assert (prefix / "share/victim").exists()


def test_there_are_fifty() -> None:
    assert len(CASES) >= 50
    assert CASES.keys() >= LET_THROUGH


@pytest.mark.parametrize(
    ("path", "links", "landings"),
    [
        ("a/b", {}, {"a/b"}),
        ("a/../b", {}, {"b"}),
        ("../b", {}, {OUTSIDE}),
        ("x/b", {"x": ["y"], "y": ["z/.."]}, {"b"}),
        ("x/b", {"x": ["/etc"]}, {OUTSIDE}),
        ("x/b", {"x": ["y", "../.."]}, {"y/b", OUTSIDE}),  # Two packages have a link at x.
        ("x", {"x": ["x"]}, {OUTSIDE}),
        ("x", {"x": ["y", "y/x"], "y": ["x", "x/y"]}, {OUTSIDE}),
    ],
)
def test_landings(path: str, links: dict[str, list[str]], landings: set[str]) -> None:
    assert set(follow_links(path, lambda at: links.get(at, []))) == landings


def test_of_one_name_there_is_one() -> None:
    """Two builds of the same name are not checked together. Packages of different names are.

    Here an older build has a file where a newer one has a console script.
    """
    contents = {"lib64": "lib", "bin/x": None}
    old = [Places(Path(f"{number}.conda"), "alpha", False, contents, []) for number in range(50)]
    require_confined([*old, Places(Path("new.conda"), "alpha", True, {"lib64/y": None}, ["x"])])
    with pytest.raises(Refused, match="with a packaged file's path"):
        require_confined([*old, Places(Path("new.conda"), "beta", True, {"lib64/y": None}, ["x"])])


def test_a_killed_write_left_a_link(tmp_path: Path) -> None:
    """write_text does not follow a link in the place of its partial file."""
    (tmp_path / "victim").write_text("before")
    (tmp_path / ".partial-x").symlink_to("victim")
    write_text(tmp_path / "x", "after")
    assert (tmp_path / "victim").read_text() == "before"
    assert (tmp_path / "x").read_text() == "after"

# SPDX-License-Identifier: BSD-3-Clause
"""Where each byte of hostile packages lands: generated places, alone and two packages together.

Our installation refuses all of them and changes nothing outside the prefix. rattler alone, which is
pixi's installer, lets those of LET_THROUGH out; SECURITY.md and upstream/rattler say so.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import rattler
from support.conda_packages import Member, file, link, package
from support.small_channel import index, workspace
from support.static_channel import tree

from forge.conda.package import OUTSIDE, landings
from forge.errors import Failed, ForgeError, Refused
from forge.files import write_text

SITE = "lib/python3.12/site-packages"
GHOST_FILE = "ghost-1.0-0.json"
RECORD = f"conda-meta/{GHOST_FILE}"
OUT = "../../../../out/victim"  # of app/.pixi/envs/default
GHOST = {  # an installed package that the solution lacks: an installer removes its files
    "name": "ghost", "version": "1.0", "build": "0", "build_number": 0, "subdir": "noarch",
    "depends": [], "fn": "ghost-1.0-0.conda", "url": "https://a.invalid/noarch/ghost-1.0-0.conda",
    "channel": "https://a.invalid/", "files": [OUT],
    "paths_data": {"paths_version": 1, "paths": [{"_path": OUT, "path_type": "hardlink"}]},
}  # fmt: skip


@dataclass
class Case:
    """alpha has the links. The files and console scripts are beta's if `apart`, else alpha's too.

    `{out}` in a link stands for the folder outside that nothing may change.
    """

    name: str
    links: dict[str, str]
    files: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    apart: bool = False


def routes(top: str) -> dict[str, dict[str, str]]:
    """The ways in which a name can lead out."""
    up = top.count("/")
    return {
        "absolute": {top: "{out}"},
        "upwards": {top: "../" * (up + 4) + "out"},  # of app/.pixi/envs/default
        "two links": {"a/one": "{out}", top: "../" * up + "a/one"},
    }


def cases() -> list[Case]:
    tops = {"bin": "bin", "share": "share", "lib": "lib"}
    tops |= {"lib/python3.12": "site-packages", SITE: "site-packages"}
    made = []
    for apart in (False, True):
        where = "two packages" if apart else "one package"
        for top, inside in tops.items():
            for route, links in routes(top).items():
                name = f"{top} {route}, {where}"
                made.append(Case(f"file {name}", links, (f"{inside}/new",), (), apart))
        for route, links in routes("bin").items():
            made.append(Case(f"script {route}, {where}", links, (), ("new",), apart))
        for top in ("bin", "python-scripts"):
            to = {f"{top}/x": "{out}/victim"}
            made.append(Case(f"script over {top} link, {where}", to, (), ("x",), apart))
        made.append(Case(f"record, {where}", {}, (RECORD,), (), apart))
        made.append(
            Case(
                f"record by link, {where}", {"m": "conda-meta"}, ("m/ghost-1.0-0.json",), (), apart
            )
        )
    for name in (
        ".partial-installed-from", "installed-from", "history", "alpha-1-0.json", "beta-1-0.json",
    ):  # fmt: skip
        made.append(Case(f"link {name}", {f"conda-meta/{name}": "{out}/victim"}))
    for name in ("conda-meta", "__clobbers__", ".trash"):
        made.append(Case(f"link {name}", {name: "{out}"}))
    made.append(Case("link CACHEDIR.TAG", {"CACHEDIR.TAG": "{out}/new"}))
    made.append(Case("script over a file", {}, ("bin/x",), ("x",)))
    return made


CASES = {case.name: case for case in cases()}
LET_THROUGH = {
    "script over bin link, one package",
    "script over python-scripts link, one package",
    "record, one package",
    "record, two packages",
    "link CACHEDIR.TAG",
}  # and others, by the order in which rattler happens to link


class Machine:
    """A channel of python, alpha and beta, a user's workspace, and what lies beside its prefix."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.out, channel = folder / "out", folder / "channel"
        self.out.mkdir()
        (self.out / "victim").write_text("before")
        links = [link(name, to.format(out=self.out)) for name, to in case.links.items()]
        rest: list[Member] = [file(name, json.dumps(GHOST).encode()) for name in case.files]
        scripts: tuple[list[str], list[str]] = ([], [f"{name} = a:b" for name in case.scripts])
        self.make(channel, "alpha", links if case.apart else links + rest, scripts[case.apart - 1])
        self.make(channel, "beta", rest if case.apart else [], scripts[not case.apart - 1])
        python = [file("bin/python3.12")]
        package(channel / "noarch", python, "python", dist="python-3.12-0", version="3.12")
        index(channel)
        self.app = workspace(folder / "app", channel.as_uri(), 'python = "*"\n')
        self.app.lock()
        self.cache = folder / "cache"

    @staticmethod
    def make(channel: Path, name: str, members: list[Member], points: list[str]) -> None:
        says = {"noarch": {"type": "python", "entry_points": points}, "package_metadata_version": 1}
        info = [file("info/link.json", json.dumps(says).encode())]
        package(channel / "noarch", members, name, info=info, noarch="python", depends=["python"])


@pytest.mark.parametrize("name", CASES)
def test_installed_by_us(name: str, tmp_path: Path) -> None:
    """Refused, or damaged in rattler's eyes; nothing beside the prefix and the cache changes."""
    machine = Machine(CASES[name], tmp_path)
    before = tree(machine.out)
    with pytest.raises(ForgeError) as error:
        machine.app.install("default", machine.cache)
    assert isinstance(error.value, Refused | Failed)
    assert "\n" not in str(error.value) and "-0.conda: " in str(error.value)
    assert tree(machine.out) == before and not machine.app.prefix("default").exists()


def test_there_are_fifty() -> None:
    assert len(CASES) >= 50 and CASES.keys() >= LET_THROUGH


@pytest.mark.skipif(
    not hasattr(rattler, "verify_attestation"), reason="LET_THROUGH is py-rattler 0.28's"
)
@pytest.mark.parametrize("name", sorted(LET_THROUGH))
def test_installed_by_rattler_alone(name: str, tmp_path: Path) -> None:
    """What SECURITY.md says of pixi is still so; once it is not, it says too much."""
    machine = Machine(CASES[name], tmp_path)
    before, prefix = tree(machine.out), machine.app.prefix("default")
    records = machine.app.locked("default")
    for _ in range(2):  # pixi repairs an environment as well
        with suppress(BaseException):  # a panic is one
            asyncio.run(rattler.install(records, prefix, machine.cache, show_progress=False))
    assert tree(machine.out) != before


@pytest.mark.parametrize(
    ("path", "links", "where"),
    [
        ("a/b", {}, {"a/b"}),
        ("a/../b", {}, {"b"}),
        ("../b", {}, {OUTSIDE}),
        ("x/b", {"x": ["y"], "y": ["z/.."]}, {"b"}),
        ("x/b", {"x": ["/etc"]}, {OUTSIDE}),
        ("x/b", {"x": ["y", "../.."]}, {"y/b", OUTSIDE}),  # packages that differ
        ("x", {"x": ["x"]}, {OUTSIDE}),
        ("x", {"x": ["y", "y/x"], "y": ["x", "x/y"]}, {OUTSIDE}),
    ],
)
def test_landings(path: str, links: dict[str, list[str]], where: set[str]) -> None:
    assert set(landings(path, links)) == where


def test_a_killed_write_left_a_link(tmp_path: Path) -> None:
    """The file that a partial file's name leads to is not written."""
    (tmp_path / "victim").write_text("before")
    (tmp_path / ".partial-x").symlink_to("victim")
    write_text(tmp_path / "x", "after")
    assert (tmp_path / "victim").read_text() == "before" and (tmp_path / "x").read_text() == "after"

# SPDX-License-Identifier: BSD-3-Clause
"""Places for the bytes of hostile packages, generated: alone and two packages together."""

import json
from dataclasses import dataclass
from pathlib import Path

from support.conda_packages import Member, file, link, package
from support.small_channel import index, workspace

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
# what rattler, and so pixi, lets out of the prefix
LET_THROUGH = {
    "script over bin link, one package",
    "script over python-scripts link, one package",
    "record, one package",
    "record, two packages",
    "link CACHEDIR.TAG",
}
PIXIS = {"link history"}  # pixi writes that file itself
# what it lets out, or not, by the order in which it happens to link
BY_ORDER = {
    name for name in CASES
    if name.startswith("script") or (name.startswith("file") and name.endswith("two packages"))
} - LET_THROUGH  # fmt: skip


class Machine:
    """A channel of python, alpha and beta, a user's workspace, and what lies beside its prefix."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.out, self.channel = folder / "out", folder / "channel"
        self.out.mkdir()
        (self.out / "victim").write_text("before")
        links = [link(name, to.format(out=self.out)) for name, to in case.links.items()]
        rest: list[Member] = [file(name, json.dumps(GHOST).encode()) for name in case.files]
        points = [f"{name} = a:b" for name in case.scripts]
        if case.apart:
            self.make("alpha", links, [])
            self.make("beta", rest, points)
        else:
            self.make("alpha", links + rest, points)
            self.make("beta", [], [])
        python = [file("bin/python3.12")]
        package(self.channel / "noarch", python, "python", dist="python-3.12-0", version="3.12")
        index(self.channel)
        self.app = workspace(folder / "app", self.channel.as_uri(), 'python = "*"\n')
        self.cache = folder / "cache"

    def make(self, name: str, members: list[Member], points: list[str]) -> None:
        says = {"noarch": {"type": "python", "entry_points": points}, "package_metadata_version": 1}
        info = [file("info/link.json", json.dumps(says).encode())]
        needs = {"noarch": "python", "depends": ["python"]}
        package(self.channel / "noarch", members, name, info=info, **needs)

    @property
    def files(self) -> list[Path]:
        """The packages of the channel."""
        return sorted(self.channel.glob("*/*.conda"))

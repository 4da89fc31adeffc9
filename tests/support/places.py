# SPDX-License-Identifier: BSD-3-Clause
"""Generate hostile packages that try to write outside of the prefix, alone or in pairs."""

import json
from dataclasses import dataclass
from pathlib import Path

from support.conda_packages import Member, file, link, package
from support.small_channel import index, workspace

SITE = "lib/python3.12/site-packages"
GHOST_FILE = "ghost-1.0-0.json"
RECORD = f"conda-meta/{GHOST_FILE}"
# A file outside of the prefix, which is app/.pixi/envs/default. The path is relative to the prefix.
OUT = "../../../../out/victim"
# The record of a package that seems to be installed, but is not in the lock. An installer would
# remove the files that this record lists.
GHOST = {
    "name": "ghost",
    "version": "1.0",
    "build": "0",
    "build_number": 0,
    "subdir": "noarch",
    "depends": [],
    "fn": "ghost-1.0-0.conda",
    "url": "https://a.invalid/noarch/ghost-1.0-0.conda",
    "channel": "https://a.invalid/",
    "files": [OUT],
    "paths_data": {"paths_version": 1, "paths": [{"_path": OUT, "path_type": "hardlink"}]},
}


@dataclass
class Case:
    """The content of the packages alpha and beta.

    Attributes:
        name: The name of the case.
        links: Links of alpha and their targets. `{out}` in a target stands for the folder outside
            of the prefix that nothing may change.
        files: Paths of files.
        scripts: Names of console scripts.
        apart: Whether the files and scripts are in beta. Otherwise they are in alpha.
    """

    name: str
    links: dict[str, str]
    files: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    apart: bool = False


def routes(top: str) -> dict[str, dict[str, str]]:
    """Return, by name, the links through which the path `top` can lead out of the prefix."""
    up = top.count("/")
    return {
        "absolute": {top: "{out}"},
        # `../` four times leads from the prefix, app/.pixi/envs/default, to the parent of `out`.
        "upwards": {top: "../" * (up + 4) + "out"},
        "two links": {"a/one": "{out}", top: "../" * up + "a/one"},
    }


def cases() -> list[Case]:
    """Return all cases."""
    tops = {"bin": "bin", "share": "share", "lib": "lib"}
    tops |= {"lib/python3.12": "site-packages", SITE: "site-packages"}
    result = []
    for apart in (False, True):
        where = "two packages" if apart else "one package"
        for top, inside in tops.items():
            for route, links in routes(top).items():
                name = f"{top} {route}, {where}"
                result.append(Case(f"file {name}", links, (f"{inside}/new",), (), apart))
        for route, links in routes("bin").items():
            result.append(Case(f"script {route}, {where}", links, (), ("new",), apart))
        for top in ("bin", "python-scripts"):
            links = {f"{top}/x": "{out}/victim"}
            result.append(Case(f"script over {top} link, {where}", links, (), ("x",), apart))
        result.append(Case(f"record, {where}", {}, (RECORD,), (), apart))
        links = {"m": "conda-meta"}
        result.append(Case(f"record by link, {where}", links, (f"m/{GHOST_FILE}",), (), apart))
    for name in (
        ".partial-installed-from",
        "installed-from",
        "history",
        "alpha-1-0.json",
        "beta-1-0.json",
    ):
        result.append(Case(f"link {name}", {f"conda-meta/{name}": "{out}/victim"}))
    for name in ("conda-meta", "__clobbers__", ".trash"):
        result.append(Case(f"link {name}", {name: "{out}"}))
    result.append(Case("link CACHEDIR.TAG", {"CACHEDIR.TAG": "{out}/new"}))
    result.append(Case("script over a file", {}, ("bin/x",), ("x",)))
    return result


CASES = {case.name: case for case in cases()}
# The cases in which rattler, and therefore pixi, writes outside of the prefix.
LET_THROUGH = {
    "script over bin link, one package",
    "script over python-scripts link, one package",
    "record, one package",
    "record, two packages",
    "link CACHEDIR.TAG",
}
# The case in which only pixi, and not rattler, writes outside of the prefix. The link is in the
# place of the file conda-meta/history, which only pixi writes.
PIXIS = {"link history"}
# The cases in which rattler writes outside of the prefix in some runs and not in others. This
# depends on the order in which rattler links the files, and the order varies.
BY_ORDER = {
    name
    for name in CASES
    if name.startswith("script") or (name.startswith("file") and name.endswith("two packages"))
} - LET_THROUGH


class Machine:
    """A channel with python, alpha and beta, a workspace, and a folder outside of its prefix.

    Attributes:
        out: The folder outside of the prefix that nothing may change.
        channel: The folder of the channel.
        app: The workspace.
        cache: The folder for the package cache.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.out = folder / "out"
        self.channel = folder / "channel"
        self.out.mkdir()
        (self.out / "victim").write_text("before")
        links = [link(name, to.format(out=self.out)) for name, to in case.links.items()]
        files: list[Member] = [file(name, json.dumps(GHOST).encode()) for name in case.files]
        entry_points = [f"{name} = a:b" for name in case.scripts]
        if case.apart:
            self.make("alpha", links, [])
            self.make("beta", files, entry_points)
        else:
            self.make("alpha", links + files, entry_points)
            self.make("beta", [], [])
        python = [file("bin/python3.12")]
        package(self.channel / "noarch", python, "python", dist="python-3.12-0", version="3.12")
        index(self.channel)
        self.app = workspace(folder / "app", self.channel.as_uri(), 'python = "*"\n')
        self.cache = folder / "cache"

    def make(self, name: str, members: list[Member], entry_points: list[str]) -> None:
        """Put a noarch Python package into the channel."""
        noarch = {"type": "python", "entry_points": entry_points}
        link_json = {"noarch": noarch, "package_metadata_version": 1}
        info = [file("info/link.json", json.dumps(link_json).encode())]
        needs = {"noarch": "python", "depends": ["python"]}
        package(self.channel / "noarch", members, name, info=info, **needs)

    @property
    def files(self) -> list[Path]:
        """Return the packages of the channel."""
        return sorted(self.channel.glob("*/*.conda"))

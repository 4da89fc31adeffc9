# SPDX-License-Identifier: BSD-3-Clause
"""What a conda package says about itself, and where it would write."""

import json
import posixpath
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rattler import PathsJson

from forge.errors import BuildFailed, Refused
from forge.provenance import archive
from forge.provenance.archive import Entry

RENDERED = "recipe/rendered_recipe.yaml"
LINKS_LIMIT = 40  # as many as Linux follows in one path


class Package:
    """A .conda or .tar.bz2 file, read without unpacking it to disk.

    Reading raises BuildFailed if it is damaged, Refused if it holds what no package may.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def payload(self) -> dict[str, Entry]:
        """Name -> Entry of the files to install."""
        return archive.read(self.path, "pkg")

    @cached_property
    def info(self) -> dict[str, bytes]:
        """Name -> content of the files in `info`, without that prefix."""
        entries = archive.read(self.path, "info")
        return {name.removeprefix("info/"): entry.content for name, entry in entries.items()}

    def parsed(self, name: str) -> dict[str, Any]:
        """The content of info/NAME, a JSON or YAML file that holds a mapping."""
        try:
            if name.endswith(".json"):
                data = json.loads(self.info[name])
            else:  # the C loader: a rendered recipe of hundreds of packages takes seconds otherwise
                data = yaml.load(self.info[name], yaml.CSafeLoader)
            if not isinstance(data, dict):
                raise ValueError(f"it holds no mapping but {type(data).__name__}")
        except (KeyError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise BuildFailed(
                f"{self.path}: info/{name} is missing or unreadable: {error!r:.200}"
            ) from None
        return data

    @cached_property
    def index(self) -> dict[str, Any]:
        """What the package says about itself: name, version, requirements, licence.

        Raises BuildFailed if that is not what its file is called.
        """
        data = self.parsed("index.json")
        says = "-".join(str(data.get(key)) for key in ("name", "version", "build"))
        if says != archive.stem(self.path):
            raise BuildFailed(f"{self.path} calls itself {says!a:.200}; was it renamed?")
        return data

    @cached_property
    def rendered(self) -> dict[str, Any]:
        """The rendered recipe that rattler-build puts into every package."""
        return self.parsed(RENDERED)

    @cached_property
    def listed(self) -> dict[str, str]:
        """Name -> sha256, or "a link", of the files in info/paths.json, as the installer reads it.

        Raises Refused for a name that leads out of the prefix, or that is listed twice.
        """
        try:
            paths = PathsJson.from_str(self.info["paths.json"].decode()).paths
        except Exception as error:
            raise BuildFailed(f"{self.path}: info/paths.json is no list: {error!a:.200}") from None
        files = {}
        for path in paths:
            name, kind = str(path.relative_path), path.path_type
            if not archive.is_plain(name) or name.split("/")[0] == "info" or name in files:
                where = "twice" if name in files else "which is no plain path below a prefix"
                raise Refused(f"{self.path} lists {name!a:.200}, {where}: install nothing of it")
            if not kind.directory:
                files[name] = "a link" if kind.softlink else (path.sha256 or b"").hex()
        return files

    def require_safe(self) -> None:
        """Raise Refused if the package could write outside the prefix that it is installed in.

        rattler links what info/paths.json names wherever that leads; see SECURITY.md.
        """
        _ = self.index
        if differs := sorted(self.payload.keys() ^ self.listed.keys()):
            which = "not in" if differs[0] in self.payload else "only in"
            self._refuse(differs[0], f"is {which} info/paths.json")
        for name, entry in self.payload.items():
            if (entry.link is not None) != (self.listed[name] == "a link"):
                self._refuse(name, "is a link, or is listed as one, but not both")
        links = {name: entry.link for name, entry in self.payload.items() if entry.link is not None}
        self.require_inside(self.payload, links)
        for script in self._scripts():
            if posixpath.basename(script) != script or script in ("", ".", ".."):
                self._refuse(script, "is a console script, but no plain file name")

    def require_inside(self, places: Iterable[str], links: Mapping[str, str]) -> None:
        """Raise Refused if one of its places is outside the prefix through one of `links`.

        A link may name a file of the system, if nothing is written through it.
        """
        for place in places:
            absolute = links.get(place, "").startswith("/")
            inside = posixpath.dirname(place) if absolute or place not in links else place
            if not stays_inside(inside, links):
                self._refuse(place, "leads out of the prefix through a link")

    def _scripts(self) -> list[str]:
        """The names of the console scripts that an installer makes of a noarch Python package."""
        if "link.json" not in self.info:
            return []
        made = self.parsed("link.json").get("noarch")
        points = made.get("entry_points") if isinstance(made, dict) else None
        return [str(point).partition("=")[0].strip() for point in points or ()]

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise Refused(f"{self.path}: {name!a:.200} {why}: install nothing of it")


def stays_inside(path: str, links: Mapping[str, str]) -> bool:
    """Whether a path below a prefix that holds `links` leads to a place in that prefix."""
    done: list[str] = []
    todo, followed = path.split("/")[::-1], 0
    while todo:
        part = todo.pop()
        if part == "..":
            if not done:
                return False
            done.pop()
        elif part not in ("", "."):
            done.append(part)
            target = links.get("/".join(done))
            if target is not None:
                followed += 1
                if target.startswith("/") or followed > LINKS_LIMIT:
                    return False
                done.pop()
                todo += target.split("/")[::-1]
    return True

# SPDX-License-Identifier: BSD-3-Clause
"""A conda package as rattler unpacks it: what it says about itself, and where it would write.

The folder that is judged is made by the code that an installation unpacks with, or is the very one
that `forge install` without pixi links: nothing is judged by one content and installed by another.
"""

import json
import os
import posixpath
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rattler import IndexJson, PathsJson

from forge.conda.unpacking import stem, unpack
from forge.errors import Failed, Refused
from forge.files import sha256_file

RENDERED = "recipe/rendered_recipe.yaml"
LINKS_LIMIT = 40  # as many as Linux follows in one path
INFO_LIMIT = 1 << 28  # bytes of `info`, which is kept in memory
FILES_LIMIT = 1_000_000
# what an index takes from info/index.json
INDEXED = ("name", "version", "build", "build_number", "subdir", "noarch", "depends", "constrains",
           "license", "python_site_packages_path")  # fmt: skip


def cache_folder() -> Path:
    """Return where rattler unpacks packages unless it is told otherwise."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RATTLER_CACHE_DIR") or Path(user, "rattler", "cache"), "pkgs")


def is_plain(name: str) -> bool:
    """Return whether a name is a relative path in its shortest form that does not lead upwards."""
    plain = posixpath.normpath(name) == name and "\0" not in name
    return plain and name != "." and not f"{name}/".startswith(("/", "../"))


class Package:
    """A .conda or .tar.bz2 file, unpacked when it is first read into a folder that goes with this.

    `folder` is one that it was unpacked to already. Reading raises Failed if the package is
    damaged, Refused if it holds what no package may.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        if folder:
            self.folder = folder

    @cached_property
    def folder(self) -> Path:
        """Its files, as they are linked into environments, and `info`."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".forge-")
        folder = Path(self._scratch.name, "package")
        unpack(self.path, folder)
        try:
            found = (
                IndexJson.from_package_archive(self.path),
                IndexJson.from_path(self._index(folder)),
            )
        except Exception as error:
            self._damaged("index.json", error)
        first, second = ([getattr(i, key, None) for key in INDEXED] for i in found)
        if list(map(str, first)) != list(map(str, second)):
            self._refuse("info/index.json", "is there twice, with other contents")
        return folder

    @staticmethod
    def _index(folder: Path) -> Path:
        return folder / "info" / "index.json"

    @cached_property
    def payload(self) -> dict[str, str | None]:
        """The files to install: name -> where a symbolic link leads, None for a file."""
        found: dict[str, str | None] = {}
        for place, folders, files in os.walk(self.folder):
            for name in [*folders, *files]:
                path = Path(place, name)
                below = path.relative_to(self.folder).as_posix()
                link = path.is_symlink()
                if not link and not path.is_file() and not path.is_dir():
                    self._refuse(below, "is not a file, directory or link")
                if below.split("/")[0] == "info":
                    if link:
                        self._refuse(below, "is a link")
                elif link or path.is_file():
                    found[below] = str(path.readlink()) if link else None
            if len(found) > FILES_LIMIT:
                self._refuse(place, f"is one of more than {FILES_LIMIT} files")
        return found

    @cached_property
    def held(self) -> dict[str, str]:
        """Name -> sha256 of each file to install, or "a link"."""
        return {
            name: sha256_file(self.folder / name) if link is None else "a link"
            for name, link in self.payload.items()
        }

    @cached_property
    def info(self) -> dict[str, bytes]:
        """Name -> content of the files in `info`, without that prefix."""
        _ = self.payload  # no links
        files = [path for path in (self.folder / "info").rglob("*") if path.is_file()]
        if sum(path.stat().st_size for path in files) > INFO_LIMIT:
            self._refuse("info", f"has more than {INFO_LIMIT} bytes")
        return {str(path.relative_to(self.folder / "info")): path.read_bytes() for path in files}

    def _read(self, name: str) -> bytes:
        """Read a file of info. Raises KeyError without one."""
        path = self.folder / "info" / name
        if "info" in self.payload or not path.is_file() or path.is_symlink():
            raise KeyError(name)
        return path.read_bytes()

    def parsed(self, name: str) -> dict[str, Any]:
        """Parse info/NAME, a JSON or YAML file that holds a mapping."""
        try:
            if name.endswith(".json"):
                data = json.loads(self._read(name))
            else:  # the C loader: a rendered recipe of hundreds of packages takes seconds otherwise
                data = yaml.load(self._read(name), yaml.CSafeLoader)
            if not isinstance(data, dict):
                raise ValueError(f"it holds no mapping but {type(data).__name__}")
        except (KeyError, ValueError, RecursionError, yaml.YAMLError) as error:
            self._damaged(name, error)
        return data

    @cached_property
    def index(self) -> dict[str, Any]:
        """What the package says about itself: name, version, requirements, licence.

        Raises Failed if that is not what its file is called.
        """
        data = self.parsed("index.json")
        says = "-".join(str(data.get(key)) for key in ("name", "version", "build"))
        if says != stem(self.path):
            raise Failed(f"{self.path} calls itself {says!a:.200}; was it renamed?")
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
            paths = PathsJson.from_str(self._read("paths.json").decode()).paths
        except (Failed, Refused):  # of the whole package
            raise
        except Exception as error:
            raise Failed(f"{self.path}: info/paths.json is not a list: {error!a:.200}") from None
        files = {}
        for path in paths:
            name, kind = str(path.relative_path), path.path_type
            if not is_plain(name) or name.split("/")[0] == "info" or name in files:
                where = "twice" if name in files else "which is not a plain path below a prefix"
                raise Refused(f"{self.path} lists {name!a:.200}, {where}: install nothing of it")
            if not kind.directory:
                files[name] = "a link" if kind.softlink else (path.sha256 or b"").hex()
        return files

    def require_safe(self, contents: bool = True) -> None:
        """Raise Refused if it could write outside its prefix, or is not what it lists.

        rattler links what info/paths.json names wherever that leads; see SECURITY.md. Without
        `contents` the files are not hashed.
        """
        _ = self.index
        if differs := sorted(self.payload.keys() ^ self.listed.keys()):
            which = "not in" if differs[0] in self.payload else "only in"
            self._refuse(differs[0], f"is {which} info/paths.json")
        for name, link in self.payload.items():
            if (link is not None) != (self.listed[name] == "a link"):
                self._refuse(name, "is a link, or is listed as one, but not both")
        links = {name: link for name, link in self.payload.items() if link is not None}
        self.require_inside(self.payload, links)
        for script in self._scripts():
            if posixpath.basename(script) != script or script in ("", ".", ".."):
                self._refuse(script, "is a console script, but no plain file name")
        if contents and (wrong := sorted(self.held.items() - self.listed.items())):
            self._refuse(wrong[0][0], "has another sha256 than info/paths.json says")

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
        """Name the console scripts that an installer makes of a noarch Python package."""
        if not (self.folder / "info" / "link.json").exists():
            return []
        made = self.parsed("link.json").get("noarch")
        points = made.get("entry_points") if isinstance(made, dict) else None
        return [str(point).partition("=")[0].strip() for point in points or ()]

    def _damaged(self, name: str, error: Exception) -> NoReturn:
        raise Failed(f"{self.path}: info/{name} is missing or unreadable: {error!r:.200}") from None

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise Refused(f"{self.path}: {name!a:.200} {why}: install nothing of it")


def stays_inside(path: str, links: Mapping[str, str]) -> bool:
    """Return whether a path below a prefix that holds `links` leads to a place in that prefix."""
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

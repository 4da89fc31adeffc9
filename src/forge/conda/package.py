# SPDX-License-Identifier: BSD-3-Clause
"""A conda package as rattler unpacks it: what it says about itself, and where it would write.

The folder that is judged is made by the code that an installation unpacks with, or is the very one
that `forge install` without pixi links: nothing is judged by one content and installed by another.
"""

import json
import os
import posixpath
import re
import struct
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import yaml
from filelock import FileLock
from rattler import IndexJson, PackageRecord, PathsJson
from rattler.package_streaming import extract

from forge import limits
from forge.errors import Failed, Refused
from forge.files import sha256_file, swept

RENDERED = "recipe/rendered_recipe.yaml"
LINKS_LIMIT = 40  # as many as Linux follows in one path
OUTSIDE = ".."  # of a prefix
# what an installer writes itself, through a link if a package left one there
INSTALLERS = ("conda-meta", "__clobbers__", "CACHEDIR.TAG", ".trash")
PYTHON = re.compile("^lib/python[^/]+")
Tree = defaultdict[str, list[tuple["Places", str]]]  # by place: whose, and a name or target
# what an index takes from info/index.json
INDEXED = ("name", "version", "build", "build_number", "subdir", "noarch", "depends", "constrains",
           "license", "python_site_packages_path", "track_features", "timestamp")  # fmt: skip


def cache_folder() -> Path:
    """Return where rattler unpacks packages unless it is told otherwise."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RATTLER_CACHE_DIR") or Path(user, "rattler", "cache"), "pkgs")


def scratch(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder to unpack in, locked while its process lives; what killed ones left goes."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".forge.lock"):
        list(_ours(cache))
        made = tempfile.TemporaryDirectory(None, ".forge-", cache, ignore_cleanup_errors=True)
        lock = FileLock(Path(made.name, ".lock"), thread_local=False)
        made.lock = lock.acquire()  # type: ignore[attr-defined]
    return made


def _ours(cache: Path) -> Iterator[Path]:
    for left in cache.glob(".forge-*"):  # also where rattler wrote on after its error
        with suppress(OSError):  # its process may just end
            (left / ".lock").touch()
            yield from swept(left / ".lock", [left])


def swept_cache(cache: Path) -> list[Path]:
    """Remove the folders in which killed processes unpacked, ours and rattler's; return them."""
    # rattler unpacks NAME into .NAMExxxxxx, and holds NAME.lock meanwhile, or the whole cache's
    theirs = (path for path in cache.glob(".*-*-*") if path.is_dir())
    dead = (swept(cache / f"{path.name[1:-6]}.lock", [path]) for path in theirs)
    both = swept(cache / ".cache.lock", chain.from_iterable(dead))
    return [*swept(cache / ".forge.lock", _ours(cache)), *both]


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
        self._scratch = scratch(cache_folder())
        folder = Path(self._scratch.name, "package")
        unpack(self.path, folder)
        try:
            inside = IndexJson.from_path(folder / "info" / "index.json")
            found = IndexJson.from_package_archive(self.path), inside
        except Exception as error:
            self._damaged("index.json", error)
        first, second = ([getattr(i, key, None) for key in INDEXED] for i in found)
        if list(map(str, first)) != list(map(str, second)):
            _refuse(self.path, "info/index.json", "is there twice, with other contents")
        return folder

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
                    _refuse(self.path, below, "is not a file, directory or link")
                if below.split("/")[0] == "info":
                    if link:
                        _refuse(self.path, below, "is a link")
                elif link or path.is_file():
                    found[below] = str(path.readlink()) if link else None
            if len(found) > limits.FILES:
                _refuse(self.path, place, f"is one of more than {limits.FILES} files")
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
        if sum(path.stat().st_size for path in files) > limits.INFO:
            _refuse(self.path, "info", f"has more than {limits.INFO} bytes")
        return {str(path.relative_to(self.folder / "info")): path.read_bytes() for path in files}

    def parsed(self, name: str) -> dict[str, Any]:
        """Parse info/NAME, a JSON or YAML file that holds a mapping."""
        try:
            if name.endswith(".json"):
                data = json.loads(self.info[name])
            else:  # the C loader: a rendered recipe of hundreds of packages takes seconds otherwise
                data = yaml.load(self.info[name], yaml.CSafeLoader)
            if not isinstance(data, dict):
                raise ValueError(f"it holds no mapping but {type(data).__name__}")
        except (KeyError, ValueError, RecursionError, yaml.YAMLError) as error:
            self._damaged(name, error)
        return data

    @cached_property
    def index(self) -> dict[str, Any]:
        """What the package says about itself. Raises Failed if its file is called otherwise."""
        data = self.parsed("index.json")
        says = "-".join(str(data.get(key)) for key in ("name", "version", "build"))
        if says != stem(self.path):
            raise Failed(f"{self.path} calls itself {says!a:.200}; was it renamed?")
        return data

    rendered = cached_property(lambda self: self.parsed(RENDERED))  # its recipe

    @cached_property
    def listed(self) -> dict[str, str]:
        """Name -> sha256, or "a link", of the files in info/paths.json, as the installer reads it.

        Raises Refused for a name that leads out of the prefix, or that is listed twice.
        """
        text = self.info.get("paths.json", b"")
        try:
            paths = PathsJson.from_str(text.decode()).paths
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

    def require_safe(self, contents: bool = True) -> "Places":
        """Return its places. Raises Refused if it could write outside, or is not what it lists.

        rattler links what info/paths.json names wherever that leads; see SECURITY.md. Without
        `contents` the files are not hashed.
        """
        _ = self.index
        if differs := sorted(self.payload.keys() ^ self.listed.keys()):
            which = "not in" if differs[0] in self.payload else "only in"
            _refuse(self.path, differs[0], f"is {which} info/paths.json")
        for name, link in self.payload.items():
            if (link is not None) != (self.listed[name] == "a link"):
                _refuse(self.path, name, "is a link, or is listed as one, but not both")
        require_confined([self.places])
        if contents and (wrong := sorted(self.held.items() - self.listed.items())):
            _refuse(self.path, wrong[0][0], "has another sha256 than info/paths.json says")
        return self.places

    @cached_property
    def places(self) -> "Places":
        """What of it comes into a prefix, which is known after its folder went."""
        made = self.parsed("link.json").get("noarch") if "link.json" in self.info else None
        points = made.get("entry_points") if isinstance(made, dict) else None
        scripts = [str(point).partition("=")[0].strip() for point in points or ()]
        for name in scripts:
            if posixpath.basename(name) != name or name in ("", ".", ".."):
                _refuse(self.path, name, "is a console script, but no plain file name")
        name, every = str(self.index["name"]), self.index.get("noarch") == "python"
        return Places(self.path, name, every, self.payload, scripts)

    def _damaged(self, name: str, error: Exception) -> NoReturn:
        raise Failed(f"{self.path}: info/{name} is missing or unreadable: {error!r:.200}") from None


def _refuse(package: Path, name: str, why: str) -> NoReturn:
    raise Refused(f"{package}: {name!a:.200} {why}: install nothing of it")


@dataclass(frozen=True)
class Places:
    """What of a package comes into a prefix: files, links and where they lead, console scripts."""

    path: Path
    name: str
    every_python: bool
    payload: Mapping[str, str | None]
    scripts: Sequence[str]

    def placed(self, site: str) -> dict[str, str | None]:
        """Map where its files are linked (of every Python: at `site`) to links' targets."""
        moved = {"site-packages": site, "python-scripts": "bin"} if self.every_python else {}
        parts = ((name.partition("/"), link) for name, link in self.payload.items())
        return {f"{moved.get(top, top)}{slash}{rest}": link for (top, slash, rest), link in parts}

    def beside(self, tree: Tree, place: str) -> Iterable[str]:
        """Pick what is its own or another package's: of one name there is one in a prefix."""
        return dict.fromkeys(w for p, w in tree.get(place, ()) if p is self or p.name != self.name)

    def lands(self, place: str, link: str | None, tree: Tree) -> set[str]:
        """Return where it may land; a link may name a system's file. Raises Refused for outside."""
        links, (folder, name) = partial(self.beside, tree), posixpath.split(place)
        found = {posixpath.join(parent, name) for parent in landings(folder, links)}
        reached = found if (link or "").startswith("/") else set(landings(place, links))
        for where in sorted(found | reached):
            if f"{where}/".startswith(f"{OUTSIDE}/"):
                _refuse(self.path, place, "leads out of the prefix through a link")
            if (top := where.split("/")[0]) in INSTALLERS:
                _refuse(self.path, place, f"lands in {top}, which is the installer's own")
        return found if link is not None else reached


def require_confined(packages: Sequence[Places], python: PackageRecord | None = None) -> None:
    """Raise Refused unless packages stay inside their prefix, whichever are installed together.

    `python` is the record that places files for every Python; else any Python's links count.
    """
    version = ".".join(str(python.version if python else "3").split(".")[:2])
    site = (python and python.python_site_packages_path) or f"lib/python{version}/site-packages"
    if not is_plain(site):
        raise Refused(f"python's record puts packages at {site!a:.200}, outside a prefix")
    every = [(p, *item) for p in packages for item in p.placed(site).items()]
    links, taken = Tree(list), Tree(list)
    for package, name, link in every:
        for at in {name, name if python else PYTHON.sub("lib/python3", name)} if link else ():
            links[at].append((package, str(link)))
    for package, name, link in every:
        for where in package.lands(name, link, links):
            taken[where].append((package, name))
    for package in packages:
        for script in package.scripts:
            for where in package.lands(f"bin/{script}", None, links):
                # rattler writes it through what is there: a hard link to a file of its cache
                if package.beside(taken, where):
                    _refuse(package.path, script, "is a console script in place of a packaged file")


def landings(path: str, links: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield where a path may lead, in a prefix or OUTSIDE; `links` says what a place links to."""
    ways = [("", path)]
    for _ in range(LINKS_LIMIT):
        if not ways:
            return
        done, rest = ways.pop()
        while rest and done != OUTSIDE:
            part, _, rest = rest.partition("/")
            if part == "..":
                done = posixpath.dirname(done) if done else OUTSIDE
            elif part not in ("", "."):
                done = posixpath.join(done, part)
                if targets := links(done):
                    for target in targets:
                        start = OUTSIDE if target.startswith("/") else posixpath.dirname(done)
                        ways.append((start, f"{target}/{rest}"))
                    break
        else:
            yield done
    if ways:
        yield OUTSIDE


def stem(package: Path) -> str:
    """Return NAME-VERSION-BUILD of a .conda or .tar.bz2 file."""
    return package.name.removesuffix(".conda").removesuffix(".tar.bz2")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a package. Raises Failed if it is damaged, Refused if readers could differ in it."""
    try:
        if archive.name.endswith(".conda"):
            _require_one_reading(archive)
        extract(archive, folder)
    except Refused as error:
        raise Refused(f"{archive} holds {error}: install nothing of it") from None
    except Exception as error:  # zipfile's, struct's, and what the bindings raise
        says = "; ".join(str(error).splitlines()) or "truncated"
        raise Failed(f"{archive} cannot be read: {says:.500}") from None


def _require_one_reading(archive: Path) -> None:
    """Raise Refused unless a .conda is what its name says, stored, in order, and nothing else.

    Some readers take the central directory, others the headers before each member.
    """
    names = ["metadata.json", *(f"{kind}-{stem(archive)}.tar.zst" for kind in ("info", "pkg"))]
    with archive.open("rb") as file, zipfile.ZipFile(file) as listing:
        members, end = listing.infolist(), 0
        if sorted(member.filename for member in members) != sorted(names):
            what = "other members than metadata.json and two archives of its name"
            raise Refused(f"{what}; was it renamed?")
        for member in members:
            file.seek(end)
            header = struct.unpack("<4s2xHH4xIIIHH", file.read(30))
            signature, flags, method, crc, packed, size, name, extra = header
            says, more = file.read(name), file.read(extra)
            if extra and size == packed == 0xFFFFFFFF:  # more than 32 bits of size
                size, packed = struct.unpack("<4xQQ", more[:20])
            fields = (signature, flags, method, crc, says.decode(), packed, size)
            if (end, *fields) != (
                member.header_offset, b"PK\3\4", member.flag_bits, member.compress_type, member.CRC,
                member.filename, member.compress_size, member.file_size,
            ) or (flags, method) != (0, zipfile.ZIP_STORED):  # fmt: skip
                raise Refused("a member that is not stored, or headers that differ")
            end += 30 + name + extra + size
        file.seek(-22, os.SEEK_END)  # where the last record of a zip archive is
        if end != listing.start_dir or listing.comment or file.read(4) != b"PK\5\6":
            raise Refused("data beside the members of its zip archive")

# SPDX-License-Identifier: BSD-3-Clause
"""Read a conda package as rattler unpacks it: its metadata, its files, and where it would write.

The checks read exactly the files that are installed. Either the installer's own code (rattler) has
unpacked them, or they are in the folder that `forge install` links without pixi.
"""

import json
import os
import posixpath
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import yaml
from rattler import IndexJson, PackageRecord, PathsJson
from rattler.package_streaming import extract

from forge import limits
from forge.conda.scratch import cache_folder, scratch
from forge.errors import Failed, Refused
from forge.files import sha256_file

RENDERED = "recipe/rendered_recipe.yaml"
# The maximum number of links that Linux follows in one path.
LINKS_LIMIT = 40
# This stands for every place outside of a prefix.
OUTSIDE = ".."
# A link has this value instead of a sha256.
A_LINK = "a link"
# Names at the top of a prefix that the installer itself writes. If a package had a link there, the
# installer would write through it.
INSTALLERS = ("conda-meta", "__clobbers__", "CACHEDIR.TAG", ".trash")
PYTHON = re.compile("^lib/python[^/]+")
# Maps a path in a prefix to the packages that have a link or a file there. Each package is paired
# with the target of the link or the name of the file.
Tree = defaultdict[str, list[tuple["Places", str]]]
# The fields that the index of a channel copies from info/index.json.
INDEXED = (
    "name",
    "version",
    "build",
    "build_number",
    "subdir",
    "noarch",
    "depends",
    "constrains",
    "license",
    "python_site_packages_path",
    "track_features",
    "timestamp",
)
# The header before each member of a zip archive, without version and time.
ZIP_HEADER = struct.Struct("<4s2xHH4xIIIHH")
ZIP_HEADER_SIGNATURE = b"PK\3\4"
ZIP_END_SIGNATURE = b"PK\5\6"
ZIP_END_SIZE = 22
# This value as a size means that the size needs more than 32 bits, and is in the header's extra
# field.
IN_EXTRA = 0xFFFFFFFF


def is_plain(name: str) -> bool:
    """Return whether a name is a relative path in its shortest form that does not lead upwards."""
    if "\0" in name or name == "." or posixpath.normpath(name) != name:
        return False
    return not f"{name}/".startswith(("/", "../"))


class Package:
    """A .conda or .tar.bz2 file. It is unpacked when it is first read.

    Reading raises Failed if the package is damaged, and Refused if its content is not allowed.

    Attributes:
        path: The file.
        folder: The unpacked package: the files that are linked into environments, and `info`.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        """Make the object for a package file. Nothing is read yet.

        Args:
            path: The file.
            folder: The folder to which the package is already unpacked. Without it, the package is
                unpacked to a scratch folder, which is removed together with this object.
        """
        self.path = path
        if folder:
            self.folder = folder

    @cached_property
    def folder(self) -> Path:
        """The unpacked package: the files that are linked into environments, and `info`."""
        self._scratch = scratch(cache_folder())
        folder = Path(self._scratch.name, "package")
        unpack(self.path, folder)
        try:
            unpacked = IndexJson.from_path(folder / "info" / "index.json")
            archived = IndexJson.from_package_archive(self.path)
        except Exception as error:
            self._raise_damaged("index.json", error)
        if _indexed_values(archived) != _indexed_values(unpacked):
            _refuse(self.path, "info/index.json", "is in the archive twice, with other contents")
        return folder

    @cached_property
    def payload(self) -> dict[str, str | None]:
        """The files to install, each with its target if it is a symbolic link, else with None."""
        payload: dict[str, str | None] = {}
        for place, folders, files in os.walk(self.folder):
            for name in [*folders, *files]:
                path = Path(place, name)
                relative = path.relative_to(self.folder).as_posix()
                is_link = path.is_symlink()
                is_file = not is_link and path.is_file()
                if not (is_link or is_file or path.is_dir()):
                    _refuse(self.path, relative, "is not a file, directory or link")
                if relative.split("/")[0] == "info":
                    if is_link:
                        _refuse(self.path, relative, "is a link")
                elif is_link:
                    payload[relative] = str(path.readlink())
                elif is_file:
                    payload[relative] = None
            if len(payload) > limits.FILES:
                reason = f"has more than {limits.FILES} files: do not install this package"
                raise Refused(f"{self.path} {reason}")
        return payload

    @cached_property
    def digests(self) -> dict[str, str]:
        """The files to install, each with its sha256, or with A_LINK if it is a link."""
        digests = {}
        for name, target in self.payload.items():
            if target is None:
                digests[name] = sha256_file(self.folder / name)
            else:
                digests[name] = A_LINK
        return digests

    @cached_property
    def info(self) -> dict[str, bytes]:
        """The contents of the files in `info`, by the path below `info`."""
        # This raises Refused if `info` has links.
        _ = self.payload
        folder = self.folder / "info"
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if size > limits.INFO:
            _refuse(self.path, "info", f"has more than {limits.INFO} bytes")
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def _parse(self, name: str) -> dict[str, Any]:
        """Parse info/NAME, a JSON or YAML file whose content is a mapping."""
        try:
            if name.endswith(".json"):
                data = json.loads(self.info[name])
            else:
                # PyYAML's loader in Python would take seconds for the recipe of a package with
                # hundreds of dependencies.
                data = yaml.load(self.info[name], yaml.CSafeLoader)
            if not isinstance(data, dict):
                raise ValueError(f"its content is not a mapping but {type(data).__name__}")
        except (KeyError, ValueError, RecursionError, yaml.YAMLError) as error:
            self._raise_damaged(name, error)
        return data

    @cached_property
    def index(self) -> dict[str, Any]:
        """The package's info/index.json. Raise Failed if the package file has another name."""
        data = self._parse("index.json")
        stated = "-".join(str(data.get(key)) for key in ("name", "version", "build"))
        if stated != stem(self.path):
            raise Failed(f"{self.path} calls itself {stated!a:.200}; was it renamed?")
        return data

    @cached_property
    def rendered(self) -> dict[str, Any]:
        """The rendered recipe that the package was built from."""
        return self._parse(RENDERED)

    @cached_property
    def listed(self) -> dict[str, str]:
        """The files that info/paths.json lists, each with its sha256 or A_LINK.

        Raises Refused for a name that is listed twice, that is in `info`, or that is not a relative
        path inside the prefix in its shortest form.
        """
        text = self.info.get("paths.json", b"")
        try:
            paths = PathsJson.from_str(text.decode()).paths
        except Exception as error:
            reason = "is missing, or is not a list of files"
            raise Failed(f"{self.path}: info/paths.json {reason}: {error!a:.200}") from None
        files = {}
        for path in paths:
            name = str(path.relative_path)
            if name in files:
                self._refuse_listed(name, "twice")
            if not is_plain(name) or name.split("/")[0] == "info":
                self._refuse_listed(name, "which is not a plain path inside a prefix")
            if path.path_type.directory:
                continue
            if path.path_type.softlink:
                files[name] = A_LINK
            else:
                files[name] = (path.sha256 or b"").hex()
        return files

    def _refuse_listed(self, name: str, reason: str) -> NoReturn:
        raise Refused(f"{self.path} lists {name!a:.200}, {reason}: do not install this package")

    def require_safe(self, contents: bool = True) -> "Places":
        """Require that the package writes only inside its prefix and has exactly the listed files.

        rattler installs each path in info/paths.json, even a path that leads out of the prefix (see
        SECURITY.md).

        Args:
            contents: Compare the sha256 of each file, too.

        Returns:
            The places where the package writes.

        Raises:
            Failed: The package is damaged, or was renamed.
            Refused: The package could write outside its prefix or over the installer's files, its
                files differ from the list, or its content is not allowed for another reason.
        """
        # This raises Failed for a renamed package.
        _ = self.index
        differing = sorted(self.payload.keys() ^ self.listed.keys())
        if differing:
            which = "not in" if differing[0] in self.payload else "only in"
            _refuse(self.path, differing[0], f"is {which} info/paths.json")
        for name, target in self.payload.items():
            is_link = target is not None
            is_listed_as_link = self.listed[name] == A_LINK
            if is_link != is_listed_as_link:
                _refuse(
                    self.path,
                    name,
                    "is a link but listed as a file in info/paths.json, or the reverse",
                )
        require_confined([self.places])
        if contents:
            changed = sorted(self.digests.items() - self.listed.items())
            if changed:
                name, _ = changed[0]
                _refuse(self.path, name, "has another sha256 than the one in info/paths.json")
        return self.places

    @cached_property
    def places(self) -> "Places":
        """The places where the package writes. They remain known after its folder is removed."""
        link_json = self._parse("link.json") if "link.json" in self.info else {}
        noarch = link_json.get("noarch")
        entry_points = noarch.get("entry_points") if isinstance(noarch, dict) else None
        scripts = []
        for entry_point in entry_points or ():
            name = str(entry_point).partition("=")[0].strip()
            if posixpath.basename(name) != name or name in ("", ".", ".."):
                _refuse(self.path, name, "is a console script whose name is not a plain file name")
            scripts.append(name)
        return Places(
            path=self.path,
            name=str(self.index["name"]),
            is_noarch_python=self.index.get("noarch") == "python",
            payload=self.payload,
            scripts=scripts,
        )

    def _raise_damaged(self, name: str, error: Exception) -> NoReturn:
        raise Failed(f"{self.path}: info/{name} is missing or unreadable: {error!r:.200}") from None


def _indexed_values(index: IndexJson) -> list[str]:
    """Return the fields that an index copies from info/index.json, as text."""
    return [str(getattr(index, key, None)) for key in INDEXED]


def _refuse(package: Path, name: str, reason: str) -> NoReturn:
    raise Refused(f"{package}: {name!a:.200} {reason}: do not install this package")


@dataclass(frozen=True)
class Places:
    """The places where a package writes in a prefix.

    Attributes:
        path: The package file.
        name: The name of the package.
        is_noarch_python: Whether the package is `noarch: python`. The installer puts modules and
            scripts of such a package where the prefix's Python looks for them.
        payload: The files, each with its target if it is a symbolic link, else with None.
        scripts: The names of console scripts that the installer makes in `bin`.
    """

    path: Path
    name: str
    is_noarch_python: bool
    payload: Mapping[str, str | None]
    scripts: Sequence[str]

    def map_targets(self, site_packages: str) -> dict[str, str | None]:
        """Map the path that each file has in a prefix to its target if it is a link, else to None.

        Args:
            site_packages: The folder for modules, relative to the prefix.
        """
        folders = {}
        if self.is_noarch_python:
            folders = {"site-packages": site_packages, "python-scripts": "bin"}
        targets = {}
        for name, target in self.payload.items():
            top, slash, rest = name.partition("/")
            targets[f"{folders.get(top, top)}{slash}{rest}"] = target
        return targets

    def select_coinstalled(self, tree: Tree, place: str) -> list[str]:
        """Return those entries at a path of a tree that can share a prefix with this package.

        These are the package's own entries and those of packages with other names. Two packages of
        the same name are never in one prefix.
        """
        entries = []
        for package, entry in tree.get(place, ()):
            if package is self or package.name != self.name:
                entries.append(entry)
        return list(dict.fromkeys(entries))

    def find_landings(self, place: str, target: str | None, links: Tree) -> set[str]:
        """Return the paths at which a file of the package may be written, after following links.

        Args:
            place: The path of the file in the prefix.
            target: The target if the file is a symbolic link, or else None.
            links: The links of all packages.

        Raises:
            Refused: The file may be written outside of the prefix, or over the installer's files.
        """

        def targets_of(path: str) -> list[str]:
            return self.select_coinstalled(links, path)

        folder, name = posixpath.split(place)
        unfollowed = {posixpath.join(parent, name) for parent in follow_links(folder, targets_of)}
        if target is not None and target.startswith("/"):
            # The link points to a system file, which is allowed.
            followed = unfollowed
        else:
            followed = set(follow_links(place, targets_of))
        for landing in sorted(unfollowed | followed):
            if f"{landing}/".startswith(f"{OUTSIDE}/"):
                _refuse(self.path, place, "leads out of the prefix through a link")
            top = landing.split("/")[0]
            if top in INSTALLERS:
                _refuse(self.path, place, f"is written to {top}, which only the installer may do")
        return followed if target is None else unfollowed

    def require_own_scripts(self, links: Tree, landings: Tree) -> None:
        """Raise Refused if one of the console scripts has the path of a packaged file.

        A packaged file in a prefix is a hard link to a file in rattler's cache. rattler would write
        the script into that file, and so change the cache.

        Args:
            links: The links of all packages.
            landings: The files of all packages, by the paths at which they may be written.
        """
        for script in self.scripts:
            for landing in self.find_landings(f"bin/{script}", None, links):
                if self.select_coinstalled(landings, landing):
                    _refuse(self.path, script, "is a console script with a packaged file's path")


def require_confined(packages: Sequence[Places], python: PackageRecord | None = None) -> None:
    """Require that packages stay inside their prefix, in any combination of them.

    Args:
        packages: The places where each package writes.
        python: The record of the Python that the packages are installed for. Without it, the links
            of packages for every Python count.

    Raises:
        Refused: A package could write outside its prefix or over the installer's files, or a
            console script has the path of a packaged file.
    """
    site_packages = _find_site_packages(python)
    files = []
    for package in packages:
        for place, target in package.map_targets(site_packages).items():
            files.append((package, place, target))
    links = Tree(list)
    for package, place, target in files:
        if target is None:
            continue
        links[place].append((package, target))
        any_python = PYTHON.sub("lib/python3", place)
        if not python and any_python != place:
            links[any_python].append((package, target))
    landings = Tree(list)
    for package, place, target in files:
        for landing in package.find_landings(place, target, links):
            landings[landing].append((package, place))
    for package in packages:
        package.require_own_scripts(links, landings)


def _find_site_packages(python: PackageRecord | None) -> str:
    """Return the folder for modules, relative to the prefix; without a Python, that of Python 3."""
    if python and python.python_site_packages_path:
        site_packages = python.python_site_packages_path
    else:
        version = str(python.version) if python else "3"
        short = ".".join(version.split(".")[:2])
        site_packages = f"lib/python{short}/site-packages"
    if not is_plain(site_packages):
        reason = "which is not a plain path inside a prefix"
        raise Refused(f"python's record puts packages at {site_packages!a:.200}, {reason}")
    return site_packages


def follow_links(path: str, targets_of: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield where a path in a prefix may lead: other paths in the prefix, or OUTSIDE.

    Args:
        path: A path in the prefix.
        targets_of: Returns the targets of the links that packages have at a path.
    """
    # Each pair consists of the part of a path whose links have been followed, and the rest of it.
    pending = [("", path)]
    for _ in range(LINKS_LIMIT):
        if not pending:
            return
        resolved, rest = pending.pop()
        while rest and resolved != OUTSIDE:
            part, _, rest = rest.partition("/")
            if part in ("", "."):
                continue
            if part == "..":
                resolved = posixpath.dirname(resolved) if resolved else OUTSIDE
                continue
            resolved = posixpath.join(resolved, part)
            targets = targets_of(resolved)
            if not targets:
                continue
            for target in targets:
                start = OUTSIDE if target.startswith("/") else posixpath.dirname(resolved)
                pending.append((start, f"{target}/{rest}"))
            break
        else:
            yield resolved
    if pending:
        yield OUTSIDE


def stem(package: Path) -> str:
    """Return NAME-VERSION-BUILD of a .conda or .tar.bz2 file."""
    return package.name.removesuffix(".conda").removesuffix(".tar.bz2")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a package.

    Raises:
        Failed: The package is damaged.
        Refused: Two programs could read different contents from the archive.
    """
    try:
        if archive.name.endswith(".conda"):
            _require_one_reading(archive)
        extract(archive, folder)
    except Refused as error:
        raise Refused(f"{archive} holds {error}: do not install it") from None
    except Exception as error:
        # zipfile, struct and the bindings raise many types of exceptions.
        reason = "; ".join(str(error).splitlines()) or "truncated"
        raise Failed(f"{archive} cannot be read: {reason:.500}") from None


def _require_one_reading(archive: Path) -> None:
    """Raise Refused unless every program reads the same members from a .conda file.

    Some programs read the central directory of a zip archive, and other programs read the header
    before each member. So the directory and the headers have to list the same members: the three
    members of a package, uncompressed and without gaps.
    """
    name = stem(archive)
    expected = ["metadata.json", f"info-{name}.tar.zst", f"pkg-{name}.tar.zst"]
    with archive.open("rb") as file, zipfile.ZipFile(file) as directory:
        members = directory.infolist()
        if sorted(member.filename for member in members) != sorted(expected):
            contents = "other members than metadata.json and the two archives with its name"
            raise Refused(f"{contents}; was it renamed?")
        end = 0
        for member in members:
            end = _require_same_header(file, end, member)
        file.seek(-ZIP_END_SIZE, os.SEEK_END)
        is_end = file.read(4) == ZIP_END_SIGNATURE
        if end != directory.start_dir or directory.comment or not is_end:
            raise Refused("data that belong to no member of its zip archive")


def _require_same_header(file: BinaryIO, start: int, member: zipfile.ZipInfo) -> int:
    """Compare the header before a member with the central directory.

    Args:
        file: The archive.
        start: The offset at which the previous member ends.
        member: The member as the central directory describes it.

    Returns:
        The offset at which this member ends.

    Raises:
        Refused: The header and the central directory differ, or the member is compressed.
    """
    file.seek(start)
    header = ZIP_HEADER.unpack(file.read(ZIP_HEADER.size))
    signature, flags, method, crc, packed, size, name_length, extra_length = header
    name = file.read(name_length)
    extra = file.read(extra_length)
    if extra_length and size == packed == IN_EXTRA:
        size, packed = struct.unpack("<4xQQ", extra[:20])
    stated = (
        start,
        signature,
        flags,
        method,
        crc,
        name.decode(),
        packed,
        size,
    )
    listed = (
        member.header_offset,
        ZIP_HEADER_SIGNATURE,
        member.flag_bits,
        member.compress_type,
        member.CRC,
        member.filename,
        member.compress_size,
        member.file_size,
    )
    is_stored = flags == 0 and method == zipfile.ZIP_STORED
    if stated != listed or not is_stored:
        raise Refused("a compressed member, or headers that differ")
    return start + ZIP_HEADER.size + name_length + extra_length + size

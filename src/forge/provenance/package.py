# SPDX-License-Identifier: BSD-3-Clause
"""The inside of a conda package: its files' digests, and what it says about itself."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import yaml
import zstandard

from forge.errors import BuildFailed
from forge.files import sha256_file

RECIPE = "info/recipe/"
RENDERED = f"{RECIPE}rendered_recipe.yaml"
# what rattler-build adds to the recipe's own files
ADDED = (RENDERED, f"{RECIPE}variant_config.yaml")
T = TypeVar("T")


class Entry(NamedTuple):
    """One file of a package. For a link `sha256` is that of its target's name."""

    sha256: str
    mode: int
    link: bool


class Package:
    """A .conda file, read without unpacking it to disk. Raises BuildFailed if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self, section: str, take: Callable[[tarfile.TarInfo, IO[bytes]], T]) -> dict[str, T]:
        """Name -> what `take` makes of each file in `info` or `pkg`. A link holds its target.

        By hand: py-rattler's PackageArchive has no modes, holds whole files in memory, and most
        processes that read through it abort when they exit.
        """
        # a rebuilt file has another name than its inner archives
        dist = re.sub(r"-rebuilt-\d{8}-\d{6}$", "", self.path.stem)
        inner = f"{section}-{dist}.tar.zst"
        try:
            with (
                zipfile.ZipFile(self.path) as archive,
                archive.open(inner) as packed,
                zstandard.ZstdDecompressor().stream_reader(packed) as stream,
                tarfile.open(fileobj=stream, mode="r|") as tar,
            ):
                found = {}
                for member in tar:
                    if not member.isdir():
                        content = tar.extractfile(member) if member.isreg() else None
                        found[member.name] = take(
                            member, content or io.BytesIO(member.linkname.encode())
                        )
                return found
        except KeyError:
            raise BuildFailed(f"{self.path} holds no {inner}; was it renamed?") from None
        except Exception as error:  # each layer has its own errors, and zipfile wrong ones too
            raise BuildFailed(f"{self.path} cannot be read: {error or 'truncated'}") from None

    def entries(self, section: str) -> dict[str, Entry]:
        """Name -> Entry of every file in `info` or `pkg`."""

        def entry(member: tarfile.TarInfo, content: Any) -> Entry:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
            return Entry(sha256, member.mode, not member.isreg())

        return self.files(section, entry)

    @cached_property
    def info(self) -> dict[str, bytes]:
        """Name -> content of the files in `info`."""
        return self.files("info", lambda _, content: content.read())

    def json(self, name: str) -> Any:
        """A parsed info/NAME.json."""
        return self._parsed(f"info/{name}.json", json.loads)

    @cached_property
    def index(self) -> dict[str, Any]:
        return self.json("index")

    @cached_property
    def rendered(self) -> dict[str, Any]:
        """The rendered recipe that rattler-build puts into every package."""
        # the C loader: a rendered recipe of hundreds of packages takes seconds otherwise
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return self._parsed(RENDERED, lambda text: yaml.load(text, loader))

    def _parsed(self, name: str, parse: Callable[[bytes], Any]) -> Any:
        try:
            return parse(self.info[name])
        except (KeyError, ValueError, yaml.YAMLError) as error:
            raise BuildFailed(f"{self.path}: {name} is missing or unreadable: {error}") from None

    @property
    def recipe_files(self) -> dict[str, str]:
        """Name in the recipe's folder -> sha256."""
        return {
            name.removeprefix(RECIPE): hashlib.sha256(content).hexdigest()
            for name, content in self.info.items()
            if name.startswith(RECIPE) and name not in ADDED
        }


def compare(original: Path, rebuilt: Path) -> list[str]:
    """The files that differ between two packages; nothing if they are the same byte for byte."""
    if sha256_file(original) == sha256_file(rebuilt):
        return []
    lines = []
    for section in ("info", "pkg"):
        before, after = Package(original).entries(section), Package(rebuilt).entries(section)
        lines += [f"{name}: only in the original" for name in sorted(before.keys() - after.keys())]
        lines += [f"{name}: only in the rebuilt" for name in sorted(after.keys() - before.keys())]
        common = sorted(before.keys() & after.keys())
        lines += [f"{name}: differs" for name in common if before[name] != after[name]]
    lines = lines or ["every file is the same; the archives differ in order, times or compression"]
    return [*lines, f"diffoscope {original} {rebuilt} shows how"]

# SPDX-License-Identifier: BSD-3-Clause
"""The inside of a conda package: its files' digests, and what it says of itself."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import yaml
import zstandard

from forge.errors import BuildFailed

RECIPE = "info/recipe/"
RENDERED = f"{RECIPE}rendered_recipe.yaml"
# what rattler-build adds to the folder of the recipe's own files
ADDED = (RENDERED, f"{RECIPE}variant_config.yaml")
# zipfile takes a changed flag for a password (RuntimeError), a changed version or method for one
# that it lacks (NotImplementedError, which is a RuntimeError), or for deflate's (zlib)
DAMAGED = (
    zipfile.BadZipFile, zstandard.ZstdError, tarfile.TarError, zlib.error, OSError, EOFError,
    RuntimeError,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One file of a package. Of a link `size` is 0 and `sha256` that of the target's name."""

    sha256: str
    size: int
    mode: int
    link: str | None = None


class Package:
    """A .conda file, read without unpacking it to disk. Raises BuildFailed when it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # a rebuilt file has another name than its inner archives
        self.dist = re.sub(r"-rebuilt-\d{8}-\d{6}$", "", path.stem)

    def _members(self, section: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
        """Every member of `info` or `pkg` that is no folder; the content of a link is its target.

        py-rattler's PackageArchive would do, but most processes that read through it abort at
        their end.
        """
        inner = f"{section}-{self.dist}.tar.zst"
        try:
            with (
                zipfile.ZipFile(self.path) as archive,
                archive.open(inner) as packed,
                zstandard.ZstdDecompressor().stream_reader(packed) as stream,
                tarfile.open(fileobj=stream, mode="r|") as tar,
            ):
                for member in tar:
                    if member.isreg():
                        yield member, tar.extractfile(member)
                    elif not member.isdir():
                        yield member, io.BytesIO(member.linkname.encode())
        except KeyError:
            raise BuildFailed(f"{self.path} holds no {inner}; was it renamed?") from None
        except DAMAGED as error:
            raise BuildFailed(f"{self.path} cannot be read: {error or 'cut off'}") from None

    def content(self, section: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """Name -> content of the `wanted` files in `info` or `pkg`."""
        members = self._members(section)
        return {member.name: file.read() for member, file in members if wanted(member.name)}

    def entries(self, section: str) -> dict[str, Entry]:
        """Name -> Entry of every file in `info` or `pkg`."""
        found = {}
        for member, file in self._members(section):
            link = None if member.isreg() else member.linkname
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            found[member.name] = Entry(sha256, member.size, member.mode, link)
        return found

    @cached_property
    def info(self) -> dict[str, bytes]:
        """The files below info/."""
        return self.content("info", lambda _: True)

    def _parsed(self, name: str, parse: Any) -> Any:
        try:
            return parse(self.info[name])
        except (KeyError, ValueError, yaml.YAMLError) as error:
            raise BuildFailed(f"{self.path}: {name} is missing or unreadable: {error}") from None

    @cached_property
    def index(self) -> dict[str, Any]:
        return self._parsed("info/index.json", json.loads)

    @cached_property
    def about(self) -> dict[str, Any]:
        return self._parsed("info/about.json", json.loads)

    @cached_property
    def paths(self) -> list[dict[str, Any]]:
        """The entries of info/paths.json."""
        return self._parsed("info/paths.json", json.loads)["paths"]

    @cached_property
    def rendered(self) -> dict[str, Any]:
        """The rendered recipe that rattler-build puts into every package."""
        # the C loader: a rendered recipe of hundreds of packages takes seconds otherwise
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return self._parsed(RENDERED, lambda text: yaml.load(text, loader))

    @property
    def recipe_files(self) -> dict[str, str]:
        """Name in the recipe's folder -> sha256 of its content."""
        return {
            name.removeprefix(RECIPE): hashlib.sha256(content).hexdigest()
            for name, content in self.info.items()
            if name.startswith(RECIPE) and name not in ADDED
        }

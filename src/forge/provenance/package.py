# SPDX-License-Identifier: BSD-3-Clause
"""The inside of a conda package: its files' digests, and what it says about itself."""

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
import zstandard

from forge.errors import BuildFailed

RENDERED = "recipe/rendered_recipe.yaml"


class Entry(NamedTuple):
    """One file of a package. A link contains its target's name; `content` is kept of `info`."""

    sha256: str
    link: bool
    content: bytes


class Package:
    """A .conda file, read without unpacking it to disk. Raises BuildFailed if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, section: str) -> dict[str, Entry]:
        """Name -> Entry of every file in `info` or `pkg`.

        By hand: py-rattler's PackageArchive holds whole files in memory, and most processes that
        read through it abort when they exit.
        """
        inner = f"{section}-{self.path.stem}.tar.zst"
        try:
            with (
                zipfile.ZipFile(self.path) as archive,
                archive.open(inner) as packed,
                zstandard.ZstdDecompressor().stream_reader(packed) as unpacked,
                tarfile.open(fileobj=unpacked, mode="r|") as tar,
            ):
                entries = {}
                for member in (member for member in tar if not member.isdir()):
                    target = io.BytesIO(member.linkname.encode())
                    stream: Any = tar.extractfile(member) if member.isreg() else target
                    content = stream.read() if section == "info" else b""
                    sha256 = hashlib.file_digest(
                        stream if section == "pkg" else io.BytesIO(content), "sha256"
                    ).hexdigest()
                    entries[member.name] = Entry(sha256, not member.isreg(), content)
                return entries
        except KeyError:
            raise BuildFailed(f"{self.path} holds no {inner}; was it renamed?") from None
        except Exception as error:  # each layer has its own errors, and zipfile wrong ones too
            raise BuildFailed(f"{self.path} cannot be read: {error or 'truncated'}") from None

    @cached_property
    def info(self) -> dict[str, bytes]:
        """Name -> content of the files in `info`, without that prefix."""
        entries = self.entries("info")
        return {name.removeprefix("info/"): entry.content for name, entry in entries.items()}

    def parsed(self, name: str) -> Any:
        """The content of info/NAME, a JSON or YAML file."""
        try:
            if name.endswith(".json"):
                return json.loads(self.info[name])
            # the C loader: a rendered recipe of hundreds of packages takes seconds otherwise
            return yaml.load(self.info[name], yaml.CSafeLoader)
        except (KeyError, ValueError, yaml.YAMLError) as error:
            raise BuildFailed(
                f"{self.path}: info/{name} is missing or unreadable: {error}"
            ) from None

    @property
    def index(self) -> dict[str, Any]:
        """What the package says about itself: name, version, requirements, licence."""
        return self.parsed("index.json")

    @cached_property
    def rendered(self) -> dict[str, Any]:
        """The rendered recipe that rattler-build puts into every package."""
        return self.parsed(RENDERED)


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], we: str, they: str
) -> list[str]:
    """A line for each key whose values differ; `we` and `they` say whose value is which."""
    return [
        f"{key}: {we} {ours.get(key, 'nothing')}, {they} {theirs.get(key, 'nothing')}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]

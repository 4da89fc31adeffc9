# SPDX-License-Identifier: BSD-3-Clause
"""The local channel: its index, its records, and how builds add packages to it."""

import asyncio
import contextlib
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rattler.index import index_fs

from forge import limits
from forge.conda import index, pypi
from forge.conda.pypi import Names
from forge.errors import Failed, ForgeError
from forge.files import move_whole, sha256_file, write_text
from forge.limits import read_bytes
from forge.project import SUBDIRS

# The build strings of the host base's packages, and of packages that were built on that base, begin
# with this prefix.
HOST_BOUND = "hostbound_"
# Prefix of the build string of a package that was made in a rehearsal; see docs/rehearsal.md.
REHEARSED = "rehearsal_"
# The end of a build string: a hash of the content, and the build number.
CONTENT_HASH = re.compile(r"h[0-9a-f]{7}_\d+$")


@dataclass(frozen=True)
class Output:
    """The identity of a package, which may not be built yet.

    Attributes:
        name: The package's name.
        version: Its version.
        build: Its complete build string.
        subdir: One of SUBDIRS.
    """

    name: str
    version: str
    build: str
    subdir: str

    @property
    def dist(self) -> str:
        """The package's identifier, NAME-VERSION-BUILD."""
        return f"{self.name}-{self.version}-{self.build}"

    @property
    def file_name(self) -> str:
        """The name of its package file."""
        return f"{self.dist}.conda"

    @property
    def number(self) -> int:
        """The build number."""
        return int(self.build.rsplit("_", 1)[1])

    @property
    def family(self) -> tuple[str, str, str]:
        """The package's name, version and build string without content hash and build number.

        Packages that agree in these form a family, of which only the newest build counts.
        """
        return self.name, self.version, CONTENT_HASH.sub("", self.build)


@dataclass(frozen=True)
class Record(Output):
    """A package in the index of a channel.

    Attributes:
        sha256: The sha256 of its file.
        size: The size of its file, in bytes.
    """

    sha256: str
    size: int


def write_index(folder: Path, **options: Any) -> None:
    """Index a folder of packages.

    Args:
        folder: The channel.
        options: Further arguments of rattler's index_fs.

    Raises:
        Failed: The folder cannot be written, or a package in it is damaged.
    """
    for package in sorted(folder.glob("*/[!.]*.conda")):
        if not zipfile.is_zipfile(package):
            # The bindings' error would not name the package.
            raise Failed(f"{package} is damaged, perhaps cut off: delete it and build it again")
    try:
        asyncio.run(index_fs(folder, **options))
    except Exception as error:
        raise Failed(f"cannot index {folder}: {error}") from None


class LocalChannel:
    """A channel in a folder. For each package that `add` added, it has a note, `forge/DIST.json`.

    Attributes:
        folder: The folder of the channel.
    """

    def __init__(self, folder: Path, recipes: Path | None = None) -> None:
        """Open a channel.

        Args:
            folder: The folder of the channel. It need not exist.
            recipes: The folder of the recipes of its packages, which state the packages' names on
                PyPI. Without it, no names are known.
        """
        self.folder = folder
        self._recipes = recipes

    @cached_property
    def names(self) -> Names:
        """The names on PyPI that the recipes state for their packages."""
        return pypi.read_names(self._recipes) if self._recipes else {}

    def records(self) -> list[Record]:
        """List every package in the index. Raise ForgeError if an index file is damaged."""
        records: list[Record] = []
        for subdir in SUBDIRS:
            records += self._read_index(subdir)
        return records

    def _read_index(self, subdir: str) -> Iterator[Record]:
        path = self.folder / subdir / "repodata.json"
        if not path.exists():
            return
        damage = f"{path} is damaged; ./forge build-all rewrites it"
        data = index.parse(read_bytes(path, limits.INDEX))
        if "packages.conda" not in data:
            raise ForgeError(damage)
        for file_name, record in data["packages.conda"].items():
            reason = index.find_fault(file_name, record)
            if "renamed" in reason:
                file = path.with_name(file_name)
                raise ForgeError(f"{file} {reason}. Delete it and {path}")
            if reason or record.get("subdir") != subdir:
                raise ForgeError(damage)
            values = {field.name: record[field.name] for field in fields(Record)}
            yield Record(**values)

    def path(self, output: Output) -> Path:
        """Return the path of a package's file, which need not exist."""
        return self.folder / output.subdir / output.file_name

    def reconcile(self) -> None:
        """Update the index so that it lists exactly the package files in the folder.

        If a build is killed before or during indexing, a file has no entry, or the index is
        incomplete. If somebody deletes a package, an entry has no file.
        """
        try:
            indexed = {self.path(record) for record in self.records()}
        except ForgeError:
            # Ignore the damaged index, because it is made again from the packages.
            indexed = set()
            for damaged in self.folder.glob("*/repodata.json"):
                damaged.unlink()
        packages = set(self.folder.glob("*/*.conda"))
        if indexed != packages or not self.is_indexed():
            self.index()
        self._write_pypi_names()

    def is_indexed(self) -> bool:
        """Return whether each subdir has an index. Solvers refuse a channel without one."""
        return all((self.folder / subdir / "repodata.json").exists() for subdir in SUBDIRS)

    def find_unlisted(self) -> set[Path]:
        """Return the package files that the index does not list."""
        listed = {self.path(record) for record in self.records()}
        return set(self.folder.glob("*/[!.]*.conda")) - listed

    def is_host_bound(self) -> bool | None:
        """Return whether the packages are host-bound; None if the index is empty or damaged.

        Only the first package counts, because builds refuse to mix the bases in a channel.
        """
        with contextlib.suppress(ForgeError):
            for record in self.records():
                return record.build.startswith(HOST_BOUND)
        return None

    def require_base(self, tag: str) -> None:
        """Raise ForgeError if the channel has packages of the other base.

        Solvers would mix the packages of the two bases.

        Args:
            tag: The base_tag of the required base.
        """
        needs_host_bound = tag == HOST_BOUND
        for record in self.records():
            is_host_bound = record.build.startswith(HOST_BOUND)
            if is_host_bound != needs_host_bound:
                raise ForgeError(
                    f"{self.folder} holds packages of the other base, such as {record.file_name}. "
                    "Choose that base with --base, use another folder with --output, or delete "
                    "this folder"
                )

    def index(self) -> None:
        """Write repodata.json of both subdirs. Entries of unchanged packages are kept."""
        for subdir in SUBDIRS:
            (self.folder / subdir).mkdir(parents=True, exist_ok=True)
        write_index(self.folder, write_zst=False, write_shards=False)
        self._write_pypi_names()

    def _write_pypi_names(self) -> None:
        """Write each package's name on PyPI into the index. rattler's index_fs does not do that."""
        for path in self.folder.glob("*/repodata.json"):
            data = index.parse(read_bytes(path, limits.INDEX))
            has_changed = False
            for file, record in index.records(data).items():
                purls = pypi.purls(file, self.names)
                if purls != record.get("purls", []):
                    record["purls"] = purls
                    has_changed = True
            if has_changed:
                write_text(path, json.dumps(data))

    def add(self, packages: dict[Path, int], digest: dict[str, str]) -> None:
        """Move packages into the channel and index them.

        Args:
            packages: The path of each package, which ends with SUBDIR/FILE, and the number of
                tests that the package passed.
            digest: The parts that the content digest of the packages was computed from.

        Raises:
            ForgeError: The channel has a file of the same name with other bytes.
        """
        targets = {}
        for package in packages:
            target = self.folder / package.parent.name / package.name
            if target.exists() and sha256_file(target) != sha256_file(package):
                raise ForgeError(f"{target} exists with other content; it is not replaced")
            targets[package] = target
        for package, test_count in packages.items():
            note = {
                "digest": digest,
                "tests": test_count,
                "sha256": sha256_file(package),
            }
            path = self.folder / "forge" / f"{package.stem}.json"
            write_text(path, json.dumps(note, indent=1))
            move_whole(package, targets[package])
        self.index()

    def read_digest(self, record: Record) -> dict[str, str] | None:
        """Return the parts that a package's content digest was computed from; None if unknown."""
        digest = self._read_note(record).get("digest")
        return digest if isinstance(digest, dict) else None

    def read_test_count(self, record: Record) -> int | None:
        """Return how many tests a package passed before it was added; None if unknown.

        The number counts only if the package still has the sha256 that it had when it was added.
        """
        note = self._read_note(record)
        if note.get("sha256") != record.sha256:
            return None
        test_count = note.get("tests")
        is_count = type(test_count) is int and test_count >= 0
        return test_count if is_count else None

    def _read_note(self, record: Record) -> dict[str, Any]:
        """Return the content of a package's `forge/DIST.json`; empty if absent or damaged."""
        path = self.folder / "forge" / f"{record.dist}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            note = json.loads(read_bytes(path))
            if isinstance(note, dict):
                return note
        return {}

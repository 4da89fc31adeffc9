# SPDX-License-Identifier: BSD-3-Clause
"""The local channel, which builds add to: its index, its records, and what may enter it."""

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

# The build string of a package begins with it if the package holds parts of one machine, or was
# built against such a package.
HOST_BOUND = "hostbound_"
# The build string of a package begins with it if a rehearsal made it; see docs/rehearsal.md.
REHEARSED = "rehearsal_"
# The end of a build string: a hash of the content, and the build number.
CONTENT_HASH = re.compile(r"h[0-9a-f]{7}_\d+$")


@dataclass(frozen=True)
class Output:
    """A package by its coordinates, whether it is built or not.

    Attributes:
        name: The package's name.
        version: Its version.
        build: Its whole build string.
        subdir: One of SUBDIRS.
    """

    name: str
    version: str
    build: str
    subdir: str

    @property
    def dist(self) -> str:
        """NAME-VERSION-BUILD."""
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
        """Everything but content hash and build number: of a family, the newest build counts."""
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
        options: Those of rattler's index_fs.

    Raises:
        Failed: The folder cannot be written, or a package in it is not whole.
    """
    for package in sorted(folder.glob("*/[!.]*.conda")):
        if not zipfile.is_zipfile(package):  # the bindings would not say which
            raise Failed(f"{package} is damaged, perhaps cut off: delete it and build it again")
    try:
        asyncio.run(index_fs(folder, **options))
    except Exception as error:
        raise Failed(f"cannot index {folder}: {error}") from None


class LocalChannel:
    """A channel in a folder, with a note `forge/DIST.json` on each package that the driver built.

    Attributes:
        folder: The folder of the channel.
    """

    def __init__(self, folder: Path, recipes: Path | None = None) -> None:
        """Open a channel.

        Args:
            folder: The folder of the channel. It need not exist.
            recipes: The recipes of its packages, which state their names on PyPI.
        """
        self.folder = folder
        self._recipes = recipes

    @cached_property
    def names(self) -> Names:
        """The names on PyPI that the recipes of its packages state."""
        return pypi.read_names(self._recipes) if self._recipes else {}

    def records(self) -> list[Record]:
        """List every package in the index. Raises ForgeError if an index file cannot be read."""
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
        """Return where a package is or would be."""
        return self.folder / output.subdir / output.file_name

    def reconcile(self) -> None:
        """Make the index name exactly the files in the folder.

        A build that is killed before or while it indexes leaves a file without an entry, or half an
        index. Somebody who deletes a package leaves an entry without a file.
        """
        try:
            indexed = {self.path(record) for record in self.records()}
        except ForgeError:  # nothing is lost: the packages hold all of it
            indexed = set()
            for damaged in self.folder.glob("*/repodata.json"):
                damaged.unlink()
        packages = set(self.folder.glob("*/*.conda"))
        if indexed != packages or not self.is_indexed():
            self.index()
        self._write_pypi_names()

    def is_indexed(self) -> bool:
        """Return whether solvers can read the channel; they refuse a subdir without an index."""
        return all((self.folder / subdir / "repodata.json").exists() for subdir in SUBDIRS)

    def is_host_bound(self) -> bool | None:
        """Return whether its packages are the host base's; None where no package is indexed."""
        with contextlib.suppress(ForgeError):
            for record in self.records():
                return record.build.startswith(HOST_BOUND)
        return None

    def require_base(self, tag: str) -> None:
        """Raise ForgeError if the channel has packages of another base: solvers would mix the two.

        Args:
            tag: The base_tag of the base.
        """
        needs_host_bound = tag == HOST_BOUND
        for record in self.records():
            is_host_bound = record.build.startswith(HOST_BOUND)
            if is_host_bound != needs_host_bound:
                raise ForgeError(
                    f"{self.folder} holds packages of the other base, such as {record.file_name}. "
                    "Name it with --base, use another folder with --output, or delete this"
                )

    def index(self) -> None:
        """Write repodata.json of both subdirs. Entries of unchanged packages are kept."""
        for subdir in SUBDIRS:
            (self.folder / subdir).mkdir(parents=True, exist_ok=True)
        write_index(self.folder, write_zst=False, write_shards=False)
        self._write_pypi_names()

    def _write_pypi_names(self) -> None:
        """Write the names on PyPI into the index, which rattler-build leaves empty."""
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
            packages: SUBDIR/FILE of each package, and the number of tests that it passed.
            digest: What the content digest of the packages was made of.

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
        """Return what the content digest of a package was made of; None if that is unknown."""
        digest = self._read_note(record).get("digest")
        return digest if isinstance(digest, dict) else None

    def read_test_count(self, record: Record) -> int | None:
        """Return how many tests a package's bytes passed before it was added; None if unknown."""
        note = self._read_note(record)
        if note.get("sha256") != record.sha256:
            return None
        test_count = note.get("tests")
        is_count = type(test_count) is int and test_count >= 0
        return test_count if is_count else None

    def _read_note(self, record: Record) -> dict[str, Any]:
        """Return the note on a package; empty if it is absent or damaged."""
        path = self.folder / "forge" / f"{record.dist}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            note = json.loads(read_bytes(path))
            if isinstance(note, dict):
                return note
        return {}

# SPDX-License-Identifier: BSD-3-Clause
"""The local channel: its records and index, and the rules of what may enter and leave it."""

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

# Marks packages that hold parts of one machine, or were built against them.
HOST_BOUND = "hostbound_"
# Marks packages that a rehearsal made: docs/rehearsal.md.
REHEARSED = "rehearsal_"
CONTENT_HASH = re.compile(r"h[0-9a-f]{7}_\d+$")


@dataclass(frozen=True)
class Output:
    """A package by its coordinates, built or not. `build` is the full build string."""

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
        """What a newer build supersedes: everything but content hash and number."""
        return self.name, self.version, CONTENT_HASH.sub("", self.build)


@dataclass(frozen=True)
class Record(Output):
    """A package that the index of a channel names."""

    sha256: str
    size: int


def write_index(folder: Path, **options: Any) -> None:
    """Index a folder of packages; `options` are index_fs's.

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


class Channel:
    """A conda channel in a folder, with one `forge/DIST.json` per package that the driver built."""

    def __init__(self, folder: Path, recipes: Path | None = None) -> None:
        self.folder = folder
        self._recipes = recipes

    @cached_property
    def names(self) -> Names:
        """The names on PyPI that the recipes of its packages state."""
        return pypi.read_names(self._recipes) if self._recipes else {}

    def records(self) -> list[Record]:
        """List every package in the index. Raises ForgeError if an index file cannot be read."""
        return [record for subdir in SUBDIRS for record in self._subdir(subdir)]

    def _subdir(self, subdir: str) -> Iterator[Record]:
        path = self.folder / subdir / "repodata.json"
        if not path.exists():
            return
        data = index.parse(read_bytes(path, limits.INDEX))
        for file_name, record in data.get("packages.conda", {"": {}}).items():
            if "renamed" in (why := index.fault(file_name, record)):
                file = path.with_name(file_name)
                raise ForgeError(f"{file} {why}. Delete it and {path}")
            if why or record.get("subdir") != subdir:
                raise ForgeError(f"{path} is damaged; ./forge build-all rewrites it")
            yield Record(**{f.name: record[f.name] for f in fields(Record)})

    def path(self, output: Output) -> Path:
        """Return where a package is or would be."""
        return self.folder / output.subdir / output.file_name

    def reconcile(self) -> None:
        """Make the index name exactly the files that are there.

        A build killed before or while it indexes leaves a file or half an index, and somebody who
        deletes a package an entry without a file. All of it ends here.
        """
        try:
            indexed = {self.path(record) for record in self.records()}
        except ForgeError:  # nothing is lost: the packages hold all of it
            indexed = set()
            for damaged in self.folder.glob("*/repodata.json"):
                damaged.unlink()
        if indexed != set(self.folder.glob("*/*.conda")) or not self.is_indexed():
            self.index()
        self._name_on_pypi()

    def is_indexed(self) -> bool:
        """Return whether solvers can read the folder; they refuse one without repodata.json."""
        return all((self.folder / subdir / "repodata.json").exists() for subdir in SUBDIRS)

    def is_host_bound(self) -> bool | None:
        """Return whether its packages are the host base's; None where no package is indexed."""
        with contextlib.suppress(ForgeError):
            for record in self.records():
                return record.build.startswith(HOST_BOUND)
        return None

    def require_base(self, tag: str) -> None:
        """Raise ForgeError for packages of another base: the solver would mix the two."""
        for record in self.records():
            if record.build.startswith(HOST_BOUND) != (tag == HOST_BOUND):
                why = f"{self.folder} holds packages of the other base, such as {record.file_name}"
                advice = "Name it with --base, use another folder with --output, or delete this"
                raise ForgeError(f"{why}. {advice}")

    def index(self) -> None:
        """Write repodata.json of both subdirs, keeping known entries."""
        for subdir in SUBDIRS:
            (self.folder / subdir).mkdir(parents=True, exist_ok=True)
        write_index(self.folder, write_zst=False, write_shards=False)
        self._name_on_pypi()

    def _name_on_pypi(self) -> None:
        """Write into the index what its packages are on PyPI; rattler-build leaves that empty."""
        for path in self.folder.glob("*/repodata.json"):
            data = index.parse(read_bytes(path, limits.INDEX))
            found = index.records(data)
            wrong = {
                f: p for f in found if (p := pypi.purls(f, self.names)) != found[f].get("purls", [])
            }
            for file, purls in wrong.items():
                found[file]["purls"] = purls
            if wrong:
                write_text(path, json.dumps(data))

    def add(self, packages: dict[Path, int], digest: dict[str, str]) -> None:
        """Move built packages in and index them; the numbers are those of the tests each passed.

        Raises ForgeError when a file of that name with other bytes is already there.
        """
        for package in packages:
            target = self.folder / package.parent.name / package.name
            if target.exists() and sha256_file(target) != sha256_file(package):
                raise ForgeError(f"{target} exists with other content; it is not replaced")
        for package, tests in packages.items():
            note = {"digest": digest, "tests": tests, "sha256": sha256_file(package)}
            path = self.folder / "forge" / f"{package.stem}.json"
            write_text(path, json.dumps(note, indent=1))
            move_whole(package, self.folder / package.parent.name / package.name)
        self.index()

    def digest_of(self, record: Record) -> dict[str, str] | None:
        """Return what the content digest of a package was made of, if that is still known."""
        digest = self._note(record).get("digest")
        return digest if isinstance(digest, dict) else None

    def tests_of(self, record: Record) -> int | None:
        """Count the tests that these very bytes passed before they came in, if that is known."""
        note = self._note(record)
        tests = note.get("tests") if note.get("sha256") == record.sha256 else None
        return tests if type(tests) is int and tests >= 0 else None

    def _note(self, record: Record) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            note = json.loads(read_bytes(self.folder / "forge" / f"{record.dist}.json"))
            return note if isinstance(note, dict) else {}
        return {}  # absent or damaged: unknown

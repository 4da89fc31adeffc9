# SPDX-License-Identifier: BSD-3-Clause
"""rattler's package cache, filled with checked packages alone.

rattler links what info/paths.json names wherever that leads, and takes a folder in its cache for
the right package. So each is fetched, checked and unpacked here before anything is linked, and what
lies in the cache is checked as well.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from rattler import RepoDataRecord
from rattler.package_streaming import extract

from forge.channel.location import Location
from forge.errors import BuildFailed, ForgeError, NotAttempted, Refused
from forge.files import sha256_file
from forge.provenance.archive import Entry, stem
from forge.provenance.package import Package

AT_ONCE = 8
TRIES = 3
LARGE = 4 << 20  # bytes; unpacked in a tenth of a second
REVISION = bytes(8)  # of an entry, which rattler writes to NAME.lock before the archive's sha256


class Unpacked(Package):
    """A package as it lies in the cache."""

    @cached_property
    def info(self) -> dict[str, bytes]:
        files = (self.path / "info" / name for name in ("index.json", "paths.json", "link.json"))
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    @cached_property
    def payload(self) -> dict[str, Entry]:
        found = {}
        for path in self.path.rglob("*"):
            name, link = str(path.relative_to(self.path)), path.is_symlink()
            if not link and not path.is_file() and not path.is_dir():
                self._refuse(name, "is no file, folder or link")
            if link or (path.is_file() and not name.startswith("info/")):
                found[name] = Entry("", str(path.readlink()) if link else None, b"")
        return found

    def placed(self, python: Mapping[str, Any]) -> dict[str, str | None]:
        """Where its files are linked, and where each that is a link leads.

        `python` is that package's index: files for every Python go where it looks for them.
        """
        version = ".".join(str(python.get("version", "3")).split(".")[:2])
        site = python.get("python_site_packages_path") or f"lib/python{version}/site-packages"
        moved = {"site-packages": str(site), "python-scripts": "bin"}
        moved = moved if self.index.get("noarch") == "python" else {}
        parts = ((name.partition("/"), entry.link) for name, entry in self.payload.items())
        return {f"{moved.get(top, top)}{slash}{rest}": link for (top, slash, rest), link in parts}


def default() -> Path:
    """The package cache that rattler takes by itself."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RATTLER_CACHE_DIR") or Path(user, "rattler", "cache"), "pkgs")


def fill(cache: Path, records: Sequence[RepoDataRecord]) -> None:
    """Have every package in the cache, and all of them together safe to link.

    Raises BuildFailed for a package that cannot be fetched or differs from its record, and Refused
    for one that could write outside a prefix; both name its URL.
    """
    cache.mkdir(parents=True, exist_ok=True)

    def have(record: RepoDataRecord) -> Unpacked:
        try:
            return _have(cache, record)
        except (ForgeError, RuntimeError) as error:  # the bindings raise RuntimeError
            kind = type(error) if isinstance(error, ForgeError) else BuildFailed
            raise kind(f"{record.url}: {'; '.join(str(error).splitlines())}") from None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            packages = list(pool.map(have, records))
        finally:  # the first that fails ends it
            pool.shutdown(cancel_futures=True)
    python = next((p.index for p in packages if p.index["name"] == "python"), {})
    placed = [package.placed(python) for package in packages]
    links = {name: link for places in placed for name, link in places.items() if link is not None}
    for package, places in zip(packages, placed, strict=True):
        package.require_inside(places, links)


def offer(archive: Path) -> None:
    """Have rattler's own cache hold a large package that was made here, if there is room for it.

    Otherwise rattler-build unpacks it again for each test of another package, gigabytes with
    pytorch: it fills the cache for builds alone.
    """
    if archive.stat().st_size < LARGE:
        return
    with suppress(OSError, RuntimeError):  # the bindings raise RuntimeError
        default().mkdir(parents=True, exist_ok=True)
        _unpack(archive, bytes.fromhex(sha256_file(archive)), default())


def _unpack(archive: Path, sha256: bytes, cache: Path) -> None:
    folder = cache / stem(archive)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".forge-") as work:
        extract(archive, Path(work, "package"))
        with (cache / ".cache.lock").open("a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)  # as rattler does
            shutil.rmtree(folder, ignore_errors=True)
            Path(work, "package").rename(folder)
            Path(f"{folder}.lock").write_bytes(REVISION + sha256)


def _have(cache: Path, record: RepoDataRecord) -> Unpacked:
    folder, sha256 = cache / stem(Path(record.file_name)), record.sha256 or b""
    mark, source = Path(f"{folder}.lock"), Location(record.url.rpartition("/")[0])
    if source.folder:
        _require_same(source.folder / record.file_name, record)
    package = Unpacked(folder)
    # rattler takes a folder without a mark for the right one, and rattler-build leaves the script
    # of an import test in it
    if mark.is_file() and mark.read_bytes()[len(REVISION) :] == sha256 and folder.is_dir():
        with suppress(Refused):
            package.require_safe()
            return package
    with tempfile.TemporaryDirectory(dir=cache, prefix=".forge-") as work:
        archive = Path(source.folder or work, record.file_name)
        if not source.folder:
            _download(source, record, archive)
            _require_same(archive, record)
        Package(archive).require_safe()
        _unpack(archive, sha256, cache)
    package = Unpacked(folder)
    package.require_safe()
    return package


def _download(source: Location, record: RepoDataRecord, archive: Path) -> None:
    """Fetch a package; again where it broke off in the middle: rattler repeats requests alone."""
    for left in reversed(range(TRIES)):
        with archive.open("wb") as file:
            try:
                if source.stream(archive.name, _Limited(file, record)):
                    return
                raise BuildFailed("the server has no such file (404)")
            except NotAttempted:
                if not (left and file.tell()):
                    raise


class _Limited:
    """Writes no more than a record says: a server may send without an end."""

    def __init__(self, file: BinaryIO, record: RepoDataRecord) -> None:
        self.file, self.left = file, record.size or 0

    def write(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left < 0:
            raise BuildFailed("is larger than its record says")
        self.file.write(data)


def _require_same(path: Path, record: RepoDataRecord) -> None:
    if not path.is_file():
        raise BuildFailed("is locked but missing: lock again")
    if (path.stat().st_size, sha256_file(path)) != (record.size, (record.sha256 or b"").hex()):
        raise BuildFailed("differs from its lock. If it was rebuilt lock again; else tampered with")

# SPDX-License-Identifier: BSD-3-Clause
"""rattler's package cache, filled with checked packages alone.

rattler links what info/paths.json names wherever that leads, and takes a folder in its cache for
the right package. So each is fetched, checked and unpacked here before anything is linked.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from rattler import RepoDataRecord

from forge.conda.index import file_of
from forge.conda.location import Location
from forge.conda.package import Package, cache_folder, require_confined, scratch, stem, unpack
from forge.errors import Failed, ForgeError, NotAttempted, Refused
from forge.files import sha256_file
from forge.limits import Limited

AT_ONCE = 8
TRIES = 3
LARGE = 4 << 20  # bytes; unpacked in a tenth of a second
REVISION = bytes(8)  # of an entry, which rattler writes to NAME.lock before the archive's sha256


def fill(cache: Path, records: Sequence[RepoDataRecord]) -> None:
    """Have every package in the cache, and all of them together safe to link.

    Raises Failed for one that cannot be fetched or is not its record's, Refused for a hostile one.
    """
    scratch(cache).cleanup()  # what killed processes left goes, though nothing is to be unpacked

    def have(record: RepoDataRecord) -> Package:
        try:
            return _have(cache, record)
        except (ForgeError, RuntimeError) as error:  # the bindings raise RuntimeError
            kind = type(error) if isinstance(error, ForgeError) else Failed
            raise kind(f"{record.url}: {'; '.join(str(error).splitlines())}") from None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            packages = list(pool.map(have, records))
        finally:  # the first that fails ends it
            pool.shutdown(cancel_futures=True)
    python = next((record for record in records if record.name.normalized == "python"), None)
    require_confined([package.places for package in packages], python)


def offer(archive: Path) -> None:
    """Have rattler's own cache hold a large package that passed its tests, if there is room for it.

    Otherwise rattler-build unpacks it again for each test of another package, gigabytes with
    pytorch: it fills the cache for builds alone.
    """
    if archive.stat().st_size < LARGE:
        return
    with suppress(OSError, ForgeError):
        sha256, cache = bytes.fromhex(sha256_file(archive)), cache_folder()
        if not _valid(archive, sha256, cache):
            _put(archive, sha256, cache)


def _put(archive: Path, sha256: bytes, cache: Path) -> Package:
    """Unpack a package and judge it, into the cache, where what is valid is never replaced."""
    with scratch(cache) as work:
        made = Path(work, "package")
        unpack(archive, made)
        Package(archive, made).require_safe()
        with FileLock(cache / ".cache.lock"):  # as rattler does
            if there := _valid(archive, sha256, cache):
                return there
            folder = cache / stem(archive)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
            Path(f"{folder}.lock").write_bytes(REVISION + sha256)
    return Package(archive, folder)


def _valid(archive: Path, sha256: bytes, cache: Path) -> Package | None:
    """Return the package in the cache, if it is that of this sha256 and holds what it lists."""
    folder = cache / stem(archive)
    mark = Path(f"{folder}.lock")
    # rattler takes one without a mark for the right one; rattler-build leaves a test's script in it
    if mark.is_file() and mark.read_bytes()[len(REVISION) :] == sha256 and folder.is_dir():
        package = Package(archive, folder)
        with suppress(Refused, Failed):
            package.require_safe(contents=False)
            return package
    return None


def _have(cache: Path, record: RepoDataRecord) -> Package:
    folder, name = file_of(record)
    sha256, source = record.sha256 or b"", Location(folder)
    if source.folder:
        _require_same(source.folder / name, record)
    if there := _valid(Path(name), sha256, cache):
        return there
    with scratch(cache) as work:
        archive = Path(source.folder or work, name)
        if not source.folder:
            _download(source, record, archive)
            _require_same(archive, record)
        return _put(archive, sha256, cache)


def _download(source: Location, record: RepoDataRecord, archive: Path) -> None:
    """Fetch a package; again where it broke off in the middle: rattler repeats requests alone."""
    for left in reversed(range(TRIES)):
        with archive.open("wb") as file:
            limited = Limited(file, record.size or 0, "is larger than its record says")
            try:
                if source.stream(archive.name, limited):
                    return
                raise Failed("the server has no such file (404)")
            except NotAttempted:
                if not (left and file.tell()):
                    raise


def _require_same(path: Path, record: RepoDataRecord) -> None:
    if not path.is_file():
        raise Failed("is locked but missing: lock again")
    if (path.stat().st_size, sha256_file(path)) != (record.size, (record.sha256 or b"").hex()):
        raise Failed("differs from its lock. If it was rebuilt lock again; else tampered with")

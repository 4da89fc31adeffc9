# SPDX-License-Identifier: BSD-3-Clause
"""Fill rattler's package cache, only with packages that were checked.

rattler itself does not check enough. It links every path that info/paths.json names, even a path
that leads out of the prefix, and it trusts each folder in its cache. So this module fetches, checks
and unpacks each package before rattler links its files.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from rattler import RepoDataRecord

from forge.conda.index import locate_file
from forge.conda.location import Location
from forge.conda.package import Package, require_confined, stem, unpack
from forge.conda.scratch import cache_folder, scratch
from forge.errors import Failed, ForgeError, NotAttempted, Refused
from forge.files import sha256_file
from forge.limits import Limited

THREADS = 8
TRIES = 3
# Packages of fewer bytes are not offered to the cache, because unpacking them takes only a tenth of
# a second.
LARGE = 4 << 20
# Next to the folder NAME of a cached package, rattler writes a mark: a file NAME.lock with the
# revision of the entry, followed by the sha256 of the archive. A new entry has revision 0.
REVISION = bytes(8)


def fill(cache: Path, records: Sequence[RepoDataRecord]) -> None:
    """Put packages into a cache, and check that all of them together are safe to link.

    Args:
        cache: The folder of the cache, such as cache_folder().
        records: The records of the packages.

    Raises:
        NotAttempted: A server does not send a package.
        Failed: A package is missing, or differs from its record.
        Refused: A package is unsafe.
        ForgeError: A record contradicts its URL.
    """
    # Remove the leftovers of killed processes, even if no package has to be fetched.
    scratch(cache).cleanup()

    def ensure(record: RepoDataRecord) -> Package:
        try:
            return _ensure_cached(cache, record)
        except (ForgeError, RuntimeError) as error:
            # The bindings raise RuntimeError.
            kind = type(error) if isinstance(error, ForgeError) else Failed
            reason = "; ".join(str(error).splitlines())
            raise kind(f"{record.url}: {reason}") from None

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            packages = list(pool.map(ensure, records))
        finally:
            # After the first error, leave out the packages that were not started.
            pool.shutdown(cancel_futures=True)
    pythons = [record for record in records if record.name.normalized == "python"]
    python = pythons[0] if pythons else None
    require_confined([package.places for package in packages], python)


def offer(archive: Path) -> None:
    """Put a large package into rattler's cache, if it is safe and there is room for it.

    rattler-build fills that cache only during builds. Without this function, it would unpack the
    package again for each test that needs it. For pytorch, these are gigabytes.
    """
    if archive.stat().st_size < LARGE:
        return
    with suppress(OSError, ForgeError):
        cache = cache_folder()
        sha256 = bytes.fromhex(sha256_file(archive))
        if not _find_valid(archive, sha256, cache):
            _put(archive, sha256, cache)


def _put(archive: Path, sha256: bytes, cache: Path) -> Package:
    """Unpack a package, check it and move it into the cache. A valid entry is never replaced."""
    with scratch(cache) as work:
        unpacked = Path(work, "package")
        unpack(archive, unpacked)
        Package(archive, unpacked).require_safe()
        with FileLock(cache / ".cache.lock"):
            # rattler uses this lock, too.
            cached = _find_valid(archive, sha256, cache)
            if cached:
                return cached
            folder = cache / stem(archive)
            shutil.rmtree(folder, ignore_errors=True)
            unpacked.rename(folder)
            _mark_of(folder).write_bytes(REVISION + sha256)
    return Package(archive, folder)


def _mark_of(folder: Path) -> Path:
    return Path(f"{folder}.lock")


def _find_valid(archive: Path, sha256: bytes, cache: Path) -> Package | None:
    """Return the cached package if it has this sha256 and exactly the files it lists, else None."""
    folder = cache / stem(archive)
    mark = _mark_of(folder)
    # rattler would accept a folder without a mark; this function does not
    if not (mark.is_file() and folder.is_dir()):
        return None
    if mark.read_bytes()[len(REVISION) :] != sha256:
        return None
    package = Package(archive, folder)
    # The folder is not valid if it has other files. rattler-build may leave test scripts in it.
    with suppress(Refused, Failed):
        package.require_safe(contents=False)
        return package
    return None


def _ensure_cached(cache: Path, record: RepoDataRecord) -> Package:
    """Return a record's package from the cache, and fetch it first if the cache lacks it."""
    folder, name = locate_file(record)
    sha256 = record.sha256 or b""
    source = Location(folder)
    if source.folder:
        _require_same(source.folder / name, record)
    cached = _find_valid(Path(name), sha256, cache)
    if cached:
        return cached
    if source.folder:
        return _put(source.folder / name, sha256, cache)
    with scratch(cache) as work:
        archive = Path(work, name)
        _download(source, record, archive)
        _require_same(archive, record)
        return _put(archive, sha256, cache)


def _download(source: Location, record: RepoDataRecord, archive: Path) -> None:
    """Fetch a package.

    A download that stops in the middle is repeated here, because rattler repeats only requests that
    fail before any data arrive.
    """
    for attempt in range(1, TRIES + 1):
        with archive.open("wb") as file:
            limited = Limited(file, record.size or 0, "is larger than its record says")
            try:
                if source.stream(archive.name, limited):
                    return
                raise Failed("the server has no such file (404)")
            except NotAttempted:
                has_begun = file.tell() > 0
                if attempt == TRIES or not has_begun:
                    raise


def _require_same(path: Path, record: RepoDataRecord) -> None:
    """Raise Failed if a file does not have the size and sha256 of its record."""
    if not path.is_file():
        # The caller adds the URL.
        raise Failed("is locked but missing: lock again")
    expected = (record.size, (record.sha256 or b"").hex())
    if (path.stat().st_size, sha256_file(path)) != expected:
        reason = "differs from its lock: it was rebuilt, damaged or tampered with"
        raise Failed(f"{reason}. Lock again only if it was rebuilt")

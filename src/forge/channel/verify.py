# SPDX-License-Identifier: BSD-3-Clause
"""Hold a channel against its own records: files, every form of the index, revisions and locks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zstandard
from rattler.lock import LockFile

from forge.channel import revisions
from forge.channel.places import Digest, Folder, Unreadable, Web
from forge.errors import ForgeError
from forge.project import SUBDIRS

Place = Folder | Web
SHARDS = "repodata_shards.msgpack.zst"
# What decides a solve and an installation, and what every form of the index holds.
ESSENCE = ("name", "version", "build", "subdir", "depends", "sha256", "md5", "size")


@dataclass
class Index:
    """What a channel's repodata.json files say. Files are SUBDIR/FILE.

    `findings` tells where other forms of the index say something else.
    """

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)


def channel(place: Place, locks: list[Path], url: str | None = None) -> tuple[Index, list[str]]:
    """Verify a channel, and that each of `locks` can be installed from it.

    `url` is what the locks call the channel; by default its URL, or for a folder the first channel
    of each lock. Returns its index and one line for every finding. Raises Unreadable when there is
    no index to start from.
    """
    if all(place.read(f"{subdir}/repodata.json") is None for subdir in SUBDIRS):
        raise Unreadable(f"{place} is no channel: it has no repodata.json, so nothing was checked")
    index = read_index(place)
    found = [*index.findings, *_files(place, index)]
    for lock in locks:
        found += _locked(lock, url or (place.url if isinstance(place, Web) else None), index)
    return index, found


def read_index(place: Place) -> Index:
    """Read repodata.json of both subdirs and hold its other forms and the log against it."""
    index, log = Index(), revisions.read(place)
    for subdir in SUBDIRS:
        name = f"{subdir}/repodata.json"
        data = _json(place.read(name))
        if data is None:
            index.findings.append(f"{name}: missing or damaged")
            continue
        index.records |= {f"{subdir}/{file}": r for file, r in _records(data).items()}
        index.removed |= {f"{subdir}/{file}" for file in data.get("removed", [])}
        index.findings += _forms(place, subdir, data, bool(log))
    if log:
        index.findings += _history(place, log, index)
    return index


def hashes(place: Place) -> dict[str, str]:
    """The sha256 of every file that the plain repodata.json of both subdirs name."""
    return {
        f"{subdir}/{file}": record.get("sha256", "")
        for subdir in SUBDIRS
        for file, record in _records(_json(place.read(f"{subdir}/repodata.json")) or {}).items()
    }


def shard_files(place: Place, subdir: str) -> dict[str, str]:
    """File name of each shard that the shard index names -> the package's name."""
    data = _unpack(place.read(f"{subdir}/{SHARDS}")) or {"shards": {}}
    return {f"{digest.hex()}.msgpack.zst": name for name, digest in data["shards"].items()}


def _forms(place: Place, subdir: str, data: dict, required: bool) -> Iterator[str]:
    """Every other form of one subdir's index. Our own channels have all of them."""
    expected = _essence(_records(data)), set(data.get("removed", []))
    for file in ("repodata.json.zst", SHARDS, "repodata_from_packages.json", "run_exports.json"):
        name = f"{subdir}/{file}"
        raw = place.read(name)
        if raw is None:
            if required:
                yield f"{name}: missing"
            continue
        if file == SHARDS:
            yield from _shards(place, subdir, expected)
            continue
        found = _json(_decompressed(raw) if file.endswith(".zst") else raw)
        if found is None:
            yield f"{name}: damaged"
        elif file == "run_exports.json":
            if set(_records(found)) != set(expected[0]):
                yield f"{name}: names other files than repodata.json"
            if _json(_decompressed(place.read(f"{name}.zst"))) != found:
                yield f"{name}.zst: missing, or other than {file}"
        elif file == "repodata_from_packages.json":
            # before patches: the dependencies may be others, the files may not
            if _hashes(_records(found)) != _hashes(_records(data)):
                yield f"{name}: disagrees with repodata.json"
        elif found != data:
            yield f"{name}: disagrees with repodata.json"


def _shards(place: Place, subdir: str, expected: tuple[dict, set[str]]) -> Iterator[str]:
    files = shard_files(place, subdir)
    records: dict[str, dict] = {}
    removed: set[str] = set()
    for file, package in files.items():
        name = f"{subdir}/shards/{file}"
        raw = place.read(name)
        if raw is None or hashlib.sha256(raw).hexdigest() != file.split(".")[0]:
            yield f"{name}: {'missing' if raw is None else 'damaged'} (shard of {package})"
            continue
        shard = _unpack(raw) or {}
        records |= _records(shard)
        removed |= set(shard.get("removed", []))
    if (_essence(records), removed) != expected:
        yield f"{subdir}/{SHARDS}: disagrees with repodata.json"


def _history(place: Place, log: list[revisions.Revision], index: Index) -> Iterator[str]:
    if revisions.state(log) != (set(index.records), index.removed):
        yield (
            f"{revisions.LOG}: revision {log[-1].revision} is not what the index holds; "
            "publish again to complete it"
        )
    for entry in log:
        for subdir in SUBDIRS:
            name = revisions.index_path(entry.revision, subdir)
            data = _json(_decompressed(place.read(name)))
            if data is None:
                yield f"{name}: missing or damaged"
            elif lost := {f"{subdir}/{file}" for file in _records(data)} - set(index.records):
                yield f"{name}: names {min(lost)}, which the index does not"


def _files(place: Place, index: Index) -> Iterator[str]:
    for name, record in sorted(index.records.items()):
        if not {"sha256", "size"} <= record.keys():
            yield f"{name}: its record has no sha256 or no size to hold it against"
            continue
        try:
            found = place.digest(name)
        except (Unreadable, OSError) as error:
            yield f"{name}: {error}"
            continue
        expected = Digest(record["sha256"], record.get("md5", ""), record["size"])
        if found is None:
            yield f"{name}: missing"
        elif found.size != expected.size:
            yield f"{name}: {found.size} bytes, the record says {expected.size}"
        elif found.sha256 != expected.sha256 or expected.md5 not in ("", found.md5):
            yield f"{name}: has sha256 {found.sha256}, the record says {expected.sha256}"
    for name in sorted((place.packages() or set()) - set(index.records) - index.removed):
        yield f"{name}: orphan, no index names it"


def _locked(path: Path, url: str | None, index: Index) -> Iterator[str]:
    """Whether every package that a lock takes from this channel is there with its hash."""
    try:
        environments = LockFile.from_path(path).environments()
    except Exception as error:
        raise ForgeError(f"{path} is not a lock file: {error}") from None
    count = 0
    for _, environment in environments:
        base = url or str(environment.channels()[0])
        prefix = f"{base.rstrip('/')}/"
        for packages in environment.packages_by_platform().values():
            for package in packages:
                if not package.location.startswith(prefix):
                    continue
                count += 1
                name = package.location.removeprefix(prefix)
                record = index.records.get(name)
                locked = package.hashes.sha256.hex() if package.hashes else ""
                if record is None:
                    yield f"{path}: locks {name}, which the index does not name"
                elif (known := record.get("sha256")) != locked:
                    yield f"{path}: locks {name} with sha256 {locked}, not {known}"
    if not count:
        yield f"{path}: locks no package of {url or 'its first channel'}, so nothing was checked"


def _records(data: dict) -> dict[str, dict]:
    return {**data.get("packages", {}), **data.get("packages.conda", {})}


def _hashes(records: dict[str, dict]) -> dict[str, tuple]:
    return {file: (r.get("sha256"), r.get("size")) for file, r in records.items()}


def _essence(records: dict[str, dict]) -> dict[str, list]:
    """Hashes are bytes in shards and hex elsewhere."""
    return {
        file: [v.hex() if isinstance(v := record.get(key), bytes) else v for key in ESSENCE]
        for file, record in records.items()
    }


def _json(raw: bytes | None) -> dict | None:
    try:
        data = None if raw is None else json.loads(raw)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _decompressed(raw: bytes | None) -> bytes | None:
    try:
        return None if raw is None else zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    except zstandard.ZstdError:
        return None


def _unpack(raw: bytes | None) -> dict | None:
    try:
        data = _decompressed(raw)
        return None if data is None else msgpack.unpackb(data, timestamp=3)
    except (ValueError, msgpack.UnpackException):
        return None

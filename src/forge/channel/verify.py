# SPDX-License-Identifier: BSD-3-Clause
"""Check a channel against its own records: files, every form of the index, revisions and locks."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import zstandard
from rattler.lock import LockFile

from forge.channel import revisions
from forge.channel.location import Location, Unreadable
from forge.errors import ForgeError
from forge.project import SUBDIRS

PACKAGES = (".conda", ".tar.bz2")
SHARDS = "repodata_shards.msgpack.zst"
# What decides a solve and an installation; every form of the index has these fields.
ESSENCE = ("name", "version", "build", "subdir", "depends", "sha256", "md5", "size")


@dataclass
class Index:
    """What a channel's repodata.json files say. Files are SUBDIR/FILE.

    `findings` lists where other forms of the index or the log disagree.
    """

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)


class Hasher:
    """Takes a file in chunks and keeps none of them."""

    def __init__(self) -> None:
        self.sha256, self.size = hashlib.sha256(), 0

    def write(self, chunk: bytes) -> None:
        self.sha256.update(chunk)
        self.size += len(chunk)


def channel(
    location: Location, locks: list[Path], url: str | None = None
) -> tuple[Index, list[str]]:
    """Verify a channel, and that each of `locks` can be installed from it.

    `url` is what the locks call the channel; by default its URL, or for a folder the first channel
    of each lock. Returns its index and one line per finding. Raises Unreadable if it has no index.
    """
    if all(location.read(f"{subdir}/repodata.json") is None for subdir in SUBDIRS):
        raise Unreadable(f"{location} has no repodata.json, so nothing was checked")
    index = read_index(location)
    findings = [*index.findings, *_files(location, index)]
    for lock in locks:
        findings += _locked(lock, url or ("" if location.folder else location.url), index)
    return index, findings


def read_index(location: Location) -> Index:
    """Read repodata.json of both subdirs, and check its other forms and the log against it."""
    index, log = Index(), revisions.read(location)
    for subdir in SUBDIRS:
        data = _load(location, f"{subdir}/repodata.json")
        if not data:
            index.findings.append(f"{subdir}/repodata.json: missing or damaged")
            continue
        index.records |= {f"{subdir}/{file}": r for file, r in _records(data).items()}
        index.removed |= {f"{subdir}/{file}" for file in data.get("removed", [])}
        index.findings += _forms(location, subdir, data, required=bool(log))
    if log:
        index.findings += _history(location, log, index)
    return index


def hashes(location: Location) -> dict[str, str]:
    """The sha256 of every file in the plain repodata.json of both subdirs."""
    return {
        f"{subdir}/{file}": record.get("sha256", "")
        for subdir in SUBDIRS
        for file, record in _records(_load(location, f"{subdir}/repodata.json") or {}).items()
    }


def _forms(location: Location, subdir: str, data: dict, required: bool) -> Iterator[str]:
    """Check the other forms of one subdir's index; `required` if all of them must be there."""
    for file, view in FORMS.items():
        name = f"{subdir}/{file}"
        form = _load(location, name)
        if form is None and required:
            yield f"{name}: missing"
        elif form == {}:
            yield f"{name}: damaged"
        elif form and file == SHARDS:
            yield from _shards(location, subdir, form, data)
        elif form and view(form) != view(data):
            yield f"{name}: disagrees with repodata.json"


def _shards(location: Location, subdir: str, index: dict, data: dict) -> Iterator[str]:
    merged: dict[str, Any] = {"packages.conda": {}, "removed": []}
    for package, digest in index["shards"].items():
        name = f"{subdir}/shards/{digest.hex()}.msgpack.zst"
        raw = location.read(name)
        if raw is None or hashlib.sha256(raw).digest() != digest:
            yield f"{name}: {'missing' if raw is None else 'damaged'} (shard of {package})"
            continue
        shard = _parse(name, raw)
        merged["packages.conda"] |= _records(shard)
        merged["removed"] += shard.get("removed", [])
    if _essence(merged) != _essence(data):
        yield f"{subdir}/{SHARDS}: disagrees with repodata.json"


def _history(location: Location, log: list[revisions.Revision], index: Index) -> Iterator[str]:
    if revisions.state(log) != (set(index.records), index.removed):
        yield (
            f"{revisions.LOG}: revision {log[-1].revision} is not what the index holds; "
            "publish again to complete it"
        )
    for entry in log:
        for subdir in SUBDIRS:
            name = revisions.index_path(entry.revision, subdir)
            data = _load(location, name)
            if not data:
                yield f"{name}: missing or damaged"
            elif lost := {f"{subdir}/{file}" for file in _records(data)} - set(index.records):
                yield f"{name}: lists {min(lost)}, which the index does not"


def _files(location: Location, index: Index) -> Iterator[str]:
    for name, record in sorted(index.records.items()):
        if not {"sha256", "size"} <= record.keys():
            yield f"{name}: its record has no sha256 or no size, so it cannot be checked"
            continue
        file = Hasher()
        try:
            if not location.stream(name, file):
                yield f"{name}: missing"
            elif file.size != record["size"]:
                yield f"{name}: {file.size} bytes, the record says {record['size']}"
            elif (sha256 := file.sha256.hexdigest()) != record["sha256"]:
                yield f"{name}: has sha256 {sha256}, the record says {record['sha256']}"
        except (Unreadable, OSError) as error:
            yield f"{name}: {error}"
    files = location.folder.glob("*/*") if location.folder else ()
    packages = {f"{f.parent.name}/{f.name}" for f in files if f.name.endswith(PACKAGES)}
    for name in sorted(packages - set(index.records) - index.removed):
        yield f"{name}: not in the index"


def _locked(path: Path, url: str, index: Index) -> Iterator[str]:
    """Check that every package which a lock takes from this channel is there with its hash."""
    try:
        environments = LockFile.from_path(path).environments()
    except Exception as error:
        raise ForgeError(f"{path} is not a lock file: {error}") from None
    locked = {}
    for _, environment in environments:
        prefix = f"{(url or str(environment.channels()[0])).rstrip('/')}/"
        for package in chain(*environment.packages_by_platform().values()):
            if package.location.startswith(prefix):
                name = package.location.removeprefix(prefix)
                locked[name] = ((package.hashes and package.hashes.sha256) or b"").hex()
    for name, sha256 in locked.items():
        if name not in index.records:
            yield f"{path}: locks {name}, which is not in the index"
        elif sha256 != (known := index.records[name].get("sha256")):
            yield f"{path}: locks {name} with sha256 {sha256}, not {known}"
    if not locked:
        yield f"{path}: locks no package of {url or 'its first channel'}, so nothing was checked"


def _records(data: dict) -> dict[str, dict]:
    return {**data.get("packages", {}), **data.get("packages.conda", {})}


def _essence(data: dict) -> tuple[dict[str, list], set[str]]:
    """The deciding fields of each record, and what is removed. In shards hashes are bytes."""
    records = {
        file: [v.hex() if isinstance(v := record.get(key), bytes) else v for key in ESSENCE]
        for file, record in _records(data).items()
    }
    return records, set(data.get("removed", []))


# What each form of the index has in common with repodata.json. Before repodata patches the
# dependencies may differ.
FORMS: dict[str, Callable[[dict], object]] = {
    "repodata.json.zst": dict,
    "repodata_from_packages.json": lambda d: {n: r.get("sha256") for n, r in _records(d).items()},
    "run_exports.json": lambda data: _records(data).keys(),
    "run_exports.json.zst": lambda data: _records(data).keys(),
    SHARDS: _essence,
}


def _load(location: Location, name: str) -> dict[str, Any] | None:
    """An index file's content: None if it is missing, {} if it is damaged."""
    raw = location.read(name)
    return None if raw is None else _parse(name, raw)


def _parse(name: str, raw: bytes) -> dict[str, Any]:
    try:
        if name.endswith(".zst"):
            raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
        data = msgpack.unpackb(raw, timestamp=3) if ".msgpack" in name else json.loads(raw)
    except (ValueError, msgpack.UnpackException, zstandard.ZstdError):
        return {}
    return data if isinstance(data, dict) else {}

# SPDX-License-Identifier: BSD-3-Clause
"""Check a channel against its own records: files, every form of the index, revisions."""
# ruff: noqa: C901 (one check after another)

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from forge.channel import revisions
from forge.conda import attestations, provenance, pypi
from forge.conda.index import PACKAGES, SHARDS, fault, foreign, load, parse, records
from forge.conda.location import Location
from forge.conda.package import INDEXED, Package, Places, cache_folder, require_confined, scratch
from forge.errors import ForgeError, NotAttempted, one_line
from forge.files import sha256_file, write_text
from forge.project import SUBDIRS

UNPATCHED = "repodata_from_packages.json"
# What a record has beside what its package says.
ADDED = {"purls", attestations.FIELD, "indexed_timestamp"}


@dataclass
class Index:
    """What repodata.json says, by SUBDIR/FILE, and where other forms or the log disagree."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)
    ours: bool = False  # it was made by `publish`
    places: list[Places] = field(default_factory=list)  # of the packages that are not yanked
    # by SUBDIR/FILE: a form of the index that may differ, its record, whether it is yanked there
    more: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


def channel(location: Location) -> tuple[Index, list[str]]:
    """Return a channel's index, and a line per finding. Raises NotAttempted without an index."""
    if all(location.read(f"{subdir}/repodata.json") is None for subdir in SUBDIRS):
        raise NotAttempted(f"{location} has no repodata.json, so nothing was checked")
    index = read_index(location)
    return index, [one_line(f) for f in [*index.findings, *_files(location, index)]]


def read_index(location: Location) -> Index:
    """Read repodata.json of both subdirs, and check its other forms and the log against it."""
    index = Index(ours=bool((log := revisions.read(location)).revisions))
    for subdir in SUBDIRS:
        data = load(location, f"{subdir}/repodata.json")
        if not data:
            index.findings.append(f"{subdir}/repodata.json: missing or damaged")
            continue
        index.records |= {f"{subdir}/{file}": r for file, r in records(data).items()}
        index.removed |= {f"{subdir}/{file}" for file in data.get("removed", [])}
        if where := foreign(data, location.url, subdir):
            index.findings.append(f"{subdir}/repodata.json: names files elsewhere, at {where}")
        index.findings += _forms(location, subdir, data, index)
    if log.revisions:
        index.findings += _history(location, log, index)
    return index


def _forms(location: Location, subdir: str, data: dict, index: Index) -> Iterator[str]:
    """Check the other forms of one subdir's index; all must be there if it is ours."""
    for file, view in FORMS.items():
        name = f"{subdir}/{file}"
        form = load(location, name)
        for package, record in records(form or {}).items() if file == UNPATCHED else ():
            index.more[f"{subdir}/{package}"].append((name, record, False))
        if form is None and index.ours:
            yield f"{name}: missing"
        elif form == {}:
            yield f"{name}: damaged"
        elif form and index.ours and (where := foreign(form, location.url, subdir)):
            yield f"{name}: names files elsewhere, at {where}"
        elif form and file == SHARDS:
            yield from _shards(location, subdir, form, data)
        # a server's repodata.json may say nothing of run_exports
        elif form and view(form) != view(data) and (index.ours or "run_exports" not in file):
            yield f"{name}: disagrees with repodata.json"
    for name in (f"{subdir}/repodata.json.bz2", f"{subdir}/current_repodata.json"):
        if index.ours and location.read(name) is not None:
            yield f"{name}: a form of the index that is never published here; delete it"


def _shards(location: Location, subdir: str, index: dict, data: dict) -> Iterator[str]:
    merged: dict[str, Any] = {"packages.conda": {}, "removed": []}
    if index.get("info", {}).get("subdir") != subdir:
        yield f"{subdir}/{SHARDS}: does not say that it is of {subdir}"
    for package, digest in index.get("shards", {}).items():
        name = f"{subdir}/shards/{digest.hex()}.msgpack.zst"
        raw = location.read(name)
        if raw is None or hashlib.sha256(raw).digest() != digest:
            yield f"{name}: {'missing' if raw is None else 'damaged'} (shard of {package})"
            continue
        shard = parse(name, raw)
        if any(record.get("name") != package for record in records(shard).values()):
            yield f"{name}: is not the shard of {package}"
        merged["packages.conda"] |= records(shard)
        merged["removed"] += shard.get("removed", [])
    if _essence(merged) != _essence(data):
        yield f"{subdir}/{SHARDS}: disagrees with repodata.json"


def _history(location: Location, log: revisions.Log, index: Index) -> Iterator[str]:
    last = f"revision {len(log.revisions)}"
    if revisions.state(log.revisions) != (set(index.records), index.removed):
        yield f"{revisions.LOG}: {last} is not what the index holds; publish again"
    if log.before:
        yield f"{revisions.LOG}: {last} is being published, or was killed; publish again"
    for name, digest in log.index.items():
        if hashlib.sha256(raw := location.read(name) or b"").hexdigest() != digest and raw:
            yield f"{name}: is not that of {last}; publish again to complete it"
    names = pypi.parse(location.read(pypi.TABLE), pypi.TABLE)
    for name, record in index.records.items():
        file = name.split("/", 1)[1]
        if (says := pypi.purls(file, names)) != (record.get("purls") or []):
            yield f"{name}: {pypi.TABLE} says purls {says}, its record {record.get('purls')}"
    for entry, subdir in product(log.revisions, SUBDIRS):
        had = revisions.state(log.revisions[: entry.revision])
        for name in revisions.index_paths(entry.revision, subdir):
            data = load(location, name) or {}
            found = {f"{subdir}/{file}": record for file, record in records(data).items()}
            lists = set(found), {f"{subdir}/{file}" for file in data.get("removed", [])}
            if not data:
                yield f"{name}: missing or damaged"
            elif lists != tuple({f for f in files if f.startswith(subdir)} for files in had):
                yield f"{name}: lists or removes other packages than that revision"
            elif data.get("info", {}).get("base_url") != f"../../../{subdir}/":
                yield f"{name}: its base_url does not lead to this channel's packages"
            for file, record in found.items():
                index.more[file].append((name, record, file in had[1]))


def _files(location: Location, index: Index) -> Iterator[str]:
    for name, record in sorted(index.records.items()):
        if why := fault(name.split("/", 1)[1], record):
            yield f"{name}: {why}"
            continue
        with scratch(cache_folder()) as folder:
            try:
                yield from _file(location, name, index, Path(folder))
            except (ForgeError, OSError) as error:
                yield f"{name}: {error}"
    try:
        require_confined(index.places)
    except ForgeError as error:
        yield str(error)
    files = location.folder.glob("*/*") if location.folder else ()
    packages = {f"{f.parent.name}/{f.name}" for f in files if f.name.endswith(PACKAGES)}
    for name in sorted(packages - set(index.records) - index.removed):
        yield f"{name}: not in the index"


def _file(location: Location, name: str, index: Index, folder: Path) -> Iterator[str]:
    """Check one package: there, of its size and hash, safe, as its record and provenance say."""
    path, record = (location.folder or folder) / name, index.records[name]
    if not location.folder:
        path.parent.mkdir()
        with path.open("wb") as file:
            there = location.stream(name, file)
        statement = f"forge/{path.stem}{provenance.SUFFIX}"
        if text := location.read(statement):
            write_text(folder / statement, text.decode(errors="replace"))
    if not (path.is_file() if location.folder else there):
        yield f"{name}: missing"
    elif (size := path.stat().st_size) != record["size"]:
        yield f"{name}: {size} bytes, the record says {record['size']}"
    elif (sha256 := sha256_file(path)) != record["sha256"]:
        yield f"{name}: has sha256 {sha256}, the record says {record['sha256']}"
    else:
        yanked, places = name in index.removed, (package := Package(path)).require_safe()
        index.places += [] if yanked else [places]
        with path.open("rb") as file:
            md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        exports = package.parsed("run_exports.json") if "run_exports.json" in package.info else {}
        own = {"md5": md5, "run_exports": exports, "sha256": sha256, "size": size}
        packed = package.index | own
        for form, said, gone in [("its record", record, yanked), *index.more[name]]:
            known = ADDED | {"depends"} if gone else ADDED  # its requirements are the publisher's
            for key in sorted({*INDEXED, *said, *(own if index.ours else ())} - known):
                if (said.get(key) or None) != (says := packed.get(key) or None):
                    yield f"{name}: {key} is {said.get(key)} in {form}, {says} in the package"
        for wrong in provenance.faults(path, package) if index.ours else ():
            yield f"{name}: its provenance: {wrong}"
    if digest := record.get(attestations.FIELD):
        bundles = location.read(f"{name}.sigs.{digest}")
        if bundles is None or hashlib.sha256(bundles).hexdigest() != digest:
            yield f"{name}: its attestations are {'missing' if bundles is None else 'damaged'}"


def _essence(data: dict) -> tuple[dict[str, dict], set[str]]:
    """Pick what each record says, and what is removed. In shards hashes are bytes."""
    says = {
        file: {k: v.hex() if isinstance(v, bytes) else v for k, v in record.items() if v}
        for file, record in records(data).items()
    }
    return says, set(data.get("removed", []))


# What each form of the index has in common with repodata.json: before patches not what it needs.
FORMS: dict[str, Callable[[dict], object]] = {
    "repodata.json.zst": dict,
    UNPATCHED: lambda d: {n: r.get("sha256") for n, r in records(d).items()},
    **dict.fromkeys(
        ("run_exports.json", "run_exports.json.zst"),
        lambda d: {n: r.get("run_exports") or {} for n, r in records(d).items()},
    ),
    SHARDS: _essence,
}

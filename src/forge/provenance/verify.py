# SPDX-License-Identifier: BSD-3-Clause
"""A package file against its record, and against what it says of itself. Needs no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from forge.errors import BuildFailed
from forge.files import sha256_file
from forge.provenance import statement as record
from forge.provenance.package import Entry, Package

LOCAL = (record.PATCH, record.SOURCE)  # what the package names without a digest of its own


@dataclass
class Verdict:
    """What was held against what (`checked`), and each difference (`wrong`), in words."""

    checked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(path: Path, statement: dict[str, Any] | None) -> Verdict:
    """Hold a package against its record (None: against itself alone)."""
    verdict, package = Verdict(), Package(path)
    if statement:
        _subject(path, statement, verdict)
    try:
        _payload(package, verdict)
        if statement:
            _definition(package, statement["predicate"]["buildDefinition"], verdict)
    except BuildFailed as error:
        verdict.wrong.append(str(error))
    return verdict


def _subject(path: Path, statement: dict[str, Any], verdict: Verdict) -> None:
    (subject,) = statement["subject"]
    found, wanted = sha256_file(path), subject["digest"]["sha256"]
    verdict.checked.append("sha256")
    if found != wanted:
        verdict.wrong.append(f"{path} has sha256 {found}, its record says {wanted}")
    if path.name != subject["name"]:
        verdict.wrong.append(f"{path} is not {subject['name']}, which the record is of")


def _payload(package: Package, verdict: Verdict) -> None:
    """Every file against info/paths.json."""
    found, listed = package.entries("pkg"), {entry["_path"]: entry for entry in package.paths}
    verdict.checked.append(f"{len(listed)} files")
    dist = "{name}-{version}-{build}".format(**package.index)
    if package.path.stem != dist:
        verdict.wrong.append(f"{package.path} says inside that it is {dist}")
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            verdict.wrong.append(f"{name} is listed in info/paths.json and not in the package")
        elif name not in listed:
            verdict.wrong.append(f"{name} is in the package and not listed in info/paths.json")
        else:
            verdict.wrong += _file(name, found[name], listed[name])


def _file(name: str, found: Entry, listed: dict[str, Any]) -> list[str]:
    # of a link, paths.json gives the digest of what it points to, maybe in another package
    if (found.link is None) == (listed["path_type"] == "softlink"):
        return [f"{name} should be a {listed['path_type']}"]
    if found.link is not None:
        return []
    wrong = []
    if found.sha256 != listed["sha256"]:
        wrong.append(f"{name} has sha256 {found.sha256}, info/paths.json says {listed['sha256']}")
    if found.size != listed["size_in_bytes"]:
        wrong.append(f"{name} has {found.size} bytes, info/paths.json says "
                     f"{listed['size_in_bytes']}")  # fmt: skip
    return wrong


def _definition(package: Package, definition: dict[str, Any], verdict: Verdict) -> None:
    """Recipe, sources, patches, packages and variant, as the package has them inside."""
    parameters = definition["externalParameters"]
    folder = PurePosixPath(parameters["recipe"]["name"])
    inside = {_key(entry): entry for entry in record.materials(package, str(folder.parent))}
    recorded = {_key(entry): entry for entry in definition["resolvedDependencies"]}
    recorded = {k: v for k, v in recorded.items() if k[0] != record.REPOSITORY}
    for kind in sorted({key[0] for key in recorded | inside}):
        count = sum(key[0] == kind for key in inside)
        verdict.checked.append(f"{count} x {kind}")
    for key in sorted(inside.keys() | recorded.keys()):
        what = f"{key[0]} {key[1]}"
        if key not in recorded:
            verdict.wrong.append(f"{what}: in the package, not in the record")
        elif key not in inside:
            verdict.wrong.append(f"{what}: in the record, not in the package")
        else:
            digests = inside[key]["digest"], recorded[key].get("digest")
            if digests[0] != digests[1] and (digests[0] or key[0] not in LOCAL):
                verdict.wrong.append(f"{what}: package says {digests[0]}, record {digests[1]}")
    sha256 = package.recipe_files.get(folder.name)
    if parameters["recipe"].get("digest") != {"sha256": sha256}:
        verdict.wrong.append(f"{folder}: package has sha256 {sha256}, record says "
                             f"{parameters['recipe'].get('digest')}")  # fmt: skip
    found, wanted = record.variant(package), parameters.get("variant", {})
    verdict.checked.append(f"{len(found)} variant values")
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            verdict.wrong.append(f"variant {name}: package says {found.get(name)}, record "
                                 f"{wanted.get(name)}")  # fmt: skip


def _key(entry: record.Descriptor) -> tuple[str, str]:
    return entry["annotations"]["kind"], entry.get("uri") or entry.get("name", "")

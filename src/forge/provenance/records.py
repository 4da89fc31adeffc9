# SPDX-License-Identifier: BSD-3-Clause
"""The record and the SBOM of a package: written beside the index, read, and verified."""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import BuildFailed, ForgeError
from forge.files import sha256_file, write_text
from forge.provenance import statement as record
from forge.provenance.package import Package
from forge.provenance.sbom import sbom

RECORD, SBOM = ".provenance.json", ".cdx.json"


def write(channel: Path, package: Path, recipe: Path, root: Path, base: str) -> None:
    """Write CHANNEL/forge/DIST.provenance.json and DIST.cdx.json of a built package."""
    inside = Package(package)
    data = record.statement(inside, recipe, root, base)
    folder = channel / "forge"
    write_text(folder / f"{package.stem}{SBOM}", sbom(inside, data))
    write_text(folder / f"{package.stem}{RECORD}", json.dumps(data, indent=1) + "\n")


def beside(package: Path) -> list[Path]:
    """Where the record of a package may be: beside it, or in its channel's folder `forge`."""
    name = f"{package.stem}{RECORD}"
    return [package.with_name(name), package.absolute().parent.parent / "forge" / name]


def read(path: Path) -> dict[str, Any]:
    """A record from its file. Raises ForgeError if it cannot be read or is not a record."""
    try:
        data = json.loads(path.read_bytes())
        kinds = data["_type"], data["predicateType"]
        if kinds == (record.STATEMENT, record.PREDICATE):
            _subject(data), _folder(data), _claims(data)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(f"{path} is not the record of a package: {error!r}") from None
    if kinds != (record.STATEMENT, record.PREDICATE):
        raise ForgeError(f"{path} is {' with '.join(map(str, kinds))}, not {record.PREDICATE}")
    return data


@dataclass
class Verdict:
    """What was checked, and each difference in words (`wrong`)."""

    checked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(path: Path, statement: dict[str, Any] | None) -> Verdict:
    """Check a package against its record, if there is one, and against its own list of files."""
    verdict, package = Verdict(), Package(path)
    if statement:
        name, expected = _subject(statement)
        verdict.checked.append("sha256")
        if (sha256 := sha256_file(path)) != expected:
            verdict.wrong.append(f"{path} has sha256 {sha256}, its record says {expected}")
        if path.name != name:
            verdict.wrong.append(f"{path} is not {name}, which the record is of")
    try:
        _check_files(package, verdict)
        if statement:
            _check_claims(package, statement, verdict)
    except BuildFailed as error:
        verdict.wrong.append(str(error))
    return verdict


def _check_files(package: Package, verdict: Verdict) -> None:
    """Every file against info/paths.json."""
    found = package.entries("pkg")
    listed = {entry["_path"]: entry for entry in package.json("paths")["paths"]}
    verdict.checked.append(f"{len(listed)} files")
    dist = "{name}-{version}-{build}".format(**package.index)
    if package.path.stem != dist:
        verdict.wrong.append(f"{package.path} says inside that it is {dist}")
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            verdict.wrong.append(f"{name} is listed in info/paths.json but missing")
        elif name not in listed:
            verdict.wrong.append(f"{name} is not listed in info/paths.json")
        elif found[name].link != (listed[name]["path_type"] == "softlink"):
            verdict.wrong.append(f"{name} should be a {listed[name]['path_type']}")
        # for a link paths.json has the digest of its target, maybe in another package
        elif not found[name].link and found[name].sha256 != (known := listed[name]["sha256"]):
            sha256 = found[name].sha256
            verdict.wrong.append(f"{name} has sha256 {sha256}, info/paths.json says {known}")


def _check_claims(package: Package, statement: dict[str, Any], verdict: Verdict) -> None:
    """Recipe, sources, patches, packages and variant, as the package itself has them."""
    materials = record.materials(package, _folder(statement))
    inside, recorded = _flat(materials, record.variant(package)), _claims(statement)
    kinds = Counter(claim.split(" ")[0] for claim in inside)
    verdict.checked += [f"{count} x {kind}" for kind, count in sorted(kinds.items())]
    for claim in sorted(inside.keys() | recorded.keys()):
        ours, theirs = inside.get(claim), recorded.get(claim)
        # a patch or local source has its digest from the record only
        if ours != theirs and not (ours == {} and theirs):
            verdict.wrong.append(f"{claim}: package says {ours}, record {theirs}")


def _subject(statement: dict[str, Any]) -> tuple[str, str]:
    (subject,) = statement["subject"]
    return subject["name"], subject["digest"]["sha256"]


def _folder(statement: dict[str, Any]) -> str:
    """The recipe's folder in the repository."""
    recipe = statement["predicate"]["buildDefinition"]["externalParameters"]["recipe"]["name"]
    return posixpath.dirname(recipe)


def _claims(statement: dict[str, Any]) -> dict[str, Any]:
    """What a record claims about the inside of its package."""
    definition = statement["predicate"]["buildDefinition"]
    used = [
        entry
        for entry in definition["resolvedDependencies"]
        if entry["annotations"]["kind"] != record.REPOSITORY
    ]
    return _flat(used, definition["externalParameters"]["variant"])


def _flat(materials: Iterable[record.Descriptor], variant: dict[str, str]) -> dict[str, Any]:
    """`KIND NAME` -> digest of each material, and `variant KEY` -> value."""
    claims: dict[str, Any] = {f"variant {key}": value for key, value in variant.items()}
    for entry in materials:
        name = entry.get("uri") or entry["name"]
        claims[f"{entry['annotations']['kind']} {name}"] = entry["digest"]
    return claims

# SPDX-License-Identifier: BSD-3-Clause
"""The record of a package: written beside the index, read, and verified."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import ForgeError, one_line
from forge.files import write_text
from forge.provenance import statement as record
from forge.provenance.package import Package

RECORD = ".provenance.json"


def write(channel: Path, package: Path, recipe: Path, root: Path, base: str) -> None:
    """Write CHANNEL/forge/DIST.provenance.json of a built package."""
    data = record.statement(Package(package), recipe, root, base)
    write_text(channel / "forge" / f"{package.stem}{RECORD}", json.dumps(data, indent=1) + "\n")


def beside(package: Path) -> list[Path]:
    """Where the record of a package may be: beside it, or in its channel's folder `forge`."""
    name = f"{package.stem}{RECORD}"
    return [package.with_name(name), package.absolute().parent.parent / "forge" / name]


def read(path: Path) -> dict[str, Any]:
    """A record from its file. Raises ForgeError if it cannot be read or is not a record."""
    try:
        data = json.loads(path.read_bytes())
        kinds = data["_type"], data["predicateType"]
        if kinds != (record.STATEMENT, record.PREDICATE):
            raise ForgeError(
                f"{path} is {' with '.join(map(str, kinds)):.200}, not {record.PREDICATE}"
            )
        _claims(data)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ForgeError(f"{path} is not the record of a package: {error!a:.200}") from None
    return data


@dataclass
class Verdict:
    """What was checked, and each difference in words (`wrong`)."""

    checked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def verify(path: Path, statement: dict[str, Any] | None) -> Verdict:
    """Check a package against its own list of files, and against its record if there is one."""
    verdict, package = Verdict(), Package(path)
    try:
        # for a link paths.json has the digest of its target, maybe in another package
        held = {
            name: entry.sha256 if entry.link is None else "a link"
            for name, entry in package.payload.items()
        }
        verdict.checked.append(f"{len(package.listed)} files")
        verdict.wrong += differences(held, package.listed, "the package has", "info/paths.json")
        if not verdict.wrong:
            package.require_safe()
        if statement:
            recipe, recorded = _claims(statement)
            _, ours = _claims(record.described(package, recipe, base=""))
            # a patch or local source has its digest from the record only
            ours = {claim: value or recorded.get(claim, value) for claim, value in ours.items()}
            counts = Counter(claim.split(" ")[0] for claim in ours)
            verdict.checked += [f"{count} x {kind}" for kind, count in sorted(counts.items())]
            verdict.wrong += differences(ours, recorded, "the package has", "its record")
    except ForgeError as error:
        verdict.wrong.append(str(error))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        verdict.wrong.append(f"{path} cannot be checked: its rendered recipe lacks {error!a:.200}")
    return verdict


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], we: str, they: str
) -> list[str]:
    """A line for each key whose values differ; `we` and `they` say whose value is which."""
    return [
        one_line(f"{key}: {we} {ours.get(key, 'nothing')}, {they} {theirs.get(key, 'nothing')}")
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def _claims(statement: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The recipe, and what a statement says of its package: `KIND NAME` -> digest or value."""
    (subject,) = statement["subject"]
    definition = statement["predicate"]["buildDefinition"]
    parameters = definition["externalParameters"]
    claims = {"name": subject["name"], "sha256": subject["digest"]["sha256"]}
    claims |= {f"variant {key}": value for key, value in parameters["variant"].items()}
    for entry in definition["resolvedDependencies"]:
        if (kind := entry["annotations"]["kind"]) != record.REPOSITORY:
            claims[f"{kind} {entry.get('uri') or entry['name']}"] = entry["digest"]
    return parameters["recipe"]["name"], claims

# SPDX-License-Identifier: BSD-3-Clause
"""The software bill of materials of a package, in CycloneDX 1.6.

The package, with the patches that it carries; its sources; what it needs at run time. Like the
record it has no clock or random number of its own: one package gives one document.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import (
    Component,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from forge.provenance import statement as record
from forge.provenance.package import Package

CLASSES = {"Backport": PatchClassification.BACKPORT}


def sbom(package: Path, statement: dict[str, Any]) -> str:
    """The SBOM of `package`, whose record is `statement`, as JSON text."""
    inside = Package(package)
    predicate, (subject,) = statement["predicate"], statement["subject"]
    used = predicate["buildDefinition"]["resolvedDependencies"]
    sha256 = subject["digest"]["sha256"]
    root = Component(
        name=inside.index["name"],
        version=str(inside.index["version"]),
        type=ComponentType.LIBRARY,
        bom_ref=subject["name"],
        purl=PackageURL.from_string(record.conda_purl(inside.index)),
        hashes=[_sha256(sha256)],
        description=inside.about.get("summary"),
        licenses=[LicenseFactory().make_from_string(text)]
        if (text := inside.index.get("license"))
        else [],
        pedigree=Pedigree(patches=[_patch(e) for e in used if _kind(e) == record.PATCH]),
    )
    parts = [_source(entry) for entry in used if _kind(entry) == record.SOURCE]
    parts += [_requirement(name, specs) for name, specs in _requirements(inside).items()]
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{sha256}"), components=parts)
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromisoformat(
        predicate["runDetails"]["metadata"]["startedOn"]
    )
    versions = predicate["runDetails"]["builder"]["version"]
    bom.metadata.tools = ToolRepository(
        components=[
            Component(name=name, version=version, type=ComponentType.APPLICATION)
            for name, version in versions.items()
        ]
    )
    bom.register_dependency(root, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _kind(entry: record.Descriptor) -> str:
    return entry["annotations"]["kind"]


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)


def _patch(entry: record.Descriptor) -> Patch:
    status = entry["annotations"].get("upstreamStatus", "").split(" ")[0]
    kind = CLASSES.get(status, PatchClassification.UNOFFICIAL)
    return Patch(type=kind, diff=Diff(url=XsUri(entry["name"])))


def _source(entry: record.Descriptor) -> Component:
    """A source archive, commit, or folder of the repository."""
    uri = entry.get("uri", "")
    purl = PackageURL.from_string(uri) if uri.startswith("pkg:") else None
    digest = entry["digest"]
    return Component(
        name=purl.name if purl else entry.get("name") or uri,
        version=purl.version if purl else digest.get("gitCommit"),
        type=ComponentType.LIBRARY if purl else ComponentType.FILE,
        bom_ref=uri or entry["name"],
        purl=purl,
        hashes=[_sha256(digest["sha256"])] if "sha256" in digest else [],
        properties=[
            Property(name=f"strix-forge:{name}", value=value)
            for name, value in digest.items()
            if name != "sha256"
        ],
    )


def _requirements(package: Package) -> dict[str, list[str]]:
    """Run-time requirements: name -> specs. Virtual packages are the machine's, not listed."""
    found: dict[str, list[str]] = {}
    for spec in package.index.get("depends", []):
        name, _, rest = spec.partition(" ")
        if not name.startswith("__"):
            found.setdefault(name, []).append(rest or "*")
    return found


def _requirement(name: str, specs: list[str]) -> Component:
    return Component(
        name=name,
        type=ComponentType.LIBRARY,
        bom_ref=f"requirement:{name}",
        purl=PackageURL("conda", None, name),
        properties=[Property(name="strix-forge:spec", value=", ".join(specs))],
    )

# SPDX-License-Identifier: BSD-3-Clause
"""The software bill of materials of a package, in CycloneDX 1.6.

The package with its patches, its sources, and what it needs at run time. Like the record it has no
clock or random number: one package gives one document.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model import component as model
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from forge.provenance.package import Package
from forge.provenance.statement import PATCH, SOURCE, Descriptor, conda_purl

LIBRARY, FILE, APPLICATION = ComponentType.LIBRARY, ComponentType.FILE, ComponentType.APPLICATION


def sbom(package: Package, statement: dict[str, Any]) -> str:
    """The SBOM of a package, from its record, as JSON text."""
    predicate, (subject,) = statement["predicate"], statement["subject"]
    details, used = predicate["runDetails"], predicate["buildDefinition"]["resolvedDependencies"]
    licence = package.index.get("license")
    root = Component(
        name=package.index["name"],
        version=str(package.index["version"]),
        type=LIBRARY,
        bom_ref=subject["name"],
        purl=PackageURL.from_string(conda_purl(package.index)),
        hashes=_hashes(subject["digest"]),
        description=package.json("about").get("summary"),
        licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
        pedigree=model.Pedigree(patches=[_patch(e) for e in used if _kind(e) == PATCH]),
    )
    parts = [_source(entry) for entry in used if _kind(entry) == SOURCE]
    parts += _requirements(package.index.get("depends", []))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{subject['digest']['sha256']}")
    bom = Bom(serial_number=serial, components=parts)
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromisoformat(details["metadata"]["startedOn"])
    tools = details["builder"]["version"].items()
    bom.metadata.tools = ToolRepository(
        components=[Component(name=name, version=v, type=APPLICATION) for name, v in tools]
    )
    bom.register_dependency(root, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _kind(entry: Descriptor) -> str:
    return entry["annotations"]["kind"]


def _hashes(digest: dict[str, str]) -> list[HashType]:
    sha256 = digest.get("sha256")
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def _patch(entry: Descriptor) -> model.Patch:
    backport = entry["annotations"].get("upstreamStatus", "").startswith("Backport")
    kind = model.PatchClassification("backport" if backport else "unofficial")
    return model.Patch(type=kind, diff=model.Diff(url=XsUri(entry["name"])))


def _source(entry: Descriptor) -> Component:
    """A source archive, commit, or folder of the repository."""
    uri, digest = entry.get("uri", ""), entry["digest"]
    purl = PackageURL.from_string(uri) if uri.startswith("pkg:") else None
    others = [(name, value) for name, value in digest.items() if name != "sha256"]
    return Component(
        name=purl.name if purl else entry.get("name") or uri,
        version=purl.version if purl else digest.get("gitCommit"),
        type=LIBRARY if purl else FILE,
        bom_ref=uri or entry["name"],
        purl=purl,
        hashes=_hashes(digest),
        properties=[Property(name=f"strix-forge:{name}", value=value) for name, value in others],
    )


def _requirements(depends: list[str]) -> list[Component]:
    """Run-time requirements, without virtual packages, which are the machine's."""
    specs: dict[str, list[str]] = {}
    for spec in depends:
        name, _, rest = spec.partition(" ")
        if not name.startswith("__"):
            specs.setdefault(name, []).append(rest or "*")
    return [
        Component(
            name=name,
            type=LIBRARY,
            bom_ref=f"requirement:{name}",
            purl=PackageURL("conda", None, name),
            properties=[Property(name="strix-forge:spec", value=", ".join(found))],
        )
        for name, found in specs.items()
    ]

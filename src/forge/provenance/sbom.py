# SPDX-License-Identifier: BSD-3-Clause
"""The software bill of materials of a package, in CycloneDX 1.6.

The package with its patches, its sources, and what it needs at run time. Like the record it has no
clock or random number: one package gives one document.
"""

import uuid
from datetime import datetime
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model import component as model
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from forge.provenance.package import Package
from forge.provenance.statement import PATCH, SOURCE, Descriptor, conda_purl, used


def sbom(package: Package, statement: dict[str, Any]) -> str:
    """The SBOM of a package, from its record, as JSON text."""
    (subject,) = statement["subject"]
    licence = package.index.get("license")
    root = Component(
        name=package.index["name"],
        version=str(package.index["version"]),
        type=ComponentType.LIBRARY,
        bom_ref=subject["name"],
        purl=PackageURL.from_string(conda_purl(package.index)),
        hashes=_hashes(subject["digest"]),
        description=package.parsed("about.json").get("summary"),
        licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
        pedigree=model.Pedigree(patches=map(_patch, used(statement, PATCH))),
    )
    # virtual packages are the machine's
    specs = {spec for spec in package.index.get("depends", []) if not spec.startswith("__")}
    parts = [*map(_source, used(statement, SOURCE)), *map(_requirement, sorted(specs))]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{subject['digest']['sha256']}")
    bom = Bom(serial_number=serial, components=parts)
    bom.metadata.component = root
    started = statement["predicate"]["runDetails"]["metadata"]["startedOn"]
    bom.metadata.timestamp = datetime.fromisoformat(started)
    bom.register_dependency(root, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


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
    name = entry.get("name") or uri
    return Component(
        name=purl.name if purl else name,
        version=purl.version if purl else digest.get("gitCommit") or digest.get("dirHash"),
        type=ComponentType.LIBRARY if purl else ComponentType.FILE,
        bom_ref=uri or name,
        purl=purl,
        hashes=_hashes(digest),
    )


def _requirement(spec: str) -> Component:
    name, _, versions = spec.partition(" ")
    return Component(
        name=name,
        type=ComponentType.LIBRARY,
        bom_ref=f"requirement:{spec}",
        purl=PackageURL("conda", None, name),
        properties=[Property(name="strix-forge:spec", value=versions or "*")],
    )

# SPDX-License-Identifier: BSD-3-Clause
"""The record of a package: an in-toto Statement v1 with an SLSA provenance v1 predicate.

What the package says of itself (sources, variant, the packages it was built with) is read from
its rendered recipe; the repository adds what the package lacks: the patches, folders used as
source, and its own commit. One package has one record: there is no clock but the package's own.

Specifications: in-toto/attestation spec/v1 (statement, resource_descriptor, digest_set) and
slsa.dev/spec/v1.0/provenance.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packageurl import PackageURL

from forge.errors import ForgeError
from forge.files import digest_tree, sha256_file
from forge.provenance.package import Package

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:strix-forge:recipe-build:v1"
BUILDER = "urn:strix-forge:builder:local"
# The values of the annotation `kind` of what went into a package.
RECIPE, SOURCE, PATCH, REPOSITORY = "recipe", "source", "patch", "repository"
TRAILERS = {"upstreamStatus": "Upstream-Status", "appliesTo": "Applies-To"}
Descriptor = dict[str, Any]


def statement(package: Path, recipe: Path, root: Path, base: str) -> dict[str, Any]:
    """The record of `package`, built from `recipe` in the repository at `root` on `base`.

    Raises ForgeError for a package that cannot be read or a patch that is not there.
    """
    inside = Package(package)
    folder = recipe.parent.relative_to(root).as_posix()
    configuration = inside.rendered["build_configuration"]
    dependencies = list(materials(inside, folder))
    for entry in dependencies:
        if not entry.get("digest"):
            _complete(entry, root)
    if commit := _commit(root):
        dependencies.append(_descriptor(REPOSITORY, name="strix-forge", gitCommit=commit))
    settings = configuration["packaging_settings"]
    return {
        "_type": STATEMENT,
        "subject": [{"name": package.name, "digest": {"sha256": sha256_file(package)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "recipe": {
                        "name": f"{folder}/{recipe.name}",
                        "digest": {"sha256": inside.recipe_files[recipe.name]},
                    },
                    "variant": variant(inside),
                    "base": base,
                    "packageFormat": f"{settings['archive_type']}:{settings['compression_level']}",
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {
                    "id": BUILDER,
                    "version": {
                        "strix-forge": driver_version(),
                        "py-rattler-build": inside.rendered["system_tools"]["rattler-build"],
                    },
                },
                "metadata": {"startedOn": timestamp(inside)},
            },
        },
    }


def materials(package: Package, folder: str) -> Iterator[Descriptor]:
    """What went into a package, as it says itself; `folder` is the recipe's, in the repository.

    Patches and local sources are named without a digest, which only the repository can give.
    """
    for name, sha256 in sorted(package.recipe_files.items()):
        yield _descriptor(RECIPE, name=f"{folder}/{name}", sha256=sha256)
    recipe = package.rendered["recipe"]
    purls = map(PackageURL.from_string, recipe.get("extra", {}).get("purls", []))
    by_file = {purl.qualifiers.get("file_name"): str(purl) for purl in purls}
    for section in [recipe, *recipe.get("staging_caches", [])]:
        for source in section.get("source", []):
            yield _source(source, by_file, folder)
            for patch in source.get("patches", []):
                yield _descriptor(PATCH, name=_in_repository(folder, patch))
    for key in ("finalized_cache_dependencies", "finalized_dependencies"):
        for kind in ("build", "host"):
            resolved = ((package.rendered.get(key) or {}).get(kind) or {}).get("resolved", [])
            for record in sorted(resolved, key=lambda record: record["name"]):
                yield _descriptor(kind, uri=conda_purl(record), sha256=record["sha256"])


def _source(source: dict[str, Any], purls: dict[str | None, str], folder: str) -> Descriptor:
    if "path" in source:
        return _descriptor(SOURCE, name=_in_repository(folder, str(source["path"])))
    if "git" in source:
        url, commit = source["git"], str(source["rev"])
        return _descriptor(SOURCE, uri=f"git+{url}@{commit}", gitCommit=commit)
    urls = [source["url"]] if isinstance(source["url"], str) else source["url"]
    file_name = urls[0].rsplit("/", 1)[1]
    uri = purls.get(file_name, urls[0])
    return _descriptor(SOURCE, name=file_name, uri=uri, sha256=source["sha256"])


def _descriptor(kind: str, name: str = "", uri: str = "", **digest: str) -> Descriptor:
    """A ResourceDescriptor. `kind` tells what it was to the build."""
    named = {key: value for key, value in (("name", name), ("uri", uri)) if value}
    return named | {"digest": digest, "annotations": {"kind": kind}}


def _in_repository(folder: str, path: str) -> str:
    """A path of a recipe as seen from the repository's root."""
    return posixpath.normpath(posixpath.join(folder, path))


def _complete(entry: Descriptor, root: Path) -> None:
    """Add the digest of a patch or local source, and what a patch says of its state upstream."""
    path = root / entry["name"]
    if path.is_dir():
        entry["digest"] = {"dirHash": dir_hash(path)}
    elif path.is_file():
        entry["digest"] = {"sha256": sha256_file(path)}
    else:
        raise ForgeError(f"{path} went into a package and is gone; no record can be written")
    if entry["annotations"]["kind"] == PATCH:
        found = dict(re.findall(r"^([A-Z][\w-]+): (.+)$", path.read_text(), re.M))
        status = {key: found[name] for key, name in TRAILERS.items() if name in found}
        entry["annotations"] |= status


def dir_hash(folder: Path) -> str:
    """in-toto's dirHash of a folder without byte code: Go's Hash1 in hex."""
    lines = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder)
        if path.is_file() and not any(
            part == "__pycache__" or part.endswith(".egg-info") for part in parts.parts
        ):
            lines.append((parts.as_posix(), sha256_file(path)))
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()


def conda_purl(record: dict[str, Any]) -> str:
    """The package URL of a conda package. A channel in a folder is not named: it is one machine's.

    Qualifiers: package-url/purl-spec, type conda.
    """
    channel = str(record.get("channel") or "").rstrip("/")
    qualifiers = {"build": record["build"], "subdir": record["subdir"]}
    if channel.startswith("http"):
        qualifiers["channel"] = channel
    return str(PackageURL("conda", None, record["name"], str(record["version"]), qualifiers))


def variant(package: Package) -> dict[str, str]:
    """The variant values that a package was built with."""
    values = package.rendered["build_configuration"]["variant"]
    return {key: str(value) for key, value in sorted(values.items())}


def timestamp(package: Package) -> str:
    """The package's own time, in seconds: the one that its build knew as SOURCE_DATE_EPOCH."""
    return str(package.rendered["build_configuration"]["timestamp"])[:19].replace(" ", "T") + "Z"


@functools.cache
def driver_version() -> str:
    """The digest of the driver's code: it has no releases of its own."""
    return digest_tree(Path(__file__).parent.parent)[:16]


def _commit(root: Path) -> str:
    """The repository's commit, or nothing where it has none or files differ from it."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
        except FileNotFoundError:  # without git there is no commit to name, but a package
            return None
        return None if done.returncode else done.stdout.strip()

    if git("rev-parse", "--show-toplevel") != str(root) or git("status", "--porcelain") != "":
        return ""
    return git("rev-parse", "HEAD") or ""

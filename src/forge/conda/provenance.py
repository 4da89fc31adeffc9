# SPDX-License-Identifier: BSD-3-Clause
"""The provenance of a package: an in-toto Statement v1 with an SLSA provenance v1 predicate.

Sources, variant and build packages come from the rendered recipe inside the package; the
repository adds the digests of patches and local sources, and its commit. The only time is the
package's own, so one package has one statement. Written beside the index, read, and verified.

Specifications: in-toto/attestation spec/v1 and slsa.dev/spec/v1.0/provenance.
"""

import functools
import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packageurl import PackageURL

from forge.conda.package import RENDERED, Package, Places
from forge.errors import ForgeError, one_line
from forge.files import digest_tree, git, sha256_file, write_text

SUFFIX = ".provenance.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# values of the annotation `kind`: what a dependency is to the build; also `build` and `host`
RECIPE, SOURCE, PATCH, REPOSITORY = "recipe", "source", "patch", "repository"
# what rattler-build adds to the recipe's own files
ADDED = (RENDERED, "recipe/variant_config.yaml")
CODE = Path(__file__).parents[1]
_driver = functools.cache(lambda: digest_tree(CODE, CODE.parents[1])[:16])  # it has no releases
# what a package does not hold: the repository says it, and whoever wrote the statement
FOREIGN = re.compile(r"recipe|(repository )?strix-forge|(patch|source) [^:]*( upstreamStatus)?")
Descriptor = dict[str, Any]


def statement(package: Package, recipe: Path, root: Path, base: str) -> dict[str, Any]:
    """Make the statement on a package built from `recipe`; ForgeError for a missing patch."""
    data = described(package, recipe.relative_to(root).as_posix(), base)
    dependencies = data["predicate"]["buildDefinition"]["resolvedDependencies"]
    for entry in dependencies:
        if not entry["digest"]:
            _complete(entry, root)
    status = git(root, "status", "--porcelain=v2", "--branch")
    if clean := re.fullmatch(r"# branch.oid (\w+)\n(# .*\n)*", status):  # else there is no commit
        dependencies.append(_descriptor(REPOSITORY, name="strix-forge", gitCommit=clean[1]))
    return data


def described(package: Package, recipe: str, base: str) -> dict[str, Any]:
    """Make a statement by a package's own word, which has no digest of patches or local sources."""
    configuration = package.rendered["build_configuration"]
    settings, variant = configuration["packaging_settings"], configuration["variant"]
    parameters = {
        "recipe": {"name": recipe},
        "variant": {key: str(value) for key, value in sorted(variant.items())},
        "base": base,
        "packageFormat": f"{settings['archive_type']}:{settings['compression_level']}",
    }
    definition = {
        "buildType": "urn:strix-forge:recipe-build:v1",
        "externalParameters": parameters,
        "resolvedDependencies": list(_materials(package, posixpath.dirname(recipe))),
    }
    bindings = package.rendered["system_tools"]["rattler-build"]
    versions = {"strix-forge": _driver(), "py-rattler-build": bindings}
    # the build's SOURCE_DATE_EPOCH, in whole seconds
    started = str(configuration["timestamp"])[:19].replace(" ", "T") + "Z"
    builder = {"id": "urn:strix-forge:builder:local", "version": versions}
    details = {"builder": builder, "metadata": {"startedOn": started}}
    return {
        "_type": STATEMENT,
        "subject": [{"name": package.path.name, "digest": {"sha256": sha256_file(package.path)}}],
        "predicateType": PREDICATE,
        "predicate": {"buildDefinition": definition, "runDetails": details},
    }


def _materials(package: Package, folder: str) -> Iterator[Descriptor]:
    for name, content in sorted(package.info.items()):
        if name.startswith("recipe/") and name not in ADDED:
            path = name.replace("recipe", folder, 1)
            yield _descriptor(RECIPE, path, sha256=hashlib.sha256(content).hexdigest())
    recipe = package.rendered["recipe"]
    purls = map(PackageURL.from_string, recipe.get("extra", {}).get("purls", []))
    by_file = {purl.qualifiers.get("file_name"): str(purl) for purl in purls}
    for section in [recipe, *recipe.get("staging_caches", [])]:
        for source in section.get("source", []):
            yield _source(source, by_file, folder)
            for patch in source.get("patches", []):
                yield _descriptor(PATCH, posixpath.normpath(f"{folder}/{patch}"))
    for key in ("finalized_cache_dependencies", "finalized_dependencies"):
        for kind in ("build", "host"):
            resolved = ((package.rendered.get(key) or {}).get(kind) or {}).get("resolved", [])
            for record in sorted(resolved, key=lambda record: record["name"]):
                yield _descriptor(kind, uri=conda_purl(record), sha256=record["sha256"])


def _source(source: dict[str, Any], purls: dict[str | None, str], folder: str) -> Descriptor:
    if "path" in source:
        return _descriptor(SOURCE, posixpath.normpath(f"{folder}/{source['path']}"))
    if "git" in source:
        commit = str(source["rev"])
        return _descriptor(SOURCE, uri=f"git+{source['git']}@{commit}", gitCommit=commit)
    url = source["url"] if isinstance(source["url"], str) else source["url"][0]
    file = url.rsplit("/", 1)[1]
    return _descriptor(SOURCE, file, purls.get(file, url), sha256=source["sha256"])


def _descriptor(kind: str, name: str = "", uri: str = "", **digest: str) -> Descriptor:
    """Make a ResourceDescriptor."""
    named = {key: value for key, value in (("name", name), ("uri", uri)) if value}
    return named | {"digest": digest, "annotations": {"kind": kind}}


def _complete(entry: Descriptor, root: Path) -> None:
    """Add the digest of a patch or local source, and a patch's status upstream."""
    path = root / entry["name"]
    if path.is_dir():
        entry["digest"] = {"dirHash": dir_hash(path)}
    elif path.is_file():
        entry["digest"] = {"sha256": sha256_file(path)}
    else:
        raise ForgeError(f"{path} went into a package and is gone: its provenance is not known")
    is_patch = entry["annotations"]["kind"] == PATCH
    if is_patch and (status := re.search(r"^Upstream-Status: (.+)$", path.read_text(), re.M)):
        entry["annotations"]["upstreamStatus"] = status[1]


def dir_hash(folder: Path) -> str:
    """Compute in-toto's dirHash of a folder, without byte code: Go's Hash1 in hex."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not re.search(r"__pycache__/|\.egg-info/", f"{path}/")
    }
    text = "".join(f"{sha256_file(files[name])}  {name}\n" for name in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()


def conda_purl(record: dict[str, Any]) -> str:
    """Make the package URL of a conda package. A channel in a folder is left out: it is local."""
    qualifiers = {"build": record["build"], "subdir": record["subdir"]}
    if (channel := str(record.get("channel") or "")).startswith("http"):
        qualifiers["channel"] = channel.rstrip("/")
    return str(PackageURL("conda", None, record["name"], str(record["version"]), qualifiers))


def write(channel: Path, package: Path, recipe: Path, root: Path, base: str) -> None:
    """Write CHANNEL/forge/DIST.provenance.json of a built package."""
    data = statement(Package(package), recipe, root, base)
    write_text(channel / "forge" / f"{package.stem}{SUFFIX}", json.dumps(data, indent=1) + "\n")


def beside(package: Path) -> list[Path]:
    """List where a package's provenance may be: beside it, or in its channel's folder `forge`."""
    name = f"{package.stem}{SUFFIX}"
    return [package.with_name(name), package.absolute().parent.parent / "forge" / name]


def of(package: Path) -> dict[str, Any] | None:
    """Read the provenance of a package; None without one. Raises ForgeError for two that differ."""
    found = {str(path): read(path) for path in beside(package) if path.exists()}
    if len({json.dumps(data, sort_keys=True) for data in found.values()}) > 1:
        raise ForgeError(f"{' and '.join(found)} differ: delete the wrong one")
    return next(iter(found.values()), None)


def read(path: Path) -> dict[str, Any]:
    """Read a statement from its file. Raises ForgeError if it cannot be read or is none."""
    try:
        # no NaN is an int
        data = json.loads(path.read_bytes(), parse_constant=int, object_pairs_hook=_unique)
        kinds = data["_type"], data["predicateType"]
        if kinds != (STATEMENT, PREDICATE):
            raise ForgeError(f"{path} is {' with '.join(map(str, kinds)):.200}, not {PREDICATE}")
        _claims(data)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ForgeError(f"{path} is not the provenance of a package: {error!a:.200}") from None
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice: readers would differ in which counts")
    return dict(pairs)


@dataclass
class Verdict:
    """What was checked, what was not, each difference in words (`wrong`), where it is installed."""

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    places: list[Places] = field(default_factory=list)


def verify(path: Path, known: dict[str, Any] | None, package: Package | None = None) -> Verdict:
    """Check a package, read already or not, against its own list of files and its provenance."""
    verdict, package = Verdict(), package or Package(path)
    try:
        # for a link paths.json has the digest of its target, maybe in another package
        verdict.checked.append(f"{len(package.listed)} files")
        found = differences(package.held, package.listed, "the package has", "info/paths.json")
        verdict.wrong += found
        if not verdict.wrong:
            verdict.places.append(package.require_safe())
        if known:
            stated = _claims(known)
            base = stated["variant content_digest"].rpartition("-")[0]
            ours = _claims(described(package, stated["recipe"], base))
            held = {*ours, *(f"{c} upstreamStatus" for c in ours), "repository strix-forge"}
            verdict.unchecked = [c for c in stated if FOREIGN.fullmatch(c) and c in held]
            for claim in verdict.unchecked:
                stated.pop(claim), ours.pop(claim, None)
            counts = Counter(claim.split(" ")[0] for claim in ours)
            verdict.checked += [f"{count} x {kind}" for kind, count in sorted(counts.items())]
            verdict.wrong += differences(ours, stated, "the package has", "its provenance")
    except ForgeError as error:
        verdict.wrong.append(str(error))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        verdict.wrong.append(f"{path} cannot be checked: its rendered recipe lacks {error!a:.200}")
    return verdict


def faults(path: Path, package: Package) -> list[str]:
    """List where a package is not what the statement beside it says, or that there is none."""
    try:
        return verify(path, known, package).wrong if (known := of(path)) else ["there is none"]
    except ForgeError as error:
        return [str(error)]


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], we: str, they: str
) -> list[str]:
    """List the keys whose values differ, a line each; `we` and `they` say whose value is which."""
    return [
        one_line(f"{key}: {we} {ours.get(key, 'nothing')}, {they} {theirs.get(key, 'nothing')}")
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def _claims(data: dict[str, Any]) -> dict[str, Any]:
    """Collect all that a statement says of its package, by name; a digest by `KIND NAME`."""
    (subject,) = data["subject"]
    definition, details = (data["predicate"][key] for key in ("buildDefinition", "runDetails"))
    parameters = dict(definition["externalParameters"])
    claims = {"name": subject["name"], "sha256": subject["digest"]["sha256"]}
    claims |= {f"variant {key}": value for key, value in parameters.pop("variant").items()}
    tables = [data, subject, subject["digest"], data["predicate"], definition, details,
              details["builder"], parameters["recipe"]]  # fmt: skip
    claims["keys"] = " ".join(sorted(key for table in tables for key in table))
    claims |= {"recipe": parameters.pop("recipe")["name"], **parameters}
    claims |= details["builder"]["version"] | details["metadata"]
    claims |= {"builder": details["builder"]["id"], "buildType": definition["buildType"]}
    for entry in definition["resolvedDependencies"]:
        if unknown := entry.keys() - {"name", "uri", "digest", "annotations"}:
            raise ValueError(f"a dependency has an unknown key, {min(unknown)}")
        notes = dict(entry["annotations"])
        claim = f"{notes.pop('kind')} {entry.get('uri') or entry['name']}"
        if claims.setdefault(claim, entry["digest"]) != entry["digest"]:
            raise ValueError(f"{claim} has two digests")
        claims |= {f"{claim} {key}": value for key, value in notes.items()}
        if entry.get("uri") and entry.get("name"):
            claims[f"{claim} as"] = entry["name"]
    return claims

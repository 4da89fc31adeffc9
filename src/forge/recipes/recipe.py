# SPDX-License-Identifier: BSD-3-Clause
"""One recipe: what it requires, which sources and patches it reads, and a digest of them all."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packageurl import PackageURL

from forge.bases import DIGEST_KEY, Base
from forge.errors import ForgeError
from forge.files import digest_tree, sha256_file
from forge.recipes.render import render
from forge.sources.cache import PYPI_URL, Source

REQUIREMENT_KINDS = ("build", "host", "run")


@dataclass
class Recipe:
    """One recipe folder, rendered for a base.

    `requirements` are its specs by kind, `needs` the names in them, `all_needs` those and what its
    tests install. `sources` are rendered source mappings, `extra` the recipe's own section.
    """

    name: str
    path: Path
    version: str
    requirements: dict[str, list[str]]
    needs: set[str]
    all_needs: set[str]
    sources: list[dict[str, Any]]
    extra: dict[str, Any]
    output_names: set[str]

    @classmethod
    def read(cls, path: Path, base: Base) -> Recipe:
        """Raises ForgeError if it does not render, has no content digest, or names no file."""
        outputs = [rendered["recipe"] for rendered in render(path, base, "none")]
        if not outputs:
            raise ForgeError(f"{path} yields no package on the {base.name} base")
        requirements: dict[str, list[str]] = {kind: [] for kind in REQUIREMENT_KINDS}
        tested_with: set[str] = set()
        sources: list[dict[str, Any]] = []
        for data in outputs:
            for section in [data, *data.get("staging_caches", [])]:
                for kind, specs in requirements.items():
                    new = map(_match_spec, section.get("requirements", {}).get(kind, []))
                    specs += [spec for spec in new if spec not in specs]
                sources += [s for s in section.get("source", []) if s not in sources]
            for test in data.get("tests", []):
                for specs in test.get("requirements", {}).values():
                    tested_with |= set(map(package_name, specs))
            if DIGEST_KEY not in data["build"].get("variant", {}).get("use_keys", []):
                why = "without it an edited recipe would not be rebuilt"
                raise ForgeError(f"{path}: add {DIGEST_KEY} to every build.variant.use_keys; {why}")
        names = {data["package"]["name"] for data in outputs}
        needs = {package_name(spec) for specs in requirements.values() for spec in specs} - names
        version, extra = str(outputs[0]["package"]["version"]), outputs[0].get("extra", {})
        recipe = cls(
            path.parent.name, path, version, requirements, needs, needs | (tested_with - names),
            sources, extra, names,
        )  # fmt: skip
        for file in recipe.local_files():
            if not file.exists():
                raise ForgeError(f"{path} names {file}, which does not exist")
        return recipe

    def local_files(self) -> list[Path]:
        """The patches and local sources that it names."""
        names = [patch for source in self.sources for patch in source.get("patches", [])]
        names += [source["path"] for source in self.sources if "path" in source]
        return [(self.path.parent / name).resolve() for name in names]

    def content(self) -> str:
        """The digest of everything that the recipe says and reads from this repository."""
        total = hashlib.sha256(digest_tree(self.path.parent).encode())
        for file in self.local_files():
            digest = digest_tree(file) if file.is_dir() else sha256_file(file)
            total.update(f"{file.name} {digest}".encode())
        return total.hexdigest()[:16]


def _match_spec(requirement: Any) -> str:
    """A rendered requirement as a match spec: a pin mapping becomes the name that it pins."""
    if isinstance(requirement, dict):
        requirement = next(iter(requirement.values()))
    return str(requirement["name"] if isinstance(requirement, dict) else requirement)


def package_name(spec: str) -> str:
    """The package name of a match spec."""
    return re.split(r"[\s=<>!~\[]", spec.strip(), maxsplit=1)[0].rsplit("::", 1)[-1]


def purls_of(recipe: Recipe) -> list[PackageURL]:
    """The package URLs in a recipe's extra section. Raises ForgeError for an invalid one."""
    try:
        return [PackageURL.from_string(text) for text in recipe.extra.get("purls", [])]
    except ValueError as error:
        raise ForgeError(f"{recipe.path}: extra.purls: {error}") from None


def sources_of(recipe: Recipe) -> list[Source]:
    """The files that a recipe needs. Raises ForgeError for one without sha256 or package URL."""
    return [source_of(recipe, data) for data in recipe.sources if "path" not in data]


def source_of(recipe: Recipe, data: dict[str, Any]) -> Source:
    """One rendered source mapping as a source to fetch. Raises ForgeError like sources_of."""
    if "git" in data:
        if not re.fullmatch("[0-9a-f]{40}", str(data.get("rev", ""))):
            raise ForgeError(f"{recipe.path}: a git source needs rev, a full commit: {data}")
        return Source(data["git"], "", commit=data["rev"])
    if "url" not in data or "sha256" not in data:
        raise ForgeError(f"{recipe.path}: a source needs url and sha256: {data}")
    url, *mirrors = [data["url"]] if isinstance(data["url"], str) else data["url"]
    by_file = {purl.qualifiers.get("file_name"): purl for purl in purls_of(recipe)}
    source = Source(url, data["sha256"], by_file.get(url.rsplit("/", 1)[1]), tuple(mirrors))
    if url.startswith(PYPI_URL) and source.purl is None:
        raise ForgeError(
            f"{recipe.path}: add pkg:pypi/NAME@VERSION?file_name={source.file_name} to extra.purls"
        )
    return source

# SPDX-License-Identifier: BSD-3-Clause
"""One recipe: what it requires, which sources and patches it reads, and a digest of them all."""

import hashlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

import yaml
from packageurl import PackageURL

from forge.bases import DIGEST_KEY, Base
from forge.conda.local import CONTENT_HASH
from forge.conda.package import is_plain
from forge.errors import ForgeError, one_line
from forge.files import digest_tree, read_text, require_file
from forge.recipes.render import render
from forge.sources import patching
from forge.sources.archives import unpack
from forge.sources.cache import PYPI_URL, Source, SourceCache

# The top-level key and all lines up to the next one, with the comments between them.
EXTRA = re.compile(rb"(?m)^extra:.*(?:\n(?![^\s#]).*)*\n?")
REQUIREMENT_KINDS = ("build", "host", "run")


class NoPackage(ForgeError):
    """All that a recipe yields is skipped, by the variants."""


class Recipe:
    """One recipe folder, rendered for a base.

    `requirements` are its specs by kind, `needs` the names in them, `all_needs` those and what its
    tests install. `sources` are rendered source mappings, `extra` the recipe's own section.
    `content` is the digest of everything that it reads from this repository, but for `extra`:
    a new record of what a package was proven to do is no reason to build it again. Raises
    ForgeError if it does not render, has no digest or another build string, or lacks a file.
    """

    def __init__(self, path: Path, base: Base) -> None:  # noqa: C901 (reads and checks)
        self.name, self.path = path.parent.name, path
        require_file(path)
        outputs = [rendered["recipe"] for rendered in render(path, base, "none")]
        if not outputs:
            raise NoPackage(f"{path} yields no package on the {base.name} base")
        self.version = str(outputs[0]["package"]["version"])
        self.extra: dict[str, Any] = outputs[0].get("extra", {})
        self.output_names = {data["package"]["name"] for data in outputs}
        self.requirements: dict[str, list[str]] = {kind: [] for kind in REQUIREMENT_KINDS}
        self.sources: list[dict[str, Any]] = []
        tested_with: list[str] = []
        for data in outputs:
            for section in [data, *data.get("staging_caches", [])]:
                for kind, specs in self.requirements.items():
                    new = map(_match_spec, section.get("requirements", {}).get(kind, []))
                    specs += [spec for spec in new if spec not in specs]
                self.sources += [s for s in section.get("source", []) if s not in self.sources]
            for test in data.get("tests", []):
                wanted = itertools.chain(*test.get("requirements", {}).values())
                tested_with += map(_match_spec, wanted)
            if DIGEST_KEY not in data["build"].get("variant", {}).get("use_keys", []):
                why = "without it an edited recipe would not be rebuilt"
                raise ForgeError(f"{path}: add {DIGEST_KEY} to every build.variant.use_keys; {why}")
            name, build = data["package"]["name"], data["build"]["string"]
            if not (CONTENT_HASH.search(build) and build.startswith(base.base_tag)):
                form = "${{ base_tag }}...h${{ hash }}_${{ build_number }}"
                raise ForgeError(f"{path}: {name}'s build string {build!r:.200} is not {form}")
        built_with = itertools.chain(*self.requirements.values())
        self.needs = set(map(package_name, built_with)) - self.output_names
        self.all_needs = self.needs | (set(map(package_name, tested_with)) - self.output_names)
        for source in self.sources:
            if not is_plain(target := str(source.get("target_directory") or "here")):
                raise ForgeError(f"{path}: target_directory {target!a:.80} leads out of the source")
        for file in self.local_files():
            if not os.path.exists(file):  # noqa: PTH110 (Path's raises where a name is too long)
                raise ForgeError(f"{path} names {file}, which does not exist")
        root = path.parents[2]
        contents = {path.parent.resolve() / path.name: without_extra(path.read_bytes())}
        digests = [
            f"{file.name} {digest_tree(file, root, contents=contents)}\n"
            for file in self.files_read()
        ]
        self.content = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]

    def files_read(self) -> list[Path]:
        """List what the content digest covers: its folder, patches and local sources, each once."""
        return list(dict.fromkeys([self.path.parent.resolve(), *self.local_files()]))

    def local_files(self) -> list[Path]:
        """List the patches and local sources that it names.

        A folder of patches counts by these, so that an edit of a report builds nothing anew.
        """
        names = [source["path"] for source in self.sources if "path" in source]
        try:
            files = [file for source in self.sources for file in patches_of(self, source)]
            paths = [(self.path.parent / name).resolve() for name in names]
            return [*files, *(path for path in paths if not is_patch_folder(path))]
        except (ValueError, OSError) as error:  # a NUL in a name, or one that is too long
            raise ForgeError(f"{self.path}: a patch or path: {error!s:.200}") from None


def without_extra(recipe: bytes) -> bytes:
    """Return the text of a recipe.yaml without its `extra` section, which no build reads."""
    return EXTRA.sub(b"", recipe)


def packages_in(path: Path) -> set[str]:
    """List the packages that a recipe.yaml names, whatever is skipped. Raises ForgeError."""
    try:
        data = yaml.safe_load(read_text(path))
        parts = [part for part in data.get("outputs", [data]) if "package" in part]
        return {part["package"]["name"] for part in parts}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise ForgeError(f"{path} is not a recipe: {one_line(str(error))}") from None


def is_patch_folder(path: Path) -> bool:
    """Return whether a folder holds patches, and beside them nothing but their reports."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else []
    patches = [name for name in names if name.endswith(".patch")]
    reports = [name for name in names if name.endswith(".report.md")]
    return bool(patches) and len(patches) + len(reports) == len(names)


def patches_of(recipe: Recipe, source: dict[str, Any]) -> list[Path]:
    """List the patches of a rendered source mapping: those it names, or those in its folder."""
    names = source.get("patches", [])
    found = (recipe.path.parent / source.get("path", "none")).glob("*.patch")
    return [(recipe.path.parent / name).resolve() for name in names or sorted(found)]


def patched(recipe: Recipe, source: dict[str, Any]) -> dict[str, Any]:
    """Find the source that `source`'s patches change: for a folder of patches, the recipe's wheel.
    rattler-build does not unpack a wheel: the build script applies them to what it installed."""
    if source.get("patches") or not patches_of(recipe, source):
        return source
    return next(data for data in recipe.sources if str(data.get("url")).endswith(".whl"))


def prepare(
    recipe: Recipe, source: dict[str, Any], cache: SourceCache, folder: Path, whole: bool = True
) -> str:
    """Put one fetched source where a build in `folder` finds it, and try its patches.

    If not `whole`, only the files that these touch. Returns what is wrong with them, or nothing.
    Raises ForgeError for a source that is unfit.
    """
    files, changed = patches_of(recipe, source), patched(recipe, source)
    names = patching.touched("\n".join(map(read_text, files)))
    if changed is not source:
        tree = folder / "wheel"
        unpack(cache.path(source_of(recipe, changed)), tree, names)
    elif "path" in source:
        tree = recipe.path.parent / source["path"]
        tree = tree if tree.is_dir() else tree.parent
    else:
        packed = "file_name" in source  # rattler-build leaves an archive with a name as it is
        tree = cache.prefill(source_of(recipe, source), folder, None if whole else names, packed)
    return patching.apply(tree, files) if files else ""


def _match_spec(requirement: Any) -> str:
    """Turn a rendered requirement into a match spec: a pin mapping into the name that it pins."""
    if isinstance(requirement, dict):
        requirement = next(iter(requirement.values()))
    return str(requirement["name"] if isinstance(requirement, dict) else requirement)


def package_name(spec: str) -> str:
    """Return the package name of a match spec."""
    return re.split(r"[\s=<>!~\[]", spec.strip(), maxsplit=1)[0].rsplit("::", 1)[-1]


def purls_of(recipe: Recipe) -> list[PackageURL]:
    """Parse the package URLs in a recipe's extra section. Raises ForgeError for an invalid one."""
    try:
        return [PackageURL.from_string(text) for text in recipe.extra.get("purls", [])]
    except (ValueError, TypeError, AttributeError) as error:
        raise ForgeError(f"{recipe.path}: extra.purls: {error!s:.300}") from None


def sources_of(recipe: Recipe) -> list[Source]:
    """List a recipe's sources to fetch. Raises ForgeError for one without sha256 or package URL."""
    return [source_of(recipe, data) for data in recipe.sources if "path" not in data]


def source_of(recipe: Recipe, data: dict[str, Any]) -> Source:
    """Turn a rendered source mapping into a source to fetch. Raises ForgeError like sources_of."""
    if "git" in data:
        if not re.fullmatch("[0-9a-f]{40}", str(data.get("rev", ""))):
            raise ForgeError(f"{recipe.path}: a git source needs rev, a full commit: {data!s:.200}")
        return Source(data["git"], "", commit=data["rev"])
    if "url" not in data or "sha256" not in data:
        raise ForgeError(f"{recipe.path}: a source needs url and sha256: {data!s:.200}")
    url, *mirrors = [data["url"]] if isinstance(data["url"], str) else data["url"]
    by_file = {purl.qualifiers.get("file_name"): purl for purl in purls_of(recipe)}
    source = Source(url, data["sha256"], by_file.get(url.rsplit("/", 1)[1]), tuple(mirrors))
    if url.startswith(PYPI_URL) and source.purl is None:
        raise ForgeError(
            f"{recipe.path}: add pkg:pypi/NAME@VERSION?file_name={source.file_name} to extra.purls"
        )
    return source

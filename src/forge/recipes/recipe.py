# SPDX-License-Identifier: BSD-3-Clause
"""One recipe: its requirements, sources and patches, and a digest of its content."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from packageurl import PackageURL

from forge.bases import DIGEST_KEY, Base
from forge.conda.local import CONTENT_HASH
from forge.conda.package import is_plain
from forge.conda.solve import parse_package_name
from forge.errors import ForgeError, one_line
from forge.files import digest_tree, read_text, require_file
from forge.recipes.render import render
from forge.sources import patching
from forge.sources.archives import unpack
from forge.sources.cache import PYPI_URL, Source, SourceCache

# The top-level key `extra` and all lines up to the next top-level key, including comments.
EXTRA = re.compile(rb"(?m)^extra:.*(?:\n(?![^\s#]).*)*\n?")
REQUIREMENT_KINDS = ("build", "host", "run")

Data = dict[str, Any]


class NoPackage(ForgeError):
    """The variants skip every output of a recipe."""


class Recipe:
    """One recipe folder, rendered for a base.

    Attributes:
        name: The name of the folder.
        path: Its recipe.yaml.
        version: The version of its first output.
        extra: The recipe's `extra` section.
        output_names: The names of its packages.
        requirements: Match specs of all outputs and staging caches, by kind: build, host, run.
        needs: The names of the packages in `requirements`, except for the recipe's own packages.
        all_needs: `needs`, and the names of the packages that the recipe's tests install.
        sources: The rendered source mappings.
        content: A digest of all files of this repository that the recipe reads. The section `extra`
            is left out, because it does not change a package.

    Raises:
        ForgeError: The recipe does not render, a file that it names is missing, a target_directory
            is not a plain path, an output's build string does not have the required form, or an
            output does not use the variant key DIGEST_KEY.
        NoPackage: The variants skip every output.
    """

    def __init__(self, path: Path, base: Base) -> None:
        self.path = path
        self.name = path.parent.name
        require_file(path)
        outputs = [rendered["recipe"] for rendered in render(path, base, "none")]
        if not outputs:
            raise NoPackage(f"{path} yields no package on the {base.name} base")
        self.version = str(outputs[0]["package"]["version"])
        self.extra: Data = outputs[0].get("extra", {})
        self.output_names = {output["package"]["name"] for output in outputs}
        self.requirements: dict[str, list[str]] = {kind: [] for kind in REQUIREMENT_KINDS}
        self.sources: list[Data] = []
        self.needs: set[str] = set()
        test_needs: set[str] = set()
        for output in outputs:
            for section in [output, *output.get("staging_caches", [])]:
                self._add_section(section)
            for test in output.get("tests", []):
                for requirements in test.get("requirements", {}).values():
                    test_needs |= _package_names(map(_match_spec, requirements))
            self._require_build_string(output, base)
        for specs in self.requirements.values():
            self.needs |= _package_names(specs)
        self.needs -= self.output_names
        self.all_needs = self.needs | (test_needs - self.output_names)
        self._require_sources()
        self.content = self._digest_content()

    def _add_section(self, section: Data) -> None:
        """Add the requirements and sources of an output or a staging cache."""
        requirements = section.get("requirements", {})
        for kind, specs in self.requirements.items():
            for requirement in requirements.get(kind, []):
                spec = _match_spec(requirement)
                if spec not in specs:
                    specs.append(spec)
        for source in section.get("source", []):
            if source not in self.sources:
                self.sources.append(source)

    def _require_build_string(self, output: Data, base: Base) -> None:
        """Raise ForgeError if an output does not use DIGEST_KEY or its build string is wrong."""
        name = output["package"]["name"]
        build = output["build"]["string"]
        use_keys = output["build"].get("variant", {}).get("use_keys", [])
        if DIGEST_KEY not in use_keys:
            reason = "without it, an edited recipe would not be built again"
            raise ForgeError(
                f"{self.path}: add {DIGEST_KEY} to every build.variant.use_keys; {reason}"
            )
        if not CONTENT_HASH.search(build) or not build.startswith(base.base_tag):
            form = "${{ base_tag }}...h${{ hash }}_${{ build_number }}"
            raise ForgeError(f"{self.path}: {name}'s build string {build!r:.200} is not {form}")

    def _require_sources(self) -> None:
        """Raise ForgeError if a target_directory is not plain, or if a local file is missing."""
        for source in self.sources:
            target = str(source.get("target_directory") or "here")
            if not is_plain(target):
                reason = "is not a plain path inside the source"
                raise ForgeError(f"{self.path}: target_directory {target!a:.80} {reason}")
        for file in self.local_files():
            # Path.exists would raise an error for a name that is too long.
            if not os.path.exists(file):  # noqa: PTH110 (see above)
                raise ForgeError(f"{self.path} names {file}, which does not exist")

    def _digest_content(self) -> str:
        root = self.path.parents[2]
        recipe_file = self.path.parent.resolve() / self.path.name
        contents = {recipe_file: remove_extra(self.path.read_bytes())}
        digest = hashlib.sha256()
        for file in self.files_read():
            tree = digest_tree(file, root, contents=contents)
            digest.update(f"{file.name} {tree}\n".encode())
        return digest.hexdigest()[:16]

    def files_read(self) -> list[Path]:
        """List the paths that the content digest covers: the folder, patches and local sources."""
        files = [self.path.parent.resolve(), *self.local_files()]
        return list(dict.fromkeys(files))

    def local_files(self) -> list[Path]:
        """List the patches and local sources that the recipe names.

        A folder of patches is not listed itself, only its patches. Otherwise an edited report in
        that folder would change the digest.

        Raises:
            ForgeError: A name has a NUL or is too long.
        """
        patches: list[Path] = []
        local: list[Path] = []
        try:
            for source in self.sources:
                patches += list_patches(self, source)
                if "path" not in source:
                    continue
                path = (self.path.parent / source["path"]).resolve()
                if not _is_patch_folder(path):
                    local.append(path)
        except (ValueError, OSError) as error:
            raise ForgeError(f"{self.path}: a patch or path: {error!s:.200}") from None
        return patches + local


def remove_extra(recipe: bytes) -> bytes:
    """Return the text of a recipe.yaml without its `extra` section, which no build reads."""
    return EXTRA.sub(b"", recipe)


def list_packages(path: Path) -> set[str]:
    """Return the unrendered names of all packages in a recipe.yaml, including skipped ones.

    Raises:
        ForgeError: The file is not a recipe.
    """
    try:
        data = yaml.safe_load(read_text(path))
        names = set()
        for output in data.get("outputs", [data]):
            if "package" in output:
                names.add(output["package"]["name"])
        return names
    except (yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise ForgeError(f"{path} is not a recipe: {one_line(str(error))}") from None


def _is_patch_folder(path: Path) -> bool:
    """Return whether a path is a folder that contains only patches and their reports."""
    if not path.is_dir():
        return False
    names = [file.name for file in path.iterdir()]
    has_patches = any(name.endswith(".patch") for name in names)
    return has_patches and all(name.endswith((".patch", ".report.md")) for name in names)


def list_patches(recipe: Recipe, source: Data) -> list[Path]:
    """List the patches that a rendered source names. If it names none, list those in its `path`."""
    folder = recipe.path.parent
    names = source.get("patches", [])
    if names:
        return [(folder / name).resolve() for name in names]
    local = folder / source.get("path", "none")
    return [path.resolve() for path in sorted(local.glob("*.patch"))]


def find_patched_source(recipe: Recipe, source: Data) -> Data:
    """Return the source to which the patches of `source` are applied.

    Usually, that is `source` itself. If `source` is a folder of patches, the patches are applied to
    the recipe's wheel. rattler-build does not unpack wheels, so the build script applies the
    patches after it has installed the wheel.

    Raises:
        ForgeError: `source` is a folder of patches, but the recipe has no wheel.
    """
    if source.get("patches") or not list_patches(recipe, source):
        return source
    for other in recipe.sources:
        if str(other.get("url")).endswith(".whl"):
            return other
    raise ForgeError(f"{recipe.path}: {source.get('path')} has patches, but no source is a wheel")


def prepare(
    recipe: Recipe,
    source: Data,
    cache: SourceCache,
    folder: Path,
    unpack_all: bool = True,
) -> str:
    """Put a fetched source where a build finds it, and check that its patches apply.

    A local source stays where it is.

    Args:
        recipe: The recipe.
        source: One of its rendered source mappings.
        cache: The cache with the source.
        folder: The build's folder for sources.
        unpack_all: Unpack all files. If False, unpack only the files that the patches change. Of
            a wheel, only these files are unpacked in both cases.

    Returns:
        The reason why a patch does not apply, or "".

    Raises:
        ForgeError: The source has changed, or cannot be unpacked.
    """
    patches = list_patches(recipe, source)
    patched_source = find_patched_source(recipe, source)
    text = "\n".join(map(read_text, patches))
    changed_files = patching.touched(text)
    if patched_source is not source:
        tree = folder / "wheel"
        wheel = cache.path(parse_source(recipe, patched_source))
        unpack(wheel, tree, changed_files)
    elif "path" in source:
        tree = recipe.path.parent / source["path"]
        if not tree.is_dir():
            tree = tree.parent
    else:
        tree = cache.prefill(
            parse_source(recipe, source),
            folder,
            None if unpack_all else changed_files,
            # rattler-build does not unpack archives with a `file_name`.
            "file_name" in source,
        )
    if not patches:
        return ""
    return patching.apply(tree, patches)


def _match_spec(requirement: Any) -> str:
    """Turn a rendered requirement into a match spec, or a pin into the name of its package."""
    if isinstance(requirement, dict):
        requirement = next(iter(requirement.values()))
    if isinstance(requirement, dict):
        requirement = requirement["name"]
    return str(requirement)


def _package_names(specs: Iterable[str]) -> set[str]:
    return {parse_package_name(spec) for spec in specs}


def parse_purls(recipe: Recipe) -> list[PackageURL]:
    """Parse the package URLs in a recipe's `extra.purls`. Raise ForgeError if one is invalid."""
    purls = recipe.extra.get("purls", [])
    try:
        return [PackageURL.from_string(purl) for purl in purls]
    except (ValueError, TypeError, AttributeError) as error:
        raise ForgeError(f"{recipe.path}: extra.purls: {error!s:.300}") from None


def list_sources(recipe: Recipe) -> list[Source]:
    """List the sources of a recipe that have to be fetched.

    Raises:
        ForgeError: A file lacks its URL or its sha256, a git source lacks a full commit, a file on
            PyPI lacks its package URL, or a package URL is invalid.
    """
    sources = []
    for source in recipe.sources:
        if "path" not in source:
            sources.append(parse_source(recipe, source))
    return sources


def parse_source(recipe: Recipe, source: Data) -> Source:
    """Convert a rendered source mapping to a Source. Raise ForgeError as list_sources does."""
    if "git" in source:
        commit = str(source.get("rev", ""))
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ForgeError(
                f"{recipe.path}: a git source needs rev, a full commit: {source!s:.200}"
            )
        return Source(source["git"], "", commit=commit)
    if "url" not in source or "sha256" not in source:
        raise ForgeError(f"{recipe.path}: a source needs url and sha256: {source!s:.200}")
    urls = source["url"]
    if isinstance(urls, str):
        urls = [urls]
    url, *mirrors = urls
    purls = {purl.qualifiers.get("file_name"): purl for purl in parse_purls(recipe)}
    file_name = url.rsplit("/", 1)[1]
    parsed = Source(
        url,
        source["sha256"],
        purls.get(file_name),
        tuple(mirrors),
    )
    if url.startswith(PYPI_URL) and parsed.purl is None:
        purl = f"pkg:pypi/NAME@VERSION?file_name={parsed.file_name}"
        raise ForgeError(f"{recipe.path}: add {purl} to extra.purls")
    return parsed

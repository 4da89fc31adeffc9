# SPDX-License-Identifier: BSD-3-Clause
"""What moves together: relations between our versions, as upstream's own files state them.

None is written down here. What a package requires of another is read from its metadata on PyPI
(torch's wheel names triton, vLLM's and torchvision's name torch), which commit of another project
it is made for from its source (torch's names AOTriton's), what our recipes and stacks allow from
them. Which torch AMD builds with an SDK is what its index lists.
"""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from packageurl import PackageURL
from packaging.utils import canonicalize_name
from rattler import MatchSpec, Version, VersionSpec

from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import read_text
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, package_name, purls_of, sources_of
from forge.sources.cache import Progress, Source, SourceCache
from forge.upkeep import upstream

HOLDS, BROKEN, UNKNOWN, NOTE = "holds", "broken", "not checked", "note"
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
# a commit is named in build files and manifests, not in data
LARGEST_NAMING_FILE = 1 << 18
AMD_WHEELS = "https://stable.repo.amd.com/rocm/whl-next/torch/"


@dataclass(frozen=True)
class Relation:
    """One relation: `text` says between what and by which source; `state` is one of those above."""

    state: str
    text: str


def project_of(recipe: Recipe) -> PackageURL | None:
    """The package on PyPI that a recipe packages, if its extra.purls name one."""
    return next((purl for purl in purls_of(recipe) if purl.type == "pypi"), None)


def stated(recipes: RecipeSet, moved: set[str], cache: SourceCache) -> Iterator[Relation]:
    """What metadata and recipes say of the recipes `moved`; `recipes` are the bumped ones."""
    yield from declared(recipes, moved, cache)
    yield from allowed(recipes, moved)


def in_sources(
    before: RecipeSet, after: RecipeSet, moved: set[str], cache: SourceCache, progress: Progress
) -> Iterator[Relation]:
    """What sources name, and AMD's index lists, for the recipes `moved`."""
    yield from named_commits(before, after, cache, progress)
    if moved & {"pytorch", "rocm-sdk"} and {"pytorch", "rocm-sdk"} <= set(after.recipes):
        yield built_by_amd(after.recipes["pytorch"].version, after.recipes["rocm-sdk"].version)


def declared(recipes: RecipeSet, moved: set[str], cache: SourceCache) -> Iterator[Relation]:
    """What packages require of each other by their metadata on PyPI."""
    ours = {
        canonicalize_name(purl.name): recipe
        for recipe in recipes.recipes.values()
        if (purl := project_of(recipe))
    }
    for project, recipe in ours.items():
        if recipe.name not in moved and not recipes.direct_needs(recipe.name) & moved:
            continue
        files = [cache.path(s) for s in sources_of(recipe) if s.purl]
        try:
            found = upstream.requirements(project, recipe.version, files)
        except NotAttempted as error:
            yield Relation(UNKNOWN, f"what {recipe.name} {recipe.version} requires: {error}")
            continue
        for requirement in found:
            other = ours.get(canonicalize_name(requirement.name))
            if other is None or not requirement.specifier or not {recipe.name, other.name} & moved:
                continue
            holds = requirement.specifier.contains(other.version, prereleases=True)
            yield Relation(
                HOLDS if holds else BROKEN,
                f"{recipe.name} {recipe.version} requires {requirement.name}"
                f"{requirement.specifier} (its metadata on PyPI); {other.name} {other.version}",
            )


def allowed(recipes: RecipeSet, moved: set[str]) -> Iterator[Relation]:
    """What the requirements of our recipes and stacks say against a version; no word otherwise."""
    versions = {out: recipes.recipes[name].version for name in moved & set(recipes.recipes)
                for out in recipes.recipes[name].output_names}  # fmt: skip
    said: dict[str, set[str]] = {}
    for name, recipe in recipes.recipes.items():
        for rendered in recipes.render(recipe.path, "none"):
            data = rendered["recipe"]
            for section in [data, *data.get("staging_caches", [])]:
                for kind in ("build", "host", "run", "run_constraints"):
                    specs = section.get("requirements", {}).get(kind, [])
                    said.setdefault(f"recipes/{name}", set()).update(
                        spec for spec in specs if isinstance(spec, str)
                    )
    for manifest in sorted(recipes.project.root.glob("stacks/*/pixi.toml")):
        try:
            wanted = set(dependencies(tomllib.loads(read_text(manifest))))
        except tomllib.TOMLDecodeError as error:
            raise ForgeError(f"stacks/{manifest.parent.name}/pixi.toml: {error}") from None
        said[f"stacks/{manifest.parent.name}"] = wanted
    for who, specs in said.items():
        for spec in sorted(s for s in specs if package_name(s) in versions):
            version, wanted = versions[package_name(spec)], MatchSpec(spec).version
            if wanted and not VersionSpec(wanted).matches(Version(version)):
                yield Relation(BROKEN, f"{who} has {spec}; {package_name(spec)} {version}")


def dependencies(table: dict[str, Any]) -> Iterator[str]:
    """The specs of every `dependencies` table of a pixi.toml, those of its features too."""
    for key, value in table.items():
        if key == "dependencies":
            for name, spec in value.items():
                yield f"{name} {spec if isinstance(spec, str) else spec.get('version', '*')}"
        elif isinstance(value, dict):
            yield from dependencies(value)


def named_commits(
    before: RecipeSet, after: RecipeSet, cache: SourceCache, progress: Progress
) -> Iterator[Relation]:
    """Commits of other projects that a recipe uses: its source has to name them, too.

    A commit from variants.yaml is shared with another recipe and has to agree; one of the recipe's
    own is a note for whoever bumps.
    """
    variants = after.base.variants
    shared = {str(variants[key][0]): key for key in variants}
    for name, recipe in after.recipes.items():
        archives = [source for source in sources_of(recipe) if source.sha256]
        own = variants.get(commit_key(recipe), [])
        commits = used_commits(after, recipe) - set(own) - own_trees(recipe)
        old = before.recipes[name]
        if not (archives and commits) or (
            archives == [source for source in sources_of(old) if source.sha256]
            and commits <= used_commits(before, old)
        ):
            continue
        try:
            named = commits_in(archives, commits, cache, progress)
        except NotAttempted as error:
            yield Relation(
                UNKNOWN, f"whether {name}'s source names {' and '.join(commits)}: {error}"
            )
            continue
        for commit in sorted(commits):
            key = shared.get(commit, "")
            what = f"{commit} ({key} in variants.yaml)" if key else commit
            if commit in named:
                yield Relation(HOLDS, f"{name} {recipe.version}: its source names {what}")
            else:
                text = f"{name} {recipe.version}: its source does not name {what}"
                hint = "" if key else f": see what it names instead, and edit recipes/{name}"
                yield Relation(BROKEN if key else NOTE, text + hint)


def commit_key(recipe: Recipe) -> str:
    """The key of variants.yaml for the commit of a recipe's own tag, where others need it."""
    return f"{recipe.name.replace('-', '_')}_commit"


def own_trees(recipe: Recipe) -> set[str]:
    """The hash of its tag's tree, where a recipe has it as `tree` in its context."""
    return set(re.findall(r"^  tree: ([0-9a-f]{40})$", recipe.path.read_text(), re.M))


def used_commits(recipes: RecipeSet, recipe: Recipe) -> set[str]:
    """Every full commit in a rendered recipe."""
    return set(COMMIT.findall(json.dumps(recipes.render(recipe.path, "none"))))


def commits_in(
    archives: list[Source], commits: Iterable[str], cache: SourceCache, progress: Progress
) -> set[str]:
    """Which of `commits` the text files of source archives name."""
    wanted, found = [commit.encode() for commit in commits], set()
    for source in archives:
        path = cache.fetch(source, progress)
        if not tarfile.is_tarfile(path):
            continue
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.size <= LARGEST_NAMING_FILE:
                    stream: Any = archive.extractfile(member)
                    text = stream.read()
                    found |= {commit.decode() for commit in wanted if commit in text}
    return found


def built_by_amd(torch: str, sdk: str) -> Relation:
    """Whether AMD's index lists a wheel of this torch built with this SDK. A word, no condition."""
    try:
        names = upstream.links(AMD_WHEELS)
    except NotAttempted as error:
        return Relation(UNKNOWN, f"whether AMD builds torch {torch} with ROCm {sdk}: {error}")
    pairs = set(re.findall(r"torch-([\d.]+)\+rocm([\d.]+)-", "\n".join(names)))
    if (torch, sdk) in pairs:
        return Relation(HOLDS, f"AMD builds torch {torch} with ROCm {sdk} ({AMD_WHEELS})")
    with_sdk = ", ".join(sorted(t for t, s in pairs if s == sdk)) or "none"
    return Relation(NOTE, f"AMD builds no torch {torch} with ROCm {sdk}, but {with_sdk}")


def require(relations: list[Relation], force: bool) -> None:
    """Raise Refused when one is broken, unless `force`."""
    broken = [relation.text for relation in relations if relation.state == BROKEN]
    if broken and not force:
        raise Refused(
            "refused, nothing was changed:\n  " + "\n  ".join(broken) + "\n"
            "Move what belongs together in one go: --with PKG=VERSION; --force goes on without"
        )

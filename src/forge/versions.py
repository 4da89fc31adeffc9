# SPDX-License-Identifier: BSD-3-Clause
"""Versions: what upstream has released, what it is built with, and whether ours fit together.

Where releases are listed follows from the recipe's first package URL: one of PyPI means pip's
index, one of GitHub the repository's tags.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from rattler import MatchSpec, VersionSpec
from rattler import Version as CondaVersion
from unearth import Link

from forge.conda.scratch import cache_folder, scratch
from forge.conda.solve import parse_package_name
from forge.envs.manifest import Manifest
from forge.errors import ForgeError, NotAttempted
from forge.files import read_text
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, list_sources, parse_purls
from forge.sources import git
from forge.sources.archives import unpack
from forge.sources.cache import Progress
from forge.sources.download import Downloader

# A line `ARG NAME=VERSION` of a Dockerfile.
ARGUMENT = re.compile(r'^ARG (\w+)="?v?([^\s"+]+)', re.M)
# An upstream's releases: each version, and why it was yanked; empty if it was not.
Releases = dict[Version, str]


@dataclass(frozen=True)
class Row:
    """What upstream has released of a recipe.

    Attributes:
        recipe: The recipe.
        newest: The newest release, neither yanked nor a pre-release; empty if none is known.
        state: "newer" than ours, "unreachable", or empty.
        note: Where the releases are listed, or what is wrong.
    """

    recipe: Recipe
    newest: str
    state: str
    note: str


def outdated(recipes: Iterable[Recipe]) -> Iterator[Row]:
    """Yield what upstream has released of each recipe."""
    downloader = Downloader()
    for recipe in recipes:
        yield _make_row(downloader, recipe)


def _make_row(downloader: Downloader, recipe: Recipe) -> Row:
    try:
        listed = releases(downloader, recipe)
    except NotAttempted as error:
        return Row(recipe, "", "unreachable", str(error))
    note = listed_at(recipe) or "no upstream of its own"
    current = Version(recipe.version)
    reason = listed.get(current)
    if reason:
        note = f"{current} was yanked: {reason}"
    usual = []
    for version, yank_reason in listed.items():
        if not yank_reason and not version.is_prerelease:
            usual.append(version)
    if not usual:
        return Row(recipe, "", "", note)
    newest = max(usual)
    return Row(recipe, str(newest), "newer" if newest > current else "", note)


def listed_at(recipe: Recipe) -> str:
    """Return where a recipe's upstream lists its releases; empty if it has none of its own.

    Returns:
        "PyPI", or the URL of a repository.
    """
    purls = parse_purls(recipe)
    if not purls:
        return ""
    purl = purls[0]
    if purl.type == "github":
        return f"https://github.com/{purl.namespace}/{purl.name}"
    # the kernels compiled from vLLM's source have another version than vLLM
    if purl.version in (None, recipe.version):
        return "PyPI"
    return ""


def releases(downloader: Downloader, recipe: Recipe) -> Releases:
    """List every release of a recipe's upstream. Raises NotAttempted."""
    listed: Releases = {}
    for text, reason in _list_files(downloader, recipe):
        try:
            version = Version(text)
        except ValueError:
            continue
        if version.local:  # somebody's own build, in a folder of wheels
            continue
        # A release is yanked if all of its files are.
        is_available = listed.get(version) == ""
        listed[version] = "" if is_available else reason
    return listed


def _list_files(downloader: Downloader, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the version of each file or tag, and why the file was yanked."""
    place = listed_at(recipe)
    if not place:
        return
    purl = parse_purls(recipe)[0]
    if place == "PyPI":
        for file in downloader.files_of(purl.name):
            yield file.version or "", _yank_reason(file.link)
    else:
        for version in versions_in(git.list_tags(place), purl.version or "", recipe.version):
            yield version, ""


def _yank_reason(link: Link) -> str:
    """Return why a file was yanked; empty if it was not."""
    if not link.is_yanked:
        return ""
    # the reason is empty or True where upstream gives none
    reason = link.yank_reason if isinstance(link.yank_reason, str) else ""
    return reason or "no reason given"


def versions_in(tags: Iterable[str], example: str, version: str) -> list[str]:
    """List the versions in tags.

    A tag may leave out zeros at the end: AOTriton's 0.12b is 0.12.0, TheRock's therock-10.0 10.0.0.

    Args:
        tags: The tags.
        example: The tag of a known version.
        version: That version.
    """
    in_tag = version
    while in_tag not in example and in_tag.endswith(".0"):
        in_tag = in_tag.removesuffix(".0")
    before, separator, after = example.partition(in_tag)
    if not separator:
        return []
    pattern = re.compile(re.escape(before) + r"(\d[\w.+-]*?)" + re.escape(after))
    versions = []
    for tag in tags:
        match = pattern.fullmatch(tag)
        if match:
            versions.append(match[1])
    return versions


def next_set(recipes: RecipeSet, rows: Iterable[Row], progress: Progress) -> Iterator[str]:
    """Yield a line for each version that upstream builds its newest releases with.

    Only recipes with `extra.built_with` say where these versions are.

    Args:
        recipes: All recipes.
        rows: What upstream has released.
        progress: Shows a download.
    """
    for row in rows:
        recipe = row.recipe
        if not row.newest or not recipe.extra.get("built_with"):
            continue
        try:
            with scratch(cache_folder()) as folder:
                tree = Path(folder, "tree")
                _unpack_release(recipe, row.newest, tree, progress)
                yield from pairings(recipes, recipe, row.newest, tree)
        except ForgeError as error:
            yield f"what {recipe.name} {row.newest} is built with cannot be read: {error}"


def _unpack_release(recipe: Recipe, release: str, tree: Path, progress: Progress) -> None:
    """Unpack the files that `extra.built_with` names, from another release of a recipe's source.

    No hash is compared, because no build uses them.
    """
    source = list_sources(recipe)[0]
    url = source.url.replace(recipe.version, release)
    archive = tree.with_name("archive")
    downloader = Downloader()
    downloader.download(downloader.locate(url, source.purl), archive, progress)
    unpack(archive, tree, set(recipe.extra["built_with"]))


def pairings(recipes: RecipeSet, recipe: Recipe, release: str, tree: Path) -> Iterator[str]:
    """Yield a line for each package in `extra.built_with`: upstream's version, and ours.

    Args:
        recipes: All recipes.
        recipe: The recipe with `extra.built_with`: packages by the ARG of their version, by file.
        release: A release of the recipe's upstream.
        tree: The files of that release.
    """
    for name, packages in recipe.extra["built_with"].items():
        file = tree / name
        text = read_text(file) if file.exists() else ""
        stated = dict(ARGUMENT.findall(text))
        for argument, package in packages.items():
            ours = recipes.recipes[recipes.owner[package]].version
            upstream = stated.get(argument, "nothing")
            comparison = "as" if upstream == ours else "but"
            yield (
                f"{name} of {recipe.name} {release} says {argument}={upstream}, "
                f"{comparison} ours is {package} {ours}"
            )


def conflicts(recipes: RecipeSet) -> Iterator[str]:
    """Yield a line for each requirement of recipes and stacks that our versions do not satisfy."""
    versions: dict[str, str] = {}
    for recipe in recipes.recipes.values():
        versions |= dict.fromkeys(recipe.output_names, recipe.version)
    requirements = set()
    for name, recipe in recipes.recipes.items():
        for specs in recipe.requirements.values():
            requirements |= {(f"recipes/{name}", spec) for spec in specs}
    for path in recipes.project.root.glob("stacks/*/pixi.toml"):
        for specs in Manifest.load(path).environments.values():
            requirements |= {(f"stacks/{path.parent.name}", spec) for spec in specs}
    for dependent, spec in sorted(requirements):
        version = versions.get(parse_package_name(spec))
        required = MatchSpec(spec).version
        if not version or not required:
            continue
        if not VersionSpec(required).matches(CondaVersion(version)):
            yield f"{dependent} requires {spec}, but ours is {version}"

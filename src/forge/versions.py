# SPDX-License-Identifier: BSD-3-Clause
"""Find releases of upstreams, the versions they build with, and conflicts of our versions.

A recipe's first package URL determines where releases are looked up: on pip's index if it is a
package URL of PyPI, and among the tags of the repository if it is a package URL of GitHub.
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
# An upstream's releases: for each version, the reason why it was yanked; an empty string if not.
Releases = dict[Version, str]


@dataclass(frozen=True)
class Row:
    """The newest upstream release of a recipe, compared with our version.

    Attributes:
        recipe: The recipe.
        newest: The newest release that is neither yanked nor a pre-release; empty if unknown.
        state: "newer" if `newest` is newer than our version, "unreachable" if the releases cannot
            be listed, or empty.
        note: The place where the releases are listed, "no upstream of its own", why our version was
            yanked, or an error.
    """

    recipe: Recipe
    newest: str
    state: str
    note: str


def outdated(recipes: Iterable[Recipe]) -> Iterator[Row]:
    """Yield a Row for each recipe."""
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
    """Return the place where a recipe's upstream lists its releases.

    Returns:
        "PyPI", the URL of a repository, or an empty string if the package has no upstream of
        its own.
    """
    purls = parse_purls(recipe)
    if not purls:
        return ""
    purl = purls[0]
    if purl.type == "github":
        return f"https://github.com/{purl.namespace}/{purl.name}"
    # If the version in a purl is not the recipe's, the package is only a part of the project that
    # the purl names. For example, some kernels are compiled from vLLM's source.
    if purl.version in (None, recipe.version):
        return "PyPI"
    return ""


def releases(downloader: Downloader, recipe: Recipe) -> Releases:
    """Return all releases of a recipe's upstream. Raise NotAttempted if they cannot be listed."""
    listed: Releases = {}
    for text, reason in _list_files(downloader, recipe):
        try:
            version = Version(text)
        except ValueError:
            continue
        if version.local:
            # This is a local build in a folder of wheels, not a release.
            continue
        # A release is yanked if all of its files are.
        is_available = listed.get(version) == ""
        listed[version] = "" if is_available else reason
    return listed


def _list_files(downloader: Downloader, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the version of each file or tag, and the reason why the file was yanked, or ""."""
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
    """Return why a file was yanked; an empty string if it was not."""
    if not link.is_yanked:
        return ""
    # The reason is empty or True if upstream states none.
    reason = link.yank_reason if isinstance(link.yank_reason, str) else ""
    return reason or "no reason given"


def versions_in(tags: Iterable[str], example: str, version: str) -> list[str]:
    """List the versions that tags stand for, as the tags state them.

    A tag may omit zeros at the end of the version. For example, AOTriton's tag 0.12b stands for
    0.12.0, and TheRock's tag therock-10.0 stands for 10.0.0.

    Args:
        tags: The tags of a repository.
        example: The tag of a known version, which shows the form of the tags.
        version: The known version. If `example` does not contain it, even without zeros at its end,
            no version is listed.
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
    """Yield a line for each version that the newest releases of upstreams are built with.

    Only recipes with `extra.built_with` are included, since it names the files with these versions.
    If the files of a release cannot be read, a line states the reason.

    Args:
        recipes: All recipes.
        rows: The newest release of each recipe.
        progress: Shows the progress of a download.
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
            yield f"cannot read the versions that {recipe.name} {row.newest} is built with: {error}"


def _unpack_release(recipe: Recipe, release: str, tree: Path, progress: Progress) -> None:
    """Download a release of upstream, and unpack the files that `extra.built_with` names.

    The hash of the download is not checked, because no build uses it.
    """
    source = list_sources(recipe)[0]
    url = source.url.replace(recipe.version, release)
    archive = tree.with_name("archive")
    downloader = Downloader()
    downloader.download(downloader.locate(url, source.purl), archive, progress)
    unpack(archive, tree, set(recipe.extra["built_with"]))


def pairings(recipes: RecipeSet, recipe: Recipe, release: str, tree: Path) -> Iterator[str]:
    """Yield a line for each package in `extra.built_with`.

    The line states the version that upstream builds with, and the version of our package.

    Args:
        recipes: All recipes.
        recipe: The recipe. Its `extra.built_with` maps files to the ARGs in them, and each ARG to
            our package whose version the ARG states.
        release: A release of the recipe's upstream.
        tree: The files of that release.

    Raises:
        ForgeError: No recipe yields a package that `extra.built_with` names.
    """
    for name, packages in recipe.extra["built_with"].items():
        file = tree / name
        text = read_text(file) if file.exists() else ""
        stated = dict(ARGUMENT.findall(text))
        for argument, package in packages.items():
            if package not in recipes.owner:
                raise ForgeError(f"no recipe yields {package}, which extra.built_with names")
            ours = recipes.recipes[recipes.owner[package]].version
            upstream = stated.get(argument, "nothing")
            conjunction = "and" if upstream == ours else "but"
            yield (
                f"{name} of {recipe.name} {release} has {argument}={upstream}, "
                f"{conjunction} our {package} is {ours}"
            )


def conflicts(recipes: RecipeSet) -> Iterator[str]:
    """Yield a line for each requirement of recipes and stacks that our packages do not satisfy."""
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

# SPDX-License-Identifier: BSD-3-Clause
"""Versions: what upstream has released, what it is built with, and whether ours go together.

Where releases are listed follows from the recipe's first package URL: one of PyPI means pip's
index, one of GitHub the repository's tags.
"""

import contextlib
import re
from collections import namedtuple
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from packaging.version import Version
from rattler import MatchSpec, VersionSpec
from rattler import Version as CondaVersion

from forge.conda.package import cache_folder, scratch
from forge.envs.manifest import Manifest
from forge.errors import ForgeError, NotAttempted
from forge.files import read_text
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, package_name, purls_of, sources_of
from forge.sources import git
from forge.sources.archives import unpack
from forge.sources.cache import Progress
from forge.sources.download import Downloader

Row = namedtuple("Row", "recipe newest state note")  # state: newer, unreachable or empty


def outdated(recipes: Iterable[Recipe]) -> Iterator[Row]:
    """Yield the newest release of each recipe's upstream, neither yanked nor a pre-release."""
    downloader = Downloader()
    for recipe in recipes:
        state, note = "", listed_at(recipe) or "no upstream of its own"
        try:
            found = releases(downloader, recipe)
        except NotAttempted as error:
            found, state, note = {}, "unreachable", str(error)
        ours = Version(recipe.version)
        if why := found.get(ours):
            note = f"{ours} was yanked: {why}"
        usual = (v for v, yanked in found.items() if not (yanked or v.is_prerelease))
        if (newest := max(usual, default=None)) and newest > ours:
            state = "newer"
        yield Row(recipe, str(newest or ""), state, note)


def listed_at(recipe: Recipe) -> str:
    """Say where a recipe's upstream lists its releases; empty if it has none of its own."""
    for purl in purls_of(recipe):
        if purl.type == "github":
            return f"https://github.com/{purl.namespace}/{purl.name}"
        # the kernels compiled from vLLM's source have another version than vLLM
        return "PyPI" if purl.version in (None, recipe.version) else ""
    return ""


def releases(downloader: Downloader, recipe: Recipe) -> dict[Version, str]:
    """List every release of a recipe's upstream, and why it was yanked. Raises NotAttempted."""
    found: dict[Version, str] = {}
    for text, why in _listed(downloader, recipe):
        with contextlib.suppress(ValueError):
            version = Version(text)
            if not version.local:  # that is somebody's own build, in a wheel folder
                found[version] = found.get(version, why) and why  # if all of its files were
    return found


def _listed(downloader: Downloader, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the version of each file or tag, and why the file was yanked."""
    place = listed_at(recipe)
    if place == "PyPI":
        for file in downloader.files_of(purls_of(recipe)[0].name):
            # the reason is empty or True where upstream gives none
            reason = file.link.yank_reason if isinstance(file.link.yank_reason, str) else ""
            yield file.version or "", (reason or "no reason given") if file.link.is_yanked else ""
    elif place:
        example = purls_of(recipe)[0].version or ""
        for version in versions_in(git.tags(place), example, recipe.version):
            yield version, ""


def versions_in(tags: Iterable[str], example: str, version: str) -> list[str]:
    """List the versions that `tags` stand for, given that `example` stands for `version`.

    A tag may leave out zeros at the end: AOTriton's 0.12b is 0.12.0, TheRock's therock-10.0 10.0.0.
    """
    written = version
    while written not in example and written.endswith(".0"):
        written = written.removesuffix(".0")
    before, found, after = example.partition(written)
    pattern = re.compile(re.escape(before) + r"(\d[\w.+-]*?)" + re.escape(after))
    return [match[1] for match in map(pattern.fullmatch, tags if found else ()) if match]


def next_set(recipes: RecipeSet, rows: Iterable[Row], progress: Progress) -> Iterator[str]:
    """Yield what the newest releases are built with, where a recipe says where that stands."""
    for row in rows:
        recipe = row.recipe
        if row.newest and recipe.extra.get("built_with"):
            try:
                with scratch(cache_folder()) as folder:
                    # no build uses it: no hash is asked for
                    source, file, tree = sources_of(recipe)[0], Path(folder, "x"), Path(folder, "y")
                    url = source.url.replace(recipe.version, row.newest)
                    downloader = Downloader()
                    downloader.download(downloader.locate(url, source.purl), file, progress)
                    unpack(file, tree, set(recipe.extra["built_with"]))
                    yield from pairings(recipes, recipe, row.newest, tree)
            except ForgeError as error:
                yield f"what {recipe.name} {row.newest} is built with cannot be read: {error}"


def pairings(recipes: RecipeSet, recipe: Recipe, release: str, tree: Path) -> Iterator[str]:
    """Yield what each ARG in the files of `extra.built_with` says, and which package ours is."""
    for name, packages in recipe.extra["built_with"].items():
        text = read_text(tree / name) if (tree / name).exists() else ""
        stated = dict(re.findall(r'^ARG (\w+)="?v?([^\s"+]+)', text, re.M))
        for argument, package in packages.items():
            ours = recipes.recipes[recipes.owner[package]].version
            theirs = stated.get(argument, "nothing")
            says = f"{'as' if theirs == ours else 'but'} ours is {package} {ours}"
            yield f"{name} of {recipe.name} {release} says {argument}={theirs}, {says}"


def conflicts(recipes: RecipeSet) -> Iterator[str]:
    """Yield what recipes and stacks require of our packages that our versions do not satisfy."""
    versions = {out: r.version for r in recipes.recipes.values() for out in r.output_names}
    said = {f"recipes/{n}": {*chain(*r.requirements.values())} for n, r in recipes.recipes.items()}
    for path in recipes.project.root.glob("stacks/*/pixi.toml"):
        said[f"stacks/{path.parent.name}"] = {*chain(*Manifest.load(path).environments.values())}
    for who, spec in sorted((who, spec) for who, specs in said.items() for spec in specs):
        version, wanted = versions.get(package_name(spec)), MatchSpec(spec).version
        if version and wanted and not VersionSpec(wanted).matches(CondaVersion(version)):
            yield f"{who} requires {spec}, but ours is {version}"

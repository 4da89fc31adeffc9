# SPDX-License-Identifier: BSD-3-Clause
"""`forge outdated`: what upstream has released since, and what the newest releases pair."""

import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from forge.errors import NotAttempted
from forge.files import read_text
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe
from forge.sources.cache import SourceCache
from forge.sources.download import Downloader, Progress
from forge.upkeep import patches, upstream
from forge.upkeep.bump import draft_of, every_source, pairings, pin, set_version, why_none


@dataclass(frozen=True)
class Row:
    """One line of `forge outdated`. `newest` is empty where upstream did not answer; see `note`."""

    name: str
    version: str
    newest: str
    asked: str
    note: str

    @property
    def outdated(self) -> bool:
        """Whether upstream has a newer release."""
        return bool(self.newest) and Version(self.newest) > Version(self.version)


def next_set(
    project: Project, recipes: RecipeSet, rows: list[Row], progress: Progress
) -> Iterator[str]:
    """What the newest releases pair, where a recipe says that upstream states it, and the patches
    that are there until a newer release has them."""
    for row in rows:
        recipe = recipes.recipes[row.name]
        if row.newest and recipe.extra.get("built_with"):
            try:
                with tempfile.TemporaryDirectory() as folder:
                    draft = draft_of(project, Path(folder))
                    set_version(draft, recipe, row.newest)
                    newest = every_source(draft).recipes[row.name]
                    pin(SourceCache(project), recipe, newest, progress)
                    newest = every_source(draft).recipes[row.name]
                    yield from pairings(project, recipes, newest, all_of_them=True)
            except NotAttempted as error:
                yield f"{row.name} {row.newest}: unreachable: {error}"
        for path in patches.all_patches(project) if row.outdated else ():
            text = read_text(path)
            if path.parent.name == row.name and "\nUpstream-Status: Backport " in text:
                until = re.findall("^Remove-When: (.+)$", text, re.M)
                yield f"{path.relative_to(project.root)} falls away when {until[0]}"


def outdated(recipes: Iterable[Recipe]) -> Iterator[Row]:
    """The newest release of each recipe's upstream, and whether ours was yanked."""
    downloader = Downloader()
    for recipe in recipes:
        version, asked = recipe.version, upstream.listed_at(recipe)
        note = "" if asked else why_none(recipe)
        try:
            releases = upstream.releases(downloader, recipe) if asked else []
        except NotAttempted as error:
            releases, note = [], f"unreachable: {error}"
        if why := {release.version: release.yanked for release in releases}.get(version):
            note = f"{version} was yanked: {why}"
        last = upstream.newest(releases)
        yield Row(recipe.name, version, last.version if last else "", asked, note)

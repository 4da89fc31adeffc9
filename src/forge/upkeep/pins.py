# SPDX-License-Identifier: BSD-3-Clause
"""Pins move safely: `forge bump` and `forge outdated`.

A bump edits a draft of the repository. What the draft says is rendered, downloaded, hashed and held
against upstream's own statements, and only then written. A bump that ends in the middle of that is
completed by the same command.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from forge.errors import ForgeError, NotAttempted, Refused
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, sources_of
from forge.sources import git as git_sources
from forge.sources.cache import Progress, SourceCache
from forge.upkeep import patches, relations
from forge.upkeep.draft import Draft, committed_hashes, every_source, origins, version_key
from forge.upkeep.upstream import Place, Release


@dataclass
class Bump:
    """What a bump did or found: `to_do` is left to people, `changed` are files."""

    moves: list[str] = field(default_factory=list)
    relations: list[relations.Relation] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    changed: list[Path] = field(default_factory=list)


def place_of(recipes: RecipeSet, recipe: Recipe) -> Place | str:
    """Where a recipe's releases are listed, or why there are none."""
    if sources := sources_of(recipe):
        return Place.of(sources[0].url, sources[0].purl or relations.project_of(recipe))
    key = version_key(recipe)
    leaders = [r.name for r in recipes.recipes.values() if version_key(r) == key and sources_of(r)]
    return f"goes with {leaders[0]}" if key and leaders else "is made here"


def choose(recipe: Recipe, place: Place, wanted: str | None) -> str | None:
    """The release to take: the one that is named, or the newest usual one; None if that is here.

    Raises ForgeError for a version that upstream does not have or has yanked, NotAttempted when
    it cannot be asked.
    """
    try:
        releases = place.releases(recipe.version)
    except NotAttempted as error:
        raise NotAttempted(f"{recipe.name}: {place} cannot be asked: {error}") from None
    if wanted is None:
        newest = newest_of(releases)
        return newest.version if newest and newest.key > Version(recipe.version) else None
    try:
        found = [release for release in releases if release.key == Version(wanted)]
    except InvalidVersion:
        raise ForgeError(f"{wanted!r} is no version") from None
    if not found:
        last = ", ".join(release.version for release in releases[-5:]) or "none"
        raise ForgeError(f"there is no {recipe.name} {wanted}: {place} ends with {last}")
    if found[0].yanked:
        raise Refused(f"{recipe.name} {wanted} was yanked by upstream: {found[0].yanked}")
    return found[0].version


def newest_of(releases: list[Release]) -> Release | None:
    return max((r for r in releases if r.usual), key=lambda release: release.key, default=None)


def bump(
    project: Project, wanted: dict[str, str | None], progress: Progress, force: bool = False
) -> Bump:
    """Move packages together, each to the version that is named or else to its newest.

    Raises ForgeError when something is refused or out of reach; then no file was changed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as head:
        result, draft = Bump(), Draft(project, Path(folder))
        before, cache = every_source(project), SourceCache(project)
        known, chosen = origins(before) | committed_hashes(project, Path(head)), []
        for name, version in wanted.items():
            recipe = before.recipes[name]
            place = place_of(before, recipe)
            if isinstance(place, str):
                raise ForgeError(f"{name} is not bumped, it {place}")
            new = choose(recipe, place, version)
            if new is None:
                result.moves.append(f"{name} {recipe.version}: {place} has nothing newer")
                continue
            draft.set_version(recipe, new)
            chosen.append(name)
        after = draft.recipes()
        moved = {n for n, r in after.recipes.items() if r.version != before.recipes[n].version}
        for name in sorted(moved | set(chosen)):
            old, new = before.recipes[name], after.recipes[name]
            draft.tell(old, new)
            arrow = f" -> {new.version}" if name in moved else ": the bytes are the recipe's"
            result.moves.append(f"{name} {old.version}{arrow}")
        # before gigabytes are downloaded for something that is refused
        said = list(relations.stated(after, moved, cache))
        relations.require(said, force)
        for name in chosen:
            if f'== "{after.recipes[name].version}"' in before.recipes[name].path.read_text():
                # the recipe had that release already, with its hash
                known |= {s.origin: s.digest for s in sources_of(after.recipes[name])}
            repin(draft, after.recipes[name], known, cache, progress)
        after = draft.recipes()
        if any(relation.state == relations.UNKNOWN for relation in said):
            said = list(relations.stated(after, moved, cache))  # an sdist is here now
        said += relations.in_sources(before, after, moved, cache, progress)
        relations.require(said, force)
        result.relations = [*said, *patched(draft.project, after, moved, progress)]
        result.changed = draft.changed()
        result.to_do = list(to_do(draft.project, after, moved))
        stacks = [path.parent.name for path in result.changed if path.name == "pixi.toml"]
        result.to_do += [f"stacks/{name}: ./forge lock {name}" for name in stacks]
        draft.write()
        return result


def repin(
    draft: Draft, recipe: Recipe, known: dict[str, str], cache: SourceCache, progress: Progress
) -> None:
    """Download the sources of a bumped recipe and put their hashes into it.

    Raises Refused for a file whose hash is known, and now another one.
    """
    file = f"recipes/{recipe.name}/recipe.yaml"
    for source in sources_of(recipe):
        if source.commit:
            continue
        found = cache.pin(source, progress).sha256
        expected = known.get(source.origin, found)
        if found != expected:
            raise Refused(
                f"ALARM: upstream replaced {source.origin}: its sha256 was {expected}, now it is "
                f"{found}. Nothing was changed. Find out why before you trust either"
            )
        draft.edit(file, source.sha256, found)
        place, key = Place.of(source.url, None), relations.commit_key(recipe)
        if place.kind == "git" and key in draft.recipes().base.variants:
            commit = git_sources.tags(place.name).get(place.example)
            if commit is None:
                raise Refused(f"{place.name} has no tag {place.example}")
            draft.set_variant(key, commit)
            for tree in relations.own_trees(recipe):
                draft.edit(file, tree, git_sources.tree(place.name, commit))


def patched(
    project: Project, after: RecipeSet, moved: set[str], progress: Progress
) -> Iterator[relations.Relation]:
    """Whether the patches of bumped recipes still apply. No condition: mending them comes next."""
    chosen = {name: after.recipes[name] for name in sorted(moved)}
    for found in patches.check(project, chosen, progress):
        state = relations.HOLDS if found.state == "applies" else relations.NOTE
        detail = f": {found.detail}" if found.detail else ""
        text = f"the {found.count} patches of {found.package}: {found.state}{detail}"
        yield relations.Relation(state, text)


def to_do(project: Project, after: RecipeSet, moved: set[str]) -> Iterator[str]:
    """What a bump leaves to people: words that speak of the old version."""
    for finding in patches.lint(project, after.recipes):
        if finding.split("/")[1] in moved:
            yield finding
    for name in sorted(moved):
        if key := version_key(after.recipes[name]):
            yield f"variants.yaml: the reason above {key}"
        yield f"README.md: the row of {name} tells what was seen with the old version"


@dataclass(frozen=True)
class Row:
    """One line of `forge outdated`. `newest` is empty where nobody was asked; `note` says why."""

    name: str
    version: str
    newest: str
    asked: str
    note: str

    @property
    def outdated(self) -> bool:
        return bool(self.newest) and Version(self.newest) > Version(self.version)


def outdated(recipes: RecipeSet, names: Iterable[str]) -> Iterator[Row]:
    """The newest usual release of each package, and whether the one that is here was yanked."""
    for name in names:
        recipe = recipes.recipes[name]
        place = place_of(recipes, recipe)
        if isinstance(place, str):
            yield Row(name, recipe.version, "", "", place)
            continue
        try:
            releases = place.releases(recipe.version)
        except NotAttempted as error:
            yield Row(name, recipe.version, "", str(place), f"not asked: {error}")
            continue
        newest = newest_of(releases)
        here = next((r for r in releases if r.key == Version(recipe.version)), None)
        note = f"{recipe.version} is not listed" if here is None else ""
        note = f"{recipe.version} was yanked: {here.yanked}" if here and here.yanked else note
        yield Row(name, recipe.version, newest.version if newest else "", str(place), note)

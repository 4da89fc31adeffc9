# SPDX-License-Identifier: BSD-3-Clause
"""`forge bump`: recipes move to other releases.

A bump edits a copy of the recipes as text, so that comments and layout stay. What the copy says is
rendered, downloaded and hashed before any file of the checkout is written.
"""

import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version
from rattler import MatchSpec, VersionSpec
from rattler import Version as CondaVersion

from forge import bases
from forge.envs.manifest import Manifest
from forge.errors import ForgeError, Refused
from forge.files import read_text, sha256_file, write_text
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, package_name, sources_of
from forge.sources.archives import unpack
from forge.sources.cache import Source, SourceCache
from forge.sources.download import Downloader, Progress
from forge.upkeep import patches, upstream

VARIANTS = "variants.yaml"
# A recipe may name another file for each Python that it is built for, and each place it comes from.
EVERY = {
    "python": ["3.11.* *_cpython", "3.12.* *_cpython", "3.13.* *_cp313", "3.14.* *_cp314"],
    "sources_from": ["upstream", "pypi"],
}
# a version that variants.yaml holds; `version: ${{ version }}` of the package section is none
KEY = re.compile(r"^  version: \$\{\{ (?!version )(\w+) \}\}$", re.M)


@dataclass
class Bumped:
    """What a bump did: `changed` are files, `to_do` is left to people."""

    moves: list[str] = field(default_factory=list)
    changed: list[Path] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)


def every_source(project: Project) -> RecipeSet:
    """The recipes with the sources of every Python and place, whatever base builds them."""
    return RecipeSet(project, bases.load(project, "conda-forge", EVERY))


def bump(
    project: Project, recipes: RecipeSet, wanted: dict[str, str | None], progress: Progress
) -> Bumped:
    """Move recipes to the named versions, or to the newest where none is named.

    `recipes` are those of every_source. Raises ForgeError when something is refused or out of
    reach; no file was changed then. Interrupted, it is completed by calling it again.
    """
    result, cache, downloader = Bumped(), SourceCache(project), Downloader()
    with tempfile.TemporaryDirectory() as folder:
        draft = draft_of(project, Path(folder))
        before = {path: path.read_bytes() for path in _files(draft)}
        chosen = set()
        for name, version in wanted.items():
            recipe = recipes.recipes[name]
            new = choose(downloader, recipe, version)
            if new is None:
                result.moves.append(f"{name} {recipe.version} is the newest")
                continue
            set_version(draft, recipe, new)
            chosen.add(name)
        after = every_source(draft).recipes
        moved = {n for n, r in after.items() if r.version != recipes.recipes[n].version}
        for name in sorted(moved | chosen):
            pin(cache, recipes.recipes[name], after[name], progress)
            outcome = f" -> {after[name].version}" if name in moved else ": files verified"
            result.moves.append(f"{name} {recipes.recipes[name].version}{outcome}")
        result.to_do = list(to_do(project, every_source(draft), moved, progress))
        edited = [path for path in _files(draft) if path.read_bytes() != before[path]]
        result.changed = [project.root / path.relative_to(draft.root) for path in edited]
        for path, target in zip(edited, result.changed, strict=True):
            if target.read_bytes() != before[path]:
                raise Refused(f"{target} was edited meanwhile. Nothing was written: run it again")
        for path, target in zip(edited, result.changed, strict=True):
            write_text(target, path.read_text())
    return result


def draft_of(project: Project, folder: Path) -> Project:
    """The project with a copy of its recipes and variants in `folder`; the rest is linked."""
    shutil.copytree(project.root / "recipes", folder / "recipes")
    shutil.copy(project.root / VARIANTS, folder)
    for path in project.root.iterdir():
        if path.name not in ("recipes", VARIANTS):
            (folder / path.name).symlink_to(path)
    return Project(folder.resolve(), project.channel, project.build)


def _files(project: Project) -> list[Path]:
    """The files that a bump may write, in the order of writing: what holds a version comes last.

    A bump that was killed in between then finds the old version, and completes.
    """
    found = sorted(project.root.glob("recipes/*/recipe.yaml"))
    by_key = [path for path in found if KEY.search(read_text(path))]
    return [*by_key, project.root / VARIANTS, *(path for path in found if path not in by_key)]


def choose(downloader: Downloader, recipe: Recipe, wanted: str | None) -> str | None:
    """The release to move to: the wanted one or the newest; None if the recipe has the newest."""
    if not (place := upstream.listed_at(recipe)):
        raise ForgeError(f"{recipe.name} has no upstream of its own: {why_none(recipe)}")
    releases = upstream.releases(downloader, recipe)
    if wanted is None:
        newest = upstream.newest(releases)
        return newest.version if newest and newest.key > Version(recipe.version) else None
    found = next((release for release in releases if release.version == wanted), None)
    if not found:
        last = ", ".join(release.version for release in releases[-5:]) or "none"
        raise ForgeError(f"there is no {recipe.name} {wanted}: {place} ends with {last}")
    if found.yanked:
        raise Refused(f"{recipe.name} {wanted} was yanked by upstream: {found.yanked}")
    return found.version


def why_none(recipe: Recipe) -> str:
    """Why a recipe has no upstream of its own."""
    key = KEY.search(recipe.path.read_text())
    return f"it follows {key[1]} in {VARIANTS}" if key else "it is made here"


def set_version(project: Project, recipe: Recipe, new: str) -> None:
    """Write a version where a recipe has it: its context or variants.yaml, and `extra.purls`.

    Conditions on the old version become conditions on the new one, unless the recipe has some for
    it already (rocm-sdk keeps a release to go back to).
    """
    path = project.root / "recipes" / recipe.name / "recipe.yaml"
    text, old = path.read_text(), re.escape(recipe.version)
    found = KEY.search(text)
    if found and f'== "{new}"' not in text:
        text = re.sub(rf'([=!]= )"{old}"', rf'\g<1>"{new}"', text)
    text = re.sub(rf'^(  version: )"{old}"', rf'\g<1>"{new}"', text, flags=re.M)
    if new != recipe.version:
        text = re.sub(r"^(  build_number: )\d+", r"\g<1>0", text, flags=re.M)
    for purl in recipe.extra.get("purls", []):
        if f"@{recipe.version}?" in purl:
            text = text.replace(purl, purl.replace(recipe.version, new))
    path.write_text(text)
    variants = project.root / VARIANTS
    key = found[1] if found else recipe.name.replace("-", "_")
    value = rf'(?<=^{key}:\n  - )("?){old}("?)$'
    values, count = re.subn(value, rf"\g<1>{new}\g<2>", variants.read_text(), flags=re.M)
    if found and not count:
        raise ForgeError(f"{VARIANTS} has no {key} with one value")
    variants.write_text(values)


def pin(cache: SourceCache, old: Recipe, new: Recipe, progress: Progress) -> None:
    """Write the sha256 of its files into `new`. Raises Refused for a file that was replaced."""
    kept = {source.origin for source in sources_of(new)}
    stale = {source.sha256 for source in sources_of(old) if source.origin not in kept}
    for source in (source for source in sources_of(new) if source.sha256):
        found = _download(cache, source, progress)
        if source.sha256 not in stale and found != source.sha256:
            change = f"its sha256 was {source.sha256}, now it is {found}. Nothing was changed"
            raise Refused(f"ALARM: upstream replaced {source.origin}: {change}. Find out why")
        new.path.write_text(new.path.read_text().replace(source.sha256, found))


def _download(cache: SourceCache, source: Source, progress: Progress) -> str:
    """Download a file, keep it under its sha256, and return that. Raises Refused if damaged."""
    cache.folder.mkdir(parents=True, exist_ok=True)
    # nothing of an earlier try is used: bytes of two files would give the sha256 of neither
    with tempfile.TemporaryDirectory(dir=cache.folder) as folder:
        file = Path(folder, source.file_name)
        stated = cache.download(replace(source, sha256=""), file, progress)
        found = sha256_file(file)
        if stated and stated != found:
            wrong = f"{source.origin} has sha256 {found}, but pip's index states {stated}"
            raise Refused(f"{wrong}: damaged in transit, or tampered with. It was deleted")
        try:
            unpack(file, Path(folder, "tree"))
        except Refused as error:
            why = f"cut off, or an error page? {error}"
            raise Refused(f"{source.origin} is not a whole archive: {why}") from None
        target = cache.path(replace(source, sha256=found))
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
        return found


def to_do(
    project: Project, recipes: RecipeSet, moved: set[str], progress: Progress
) -> Iterator[str]:
    """What a bump leaves to people; `recipes` are the bumped ones."""
    yield from conflicts(recipes)
    chosen = {name: recipes.recipes[name] for name in sorted(moved)}
    for found in patches.check(project, chosen, progress):
        if found.state != "applies":
            yield f"patches/{found.package}: {found.state}: {found.detail}"
    for finding in patches.lint(project, recipes.recipes):
        if finding.split("/")[1] in moved:
            yield finding
    for name, recipe in chosen.items():
        rendered = str(recipes.render(recipe.path, "none"))
        for commit in sorted(set(re.findall(r"\b[0-9a-f]{40}\b", rendered))):
            yield f"recipes/{name} uses {commit}: is it right for {recipe.version}?"
        yield from pairings(project, recipes, recipe)
        if key := KEY.search(recipe.path.read_text()):
            yield f"{VARIANTS}: the reason above {key[1]}"
        yield f"README.md, CHANGELOG.md: {name} is {recipe.version}"


def pairings(
    project: Project, recipes: RecipeSet, recipe: Recipe, all_of_them: bool = False
) -> Iterator[str]:
    """What upstream builds a release with, where ours is another version, or everywhere.

    `extra.built_with` names a file of the first source, and our package for each ARG in it.
    """
    for name, packages in recipe.extra.get("built_with", {}).items():
        with tarfile.open(SourceCache(project).path(sources_of(recipe)[0])) as tar:
            member = next((m for m in tar if m.name.partition("/")[2] == name), None)
            file = tar.extractfile(member) if member else None
            text = file.read().decode() if file else ""
        stated = dict(re.findall(r'^ARG (\w+)="?v?([^\s"+]+)', text, re.M))
        for argument, package in packages.items():
            ours = recipes.recipes[recipes.owner[package]].version
            theirs, says = stated.get(argument, "nothing"), f"ours is {package} {ours}"
            if theirs != ours or all_of_them:
                where = f"{name} of {recipe.name} {recipe.version}"
                says = f"but {says}" if theirs != ours else f"as {says}"
                yield f"{where} says {argument}={theirs}, {says}"


def conflicts(recipes: RecipeSet) -> Iterator[str]:
    """What recipes and stacks require of our packages, where our versions do not satisfy it."""
    versions = {out: r.version for r in recipes.recipes.values() for out in r.output_names}
    said = {f"recipes/{n}": [*r.requirements.values()] for n, r in recipes.recipes.items()}
    for path in sorted(recipes.project.root.glob("stacks/*/pixi.toml")):
        stack = Manifest.load(path).environments().values()
        said[f"stacks/{path.parent.name}"] = [environment.specs for environment in stack]
    for who, lists in said.items():
        for spec in sorted({spec for specs in lists for spec in specs}):
            version, wanted = versions.get(package_name(spec)), MatchSpec(spec).version
            if version and wanted and not VersionSpec(wanted).matches(CondaVersion(version)):
                yield f"{who} requires {spec}, but ours is {version}"

# SPDX-License-Identifier: BSD-3-Clause
"""Recipes: find them, render them, order them, and decide by content what has to be built.

rattler-build skips a package when one of the same name, version and build string exists, and its
build string covers the variant only. So a `content_digest` variant is added: every recipe names it
under `build.variant.use_keys`, and with it the digest enters the `h1234567` part of the build
string that conda-forge's grammar already has.
"""

from __future__ import annotations

import contextlib
import graphlib
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from rattler_build import Stage0Recipe
from rattler_build.cli_api import build_recipes

from forge.bases import DIGEST_KEY, Base
from forge.channel.local import CONTENT_HASH, Channel, Output, Record
from forge.errors import ForgeError
from forge.files import digest_tree, sha256_file
from forge.project import Project
from forge.sources.cache import PYPI_URL, Source

REQUIREMENT_KINDS = ("build", "host", "run")


@dataclass
class Recipe:
    """One recipe folder, rendered for a base.

    `requirements` are its specs by kind, `needs` the names in them, `tests_need` names that only
    its tests install. `sources` are rendered source mappings, `extra` the recipe's own section.
    """

    name: str
    path: Path
    version: str
    requirements: dict[str, list[str]]
    needs: set[str]
    tests_need: set[str]
    sources: list[dict[str, Any]]
    extra: dict[str, Any]
    output_names: set[str]


@dataclass
class Step:
    """What `plan` decided for one recipe.

    `outputs` are Records when nothing is to be done; `superseded` tells that older builds are in
    the channel. `digest` is what the content digest is made of.
    """

    recipe: Recipe
    digest: dict[str, str]
    digest_value: str
    outputs: list[Output]
    reason: str = "up to date"
    wanted: bool = False
    superseded: bool = False


class RecipeSet:
    """All recipes of a project, rendered for one base, in build order.

    A recipe of a name that the base has by itself is left out and listed in `given`.
    Raises ForgeError for an unreadable recipe, a missing patch or a dependency cycle.
    """

    def __init__(self, project: Project, base: Base, names: Set[str] = frozenset()) -> None:
        self.project, self.base = project, base
        paths = sorted((project.root / "recipes").glob("*/recipe.yaml"))
        if not paths:
            raise ForgeError(f"{project.root / 'recipes'} holds no recipe")
        self.given = [path.parent.name for path in paths if path.parent.name in names]
        paths = [path for path in paths if path.parent.name not in names]
        found = {path.parent.name: self._read(path) for path in paths}
        self.owner = {out: name for name, r in found.items() for out in r.output_names}
        self.recipes = found
        graph = {name: self.direct_needs(name) for name in found}
        try:
            order = list(graphlib.TopologicalSorter(graph).static_order())
        except graphlib.CycleError as error:
            raise ForgeError(f"recipes need each other in a circle: {error.args[1]}") from None
        self.recipes = {name: found[name] for name in order}

    def render(self, path: Path, digest: str, number: int | None = None) -> list[dict[str, Any]]:
        """The outputs of one recipe.yaml in every variant, as rattler-build would build them.

        Returns mappings with `recipe` (rendered) and `build_configuration`. `number` overrides the
        recipe's build number, which an exact pin between outputs hashes too.
        """
        try:
            with warnings.catch_warnings(), _captured_stdout() as printed:
                warnings.simplefilter("ignore", DeprecationWarning)
                build_recipes([path], **self.base.arguments(digest, number), render_only=True)
        except Exception as error:
            raise ForgeError(f"{path} does not render: {_place(path) or error}") from None
        return json.loads(printed[0])

    def _read(self, path: Path) -> Recipe:
        variants = [rendered["recipe"] for rendered in self.render(path, "none")]
        if not variants:
            raise ForgeError(f"{path} yields no package on the {self.base.name} base")
        requirements: dict[str, list[str]] = {kind: [] for kind in REQUIREMENT_KINDS}
        tests_need = set()
        sources: list[dict[str, Any]] = []
        for data in variants:
            for section in [data, *data.get("staging_caches", [])]:
                for kind, specs in requirements.items():
                    new = [_text(spec) for spec in section.get("requirements", {}).get(kind, [])]
                    specs += [spec for spec in new if spec not in specs]
                sources += [s for s in section.get("source", []) if s not in sources]
            for test in data.get("tests", []):
                wanted = test.get("requirements", {})
                tests_need |= {
                    package_name(s) for kind in ("run", "build") for s in wanted.get(kind, [])
                }
            if DIGEST_KEY not in data["build"].get("variant", {}).get("use_keys", []):
                raise ForgeError(
                    f"{path}: add {DIGEST_KEY} to build.variant.use_keys of every output; "
                    "without it an edited recipe would not be rebuilt"
                )
        for file in _patch_files(path, sources):
            if not file.is_file():
                raise ForgeError(f"{path} names the patch {file}, which does not exist")
        for source in sources:
            if "path" in source and not (path.parent / source["path"]).exists():
                raise ForgeError(f"{path} names the source {source['path']}, which does not exist")
        names = {data["package"]["name"] for data in variants}
        return Recipe(
            name=path.parent.name,
            path=path,
            version=str(variants[0]["package"]["version"]),
            requirements=requirements,
            needs={package_name(spec) for specs in requirements.values() for spec in specs} - names,
            tests_need=tests_need - names,
            sources=sources,
            extra=variants[0].get("extra", {}),
            output_names=names,
        )

    def _content(self, recipe: Recipe) -> str:
        """The digest of everything that the recipe says and reads from this repository."""
        total = hashlib.sha256(digest_tree(recipe.path.parent).encode())
        for file in _patch_files(recipe.path, recipe.sources):
            total.update(f"{file.name} {sha256_file(file)}".encode())
        for source in recipe.sources:
            if "path" in source:
                local = recipe.path.parent / source["path"]
                read = digest_tree if local.is_dir() else sha256_file
                total.update(f"{local.name} {read(local)}".encode())
        return total.hexdigest()[:16]

    def plan(self, channel: Channel, rebuild: frozenset[str] = frozenset()) -> list[Step]:
        """What each recipe would yield, and whether and why it has to be built.

        A build is current when the channel's highest build number of its family has the content
        hash that is wanted now. Otherwise it gets the next number: a new build always wins the
        solve over the one it replaces, and no file name is ever used for two contents.
        """
        records, base_dists = channel.records(), self.base.dists()
        steps: dict[str, Step] = {}
        for name, recipe in self.recipes.items():
            digest = {"base": self.base.name, "content": self._content(recipe)}
            for needed in sorted(recipe.needs):
                ours = steps.get(self.owner.get(needed, ""))
                dists = [o.dist for o in ours.outputs] if ours else base_dists.get(needed, [])
                digest |= {f"needs {dist}": "" for dist in dists}
            key = hashlib.sha256(repr(sorted(digest.items())).encode()).hexdigest()[:16]
            step = Step(recipe, digest, f"{self.base.name}-{key}", [])
            self._decide(step, records, channel, name in rebuild)
            steps[name] = step
        return list(steps.values())

    def _outputs(self, step: Step, number: int | None = None) -> list[Output]:
        outputs, tag = [], self.base.build_prefix
        for rendered in self.render(step.recipe.path, step.digest_value, number):
            data = rendered["recipe"]
            build, name = data["build"]["string"], data["package"]["name"]
            if not (CONTENT_HASH.search(build) and build.startswith(tag)):
                raise ForgeError(
                    f"{step.recipe.path}: the build string {build!r} of {name} must be "
                    "${{ base_tag }}...h${{ hash }}_${{ build_number }}"
                )
            subdir = rendered["build_configuration"]["target_platform"]
            outputs.append(Output(name, str(data["package"]["version"]), build, subdir))
        return outputs

    def _decide(self, step: Step, records: list[Record], channel: Channel, rebuild: bool) -> None:
        step.outputs = self._outputs(step)
        found = [_newest(output, records) for output in step.outputs]
        superseded = [record for record in found if record]
        newest = max((record.number for record in superseded), default=-1)
        if newest >= 0 and newest != step.outputs[0].number:
            step.outputs = self._outputs(step, newest)
        if {output.dist for output in step.outputs} == {r.dist for r in superseded} and not rebuild:
            step.outputs = superseded
            return
        step.outputs = self._outputs(step, newest + 1) if superseded else step.outputs
        step.wanted, step.superseded = True, bool(superseded)
        if rebuild:
            step.reason = "rebuild asked for"
        elif len(superseded) < len(found):
            step.reason = "not in the channel"
        else:
            step.reason = _difference(channel.digest_of(superseded[0]), step.digest)

    def direct_needs(self, name: str) -> set[str]:
        """The recipes that one recipe builds, runs or is tested with."""
        recipe = self.recipes[name]
        return {self.owner[n] for n in recipe.needs | recipe.tests_need if n in self.owner}

    def levels(self) -> dict[str, int]:
        """The level of each recipe: it needs recipes of lower levels only, so one can be built
        beside the others of its level."""
        level: dict[str, int] = {}
        for name in self.recipes:
            level[name] = 1 + max((level[other] for other in self.direct_needs(name)), default=-1)
        return level

    def lacking(self, name: str) -> list[str]:
        """What one recipe needs and neither a recipe nor a base on this machine gives.

        Nothing for conda-forge, whose packages are the solver's business.
        """
        there, recipe = self.base.dists(), self.recipes[name]
        if not there:
            return []
        needed = recipe.needs | recipe.tests_need
        return sorted(n for n in needed - self.owner.keys() - there.keys() if n[:2] != "__")

    def dependencies(self, names: set[str]) -> set[str]:
        """`names` and every recipe that they build, run or are tested with, transitively."""
        result = set(names)
        for name in reversed(self.recipes):
            result |= self.direct_needs(name) if name in result else set()
        return result

    def dependents(self, names: set[str]) -> set[str]:
        """`names` and every recipe that builds or runs against one of them, transitively."""
        result = set(names)
        for name, recipe in self.recipes.items():
            if {self.owner[n] for n in recipe.needs if n in self.owner} & result:
                result.add(name)
        return result


@contextlib.contextmanager
def _captured_stdout() -> Iterator[list[str]]:
    """Collects what is written to file descriptor 1: rattler-build prints past sys.stdout."""
    printed: list[str] = []
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as capture:
        os.dup2(capture.fileno(), 1)
        try:
            yield printed
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            capture.seek(0)
            printed.append(capture.read().decode())


def _place(path: Path) -> str:
    """Where a recipe is no recipe: build_recipes says only that it failed to parse."""
    try:
        Stage0Recipe.from_file(path)
    except Exception as error:
        return str(error)
    return ""


def _newest(output: Output, records: list[Record]) -> Record | None:
    """The record of the highest build number among the builds that `output` would supersede."""
    found = [record for record in records if record.family == output.family]
    return max(found, key=lambda record: record.number, default=None)


def _difference(before: dict[str, str] | None, now: dict[str, str]) -> str:
    """Why the digest changed, in words."""
    if before is None:
        return "changed since the build in the channel"
    if before["content"] != now["content"]:
        return "recipe, script, patch or local source changed"
    gained = [key.removeprefix("needs ").rsplit("-", 2)[0] for key in now.keys() - before.keys()]
    return f"other {', '.join(sorted(gained))}" if gained else "variant values changed"


def _text(spec: Any) -> str:
    """A rendered requirement as a match spec: a pin mapping becomes the name that it pins."""
    if isinstance(spec, dict):
        inner = next(iter(spec.values()))
        return inner["name"] if isinstance(inner, dict) else str(inner)
    return spec


def package_name(spec: str) -> str:
    """The package name of a match spec."""
    return re.split(r"[\s=<>!~\[]", spec.strip(), maxsplit=1)[0].rsplit("::", 1)[-1]


def _patch_files(recipe: Path, sources: list[dict[str, Any]]) -> list[Path]:
    return [(recipe.parent / p).resolve() for s in sources for p in s.get("patches", [])]


def sources_of(recipe: Recipe) -> list[Source]:
    """The files that a recipe needs. Raises ForgeError for one without sha256 or package URL."""
    return [source_of(recipe, data) for data in recipe.sources if "path" not in data]


def purls_of(recipe: Recipe) -> list[PackageURL]:
    """The package URLs in a recipe's extra section. Raises ForgeError for what is none."""
    try:
        return [PackageURL.from_string(text) for text in recipe.extra.get("purls", [])]
    except ValueError as error:
        raise ForgeError(f"{recipe.path}: extra.purls: {error}") from None


def source_of(recipe: Recipe, data: dict[str, Any]) -> Source:
    """One rendered source mapping as a source to fetch. Raises ForgeError like sources_of."""
    if "git" in data:
        if not re.fullmatch("[0-9a-f]{40}", str(data.get("rev", ""))):
            raise ForgeError(f"{recipe.path}: a git source needs rev, a full commit, found {data}")
        return Source(data["git"], "", commit=data["rev"])
    if "url" not in data or "sha256" not in data:
        raise ForgeError(f"{recipe.path}: a source needs url and sha256, found {data}")
    url, *mirrors = [data["url"]] if isinstance(data["url"], str) else data["url"]
    by_file = {purl.qualifiers.get("file_name"): purl for purl in purls_of(recipe)}
    source = Source(url, data["sha256"], by_file.get(url.rsplit("/", 1)[1]), tuple(mirrors))
    if url.startswith(PYPI_URL) and source.purl is None:
        raise ForgeError(
            f"{recipe.path}: add pkg:pypi/NAME@VERSION?file_name={source.file_name} to extra.purls"
        )
    return source

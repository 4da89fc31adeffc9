# SPDX-License-Identifier: BSD-3-Clause
"""All recipes: find them, order them, and decide by content what has to be built.

rattler-build skips a package when one of the same name, version and build string exists, and its
build string covers the variant only. So a `content_digest` variant is added: every recipe names it
under `build.variant.use_keys`, and with it the digest enters the `h1234567` part of the build
string that conda-forge's grammar already has.
"""

import graphlib
import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.bases import Base
from forge.channel.local import CONTENT_HASH, Channel, Output, Record
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.recipe import Recipe
from forge.recipes.render import render

# What a plan says of a recipe. SKIPPED is what the run cannot attempt; see build.runner.skipped.
BUILD, UP_TO_DATE, SKIPPED = "build", "up-to-date", "skipped"


@dataclass
class Step:
    """What `plan` decided for one recipe.

    `digest` is what the content digest is made of. `outputs` are Records when up to date;
    `superseded` says whether older builds are in the channel.
    """

    recipe: Recipe
    digest: dict[str, str]
    outputs: Sequence[Output] = ()
    action: str = UP_TO_DATE
    reason: str = "up to date"
    superseded: bool = False

    @property
    def digest_value(self) -> str:
        """The value of the content_digest variant."""
        key = hashlib.sha256(repr(sorted(self.digest.items())).encode()).hexdigest()[:16]
        return f"{self.digest['base']}-{key}"


class RecipeSet:
    """All recipes of a project, rendered for one base, in build order.

    A recipe of a name in `provided` is left out: the base provides that package.
    Raises ForgeError for an unreadable recipe, a missing patch or a dependency cycle.
    """

    def __init__(self, project: Project, base: Base, provided: Set[str] = frozenset()) -> None:
        self.project, self.base = project, base
        paths = sorted((project.root / "recipes").glob("*/recipe.yaml"))
        if not paths:
            raise ForgeError(f"{project.root / 'recipes'} holds no recipe")
        self.provided = [path.parent.name for path in paths if path.parent.name in provided]
        read = [Recipe(path, base) for path in paths if path.parent.name not in provided]
        self.recipes = {recipe.name: recipe for recipe in read}
        self.owner = {output: recipe.name for recipe in read for output in recipe.output_names}
        graph = {name: self.direct_needs(name) for name in self.recipes}
        try:
            order = graphlib.TopologicalSorter(graph).static_order()
            self.recipes = {name: self.recipes[name] for name in order}
        except graphlib.CycleError as error:
            raise ForgeError(f"recipes depend on each other in a circle: {error.args[1]}") from None

    def render(self, path: Path, digest: str, number: int | None = None) -> list[dict[str, Any]]:
        """The outputs of one recipe.yaml on this base; see forge.recipes.render."""
        return render(path, self.base, digest, number)

    def plan(self, channel: Channel, rebuild: frozenset[str] = frozenset()) -> list[Step]:
        """What each recipe would yield, and whether and why it has to be built.

        A build is current when the channel's highest build number of its family has the content
        hash of now. Otherwise it gets the next number: a new build always wins the solve over the
        one it replaces, and no file name is ever used for two contents.
        """
        records, base_dists = channel.records(), self.base.dists()
        steps: dict[str, Step] = {}
        for name, recipe in self.recipes.items():
            digest = {"base": self.base.name, "content": recipe.content()}
            for needed in sorted(recipe.needs):
                ours = steps.get(self.owner.get(needed, ""))
                dists = [o.dist for o in ours.outputs] if ours else base_dists.get(needed, [])
                digest |= {f"needs {dist}": "" for dist in dists}
            steps[name] = Step(recipe, digest)
            self._decide(steps[name], records, channel, name in rebuild)
        return list(steps.values())

    def _outputs(self, step: Step, number: int | None = None) -> list[Output]:
        outputs = []
        for rendered in self.render(step.recipe.path, step.digest_value, number):
            data, subdir = rendered["recipe"], rendered["build_configuration"]["target_platform"]
            package, build = data["package"], data["build"]["string"]
            if not (CONTENT_HASH.search(build) and build.startswith(self.base.build_prefix)):
                name, form = package["name"], "${{ base_tag }}...h${{ hash }}_${{ build_number }}"
                raise ForgeError(
                    f"{step.recipe.path}: {name}'s build string {build!r} is not {form}"
                )
            outputs.append(Output(package["name"], str(package["version"]), build, subdir))
        return outputs

    def _decide(self, step: Step, records: list[Record], channel: Channel, rebuild: bool) -> None:
        outputs = self._outputs(step)
        families = [[r for r in records if r.family == output.family] for output in outputs]
        newest = [max(builds, key=lambda r: r.number) for builds in families if builds]
        number = max((record.number for record in newest), default=-1)
        if number >= 0 and number != outputs[0].number:
            outputs = self._outputs(step, number)
        if {output.dist for output in outputs} == {r.dist for r in newest} and not rebuild:
            step.outputs = newest
            return
        step.outputs = self._outputs(step, number + 1) if newest else outputs
        step.action, step.superseded = BUILD, bool(newest)
        step.reason = "rebuild requested" if rebuild else "not in the channel"
        if not rebuild and len(newest) == len(outputs):
            step.reason = _difference(channel.digest_of(newest[0]), step.digest)

    def direct_needs(self, name: str) -> set[str]:
        """The recipes that one recipe builds, runs or is tested with."""
        return {self.owner[n] for n in self.recipes[name].all_needs if n in self.owner}

    def missing(self, name: str) -> str:
        """One line about what a recipe needs that neither a recipe nor the base provides, or "".

        Always "" for conda-forge, whose packages are the solver's business.
        """
        if not (provided := self.base.dists()):
            return ""
        missing = self.recipes[name].all_needs - self.owner.keys() - provided.keys()
        names = ", ".join(sorted(name for name in missing if not name.startswith("__")))
        return f"the {self.base.name} base has no {names}" if names else ""

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
            if any(self.owner.get(needed) in result for needed in recipe.needs):
                result.add(name)
        return result


def _difference(before: dict[str, str] | None, now: dict[str, str]) -> str:
    """Why the digest changed, in words."""
    if before is None:
        return "changed since the build in the channel"
    if before["content"] != now["content"]:
        return "recipe, script, patch or local source changed"
    gained = [key.removeprefix("needs ").rsplit("-", 2)[0] for key in now.keys() - before.keys()]
    return f"other {', '.join(sorted(gained))}" if gained else "variant values changed"

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
from dataclasses import dataclass, field
from typing import Any

from forge import bases
from forge.conda.local import Channel, Output, Record
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.recipe import NoPackage, Recipe, packages_in
from forge.recipes.render import render

# What a plan says of a recipe. SKIPPED is what the run cannot attempt; see building.runner.skipped.
BUILD, UP_TO_DATE, SKIPPED = "build", "up-to-date", "skipped"
# A recipe may name another file for each Python that it is built for, and each place it comes from.
EVERY = {
    "python": ["3.11.* *_cpython", "3.12.* *_cpython", "3.13.* *_cp313", "3.14.* *_cp314"],
    "sources_from": ["upstream", "pypi"],
}


@dataclass
class Step:
    """What `plan` decided for one recipe.

    `digest` is what the content digest is made of. `outputs` are Records when up to date;
    `superseded` says whether older builds are in the channel. `rendered` is a mapping of
    rattler-build for each output.
    """

    recipe: Recipe
    digest: dict[str, str]
    outputs: Sequence[Output] = ()
    action: str = UP_TO_DATE
    reason: str = "up to date"
    superseded: bool = False
    rendered: list[dict[str, Any]] = field(default_factory=list)

    @property
    def digest_value(self) -> str:
        """The value of the content_digest variant: BASE-CONTENT-ALL.

        CONTENT is the recipe's own digest, with which `forge verify` compares a package.
        """
        key = hashlib.sha256(repr(sorted(self.digest.items())).encode()).hexdigest()[:16]
        return f"{self.digest['base']}-{self.digest['content']}-{key}"

    def pythons(self) -> list[str]:
        """List the Pythons that the outputs are made for; none if an output serves several."""
        variants = [output["build_configuration"]["variant"] for output in self.rendered]
        if any("python" not in variant for variant in variants):
            return []
        return list(dict.fromkeys(variant["python"] for variant in variants))


class RecipeSet:
    """All recipes of a project, rendered for one base, in build order.

    A recipe of a name in `provided` is left out: the base provides that package. So is one that the
    variants skip; `absent` says why. `base_key` says what a base on this machine is made of. Raises
    ForgeError for a package of two recipes, a cycle, a skipped recipe that another needs, and one
    that cannot be read; with `keep_going` the latter are noted in `broken` and left out.
    """

    def __init__(  # noqa: C901 (reads, orders and checks)
        self, project: Project, base: bases.Base, provided: Set[str] = frozenset(),
        base_key: str = "", keep_going: bool = False,
    ) -> None:  # fmt: skip
        self.project, self.base = project, base
        self.base_names, self.base_key = provided, base_key
        self.broken: dict[str, str] = {}
        paths = {path.parent.name: path for path in project.root.glob("recipes/*/recipe.yaml")}
        if not paths:
            raise ForgeError(f"{project.root / 'recipes'} holds no recipe")
        self.absent = dict.fromkeys(sorted(paths.keys() & provided), "provided by the base")
        self.recipes: dict[str, Recipe] = {}
        self.owner: dict[str, str] = {}
        skipped: dict[str, NoPackage] = {}
        for name in sorted(paths.keys() - provided):
            try:
                self.recipes[name] = Recipe(paths[name], base)
            except NoPackage as error:
                self.absent[name] = "no package with these variants"
                skipped |= dict.fromkeys(packages_in(paths[name]), error)
                continue
            except (ForgeError, OSError) as error:
                if not keep_going:
                    raise
                self.broken[name] = str(error)
            for output in [name] if name in self.broken else self.recipes[name].output_names:
                if (other := self.owner.setdefault(output, name)) != name:
                    raise ForgeError(f"recipes/{other} and recipes/{name} both yield {output}")
        for name, recipe in self.recipes.items():
            for needed in sorted(recipe.all_needs & skipped.keys()):
                raise ForgeError(f"{skipped[needed]}, and {name} needs {needed}")
        graph = {name: sorted(self.direct_needs(name)) for name in self.recipes}
        try:
            order = graphlib.TopologicalSorter(graph).static_order()
            self.recipes = {name: self.recipes[name] for name in order if name in self.recipes}
        except graphlib.CycleError as error:
            raise ForgeError(f"recipes depend on each other in a circle: {error.args[1]}") from None

    def plan(self, channel: Channel, rebuild: frozenset[str] = frozenset()) -> list[Step]:
        """Decide what each recipe would yield, and whether and why it has to be built.

        A build is current when the channel's highest build number of its family has the content
        hash of now. Otherwise it gets the next number: a new build always wins the solve over the
        one it replaces, and no file name is ever used for two contents.
        """
        records = channel.records()
        steps: dict[str, Step] = {}
        for name, recipe in self.recipes.items():
            digest = {"base": self.base.name, "content": recipe.content}
            if self.base_key and recipe.needs & self.base_names:
                digest["base key"] = self.base_key
            for needed in sorted(recipe.needs):
                if ours := steps.get(self.owner.get(needed, "")):
                    digest |= {f"needs {output.dist}": "" for output in ours.outputs}
            steps[name] = Step(recipe, digest)
            self._decide(steps[name], records, channel, name in rebuild)
        return list(steps.values())

    def _outputs(self, step: Step, number: int | None = None) -> list[Output]:
        outputs = []
        step.rendered = render(step.recipe.path, self.base, step.digest_value, number)
        for rendered in step.rendered:
            data, subdir = rendered["recipe"], rendered["build_configuration"]["target_platform"]
            package, build = data["package"], data["build"]["string"]
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
        """Find the recipes that one recipe builds, runs or is tested with."""
        return {self.owner[n] for n in self.recipes[name].all_needs if n in self.owner}

    def missing(self, name: str, lost: Set[str] = frozenset()) -> str:
        """Say in one line what a recipe needs and will not get, or "".

        That is what neither a recipe nor the base provides (of conda-forge only the solver knows
        what it has), and recipes in `lost`.
        """
        missing = self.recipes[name].all_needs - self.owner.keys() - self.base_names
        names = ", ".join(sorted(name for name in missing if not name.startswith("__")))
        if names and self.base_key:
            return f"the {self.base.name} base has no {names}"
        needs = ", ".join(sorted(self.direct_needs(name) & lost))
        return f"needs {needs}" if needs else ""

    def dependencies(self, names: set[str]) -> set[str]:
        """Return `names` and every recipe that they build, run or are tested with, transitively."""
        result = set(names)
        for name in reversed(self.recipes):
            result |= self.direct_needs(name) if name in result else set()
        return result

    def dependents(self, names: set[str]) -> set[str]:
        """Return `names` and every recipe that builds or runs against one of them, transitively."""
        result = set(names)
        for name, recipe in self.recipes.items():
            if any(self.owner.get(needed) in result for needed in recipe.needs):
                result.add(name)
        return result


def every_source(project: Project) -> RecipeSet:
    """Load the recipes with the sources of every Python and place, whatever base builds them."""
    return RecipeSet(project, bases.load(project, "conda-forge", EVERY))


def _difference(before: object, now: dict[str, str]) -> str:
    """Say why the digest changed; `before` is what a note says, which may be damaged."""
    if not isinstance(before, dict):
        return "changed since the build in the channel"
    if before.get("content") != now["content"]:
        return "recipe, script, patch or local source changed"
    if before.get("base key") != now.get("base key"):
        return f"the {now['base']} base changed"
    gained = [key.removeprefix("needs ").rsplit("-", 2)[0] for key in now.keys() - before.keys()]
    return f"other {', '.join(sorted(gained))}" if gained else "variant values changed"

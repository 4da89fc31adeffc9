# SPDX-License-Identifier: BSD-3-Clause
"""All recipes: find them, order them, and decide by content which have to be built.

rattler-build skips a package if one of the same name, version and build string exists, and its
build string covers the variant only. Therefore the driver adds a variant, `content_digest`, which
every recipe names under `build.variant.use_keys`. The digest of a recipe's content thereby enters
the `h1234567` part of the build string, which conda-forge's build strings have as well.
"""

import graphlib
import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from forge import bases
from forge.conda.local import LocalChannel, Output, Record
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.recipe import NoPackage, Recipe, list_packages
from forge.recipes.render import render

# Actions of a plan. A run cannot attempt what is skipped; see building.runner.predict_skipped.
BUILD = "build"
UP_TO_DATE = "up-to-date"
SKIPPED = "skipped"
# A recipe may name another file for each Python that it is built for, and for each place that the
# file comes from. With these values all of them are rendered.
EVERY_SOURCE = {
    "python": [
        "3.11.* *_cpython",
        "3.12.* *_cpython",
        "3.13.* *_cp313",
        "3.14.* *_cp314",
    ],
    "sources_from": ["upstream", "pypi"],
}


@dataclass
class Step:
    """The part of a plan that is about one recipe.

    Attributes:
        recipe: The recipe.
        digest: The parts of the content digest.
        outputs: The packages that the recipe yields; Records if they are up to date.
        action: BUILD or UP_TO_DATE.
        reason: Why.
        has_older_builds: Whether the channel has builds that this one replaces.
        rendered: rattler-build's mapping for each output.
    """

    recipe: Recipe
    digest: dict[str, str]
    outputs: Sequence[Output] = ()
    action: str = UP_TO_DATE
    reason: str = "up to date"
    has_older_builds: bool = False
    rendered: list[dict[str, Any]] = field(default_factory=list)

    @property
    def digest_value(self) -> str:
        """The value of the content_digest variant: BASE-CONTENT-ALL.

        CONTENT is the recipe's own digest, with which `forge verify` compares a package.
        """
        parts = repr(sorted(self.digest.items()))
        key = hashlib.sha256(parts.encode()).hexdigest()[:16]
        return f"{self.digest['base']}-{self.digest['content']}-{key}"

    def pythons(self) -> list[str]:
        """List the Pythons that the outputs are made for; none if an output serves several."""
        pythons: list[str] = []
        for output in self.rendered:
            variant = output["build_configuration"]["variant"]
            if "python" not in variant:
                return []
            if variant["python"] not in pythons:
                pythons.append(variant["python"])
        return pythons


class RecipeSet:
    """All recipes of a project, rendered for one base, in build order.

    Attributes:
        project: The checkout.
        base: The base.
        base_names: The packages that the base provides. A recipe of such a name is left out.
        base_key: A digest of what a base on this machine is made of; empty for conda-forge.
        recipes: By name, each after those that it needs.
        owner: The recipe that yields a package, by the package's name.
        broken: The reason, by name, of recipes that cannot be read and were left out.
        absent: The reason, by name, of recipes that are not built on this base.
    """

    def __init__(
        self,
        project: Project,
        base: bases.Base,
        provided: Set[str] = frozenset(),
        base_key: str = "",
        keep_going: bool = False,
    ) -> None:
        """Read and order the recipes.

        Args:
            project: The checkout.
            base: The base.
            provided: The packages that the base provides.
            base_key: A digest of what a base on this machine is made of; empty for conda-forge.
            keep_going: Leave out recipes that cannot be read, and note them in `broken`.

        Raises:
            ForgeError: A recipe cannot be read, two recipes yield the same package, recipes depend
                on each other in a circle, or one needs another that the variants skip.
        """
        self.project = project
        self.base = base
        self.base_names = provided
        self.base_key = base_key
        self.broken: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.recipes: dict[str, Recipe] = {}
        self.owner: dict[str, str] = {}
        skipped = self._read_recipes(keep_going)
        self._require_unskipped(skipped)
        self._order_recipes()

    def _read_recipes(self, keep_going: bool) -> dict[str, NoPackage]:
        """Read all recipes; returns the packages that the variants skip, with the error of each."""
        paths = {}
        for path in self.project.root.glob("recipes/*/recipe.yaml"):
            paths[path.parent.name] = path
        if not paths:
            raise ForgeError(f"{self.project.root / 'recipes'} holds no recipe")
        skipped: dict[str, NoPackage] = {}
        for name in sorted(paths.keys() & self.base_names):
            self.absent[name] = "provided by the base"
        for name in sorted(paths.keys() - self.base_names):
            packages = {name}
            try:
                recipe = Recipe(paths[name], self.base)
                self.recipes[name] = recipe
                packages = recipe.output_names
            except NoPackage as error:
                self.absent[name] = "no package with these variants"
                for package in list_packages(paths[name]):
                    skipped[package] = error
                continue
            except (ForgeError, OSError) as error:
                if not keep_going:
                    raise
                self.broken[name] = str(error)
            self._add_owner(packages, name)
        return skipped

    def _add_owner(self, packages: Set[str], name: str) -> None:
        """Note the recipe that yields packages. Raises ForgeError if another one yields them."""
        for package in packages:
            other = self.owner.setdefault(package, name)
            if other != name:
                raise ForgeError(f"recipes/{other} and recipes/{name} both yield {package}")

    def _require_unskipped(self, skipped: dict[str, NoPackage]) -> None:
        """Raise ForgeError if a recipe needs a package that the variants skip."""
        for name, recipe in self.recipes.items():
            for package in sorted(recipe.all_needs & skipped.keys()):
                raise ForgeError(f"{skipped[package]}, and {name} needs {package}")

    def _order_recipes(self) -> None:
        """Put each recipe after those that it needs. Raises ForgeError for a circle."""
        graph = {name: sorted(self.direct_needs(name)) for name in self.recipes}
        sorter = graphlib.TopologicalSorter(graph)
        try:
            order = list(sorter.static_order())
        except graphlib.CycleError as error:
            raise ForgeError(f"recipes depend on each other in a circle: {error.args[1]}") from None
        # The order also has broken recipes that others need.
        self.recipes = {name: self.recipes[name] for name in order if name in self.recipes}

    def plan(
        self,
        channel: LocalChannel,
        rebuild: frozenset[str] = frozenset(),
    ) -> list[Step]:
        """Decide for each recipe what it would yield, and whether and why it has to be built.

        A recipe is up to date if the channel's highest build number of its family has the content
        hash of now. Otherwise the build gets the next number. So the solver always prefers a new
        build to the one that it replaces, and no file name is ever used for two contents.

        Args:
            channel: Has the packages that are built already.
            rebuild: Recipes to build even if they are up to date.
        """
        records = channel.records()
        steps: dict[str, Step] = {}
        for name, recipe in self.recipes.items():
            digest = {
                "base": self.base.name,
                "content": recipe.content,
            }
            if self.base_key and recipe.needs & self.base_names:
                digest["base key"] = self.base_key
            for needed in sorted(recipe.needs):
                owner = self.owner.get(needed, "")
                if owner in steps:
                    for output in steps[owner].outputs:
                        digest[f"needs {output.dist}"] = ""
            step = Step(recipe, digest)
            self._decide(step, records, channel, name in rebuild)
            steps[name] = step
        return list(steps.values())

    def _render_outputs(self, step: Step, number: int | None = None) -> list[Output]:
        """Render a step with a build number, into `step.rendered`; returns its outputs.

        Args:
            step: The step.
            number: The build number; None for the recipe's own.
        """
        step.rendered = render(
            step.recipe.path,
            self.base,
            step.digest_value,
            number,
        )
        outputs = []
        for rendered in step.rendered:
            package = rendered["recipe"]["package"]
            outputs.append(
                Output(
                    package["name"],
                    str(package["version"]),
                    rendered["recipe"]["build"]["string"],
                    rendered["build_configuration"]["target_platform"],
                )
            )
        return outputs

    def _decide(
        self,
        step: Step,
        records: list[Record],
        channel: LocalChannel,
        rebuild: bool,
    ) -> None:
        """Decide on the action of a step, its reason and its outputs.

        Args:
            step: The step, with its recipe and digest.
            records: All packages of the channel.
            channel: The channel.
            rebuild: Build it even if it is up to date.
        """
        outputs = self._render_outputs(step)
        newest = []
        for output in outputs:
            builds = [record for record in records if record.family == output.family]
            if builds:
                newest.append(max(builds, key=lambda record: record.number))
        number = max((record.number for record in newest), default=-1)
        if newest and number != outputs[0].number:
            # An exact pin between outputs puts the build number into the hash.
            outputs = self._render_outputs(step, number)
        planned = {output.dist for output in outputs}
        is_current = planned == {record.dist for record in newest}
        if is_current and not rebuild:
            step.outputs = newest
            return
        if newest:
            outputs = self._render_outputs(step, number + 1)
        step.outputs = outputs
        step.action = BUILD
        step.has_older_builds = bool(newest)
        if rebuild:
            step.reason = "rebuild requested"
        elif len(newest) == len(outputs):
            noted = channel.read_digest(newest[0])
            step.reason = _describe_change(noted, step.digest)
        else:
            step.reason = "not in the channel"

    def direct_needs(self, name: str) -> set[str]:
        """Return the recipes that one recipe builds with, runs with or is tested with."""
        needs = self.recipes[name].all_needs
        return {self.owner[package] for package in needs if package in self.owner}

    def describe_missing(self, name: str, lost: Set[str] = frozenset()) -> str:
        """Describe in one line what a recipe needs and cannot have; empty if it can have all.

        It cannot have a package that neither a recipe nor the host base provides. For conda-forge,
        only the solver can tell.

        Args:
            name: The recipe.
            lost: Recipes whose packages it cannot have.
        """
        if self.base_key:
            missing = self.recipes[name].all_needs - self.owner.keys() - self.base_names
            packages = [package for package in missing if not package.startswith("__")]
            if packages:
                return f"the {self.base.name} base has no {', '.join(sorted(packages))}"
        needs = sorted(self.direct_needs(name) & lost)
        if needs:
            return f"needs {', '.join(needs)}"
        return ""

    def dependencies(self, names: set[str]) -> set[str]:
        """Return `names` and every recipe that they build, run or are tested with, transitively."""
        result = set(names)
        for name in reversed(self.recipes):
            if name in result:
                result |= self.direct_needs(name)
        return result

    def dependents(self, names: set[str]) -> set[str]:
        """Return `names` and every recipe that builds or runs against one of them, transitively."""
        result = set(names)
        for name, recipe in self.recipes.items():
            needs = {self.owner.get(package) for package in recipe.needs}
            if needs & result:
                result.add(name)
        return result


def load_all_sources(project: Project) -> RecipeSet:
    """Load the recipes with the sources of every Python and place, whatever base builds them."""
    base = bases.load(project, "conda-forge", EVERY_SOURCE)
    return RecipeSet(project, base)


def _describe_change(before: object, now: dict[str, str]) -> str:
    """Describe why the digest of a recipe changed.

    Args:
        before: The parts of the digest as noted beside the package; not a mapping if damaged.
        now: The parts as of now.
    """
    if not isinstance(before, dict):
        return "changed since the build in the channel"
    if before.get("content") != now["content"]:
        return "recipe, script, patch or local source changed"
    if before.get("base key") != now.get("base key"):
        return f"the {now['base']} base changed"
    changed = []
    for key in now.keys() - before.keys():
        dist = key.removeprefix("needs ")
        changed.append(dist.rsplit("-", 2)[0])
    if changed:
        return f"other {', '.join(sorted(changed))}"
    return "variant values changed"

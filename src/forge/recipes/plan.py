# SPDX-License-Identifier: BSD-3-Clause
"""Find all recipes, put them in build order, and decide by their content which have to be built.

A package counts as built if the channel has one with the same name, version and build string. The
hash in the build string does not depend on the recipe's content, but on the variant. So the driver
adds a variant key, `content_digest`, whose value has a digest of the recipe's content. Every recipe
names this key under `build.variant.use_keys`. Thereby the hash (`h1234567`) changes together with
the content.
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

# Actions of a plan. SKIPPED means that a run would not attempt the recipe; see
# building.runner.predict_skipped.
BUILD = "build"
UP_TO_DATE = "up-to-date"
SKIPPED = "skipped"
# The source of a recipe may depend on the Python and on the variant `sources_from`. With these
# values, all sources are rendered.
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
        reason: The reason for the action.
        has_older_builds: Whether the recipe has to be built and the channel has builds that the new
            packages would replace.
        rendered: The rendered outputs, as mappings of rattler-build.
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
        """The value of the variant `content_digest`, BASE-CONTENT-ALL.

        BASE is the name of the base. CONTENT is the digest of the recipe's own content, which
        `forge verify` compares with the digest in a package. ALL is a digest of all parts of
        `digest`.
        """
        parts = repr(sorted(self.digest.items()))
        key = hashlib.sha256(parts.encode()).hexdigest()[:16]
        return f"{self.digest['base']}-{self.digest['content']}-{key}"

    def pythons(self) -> list[str]:
        """List the values of the variant `python`; empty if any output is for all Pythons."""
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
        base_names: The packages that the base provides. A recipe with such a name is left out.
        base_key: A digest of the inputs of the host base; empty for conda-forge.
        recipes: The recipes by name, in build order: each after the recipes that it needs.
        owner: A mapping from each package's name to the name of the recipe that yields it.
        broken: The names of recipes that cannot be read and were left out, with the reasons.
        absent: The names of recipes that are not built on this base, with the reasons.
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
            base_key: A digest of the inputs of the host base; empty for conda-forge.
            keep_going: Leave out recipes that cannot be read, and add them to `broken`.

        Raises:
            ForgeError: A recipe cannot be read, two recipes yield the same package, recipes depend
                on each other in a circle, or a recipe needs a package that the variants skip.
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
        """Read all recipes. Return the packages that the variants skip, each with its error."""
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
        """Record the recipe of packages. Raise ForgeError if one of them already has another."""
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
        """Put each recipe after those that it needs. Raise ForgeError if there is a circle."""
        graph = {name: sorted(self.direct_needs(name)) for name in self.recipes}
        sorter = graphlib.TopologicalSorter(graph)
        try:
            order = list(sorter.static_order())
        except graphlib.CycleError as error:
            raise ForgeError(f"recipes depend on each other in a circle: {error.args[1]}") from None
        # The order also includes broken recipes, if other recipes need them.
        self.recipes = {name: self.recipes[name] for name in order if name in self.recipes}

    def plan(
        self,
        channel: LocalChannel,
        rebuild: frozenset[str] = frozenset(),
    ) -> list[Step]:
        """Decide for each recipe which packages it yields, and whether it has to be built.

        A recipe is up to date if the current content hash is that of the build with the highest
        build number in the channel. Otherwise the new build gets the next build number. So solvers
        always prefer the new build to the one that it replaces, and a file name never stands for
        two contents.

        Args:
            channel: The channel with the existing packages.
            rebuild: The names of recipes to build even if they are up to date.
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
        """Set `step.rendered` to the recipe rendered with a build number; return its outputs.

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
        """Set the action, the reason and the outputs of a step.

        Args:
            step: The step, with its recipe and digest.
            records: All packages of the channel.
            channel: The channel.
            rebuild: Build the recipe even if it is up to date.
        """
        outputs = self._render_outputs(step)
        newest = []
        for output in outputs:
            builds = [record for record in records if record.family == output.family]
            if builds:
                newest.append(max(builds, key=lambda record: record.number))
        number = max((record.number for record in newest), default=-1)
        if newest and number != outputs[0].number:
            # Render again: with an exact pin between outputs, the hash depends on the build number.
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
            old_digest = channel.read_digest(newest[0])
            step.reason = _describe_change(old_digest, step.digest)
        else:
            step.reason = "not in the channel"

    def direct_needs(self, name: str) -> set[str]:
        """Return the names of the recipes that a recipe needs to build, run or be tested."""
        needs = self.recipes[name].all_needs
        return {self.owner[package] for package in needs if package in self.owner}

    def describe_missing(self, name: str, lost: Set[str] = frozenset()) -> str:
        """Describe in one line the packages or recipes that a recipe lacks; empty if it lacks none.

        On the host base, a package is missing if neither a recipe nor the base provides it, unless
        it is virtual (`__NAME`). On conda-forge, only the solver can find missing packages.

        Args:
            name: The name of the recipe.
            lost: The names of recipes whose packages will not exist.
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
        """Return `names` and all recipes they need to build, run or be tested, transitively."""
        result = set(names)
        for name in reversed(self.recipes):
            if name in result:
                result |= self.direct_needs(name)
        return result

    def dependents(self, names: set[str]) -> set[str]:
        """Return `names` and all recipes that need one of them to build or run, transitively."""
        result = set(names)
        for name, recipe in self.recipes.items():
            needs = {self.owner.get(package) for package in recipe.needs}
            if needs & result:
                result.add(name)
        return result


def load_all_sources(project: Project) -> RecipeSet:
    """Load all recipes, rendered for conda-forge with the sources for every Python and base."""
    base = bases.load(project, "conda-forge", EVERY_SOURCE)
    return RecipeSet(project, base)


def _describe_change(before: object, now: dict[str, str]) -> str:
    """Describe why the digest of a recipe changed.

    Args:
        before: The parts of the digest, as noted when the package in the channel was built; None
            if unknown.
        now: The current parts.
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

# SPDX-License-Identifier: BSD-3-Clause
"""Read the cost of building a recipe from its `extra.cost`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from forge.bases import Base
from forge.errors import ForgeError
from forge.recipes.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """The cost of building a recipe.

    If a recipe and the host base use the same wheel, its download counts only for the host base.

    Attributes:
        download: GiB of sources, and of wheels for the host base, to download. The packages of
            conda-forge do not count.
        disk: GiB of disk during the build.
        memory: GiB of memory of the largest process.
        cpu_hours: CPU hours, summed over all cores.
        kept: GiB that remain on the disk: packages, and their unpacked files in the package cache.
        test_hours: Time limit of each package test; None for the engine's limit.
    """

    download: float
    disk: float
    memory: float
    cpu_hours: float
    kept: float = 0
    test_hours: float | None = None


def parse_cost(stated: Mapping[str, Any], where: object, pythons: int = 1) -> Cost:
    """Parse an `extra.cost`.

    Args:
        stated: The fields of a Cost, and `further_python`: the amounts that each Python after the
            first adds to these fields.
        where: The path of the file, for error messages.
        pythons: The number of Pythons that the recipe is built for.

    Raises:
        ForgeError: A figure is missing, unknown or not a number.
    """
    names = {field.name for field in fields(Cost)}
    try:
        figures = dict(stated)
        further = figures.pop("further_python", {})
        costs = {name: float(value) for name, value in figures.items()}
        for name, value in further.items():
            costs[name] += float(value) * (pythons - 1)
        unknown = costs.keys() - names
        if unknown:
            raise ValueError(f"{min(unknown)} is none of {', '.join(sorted(names))}")
        return Cost(**costs)
    except (TypeError, ValueError, KeyError) as error:
        raise ForgeError(f"{where}: extra.cost: {error}") from None


def add_costs(costs: Iterable[Cost]) -> Cost:
    """Return the cost of builds that run one after another.

    Its `disk` includes all downloads. The folder of a build is removed before the next build
    begins; its packages stay.
    """
    builds = list(costs)
    download = sum(cost.download for cost in builds)
    peak = 0.0
    kept = 0.0
    for cost in builds:
        peak = max(peak, kept + cost.disk)
        kept += cost.kept
    return Cost(
        download=download,
        disk=download + peak,
        memory=max(cost.memory for cost in builds),
        cpu_hours=sum(cost.cpu_hours for cost in builds),
        kept=kept,
    )


def read_costs(recipes: Iterable[Recipe], base: Base) -> dict[str, Cost]:
    """Return the costs of the recipes that state them, for the Pythons of a base.

    Raises:
        ForgeError: A cost is malformed.
    """
    pythons = len(base.variants["python"])
    costs = {}
    for recipe in recipes:
        if "cost" in recipe.extra:
            stated = recipe.extra["cost"]
            costs[recipe.name] = parse_cost(stated, recipe.path, pythons)
    return costs

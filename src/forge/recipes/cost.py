# SPDX-License-Identifier: BSD-3-Clause
"""The cost of building a recipe, as its `extra.cost` states it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from forge.bases import Base
from forge.errors import ForgeError
from forge.recipes.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """The cost of building a recipe.

    A wheel that a recipe shares with the host base counts as the host base's download.

    Attributes:
        download: GiB of sources and packages.
        disk: GiB while it is built.
        memory: GiB of the largest process.
        cpu_hours: Hours, summed over cores.
        kept: GiB that stay on the disk: packages, and what the package cache unpacks.
        test_hours: Limit of each package test; None for the engine's limit.
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
        stated: The fields of a Cost, and `further_python`: the fields to which each Python after
            the first adds something.
        where: The file, for the message of an error.
        pythons: The number of Pythons.

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

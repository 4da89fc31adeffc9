# SPDX-License-Identifier: BSD-3-Clause
"""What building a recipe takes, as its `extra.cost` states it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from forge.bases import Base
from forge.errors import ForgeError
from forge.recipes.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """What building a recipe takes. A wheel that the host base shares with a recipe counts there.

    Attributes:
        download: GiB.
        disk: GiB while it is built.
        memory: GiB of the largest process.
        cpu_hours: Summed over cores.
        kept: GiB that stay taken: packages, and what the package cache unpacks.
        test_hours: Limit of each package test; None for the engine's.
    """

    download: float
    disk: float
    memory: float
    cpu_hours: float
    kept: float = 0
    test_hours: float | None = None


def parse_cost(stated: Mapping[str, Any], where: object, pythons: int = 1) -> Cost:
    """Parse an `extra.cost`, whose `further_python` is what each Python after the first adds.

    Raises ForgeError for a figure that is missing, unknown or no number.
    """
    known = {field.name for field in fields(Cost)}
    try:
        figures = dict(stated)
        further = figures.pop("further_python", {})
        costs = {key: float(value) for key, value in figures.items()}
        for key, value in further.items():
            costs[key] += float(value) * (pythons - 1)
        if unknown := costs.keys() - known:
            raise ValueError(f"{min(unknown)} is none of {', '.join(sorted(known))}")
        return Cost(**costs)
    except (TypeError, ValueError, KeyError) as error:
        raise ForgeError(f"{where}: extra.cost: {error}") from None


def read_costs(recipes: Iterable[Recipe], base: Base) -> dict[str, Cost]:
    """Read the costs of recipes by name, for the variants of a base. Raises ForgeError."""
    pythons = len(base.variants["python"])
    return {
        recipe.name: parse_cost(recipe.extra["cost"], recipe.path, pythons)
        for recipe in recipes
        if "cost" in recipe.extra
    }

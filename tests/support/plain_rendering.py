# SPDX-License-Identifier: BSD-3-Clause
"""Render recipes with rattler-build and the two committed variant files, without the driver."""

from pathlib import Path
from typing import Any

from rattler_build import Stage0Recipe, VariantConfig
from support.project import CHECKOUT

VARIANTS = [CHECKOUT / "variants.yaml", CHECKOUT / "recipes/bases/conda-forge/variants.yaml"]


def render_plain(path: Path) -> list[dict[str, Any]]:
    """Render one recipe.yaml, and return its outputs."""
    variants = Stage0Recipe.from_file(path).render(VariantConfig.from_files(VARIANTS))
    return [variant.recipe.to_dict() for variant in variants]


def render_each_alone(path: Path) -> dict[str, str]:
    """Render each output with only the variant keys that it uses, and return the problems.

    pixi renders an output in this way if the recipe is a source dependency. The output has to be
    the same as with all variant keys.

    Returns:
        The problem of each output that has one, by the output's name.
    """
    recipe = Stage0Recipe.from_file(path)
    problems = {}
    for variant in recipe.render(VariantConfig.from_files(VARIANTS)):
        own_keys = VariantConfig({key: [str(value)] for key, value in variant.variant.items()})
        output = variant.recipe.to_dict()
        name = output["package"]["name"]
        try:
            rendered = [each.recipe.to_dict() for each in recipe.render(own_keys)]
        except Exception as error:
            problems[name] = str(error)
            continue
        if output not in rendered:
            problems[name] = "another build string"
    return problems

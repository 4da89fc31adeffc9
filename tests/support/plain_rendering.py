# SPDX-License-Identifier: BSD-3-Clause
"""Recipes rendered by rattler-build with the two committed variant files and nothing of ours."""

from pathlib import Path
from typing import Any

from rattler_build import Stage0Recipe, VariantConfig
from support.project import CHECKOUT

VARIANTS = [CHECKOUT / "variants.yaml", CHECKOUT / "recipes/bases/conda-forge/variants.yaml"]


def plain(path: Path) -> list[dict[str, Any]]:
    """The outputs of one recipe.yaml as mappings."""
    variants = Stage0Recipe.from_file(path).render(VariantConfig.from_files(VARIANTS))
    return [variant.recipe.to_dict() for variant in variants]


def alone(path: Path) -> dict[str, str]:
    """Output -> what differs, or why it fails, when it renders with the variant keys of its own.

    That is how pixi builds an output of a recipe that is a source dependency.
    """
    recipe, wrong = Stage0Recipe.from_file(path), {}
    for whole in recipe.render(VariantConfig.from_files(VARIANTS)):
        own = VariantConfig({key: [str(value)] for key, value in whole.variant.items()})
        output = whole.recipe.to_dict()
        try:
            found = [variant.recipe.to_dict() for variant in recipe.render(own)]
        except Exception as error:
            wrong[output["package"]["name"]] = str(error)
            continue
        if output not in found:
            wrong[output["package"]["name"]] = "another build string"
    return wrong

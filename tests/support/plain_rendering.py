# SPDX-License-Identifier: BSD-3-Clause
"""Recipes rendered by rattler-build with the two committed variant files and nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rattler_build import Stage0Recipe, VariantConfig
from support.project import CHECKOUT

VARIANTS = [CHECKOUT / "variants.yaml", CHECKOUT / "bases/conda-forge/variants.yaml"]


def plain(path: Path) -> list[dict[str, Any]]:
    """The outputs of one recipe.yaml as mappings."""
    variants = Stage0Recipe.from_file(path).render(VariantConfig.from_files(VARIANTS))
    return [variant.recipe.to_dict() for variant in variants]

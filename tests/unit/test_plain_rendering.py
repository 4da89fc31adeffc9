# SPDX-License-Identifier: BSD-3-Clause
"""Recipes render without the driver: as `rattler-build build --recipe R -m V -m V --render-only`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rattler_build import Stage0Recipe, VariantConfig

CHECKOUT = Path(__file__).resolve().parents[2]
VARIANTS = [CHECKOUT / "variants.yaml", CHECKOUT / "bases/conda-forge/variants.yaml"]
RECIPES = sorted(CHECKOUT.glob("recipes/*/recipe.yaml"))


def plain(path: Path) -> list[dict[str, Any]]:
    """The outputs of a recipe, rendered with the two committed variant files alone."""
    variants = Stage0Recipe.from_file(path).render(VariantConfig.from_files(VARIANTS))
    return [variant.recipe.to_dict() for variant in variants]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FORGE_") or name == "PYPI_SOURCES":
            monkeypatch.delenv(name)


def test_there_are_13_recipes() -> None:
    assert len(RECIPES) == 13


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_renders_in_a_clean_environment(path: Path) -> None:
    outputs = plain(path)
    assert outputs
    for output in outputs:
        string = output["build"]["string"]
        assert "hostbound" not in string and not string.startswith("_"), string


def test_a_recipe_that_needs_the_driver_does_not_render(tmp_path: Path) -> None:
    """What the test above would find: an undefined variant, an environment variable without default."""
    good = (CHECKOUT / "recipes/flash-attn/recipe.yaml").read_text()
    for old, new in (
        (', default="file:///proc/self/cwd/pypi-sources"', ""),
        ("number: ${{ build_number }}", "string: ${{ undefined_tag }}h${{ hash }}_0"),
    ):
        assert old in good
        (tmp_path / "recipe.yaml").write_text(good.replace(old, new))
        with pytest.raises(Exception, match="undefined|not found"):
            plain(tmp_path / "recipe.yaml")

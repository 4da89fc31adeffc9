# SPDX-License-Identifier: BSD-3-Clause
"""Every recipe of this repository on both bases."""

from __future__ import annotations

import os
import re
import tomllib

import pytest
from support.project import CHECKOUT

from forge import bases
from forge.channel.local import CONTENT_HASH
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import sources_of
from forge.sources.cache import PYPI_SOURCES, PYPI_URL

os.environ[PYPI_SOURCES] = PYPI_URL
PROJECT = Project.at(CHECKOUT)
RECIPES = sorted(path.parent.name for path in CHECKOUT.glob("recipes/*/recipe.yaml"))


@pytest.fixture(scope="module", params=["conda-forge", "host"])
def recipes(request: pytest.FixtureRequest) -> RecipeSet:
    return RecipeSet(PROJECT, bases.load(PROJECT, request.param))


@pytest.mark.parametrize("name", RECIPES)
def test_renders(recipes: RecipeSet, name: str) -> None:
    """Build strings follow conda-forge's grammar, sources are pinned, a licence file is named."""
    recipe = recipes.recipes[name]
    rendered = recipes.render(recipe.path, "x")
    assert rendered
    for data in (output["recipe"] for output in rendered):
        assert data["about"]["license"] and data["about"]["license_file"]
        assert data["tests"], "a package without a test"
        assert CONTENT_HASH.search(data["build"]["string"])
        assert data["build"]["string"].startswith(recipes.base.build_prefix)
    for source in sources_of(recipe):
        assert re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", source.digest)


def test_no_recipe_knows_its_base() -> None:
    for path in CHECKOUT.glob("recipes/*/*"):
        if path.is_file():
            assert not re.search(
                "host base|hostgcc|hostgxx|hostbound|bases/host", path.read_text()
            ), path


def test_order_puts_dependencies_first(recipes: RecipeSet) -> None:
    order = list(recipes.recipes)
    for name, recipe in recipes.recipes.items():
        for needed in recipe.needs | recipe.tests_need:
            if needed in recipes.owner:
                assert order.index(recipes.owner[needed]) < order.index(name)


def test_variants_have_reasons() -> None:
    """One key per pin, a comment above each."""
    lines = (CHECKOUT / "variants.yaml").read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if re.match(r"\w+:", line)]
    assert keys
    for index in keys:
        assert lines[index - 1].startswith("# "), f"{lines[index]} has no reason above it"


def test_versions_agree(recipes: RecipeSet) -> None:
    """What a reader and a stack are told is what the recipes and variants.yaml say."""
    readme = (CHECKOUT / "README.md").read_text()
    for name, recipe in recipes.recipes.items():
        assert f"| {name} | {recipe.version} |" in readme
    pins = {key: recipes.base.variants[key][0] for key in ("pytorch", "triton", "amd_aiter_min")}
    assert recipes.recipes["triton"].version == pins["triton"]
    stack = tomllib.loads((CHECKOUT / "stacks/attention/pixi.toml").read_text())["dependencies"]
    assert pins["pytorch"].startswith(stack["pytorch"].removesuffix("*"))
    assert stack["triton"] == f"{pins['triton']}.*"
    assert stack["amd-aiter"] == f">={pins['amd_aiter_min']}"
    assert stack["flash-attn"] == f"{recipes.recipes['flash-attn'].version}.*"

# SPDX-License-Identifier: BSD-3-Clause
"""Recipes are rendered, ordered and refused without anything being built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.project import MiniProject

from forge import bases
from forge.build.runner import skipped
from forge.channel.local import Channel
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import BUILD, RecipeSet


@pytest.fixture
def mini(tmp_path: Path) -> MiniProject:
    return MiniProject(tmp_path)


def recipes_of(mini: MiniProject) -> RecipeSet:
    """Its recipes as the conda-forge base renders them."""
    project = Project.at(mini.root)
    return RecipeSet(project, bases.load(project, "conda-forge"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda text: text + "\n  - [", "Failed to parse YAML"),
        (lambda text: text.replace("build:", "bild:"), "field 'bild'"),
        (lambda text: text.replace("content_digest", "other"), "add content_digest"),
        (
            lambda text: text.replace("source: []", "source: [{path: ., patches: [no.patch]}]"),
            "no.patch, which does not exist",
        ),
        (lambda text: text.replace("source: []", "source: [{path: ./no}]"), "/no, which does not"),
    ],
)
def test_malformed_recipe(mini: MiniProject, broken: Callable[[str], str], message: str) -> None:
    recipe = mini.recipe("alpha") / "recipe.yaml"
    recipe.write_text(broken(recipe.read_text()))
    with pytest.raises(ForgeError) as error:
        recipes_of(mini)
    assert message in str(error.value) and str(recipe) in str(error.value)


def test_environment_does_not_enter_the_hash(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`env.get` names the place of PyPI's files; the build string must not depend on it."""
    source = '[{url: "${{ env.get(\'PYPI_SOURCES\') }}/a.tar.gz", sha256: "%s"}]' % ("0" * 64)
    mini.recipe("alpha", source=source)
    builds = set()
    for folder in ("file:///one", "file:///two"):
        monkeypatch.setenv("PYPI_SOURCES", folder)
        (output,) = recipes_of(mini).render(mini.root / "recipes/alpha/recipe.yaml", "x")
        assert output["recipe"]["source"][0]["url"] == f"{folder}/a.tar.gz"
        builds.add(output["recipe"]["build"]["string"])
    assert len(builds) == 1


def test_circle(mini: MiniProject) -> None:
    mini.recipe("alpha", run=["beta"])
    mini.recipe("beta", run=["alpha"])
    with pytest.raises(ForgeError, match="circle"):
        recipes_of(mini)


def test_dependencies_and_dependents(mini: MiniProject) -> None:
    mini.recipe("alpha")
    mini.recipe("beta", run=["alpha"])
    mini.recipe("gamma", run=["beta"])
    recipes = recipes_of(mini)
    assert recipes.dependencies({"beta"}) == {"alpha", "beta"}
    assert recipes.dependents({"beta"}) == {"beta", "gamma"}


def test_what_will_be_skipped(mini: MiniProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs something that neither a recipe nor the base provides, and what needs that."""
    mini.recipe("alpha", run=["nowhere", "__glibc"])
    mini.recipe("beta", run=["alpha"])
    mini.recipe("gamma", run=["python"])
    monkeypatch.setattr(bases.Base, "dists", lambda _: {"python": ["python-3.12-0"]})
    recipes = recipes_of(mini)
    steps = recipes.plan(Channel(mini.channel))
    assert {step.action for step in steps} == {BUILD}
    assert skipped(recipes.project, recipes, steps) == {
        "alpha": "the conda-forge base has no nowhere",
        "beta": "needs alpha",
    }

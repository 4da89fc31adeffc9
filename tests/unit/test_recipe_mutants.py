# SPDX-License-Identifier: BSD-3-Clause
"""Mutated recipes, variants and notes: planned, or refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.mutants import Tally, texts, trees
from support.project import MiniProject

from forge import bases
from forge.building.runner import _reason_file, skipped
from forge.conda.local import Channel
from forge.project import Project
from forge.recipes.plan import RecipeSet, Step
from forge.recipes.recipe import purls_of, sources_of

Record = Callable[[str, object], None]
RECIPE = """\
schema_version: 1
context: {version: "1.0", tag: "v${{ version }}"}
package: {name: alpha, version: "${{ version }}"}
source:
  - url: ["https://upstream.invalid/${{ tag }}.tar.gz", "https://mirror.invalid/a.tar.gz"]
    sha256: "0000000000000000000000000000000000000000000000000000000000000000"
    patches: [a.patch]
  - {git: "https://upstream.invalid/a.git", rev: "0123456789012345678901234567890123456789"}
  - {path: local, target_directory: local}
build:
  number: 0
  noarch: generic
  string: "${{ base_tag }}x_h${{ hash }}_0"
  variant: {use_keys: [content_digest]}
  script: [mkdir -p "$PREFIX/share"]
requirements:
  build: ["${{ compiler('c') }}"]
  run: [python >=3.11, "${{ pin_compatible('numpy') }}"]
tests:
  - script: [test -n ok]
    requirements: {run: [pip]}
about: {license: BSD-3-Clause, summary: a test package}
extra:
  purls: ["pkg:github/x/y@1.0?file_name=a.tar.gz"]
"""
VARIANTS = (
    'pytorch:\n  - "2.13.0"\nkernels:\n  - full\nbase_tag:\n  - ""\ncontent_digest:\n  - none\n'
)


@pytest.fixture
def mini(tmp_path: Path) -> MiniProject:
    mini = MiniProject(tmp_path / "project")
    folder = mini.recipe("alpha")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "a.patch").touch()
    (folder / "local").mkdir()
    (mini.root / "variants.yaml").write_text(VARIANTS)
    return mini


def planned(mini: MiniProject) -> list[Step]:
    project = Project.at(mini.root)
    recipes = RecipeSet(project, bases.load(project, "conda-forge"))
    steps = recipes.plan(Channel(mini.channel))
    for step in steps:
        sources_of(step.recipe), purls_of(step.recipe)
    skipped(project, recipes, steps)
    return steps


def is_alpha(steps: list[Step]) -> bool:
    (step,) = steps
    return step.recipe.name == "alpha" and bool(step.outputs) and len(step.recipe.content) == 16


def give(
    mini: MiniProject, path: Path, tally: Tally, valid: str, seed: int, counts: tuple[int, int]
) -> None:
    """Plan with mutants of a YAML file in its place: so many of its tree, and of its text."""
    dumped = (
        yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode(errors="surrogatepass")
        for tree in trees(yaml.safe_load(valid), seed, counts[0])
    )
    for mutant in [*dumped, *texts(valid.encode(), seed, counts[1])]:
        path.write_bytes(mutant)
        tally.give(lambda: planned(mini), is_alpha, mutant)


def test_the_valid_recipe_is_planned(mini: MiniProject) -> None:
    assert is_alpha(planned(mini))


def test_recipes(mini: MiniProject, record_property: Record) -> None:
    path = mini.root / "recipes/alpha/recipe.yaml"
    give(mini, path, Tally("recipe.yaml", record_property), RECIPE, 3, (70, 50))


def test_variants(mini: MiniProject, record_property: Record) -> None:
    path = mini.root / "variants.yaml"
    give(mini, path, Tally("variants.yaml", record_property), VARIANTS, 4, (25, 20))


def test_notes_of_what_was_not_attempted(mini: MiniProject, record_property: Record) -> None:
    tally, project = Tally("not-attempted", record_property), Project.at(mini.root)
    recipes = RecipeSet(project, bases.load(project, "conda-forge"))
    steps = recipes.plan(Channel(mini.channel))
    note = _reason_file(project, steps[0])
    note.parent.mkdir(parents=True)
    why = "a host is down"
    valid = f"{steps[0].digest_value}\n{why}".encode()
    note.write_bytes(valid)
    assert skipped(project, recipes, steps) == {"alpha": why}
    for text in texts(valid, 5, 60):
        note.write_bytes(text)
        tally.give(lambda: skipped(project, recipes, steps), lambda f: set(f) <= {"alpha"}, text)
    note.unlink()
    note.mkdir()
    assert skipped(project, recipes, steps) == {}

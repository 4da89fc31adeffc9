# SPDX-License-Identifier: BSD-3-Clause
"""Mutated manifests, locks, recipes, variants and notes give correct content or one error message.

The tests also plan a mutated recipe, and prepare an installation from a mutated lock.
"""

import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.mutants import Tally, texts, trees
from support.project import CHECKOUT, MiniProject

from forge import bases
from forge.bases import CONDA_FORGE
from forge.building.runner import _locate_reason, predict_skipped, read_unfetched
from forge.conda.local import LocalChannel
from forge.envs.manifest import Manifest
from forge.envs.workspace import Workspace
from forge.project import Project
from forge.recipes.plan import RecipeSet, Step
from forge.recipes.recipe import list_sources, parse_purls

MANIFEST = """\
[workspace]
name = "app"
channels = ["conda-forge", "https://ours.invalid/channel"]
channel-priority = "strict"
platforms = [{ name = "gpu", platform = "linux-64", amdgpu = "gfx1151", __cuda = "12" }]

[dependencies]
python = ">=3.11"
alpha = { version = "1.0.*", build = "cpu_*" }

[feature.more.dependencies]
beta = "*"

[feature.more.tasks]
check = { cmd = "true", description = "x" }

[environments]
more = ["more"]
bare = { features = ["more"], no-default-feature = true }
"""
# The packages to which make_small_lock reduces this repository's lock.
LOCKED = {"tzdata", "ca-certificates", "_openmp_mutex", "libgomp"}
SIMPLE = '[workspace]\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n[dependencies]\n'
Record = Callable[[str, object], None]


def to_toml(value: Any) -> str:
    """Convert JSON-like data to TOML with inline tables. Raises ValueError for None."""
    if isinstance(value, dict):
        items = [f"{json.dumps(key)} = {to_toml(item)}" for key, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    if value is None:
        raise ValueError("TOML has no null")
    return json.dumps(value)


def mutate_manifest() -> Iterator[bytes]:
    """Yield mutants of MANIFEST. Mutants that TOML cannot express are left out."""
    for tree in trees(tomllib.loads(MANIFEST), 1, 500):
        with contextlib.suppress(ValueError, AttributeError):
            lines = [f"{json.dumps(key)} = {to_toml(value)}\n" for key, value in tree.items()]
            yield "".join(lines).encode()
    yield from texts(MANIFEST.encode(), 2, 300)


def has_valid_values(manifest: Manifest) -> bool:
    """Return whether the values of a manifest have the form that solving and installing rely on."""
    for name, specs in manifest.environments.items():
        if not re.fullmatch(r"[a-z0-9-]+", name):
            return False
        if not all(isinstance(spec, str) and "\n" not in spec for spec in specs):
            return False
    for channel in manifest.channels:
        if not isinstance(channel, str) or ("://" in channel and "@" in channel):
            return False
    return True


def test_manifests(tmp_path: Path, record_property: Record) -> None:
    tally = Tally("manifest", record_property)
    file = tmp_path / "pixi.toml"
    for mutant in mutate_manifest():
        # A new file is faster, because replacing the content of a file waits for the disk.
        file.unlink(missing_ok=True)
        file.write_bytes(mutant)
        tally.give(lambda: Manifest.load(file), has_valid_values, mutant)
    assert min(tally.outcomes.values()) > 50 and sum(tally.outcomes.values()) > 600


def make_small_lock() -> dict[str, Any]:
    """Return the data of this repository's own lock, reduced to four packages."""
    lock = yaml.load((CHECKOUT / "pixi.lock").read_text(), yaml.CSafeLoader)
    default = lock["environments"]["default"]

    def is_selected(package: dict[str, Any]) -> bool:
        return package["conda"].rpartition("/")[2].rsplit("-", 2)[0] in LOCKED

    packages = list(filter(is_selected, default["packages"]["linux-64"]))
    default = default | {"packages": {"linux-64": packages}}
    lock["environments"] = {"default": default}
    lock["packages"] = list(filter(is_selected, lock["packages"]))
    return lock


def test_locks(tmp_path: Path, record_property: Record) -> None:
    """The records that would be installed from a mutated lock have valid values."""
    tally = Tally("lock", record_property)
    (tmp_path / "pixi.toml").write_text(SIMPLE + "".join(f'{name} = "*"\n' for name in LOCKED))
    workspace = Workspace("app", tmp_path)
    small_lock = make_small_lock()
    valid = yaml.safe_dump(small_lock, sort_keys=False).encode()
    workspace.lock_file.write_bytes(valid)
    assert len(workspace.locked("default")) == 4

    def are_valid(records: list[Any]) -> bool:
        url = re.compile(re.escape(CONDA_FORGE) + r"/(linux-64|noarch)/[\w.+!=-]+")
        return all(url.fullmatch(r.url) and len(r.sha256) == 32 and r.size >= 0 for r in records)

    mutants = [yaml.safe_dump(tree, sort_keys=False).encode() for tree in trees(small_lock, 3, 400)]
    mutants += texts(valid, 4, 300)
    for mutant in mutants:
        workspace.lock_file.unlink()
        workspace.lock_file.write_bytes(mutant)
        tally.give(lambda: workspace.locked("default"), are_valid, mutant)
    assert min(tally.outcomes.values()) > 50 and sum(tally.outcomes.values()) == 700


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


def make_plan(mini: MiniProject) -> list[Step]:
    """Plan the recipes, and read all parts of the recipes that a build reads."""
    project = Project.at(mini.root)
    recipes = RecipeSet(project, bases.load(project, "conda-forge"))
    steps = recipes.plan(LocalChannel(mini.channel))
    for step in steps:
        list_sources(step.recipe)
        parse_purls(step.recipe)
    predict_skipped(recipes, steps, read_unfetched(project, steps))
    return steps


def is_alpha(steps: list[Step]) -> bool:
    (step,) = steps
    return step.recipe.name == "alpha" and bool(step.outputs) and len(step.recipe.content) == 16


def plan_mutants(
    mini: MiniProject, path: Path, tally: Tally, valid: str, stream: int, counts: tuple[int, int]
) -> None:
    """Replace a YAML file of the project with each of its mutants, and plan the project's recipes.

    Args:
        mini: The project.
        path: The YAML file.
        tally: Counts the outcomes.
        valid: The valid text of the file.
        stream: A part of the random seed, so that each test gets other mutants.
        counts: The number of mutants with changed values, and of those with damaged text.
    """
    mutants = []
    for tree in trees(yaml.safe_load(valid), stream, counts[0]):
        text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
        mutants.append(text.encode(errors="surrogatepass"))
    mutants += texts(valid.encode(), stream, counts[1])
    for mutant in mutants:
        path.write_bytes(mutant)
        tally.give(lambda: make_plan(mini), is_alpha, mutant)


def test_the_valid_recipe_is_planned(mini: MiniProject) -> None:
    assert is_alpha(make_plan(mini))


def test_recipes(mini: MiniProject, record_property: Record) -> None:
    path = mini.root / "recipes/alpha/recipe.yaml"
    plan_mutants(mini, path, Tally("recipe.yaml", record_property), RECIPE, 3, (70, 50))


def test_variants(mini: MiniProject, record_property: Record) -> None:
    path = mini.root / "variants.yaml"
    plan_mutants(mini, path, Tally("variants.yaml", record_property), VARIANTS, 4, (25, 20))


def test_notes_of_what_was_not_attempted(mini: MiniProject, record_property: Record) -> None:
    tally = Tally("not-attempted", record_property)
    project = Project.at(mini.root)
    mini.recipe("beta")
    recipes = RecipeSet(project, bases.load(project, "conda-forge"))
    steps = recipes.plan(LocalChannel(mini.channel))
    # The first step, alpha, has no note.
    note = _locate_reason(project, steps[1])
    note.parent.mkdir(parents=True)
    reason = "a host is down"
    valid = f"{steps[1].digest_value}\n{reason}".encode()
    note.write_bytes(valid)
    assert read_unfetched(project, steps) == {"beta": reason}
    for text in texts(valid, 5, 60):
        note.write_bytes(text)
        tally.give(lambda: read_unfetched(project, steps), lambda f: set(f) <= {"beta"}, text)
    note.unlink()
    note.mkdir()
    assert read_unfetched(project, steps) == {}

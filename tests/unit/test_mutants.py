# SPDX-License-Identifier: BSD-3-Clause
"""Mutated manifests, locks, recipes, variants and notes: read right, or refused with one line."""

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
LOCKED = {"tzdata", "ca-certificates", "_openmp_mutex", "libgomp"}
SIMPLE = '[workspace]\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n[dependencies]\n'
Record = Callable[[str, object], None]


def toml(value: Any) -> str:
    """A tree of JSON as TOML, in inline tables. Raises ValueError for what TOML cannot say."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if value is None:
        raise ValueError("TOML has no null")
    return json.dumps(value)


def manifests() -> Iterator[bytes]:
    for tree in trees(tomllib.loads(MANIFEST), 1, 500):
        with contextlib.suppress(ValueError, AttributeError):
            lines = [f"{json.dumps(key)} = {toml(value)}\n" for key, value in tree.items()]
            yield "".join(lines).encode()
    yield from texts(MANIFEST.encode(), 2, 300)


def believable(manifest: Manifest) -> bool:
    """What solving and installing rely on."""
    specs = [spec for specs in manifest.environments.values() for spec in specs]
    return (
        all(re.fullmatch(r"[a-z0-9-]+", name) for name in manifest.environments)
        and all(isinstance(spec, str) and "\n" not in spec for spec in specs)
        and all(isinstance(c, str) and not ("://" in c and "@" in c) for c in manifest.channels)
    )


def test_manifests(tmp_path: Path, record_property: Record) -> None:
    tally, file = Tally("manifest", record_property), tmp_path / "pixi.toml"
    for mutant in manifests():
        file.unlink(missing_ok=True)  # to write over a file waits for the disk
        file.write_bytes(mutant)
        tally.give(lambda: Manifest.load(file), believable, mutant)
    assert min(tally.outcomes.values()) > 50 and sum(tally.outcomes.values()) > 600


def small_lock() -> dict[str, Any]:
    """Four packages of this repository's own lock."""
    lock = yaml.load((CHECKOUT / "pixi.lock").read_text(), yaml.CSafeLoader)
    default = lock["environments"]["default"]

    def wanted(package: dict[str, Any]) -> bool:
        return package["conda"].rpartition("/")[2].rsplit("-", 2)[0] in LOCKED

    packages = list(filter(wanted, default["packages"]["linux-64"]))
    default = default | {"packages": {"linux-64": packages}}
    kept = {"environments": {"default": default}}
    return lock | kept | {"packages": list(filter(wanted, lock["packages"]))}


def test_locks(tmp_path: Path, record_property: Record) -> None:
    """Read for an installation."""
    tally = Tally("lock", record_property)
    (tmp_path / "pixi.toml").write_text(SIMPLE + "".join(f'{name} = "*"\n' for name in LOCKED))
    workspace = Workspace("app", tmp_path)
    valid = yaml.safe_dump(small_lock(), sort_keys=False).encode()
    workspace.lock_file.write_bytes(valid)
    assert len(workspace.locked("default")) == 4

    def right(records: list[Any]) -> bool:
        inside = re.compile(re.escape(CONDA_FORGE) + r"/(linux-64|noarch)/[\w.+!=-]+")
        return all(inside.fullmatch(r.url) and len(r.sha256) == 32 and r.size >= 0 for r in records)

    dumped = (
        yaml.safe_dump(tree, sort_keys=False).encode() for tree in trees(small_lock(), 3, 400)
    )
    for mutant in [*dumped, *texts(valid, 4, 300)]:
        workspace.lock_file.unlink()
        workspace.lock_file.write_bytes(mutant)
        tally.give(lambda: workspace.locked("default"), right, mutant)
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


def planned(mini: MiniProject) -> list[Step]:
    project = Project.at(mini.root)
    recipes = RecipeSet(project, bases.load(project, "conda-forge"))
    steps = recipes.plan(LocalChannel(mini.channel))
    for step in steps:
        list_sources(step.recipe), parse_purls(step.recipe)
    predict_skipped(recipes, steps, read_unfetched(project, steps))
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
    steps = recipes.plan(LocalChannel(mini.channel))
    note = _locate_reason(project, steps[0])
    note.parent.mkdir(parents=True)
    why = "a host is down"
    valid = f"{steps[0].digest_value}\n{why}".encode()
    note.write_bytes(valid)
    assert read_unfetched(project, steps) == {"alpha": why}
    for text in texts(valid, 5, 60):
        note.write_bytes(text)
        tally.give(lambda: read_unfetched(project, steps), lambda f: set(f) <= {"alpha"}, text)
    note.unlink()
    note.mkdir()
    assert read_unfetched(project, steps) == {}

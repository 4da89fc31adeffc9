# SPDX-License-Identifier: BSD-3-Clause
"""Content decides what is built: exactly the changed recipe and its dependents, never in place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.project import MiniProject

from forge.files import sha256_file


@pytest.fixture(scope="module")
def built_chain(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """alpha <- beta <- gamma, and delta on its own; alpha reads a local source and a patch."""
    project = MiniProject(tmp_path_factory.mktemp("chain"))
    (project.root / "local").mkdir()
    (project.root / "local" / "text").write_text("one\n")
    patches = project.root / "patches" / "alpha"
    patches.mkdir(parents=True)
    (patches / "0001-two.patch").write_text("--- a/text\n+++ b/text\n@@ -1 +1 @@\n-one\n+two\n")
    source = "[{path: ../../local, patches: [../../patches/alpha/0001-two.patch]}]"
    project.recipe("alpha", source=source)
    project.recipe("beta", run=["alpha"])
    project.recipe("gamma", run=["beta"])
    project.recipe("delta")
    project.forge("build-all")
    assert project.to_build() == set()
    return project


@pytest.fixture
def chain(built_chain: MiniProject, tmp_path: Path) -> MiniProject:
    """A copy of the built chain, to be changed at will."""
    shutil.copytree(built_chain.root, tmp_path / "copy", symlinks=True)
    return MiniProject(tmp_path / "copy")


def test_unchanged_builds_nothing(chain: MiniProject) -> None:
    before = {file: file.stat().st_mtime_ns for file in chain.channel.glob("*/*.conda")}
    assert chain.forge("build-all").stdout.count("up to date") == 4
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.parametrize(
    ("edited", "text", "affected"),
    [
        ("recipes/alpha/build.sh", "# a comment\n", {"alpha", "beta", "gamma"}),
        ("recipes/beta/recipe.yaml", "# a comment\n", {"beta", "gamma"}),
        ("recipes/gamma/new-file", "new", {"gamma"}),
        ("local/other", "more\n", {"alpha", "beta", "gamma"}),
        ("patches/alpha/0001-two.patch", "\n", {"alpha", "beta", "gamma"}),
        ("recipes/delta/build.sh", "# a comment\n", {"delta"}),
        ("local/__pycache__/text.pyc", "byte code is no content", set()),
    ],
)
def test_edit(chain: MiniProject, edited: str, text: str, affected: set[str]) -> None:
    path = chain.root / edited
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write(text)
    assert chain.to_build() == affected


def test_edited_is_built_beside_what_was(chain: MiniProject) -> None:
    old = {name: sha256_file(chain.channel / "noarch" / name) for name in chain.packages()}
    with (chain.root / "recipes/beta/recipe.yaml").open("a") as stream:
        stream.write("# a comment\n")
    chain.forge("build-all")
    new = chain.packages() - old.keys()
    assert {file.split("-")[0] for file in new} == {"beta", "gamma"}
    assert all(file.endswith("_1.conda") for file in new), "a new build must outrank the old one"
    # nothing was replaced under its old name
    assert {name: sha256_file(chain.channel / "noarch" / name) for name in old} == old


def test_needs(chain: MiniProject) -> None:
    assert chain.plan()["gamma"]["needs"] == ["beta"]


def test_reason_says_what_changed(chain: MiniProject) -> None:
    with (chain.root / "recipes/alpha/build.sh").open("a") as stream:
        stream.write("# a comment\n")
    plan = chain.plan()
    assert plan["alpha"]["reason"] == "recipe, script, patch or local source changed"
    assert plan["beta"]["reason"] == "other alpha"
    assert plan["delta"]["reason"] == "up to date"


def test_revert_gets_a_number_of_its_own(chain: MiniProject) -> None:
    """Else the solver would go on choosing the newer build of the content that was taken back."""
    script = chain.root / "recipes/delta/build.sh"
    original = script.read_text()
    script.write_text(original + "# a comment\n")
    chain.forge("build-all")
    script.write_text(original)
    assert chain.to_build() == {"delta"}
    chain.forge("build-all")
    numbers = sorted(p.rsplit("_", 1)[1] for p in chain.packages() if p.startswith("delta"))
    assert numbers == ["0.conda", "1.conda", "2.conda"]
    assert chain.to_build() == set()


def test_variant_value_rebuilds_its_users_only(project: MiniProject) -> None:
    recipe = project.recipe("uses") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("a test package", "for torch ${{ pytorch }}"))
    project.recipe("other")
    project.forge("build-all")
    variants = project.root / "variants.yaml"
    variants.write_text(variants.read_text().replace('"0.1.19"', '"0.1.20"'))
    assert project.to_build() == set()
    variants.write_text(variants.read_text() + 'colour:\n  - "red"\n')
    recipe.write_text(recipe.read_text().replace("${{ pytorch }}", "${{ colour }}"))
    project.forge("build-all")
    variants.write_text(variants.read_text().replace("red", "blue"))
    assert project.to_build() == {"uses"}


def test_rebuild_bypasses_skip_and_build_with_dependents(chain: MiniProject) -> None:
    before = chain.packages()
    chain.forge("rebuild", "delta")
    (new,) = chain.packages() - before
    assert new.startswith("delta") and new.endswith("_1.conda")

    with (chain.root / "recipes/alpha/build.sh").open("a") as stream:
        stream.write("# a comment\n")
    before = chain.packages()
    chain.forge("build", "alpha", "--with-dependents")
    assert {p.split("-")[0] for p in chain.packages() - before} == {"alpha", "beta", "gamma"}


def test_build_takes_what_the_package_needs(project: MiniProject) -> None:
    project.recipe("alpha")
    project.recipe("beta", run=["alpha"])
    project.recipe("delta")
    project.forge("build", "beta")
    assert {p.split("-")[0] for p in project.packages()} == {"alpha", "beta"}


def test_explicit_build_string_carries_the_tag(project: MiniProject) -> None:
    recipe = project.recipe("alpha") / "recipe.yaml"
    text = recipe.read_text()
    tagged = 'number: 0\n  string: "${{ base_tag }}rocm_h${{ hash }}_0"'
    recipe.write_text(text.replace("number: 0", tagged))
    project.forge("build-all")
    assert any(p.startswith("alpha-1.0-hostbound_rocm_h") for p in project.packages())
    assert "alpha-1.0-rocm_h" in project.forge("plan", "--base", "conda-forge").stdout
    recipe.write_text(text.replace("number: 0", 'number: 0\n  string: "rocm_h${{ hash }}_0"'))
    assert "base_tag" in project.forge("plan", code=2).stderr


STAGED = """\
schema_version: 1
recipe: {name: staged, version: "1.0"}
build: {number: 0, noarch: generic, variant: {use_keys: [content_digest]}}
outputs:
  - staging: {name: made}
    source: {path: ../../local}
    build:
      script:
        - mkdir -p "$PREFIX/share"
        - cp text "$PREFIX/share/one"
        - cp text "$PREFIX/share/two"
    requirements:
      host: [alpha]
  - package: {name: staged-one}
    inherit: made
    build: {files: [share/one], noarch: generic, variant: {use_keys: [content_digest]}}
    about: {license: BSD-3-Clause}
  - package: {name: staged-two}
    inherit: made
    build: {files: [share/two], noarch: generic, variant: {use_keys: [content_digest]}}
    requirements:
      run: ["${{ pin_subpackage('staged-one', exact=True) }}"]
    about: {license: BSD-3-Clause}
  - package: {name: staged-all}
    build: {noarch: generic, variant: {use_keys: [content_digest]}}
    requirements:
      run: ["${{ pin_subpackage('staged-two', exact=True) }}"]
    about: {license: BSD-3-Clause}
"""


def test_staged_outputs_are_one_recipe(project: MiniProject) -> None:
    """What the staging part reads and needs counts for all outputs; its script runs once.

    And its output is in the log once.
    """
    (project.root / "local").mkdir()
    (project.root / "local" / "text").write_text("one\n")
    project.recipe("alpha")
    (project.root / "recipes" / "staged").mkdir()
    (project.root / "recipes" / "staged" / "recipe.yaml").write_text(STAGED)
    project.recipe("user", run=["staged-two"])
    assert list(project.plan()) == ["alpha", "staged", "user"]
    project.forge("build-all")
    names = {p.rsplit("-", 2)[0] for p in project.packages()}
    assert names == {"alpha", "staged-all", "staged-one", "staged-two", "user"}
    log = (project.root / "build/logs/staged.log").read_text()
    assert log.count("+ cp text $PREFIX/share/one") == 1, log
    assert project.to_build() == set()
    (project.root / "local" / "text").write_text("two\n")
    assert project.to_build() == {"staged", "user"}
    (project.root / "local" / "text").write_text("one\n")
    with (project.root / "recipes/alpha/build.sh").open("a") as stream:
        stream.write("# a comment\n")
    assert project.to_build() == {"alpha", "staged", "user"}

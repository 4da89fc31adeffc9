# SPDX-License-Identifier: BSD-3-Clause
"""A change of content rebuilds the changed recipe and its dependents, and no other recipe.

New packages never replace old packages.
"""

import shutil
from pathlib import Path

import pytest
from support.project import MiniProject

from forge.files import sha256_file


@pytest.fixture(scope="module")
def built_chain(tmp_path_factory: pytest.TempPathFactory) -> MiniProject:
    """A built project: gamma requires beta, beta requires alpha, and delta requires nothing."""
    project = MiniProject(tmp_path_factory.mktemp("chain"))
    project.recipe("alpha")
    project.recipe("beta", run=["alpha"])
    project.recipe("gamma", run=["beta"])
    project.recipe("delta")
    project.forge("build-all")
    assert project.to_build() == set()
    return project


@pytest.fixture
def chain(built_chain: MiniProject, tmp_path: Path) -> MiniProject:
    """A copy of the built chain, for one test."""
    shutil.copytree(built_chain.root, tmp_path / "copy", symlinks=True)
    return MiniProject(tmp_path / "copy")


def test_edited_is_built_beside_what_was(chain: MiniProject) -> None:
    old = {name: sha256_file(chain.channel / "noarch" / name) for name in chain.packages()}
    append_comment(chain.root / "recipes/beta/recipe.yaml")
    chain.forge("build-all")
    new = chain.packages() - old.keys()
    assert {file.split("-")[0] for file in new} == {"beta", "gamma"}
    assert all(file.endswith("_1.conda") for file in new), "a new build must outrank the old one"
    # The old packages are unchanged.
    assert {name: sha256_file(chain.channel / "noarch" / name) for name in old} == old


def append_comment(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("# a comment\n")


def test_revert_gets_a_number_of_its_own(chain: MiniProject) -> None:
    """If a change is reverted, the recipe is built again, with a higher build number.

    Otherwise the solver would still choose the build with the change.
    """
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


def test_which_recipes_are_built(chain: MiniProject) -> None:
    """`rebuild` builds a recipe that is up to date, and `build` also builds changed requirements.

    `build --with-dependents` also builds the recipes that require the named one. A changed recipe
    is not built if the command does not select it.
    """

    def run(*words: str) -> set[str]:
        """Run the driver, and return the names of the packages that it built."""
        before = chain.packages()
        chain.forge(*words)
        return {file.split("-")[0] for file in chain.packages() - before}

    assert run("rebuild", "delta") == {"delta"}
    for name in ("alpha", "delta"):
        append_comment(chain.root / f"recipes/{name}/build.sh")
    assert run("build", "beta") == {"alpha", "beta"}
    assert run("build", "alpha", "--with-dependents") == {"gamma"}
    assert chain.to_build() == {"delta"}


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
    """A change of the staging output's source or requirements rebuilds all outputs of a recipe.

    In each build, the script of the staging output runs only once, and the log has the script's
    text only once.
    """
    text = project.root / "local" / "text"
    text.parent.mkdir()
    text.write_text("one\n")
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
    text.write_text("two\n")
    assert project.to_build() == {"staged", "user"}
    text.write_text("one\n")
    append_comment(project.root / "recipes/alpha/build.sh")
    assert project.to_build() == {"alpha", "staged", "user"}

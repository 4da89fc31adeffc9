# SPDX-License-Identifier: BSD-3-Clause
"""Every recipe as a feedstock: it renders alone, to what this repository builds."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from rattler_build.cli_api import build_recipes
from support.project import CHECKOUT, MiniProject
from typer.testing import CliRunner

from forge import bases
from forge.cli.main import app
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.sources.cache import PYPI_SOURCES, PYPI_URL
from forge.upkeep import feedstock

# what conda-forge-pinning gives a feedstock's recipe, for the keys that ours leave to it
PINNING = CHECKOUT / "bases/conda-forge/variants.yaml"
NAMES = sorted(path.parent.name for path in CHECKOUT.glob("recipes/*/recipe.yaml"))
# The order that conda-smithy's linter wants, of recipes with one output and with several
ONE = ["schema_version", "context", "package", "source", "build", "requirements", "tests"]
SEVERAL = ["schema_version", "context", "recipe", "source", "build", "outputs"]
LAST = ["about", "extra"]


@pytest.fixture(scope="module")
def folders(recipes: RecipeSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the feedstock of each recipe."""
    folder = tmp_path_factory.mktemp("feedstocks")
    for name, recipe in recipes.recipes.items():
        feedstock.write(recipes, recipe, folder / name)
    return folder


def essence(rendered: dict[str, Any]) -> dict[str, Any]:
    """A rendered output without what a feedstock has to change: hash and places."""
    data = json.loads(json.dumps(rendered["recipe"]))
    data["build"]["string"] = re.sub("h[0-9a-f]{7}_", "h_", data["build"]["string"])
    data["build"].pop("variant", None)
    for section in [data, *data.get("staging_caches", [])]:
        section["build"].pop("variant", None)
        for source in section.get("source", []):
            source["patches"] = [Path(patch).name for patch in source.get("patches", [])]
            for key in ("url", "path"):
                if key in source:
                    source[key] = Path(str(source[key])).name
    text = json.dumps(data, sort_keys=True)
    return json.loads(re.sub("h[0-9a-f]{7}_", "h_", text))


@pytest.mark.parametrize("name", NAMES)
def test_renders_alone_to_the_same(
    recipes: RecipeSet,
    folders: Path,
    name: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `rattler-build build --recipe recipe -m PINNING` would, without the driver's help."""
    ours = recipes.render(CHECKOUT / "recipes" / name / "recipe.yaml", "x")
    monkeypatch.delenv(PYPI_SOURCES)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        path = folders / name / "recipe/recipe.yaml"
        build_recipes([path], variant_config=[str(PINNING)], render_only=True)
    alone = json.loads(capfd.readouterr().out)
    assert [essence(output) for output in alone] == [essence(output) for output in ours]


@pytest.mark.parametrize("name", NAMES)
def test_holds_all_it_names_and_nothing_of_ours(
    recipes: RecipeSet, folders: Path, name: str
) -> None:
    folder = folders / name / "recipe"
    text = (folder / "recipe.yaml").read_text()
    for ours in (PYPI_SOURCES, PYPI_URL, "content_digest", "base_tag", "../"):
        assert ours not in text
    for rendered in recipes.render(folder / "recipe.yaml", "x"):
        data = rendered["recipe"]
        for section in [data, *data.get("staging_caches", [])]:
            for source in section.get("source", []):
                for patch in source.get("patches", []):
                    original = CHECKOUT / "patches" / name / Path(patch).name
                    assert (folder / patch).read_bytes() == original.read_bytes()
                assert (folder / source.get("path", "recipe.yaml")).exists()
    settings = yaml.safe_load((folders / name / "conda-forge.yml").read_text())
    assert settings["conda_build_tool"] == "rattler-build"


@pytest.mark.parametrize("name", NAMES)
def test_form_that_the_linter_wants(folders: Path, name: str) -> None:
    """What conda-smithy's linter found in our recipes once; `lint-recipes` runs all of it."""
    data = yaml.safe_load((folders / name / "recipe/recipe.yaml").read_text())
    order = [*(SEVERAL if "outputs" in data else ONE), *LAST]
    assert list(data) == [key for key in order if key in data]
    assert {"homepage", "license", "license_file", "summary"} <= set(data["about"])
    assert not str(data["context"]["version"]).startswith("$"), "a version that a bot can raise"
    variants = (folders / name / "recipe/conda_build_config.yaml").read_text().splitlines()
    if "c_stdlib_version:" in variants:  # without it, it would be macOS's, too
        assert variants[variants.index("c_stdlib_version:") + 1].endswith("# [linux]")


def test_pypi_files_have_public_addresses(folders: Path) -> None:
    """PyPI's own form, found through pip, by project and file and without a hash."""
    sdist = yaml.safe_load((folders / "flash-attn/recipe/recipe.yaml").read_text())["source"]["url"]
    assert sdist.endswith("/packages/source/f/flash-attn/flash_attn-${{ version }}.tar.gz")
    wheels = yaml.safe_load((folders / "triton/recipe/recipe.yaml").read_text())["source"]
    for wheel, tag in zip(wheels, ("cp311", "cp312"), strict=True):
        assert f"/packages/{tag}/t/triton/${{{{ wheel }}}}-{tag}-" in wheel["then"]["url"]
        assert wheel["then"]["url"].startswith("https://")


def test_maintainers_replace_ours(recipes: RecipeSet, tmp_path: Path) -> None:
    feedstock.write(recipes, recipes.recipes["flash-attn"], tmp_path, ["jane", "joe"])
    read = yaml.safe_load((tmp_path / "recipe/recipe.yaml").read_text())
    assert read["extra"]["recipe-maintainers"] == ["jane", "joe"]


def test_renews_only_the_recipe(recipes: RecipeSet, tmp_path: Path) -> None:
    """What rerendering and maintainers wrote stays; a file that the recipe dropped goes."""
    recipe = recipes.recipes["amdsmi"]
    feedstock.write(recipes, recipe, tmp_path)
    (tmp_path / "conda-forge.yml").write_text("conda_build_tool: rattler-build\nazure: {}\n")
    (tmp_path / "README.md").write_text("rendered")
    (tmp_path / "recipe/old.patch").write_text("")
    feedstock.write(recipes, recipe, tmp_path)
    assert "azure" in (tmp_path / "conda-forge.yml").read_text()
    assert (tmp_path / "README.md").read_text() == "rendered"
    assert not (tmp_path / "recipe/old.patch").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"conda-forge.yml", "README.md", "recipe"}


def test_refuses_a_folder_of_something_else(recipes: RecipeSet, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ForgeError, match="no feedstock"):
        feedstock.write(recipes, recipes.recipes["amdsmi"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_refuses_what_reaches_out_of_the_recipe(project: MiniProject, tmp_path: Path) -> None:
    """A script that reads elsewhere in this repository would fail in the feedstock."""
    project.recipe("reaches", script='cp "$RECIPE_DIR/../../LICENSE" .\n')
    broken = Project.at(project.root)
    recipes = RecipeSet(broken, bases.load(broken, "conda-forge"))
    with pytest.raises(ForgeError, match="build.sh line 1 leaves the recipe's folder"):
        feedstock.write(recipes, recipes.recipes["reaches"], tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flash-attn", "--all"], "name one recipe, or --all"),
        ([], "name one recipe, or --all"),
        (["flash"], "no recipe flash; there are: "),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = ["feedstock", *arguments, "-o", str(tmp_path / "new")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ForgeError) and result.exception.exit_code == 2
    assert str(result.exception).startswith(message)
    assert not (tmp_path / "new").exists()


def test_all_leaves_out_what_conda_forge_refuses(tmp_path: Path) -> None:
    command = ["feedstock", "--all", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    written = {path.name.removesuffix("-feedstock") for path in tmp_path.iterdir()}
    assert set(NAMES) - written == {"triton"}

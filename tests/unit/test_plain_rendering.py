# SPDX-License-Identifier: BSD-3-Clause
"""Recipes render without the driver, as rattler-build's own command line renders them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.plain_rendering import render_each_alone, render_plain
from support.project import CHECKOUT

RECIPES = sorted(CHECKOUT.glob("recipes/*/recipe.yaml"))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of the driver from the environment."""
    for name in list(os.environ):
        if name.startswith("FORGE_") or name == "PYPI_SOURCES":
            monkeypatch.delenv(name)


def test_nothing_of_the_driver_is_involved() -> None:
    code = "import sys, support.plain_rendering; sys.exit('forge' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT / "tests", check=True)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_renders_in_a_clean_environment(path: Path) -> None:
    outputs = render_plain(path)
    assert outputs
    names: dict[str, set[str]] = {}
    for output in outputs:
        string = output["build"]["string"]
        assert "hostbound" not in string
        assert not string.startswith("_"), string
        names.setdefault(output["package"]["name"], set()).add(string)
    for strings in names.values():
        tags = set(re.findall(r"py3\d+(?=h)", " ".join(strings)))
        # There is one build for all Pythons, or one for each.
        assert len(strings) in (1, 2)
        assert tags == ({"py312", "py313"} if len(strings) == 2 else set())


@pytest.mark.usefixtures("clean")
def test_a_recipe_that_needs_the_driver_does_not_render(tmp_path: Path) -> None:
    """The test above fails if a recipe uses an undefined variant, or a variable without default."""
    good = (CHECKOUT / "recipes/flash-attn/recipe.yaml").read_text()
    changes = {
        ', default="file:///proc/self/cwd/pypi-sources"': "",
        "number: ${{ build_number }}": "string: ${{ undefined_tag }}h${{ hash }}_0",
    }
    for old, new in changes.items():
        assert old in good
        (tmp_path / "recipe.yaml").write_text(good.replace(old, new))
        with pytest.raises(Exception, match=r"undefined|not found"):
            render_plain(tmp_path / "recipe.yaml")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_each_output_renders_with_its_own_keys(path: Path) -> None:
    assert render_each_alone(path) == {}


@pytest.mark.usefixtures("clean")
def test_an_output_that_lacks_a_key_of_another(tmp_path: Path) -> None:
    """The test above fails if an output needs a variant key that only another output uses."""
    text = (CHECKOUT / "recipes/strix-emulate/recipe.yaml").read_text()
    for line, output, problem in (
        ("      - c_stdlib\n", "strix-emulate", "No stdlib found"),
        ("      - llvm_library\n", "strix-emulate-hip", "undefined value"),
    ):
        assert line in text
        (tmp_path / "recipe.yaml").write_text(text.replace(line, ""))
        assert problem in render_each_alone(tmp_path / "recipe.yaml")[output]

# SPDX-License-Identifier: BSD-3-Clause
"""Recipes render without the driver, as rattler-build's own command line does it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.plain_rendering import alone, plain
from support.project import CHECKOUT

RECIPES = sorted(CHECKOUT.glob("recipes/*/recipe.yaml"))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FORGE_") or name == "PYPI_SOURCES":
            monkeypatch.delenv(name)


def test_nothing_of_the_driver_is_involved() -> None:
    code = "import sys, support.plain_rendering; sys.exit('forge' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT / "tests", check=True)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_renders_in_a_clean_environment(path: Path) -> None:
    outputs = plain(path)
    assert outputs
    names: dict[str, set[str]] = {}
    for output in outputs:
        string = output["build"]["string"]
        assert "hostbound" not in string and not string.startswith("_"), string
        names.setdefault(output["package"]["name"], set()).add(string)
    for strings in names.values():  # one for each Python, or one for all
        tags = {found[0] for text in strings if (found := re.search(r"py3\d+(?=h)", text))}
        assert tags == {"py312", "py313"} if len(strings) == 2 else len(strings) == 1 and not tags


@pytest.mark.usefixtures("clean")
def test_a_recipe_that_needs_the_driver_does_not_render(tmp_path: Path) -> None:
    """The test above finds an undefined variant, and a variable without a default."""
    good = (CHECKOUT / "recipes/flash-attn/recipe.yaml").read_text()
    for old, new in (
        (', default="file:///proc/self/cwd/pypi-sources"', ""),
        ("number: ${{ build_number }}", "string: ${{ undefined_tag }}h${{ hash }}_0"),
    ):
        assert old in good
        (tmp_path / "recipe.yaml").write_text(good.replace(old, new))
        with pytest.raises(Exception, match=r"undefined|not found"):
            plain(tmp_path / "recipe.yaml")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_each_output_renders_with_its_own_keys(path: Path) -> None:
    assert alone(path) == {}


@pytest.mark.usefixtures("clean")
def test_an_output_that_lacks_a_key_of_another(tmp_path: Path) -> None:
    """The test above finds it."""
    text = (CHECKOUT / "recipes/strix-emulate/recipe.yaml").read_text()
    for line, output, problem in (
        ("      - c_stdlib\n", "strix-emulate", "No stdlib found"),
        ("      - llvm_library\n", "strix-emulate-hip", "undefined value"),
    ):
        assert line in text
        (tmp_path / "recipe.yaml").write_text(text.replace(line, ""))
        assert problem in alone(tmp_path / "recipe.yaml")[output]

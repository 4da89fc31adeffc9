# SPDX-License-Identifier: BSD-3-Clause
"""A lower bound in a stack or a product has a comment with its reason on the same line."""

import re
import tomllib

import pytest
from support.project import CHECKOUT, STACKS

from forge.recipes.plan import RecipeSet

REQUIREMENT = re.compile(r'^([\w.-]+) = ".*>=.*"(.*)$')


def find_unexplained(text: str, ours: set[str]) -> list[str]:
    """Return the packages, except `ours`, that have a lower bound without a comment."""
    exempt = {*ours, "requires-pixi"}
    result = []
    for line in text.splitlines():
        match = REQUIREMENT.match(line)
        if not match or match[1] in exempt:
            continue
        if not re.search(r"# *\w", match[2]):
            result.append(match[1])
    return result


@pytest.mark.parametrize("stack", STACKS)
def test_a_lower_bound_has_its_reason_beside_it(recipes: RecipeSet, stack: str) -> None:
    text = (CHECKOUT / "stacks" / stack / "pixi.toml").read_text()
    assert find_unexplained(text, {*recipes.owner}) == []


def test_a_lower_bound_without_a_reason_is_named() -> None:
    text = 'trl = ">=1.10,<2"\npeft = ">=0.19"  #\npytorch = ">=2"\ndatasets = ">=4"  # trl\'s'
    assert find_unexplained(text, {"pytorch"}) == ["trl", "peft"]


@pytest.mark.parametrize("product", ["strix-emulate", "strix-validate"])
def test_a_lower_bound_of_a_product_has_its_reason_beside_it(product: str) -> None:
    text = (CHECKOUT / f"packages/{product}/pyproject.toml").read_text()
    for requirement in tomllib.loads(text)["project"]["dependencies"]:
        if ">=" in requirement:
            assert re.search(rf'"{re.escape(requirement)}", *# *\w', text), requirement


def test_the_reason_of_the_emulators_numpy_holds() -> None:
    """The emulator's bound of numpy is for np.bitwise_count, which NumPy 1.26 lacks."""
    sources = (CHECKOUT / "packages/strix-emulate/src").rglob("*.py")
    assert any("np.bitwise_count(" in source.read_text() for source in sources)

# SPDX-License-Identifier: BSD-3-Clause
"""Checks fail under `python -O` as well, which removes every assert statement."""

import ast
from importlib.resources import files
from pathlib import Path

import pytest
from strix_validate.checks import CheckFailed, require


def removed(source: str) -> list[int]:
    """The lines that `python -O` changes, or that judge as an assertion does."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Name) and node.id in ("AssertionError", "__debug__"))
    ]


@pytest.mark.parametrize("package", ["strix_validate", "strix_emulate"])
def test_nothing_is_judged_by_an_assertion(package):
    """So whatever fails fails under PYTHONOPTIMIZE=1 too."""
    found = {file: removed(file.read_text()) for file in Path(str(files(package))).rglob("*.py")}
    assert found and not {file.name: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize("source", ["assert x", "raise AssertionError", "if __debug__: x()"])
def test_what_would_be_removed_is_found(source):
    assert removed(f"y = 1\n{source}") == [2]


def test_require():
    require("something", "fine")
    with pytest.raises(CheckFailed, match="nothing there"):
        require([], "nothing there")

# SPDX-License-Identifier: BSD-3-Clause
"""No code of ours checks anything with `assert`: `python -O` would skip the check."""

import ast
from pathlib import Path

import pytest
from support.project import CHECKOUT, python_files

FOLDERS = ("recipes", "src", "packages/strix-validate/src", "packages/strix-emulate/src")


def find_assertions(code: str) -> list[int]:
    """Return the numbers of the lines whose behaviour changes with `python -O`."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        is_assertion = isinstance(node, ast.Assert)
        is_name = isinstance(node, ast.Name) and node.id in ("AssertionError", "__debug__")
        if is_assertion or is_name:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "file", python_files(*FOLDERS), ids=lambda file: str(file.relative_to(CHECKOUT))
)
def test_no_check_is_an_assertion(file: Path) -> None:
    assert find_assertions(file.read_text()) == []


@pytest.mark.parametrize(
    "code",
    [
        "assert x",
        "def f():\n    if x:\n        assert x, 'wrong'",
        "try:\n    x()\nexcept AssertionError:\n    pass",
        "if __debug__:\n    check()",
    ],
)
def test_an_assertion_is_found(code: str) -> None:
    assert find_assertions(code)

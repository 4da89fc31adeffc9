# SPDX-License-Identifier: BSD-3-Clause
"""Nothing is judged by an assertion: `python -O` and PYTHONOPTIMIZE would take the check away."""

import ast
from pathlib import Path

import pytest
from support.project import CHECKOUT, python_files

FOLDERS = ("recipes", "src", "packages/strix-validate/src", "packages/strix-emulate/src")
JUDGES = python_files(*FOLDERS)


def asserted(code: str) -> list[int]:
    """The lines that mean something else, or nothing, when Python optimizes."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Name) and node.id in ("AssertionError", "__debug__"))
    ]


@pytest.mark.parametrize("file", JUDGES, ids=lambda file: str(file.relative_to(CHECKOUT)))
def test_no_check_is_an_assertion(file: Path) -> None:
    assert asserted(file.read_text()) == []


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
    assert asserted(code)

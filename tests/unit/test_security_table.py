# SPDX-License-Identifier: BSD-3-Clause
"""SECURITY.md's table: each promise names tests, and most tests fail without some guard."""

import re

import pytest
from support.guards import GUARDS
from support.project import CHECKOUT

TESTS = {path.name: path.read_text() for path in CHECKOUT.glob("tests/*/test_*.py")}
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")
# The tests that fail without a guard of support/guards.py: (file, name).
GUARDED = {tuple(re.findall(r"test_\w+(?:\.py)?", guard.test)) for guard in GUARDS}
# Tests of promises that hold by the structure of the code. No single guard could be removed.
STRUCTURAL = {
    ("test_slow_servers.py", "test_each_request_ends"),
    ("test_foreign_git.py", "test_a_moved_branch_changes_nothing"),
}


def read_rows() -> list[list[str]]:
    """Return the cells of each row: attacker, promise, tests."""
    text = (CHECKOUT / "SECURITY.md").read_text()
    table = text.split("| attacker | promise | test |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def find_missing_tests(cell: str, tests: dict[str, str]) -> list[str]:
    """Return the tests that a cell names and that do not exist.

    If the cell names no test, return `["nothing"]`.

    Args:
        cell: The cell.
        tests: The text of each test file, by its name.
    """
    references = NAMED.findall(cell)
    if not references:
        return ["nothing"]
    missing = []
    for file, name in references:
        if not re.search(rf"^ *(def|class) {name}\b", tests.get(file, ""), re.M):
            missing.append(f"{file}::{name}")
    return missing


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row[1][:40])
def test_each_promise_names_its_tests(row: list[str]) -> None:
    assert len(row) == 3 and row[1]
    assert find_missing_tests(row[2], TESTS) == []
    assert re.sub(NAMED, "", row[2]).strip(" ,") == "", "the cell must have only names of tests"


def test_each_named_test_guards_something() -> None:
    """Each test that the table names, except those in STRUCTURAL, fails without some guard.

    The table states which tests show a promise, and GUARDS states which code a test depends on. A
    promise may have several guards.
    """
    tests: set[tuple[str, str]] = set()
    for row in read_rows():
        tests.update(NAMED.findall(row[2]))
    assert tests - STRUCTURAL == GUARDED


def test_what_is_not_there_is_found() -> None:
    assert find_missing_tests("`test_a.py::test_x`", {"test_a.py": "def test_y"}) == [
        "test_a.py::test_x"
    ]
    assert find_missing_tests("`test_a.py::test_x`", {"test_a.py": "def test_xy"}) == [
        "test_a.py::test_x"
    ]
    assert find_missing_tests("`test_b.py::test_x`", {"test_a.py": "def test_x"}) == [
        "test_b.py::test_x"
    ]
    assert find_missing_tests("by hand", {}) == ["nothing"]
    assert find_missing_tests("`test_a.py::test_y`", {"test_a.py": "def test_y"}) == []

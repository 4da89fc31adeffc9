# SPDX-License-Identifier: BSD-3-Clause
"""SECURITY.md's table: each promise names tests, and behind each test there is a guard."""

import re

import pytest
from support.guards import GUARDS
from support.project import CHECKOUT

TESTS = {path.name: path.read_text() for path in CHECKOUT.glob("tests/*/test_*.py")}
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")
# with a guard each, in a test that is not of one promise
GUARDED = {tuple(guard.test.rpartition("/")[2].split("::")) for guard in GUARDS}
# what holds by the shape of the code: the test would fail with other code, not with less of it
SHAPED = {
    ("test_slow_servers.py", "test_each_request_ends"),
    ("test_foreign_git.py", "test_a_moved_branch_changes_nothing"),
}


def rows() -> list[list[str]]:
    text = (CHECKOUT / "SECURITY.md").read_text()
    table = text.split("| attacker | promise | test |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def missing(cell: str, tests: dict[str, str]) -> list[str]:
    """What a cell names and no test file has; or that it names nothing."""
    named = NAMED.findall(cell)
    lost = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^ *(def|class) {name}\b", tests.get(file, ""), re.M)
    ]
    return lost if named else ["nothing"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1][:40])
def test_each_promise_names_its_tests(row: list[str]) -> None:
    assert len(row) == 3 and row[1]
    assert missing(row[2], TESTS) == []
    assert re.sub(NAMED, "", row[2]).strip(" ,") == "", "something that is no test"


def test_each_named_test_guards_something() -> None:
    named = {test for row in rows() for test in NAMED.findall(row[2])}
    assert named - SHAPED == GUARDED


def test_there_are_rows() -> None:
    assert len([row for row in rows() if row[0]]) == 7 and len(rows()) > 20


def test_what_is_not_there_is_found() -> None:
    assert missing("`test_a.py::test_x`", {"test_a.py": "def test_y"}) == ["test_a.py::test_x"]
    assert missing("`test_a.py::test_x`", {"test_a.py": "def test_xy"}) == ["test_a.py::test_x"]
    assert missing("`test_b.py::test_x`", {"test_a.py": "def test_x"}) == ["test_b.py::test_x"]
    assert missing("by hand", {}) == ["nothing"]
    assert missing("`test_a.py::test_y`", {"test_a.py": "def test_y"}) == []

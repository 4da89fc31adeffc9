# SPDX-License-Identifier: BSD-3-Clause
"""SECURITY.md's table of attackers: one promise a row, with the test that shows it."""

import re

import pytest
from support.project import CHECKOUT

TESTS = {path.name: path.read_text() for path in CHECKOUT.glob("tests/*/test_*.py")}
NAMED = re.compile(r"`(test_\w+\.py)(?:::(\w+))?`")


def rows() -> list[list[str]]:
    text = (CHECKOUT / "SECURITY.md").read_text()
    table = text.split("| attacker | what holds | test |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def missing(cell: str, tests: dict[str, str]) -> list[str]:
    """What a cell names and no test file has; or that it names nothing."""
    named = NAMED.findall(cell)
    lost = [
        f"{file}::{name}" for file, name in named
        if file not in tests or not re.search(rf"^ *(def|class) {name}\b", tests[file], re.M)
    ]  # fmt: skip
    return lost if named else ["nothing"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1][:40])
def test_each_promise_names_its_test(row: list[str]) -> None:
    assert len(row) == 3 and row[1]
    assert missing(row[2], TESTS) == []
    assert all(name for _, name in NAMED.findall(row[2])), "a whole file shows no one promise"


def test_there_are_rows() -> None:
    assert len([row for row in rows() if row[0]]) == 6 and len(rows()) > 20


def test_what_is_not_there_is_found() -> None:
    assert missing("`test_a.py::test_x`", {"test_a.py": "def test_y"}) == ["test_a.py::test_x"]
    assert missing("`test_a.py::test_x`", {"test_a.py": "def test_xy"}) == ["test_a.py::test_x"]
    assert missing("`test_b.py`", {"test_a.py": "def test_y"}) == ["test_b.py::"]
    assert missing("by hand", {}) == ["nothing"]
    assert missing("`test_a.py::test_y`", {"test_a.py": "def test_y"}) == []

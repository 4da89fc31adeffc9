# SPDX-License-Identifier: BSD-3-Clause
"""Pairwise testing: choose a few combinations that together contain every pair of values.

Most faults depend on only one or two values. Everything here is deterministic: the same columns
give the same combinations, in the same order.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Hashable)
#: Values by column.
Combination = dict[str, Any]
#: A pair of values: a column and its value, then another column and its value.
_Pair = tuple[str, Any, str, Any]


def pairwise(rows: Sequence[tuple[Row, Sequence[Hashable]]]) -> list[Row]:
    """Return a few of the rows, in order, that together have every pair of values that a row has.

    Each step chooses the row that adds the most pairs; if several rows add as many, the first one.

    Args:
        rows: Each row with the values of its columns.
    """
    pairs_of_rows = []
    missing: set = set()
    for row, columns in rows:
        pairs = set(combinations(enumerate(columns), 2))
        pairs_of_rows.append((row, pairs))
        missing |= pairs
    chosen: list[Row] = []
    while missing:
        row, pairs = max(pairs_of_rows, key=lambda item: len(item[1] & missing))
        chosen.append(row)
        missing -= pairs
    return [row for row, _ in rows if row in chosen]


def combine(
    columns: Mapping[str, Sequence[Hashable]],
    allows: Callable[[Combination], bool],
) -> list[Combination]:
    """Return a few allowed combinations that together contain every possible pair of values.

    A combination starts from the first missing pair. Each of the remaining columns then gets the
    value that adds the most missing pairs.

    Args:
        columns: The values of each column.
        allows: Returns whether values can be combined. Its argument may have values of only some
            columns.
    """
    names = list(columns)
    missing = dict.fromkeys(_list_allowed_pairs(columns, allows))
    chosen: list[Combination] = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = next(_complete({a: x, b: y}, columns, allows, missing), None)
        if row is None:  # no allowed combination of all columns contains this pair
            del missing[a, x, b, y]
            continue
        chosen.append({name: row[name] for name in names})
        for pair in _list_pairs(row, names):
            missing.pop(pair, None)
    return chosen


def _list_pairs(row: Combination, names: Sequence[str]) -> Iterator[_Pair]:
    for a, b in combinations(names, 2):
        yield a, row[a], b, row[b]


def _list_allowed_pairs(
    columns: Mapping[str, Sequence[Hashable]],
    allows: Callable[[Combination], bool],
) -> Iterator[_Pair]:
    for a, b in combinations(columns, 2):
        for x, y in product(columns[a], columns[b]):
            if allows({a: x, b: y}):
                yield a, x, b, y


def _complete(
    row: Combination,
    columns: Mapping[str, Sequence[Hashable]],
    allows: Callable[[Combination], bool],
    missing: Mapping[_Pair, None],
) -> Iterator[Combination]:
    """Complete a row that has values of only some columns; yield each allowed combination.

    In each column, the value that adds the most missing pairs comes first.
    """
    names = list(columns)
    name = next((n for n in names if n not in row), None)
    if name is None:
        yield row
        return

    def count_missing(value: Hashable) -> int:
        count = 0
        for column, column_value in row.items():
            # a pair lists its two columns in the order of `columns`
            if names.index(column) < names.index(name):
                pair = (column, column_value, name, value)
            else:
                pair = (name, value, column, column_value)
            count += pair in missing
        return count

    values = [value for value in columns[name] if allows(row | {name: value})]
    for value in sorted(values, key=count_missing, reverse=True):
        yield from _complete(row | {name: value}, columns, allows, missing)

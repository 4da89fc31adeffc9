# SPDX-License-Identifier: BSD-3-Clause
"""Few combinations that hold each pair of values: most faults need one or two values to show.

Everything here is deterministic: the same columns give the same combinations, in the same order.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Hashable)
#: Values by column.
Combination = dict[str, Any]
#: A pair of values: a column and its value, and another column and its value.
_Pair = tuple[str, Any, str, Any]


def pairwise(rows: Sequence[tuple[Row, Sequence[Hashable]]]) -> list[Row]:
    """Return few of the rows, in order, which have each pair of values of two columns.

    Each next row is the first of those with most pairs that no chosen one has.

    Args:
        rows: each with the values of its columns.
    """
    held = [
        (row, {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(columns), 2)})
        for row, columns in rows
    ]
    left = set().union(*(pairs for _, pairs in held)) if held else set()
    chosen: list[Row] = []
    while left:
        best, pairs = max(held, key=lambda item: len(item[1] & left))
        chosen.append(best)
        left -= pairs
    return [row for row, _ in rows if row in chosen]


def combine(
    columns: Mapping[str, Sequence[Hashable]], allows: Callable[[Combination], bool]
) -> list[Combination]:
    """Return few combinations of values which hold each pair of values that can be combined.

    A combination begins with the first pair that none has yet, and takes in each other column the
    value that adds most pairs.

    Args:
        columns: the values of each column.
        allows: whether values can be combined; it is also asked about some of the columns.
    """
    names = list(columns)
    left = dict.fromkeys(_possible_pairs(columns, allows))
    chosen: list[Combination] = []
    while left:
        a, x, b, y = next(iter(left))
        row = next(_completions({a: x, b: y}, columns, allows, left), None)
        if row is None:  # no whole combination has this pair
            del left[a, x, b, y]
            continue
        chosen.append({name: row[name] for name in names})
        for pair in _pairs_of(row, names):
            left.pop(pair, None)
    return chosen


def _pairs_of(row: Combination, names: Sequence[str]) -> Iterator[_Pair]:
    for a, b in combinations(names, 2):
        yield a, row[a], b, row[b]


def _possible_pairs(
    columns: Mapping[str, Sequence[Hashable]], allows: Callable[[Combination], bool]
) -> Iterator[_Pair]:
    for a, b in combinations(columns, 2):
        for x, y in product(columns[a], columns[b]):
            if allows({a: x, b: y}):
                yield a, x, b, y


def _completions(
    row: Combination,
    columns: Mapping[str, Sequence[Hashable]],
    allows: Callable[[Combination], bool],
    left: Mapping[_Pair, None],
) -> Iterator[Combination]:
    """Yield whole combinations that hold a part of one, the one with most new pairs first."""
    names = list(columns)
    name = next((n for n in names if n not in row), None)
    if name is None:
        yield row
        return

    def count_new(value: Hashable) -> int:
        place = names.index(name)
        pairs = (
            (other, row[other], name, value) if names.index(other) < place
            else (name, value, other, row[other])
            for other in row
        )  # fmt: skip
        return sum(pair in left for pair in pairs)

    values = [value for value in columns[name] if allows(row | {name: value})]
    for value in sorted(values, key=count_new, reverse=True):
        yield from _completions(row | {name: value}, columns, allows, left)

# SPDX-License-Identifier: BSD-3-Clause
"""Few rows of a table that hold each pair of values that its rows hold."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)


def pairwise(rows: Sequence[tuple[Row, Sequence[Hashable]]]) -> list[Row]:
    """Return few of the rows, in order, which have each pair of values of two columns.

    Each next row is the first of those with most pairs that no chosen one has: the same in every
    run.

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

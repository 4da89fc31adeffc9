# SPDX-License-Identifier: BSD-3-Clause
"""Make the tables of docs/kernels.md from the lists of kernel costs in recipes/*/kernels.tsv."""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from forge.errors import ForgeError

PAGE = "docs/kernels.md"
_HEAD = (
    "kernel",
    "configurations",
    "kernels",
    "VGPRs",
    "spilled",
    "scratch, bytes a lane",
    "LDS, KiB",
    "waves per SIMD",
    "WMMA",
)
# Columns of a kernels.tsv that are also the last columns of its table in docs/kernels.md. A cell of
# that table has the range of the column's values in all rows of a kernel.
_COSTS = ("vgprs", "vgpr_spills", "scratch", "lds", "waves", "wmma")


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_range(values: list[int]) -> str:
    """Return the range of numbers as text, or a single number if all are equal."""
    low = min(values)
    high = max(values)
    if low == high:
        return str(low)
    return f"{low} to {high}"


def _read_kernels(file: Path) -> dict[str, list[dict[str, str]]]:
    """Read the rows of a kernels.tsv, by the name of the kernel."""
    kernels = defaultdict(list)
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            kernels[row["name"]].append(row)
    return kernels


def make_table(file: Path) -> str:
    """Return the table of a kernels.tsv: a row per kernel, with the range of its costs."""
    lines = [
        _format_row(_HEAD),
        _format_row(["---"] * len(_HEAD)),
    ]
    for name, rows in _read_kernels(file).items():
        configurations = {row["configuration"] for row in rows}
        cells = [
            f"`{name}`",
            str(len(configurations)),
            str(len(rows)),
        ]
        for cost in _COSTS:
            values = [int(row[cost]) for row in rows]
            if cost == "lds":
                # This cost is in bytes; convert it to KiB.
                values = [round(size / 1024) for size in values]
            cells.append(_format_range(values))
        lines.append(_format_row(cells))
    return "\n".join(lines)


def with_tables(page: str, lists: list[Path]) -> str:
    """Return the page with new tables, each below the heading `## PACKAGE`.

    Args:
        page: The text of docs/kernels.md.
        lists: The recipes' kernels.tsv files.

    Raises:
        ForgeError: The page has no table for one of the packages.
    """
    for file in lists:
        heading = f"## {file.parent.name}"
        pattern = rf"(?<={re.escape(heading)}\n\n)(\|.*\n)+"
        table = re.search(pattern, page)
        if not table:
            advice = "add its first two lines, and ./forge generate writes the rest"
            raise ForgeError(f"{PAGE} has no table below {heading!r}: {advice}")
        before = page[: table.start()]
        after = page[table.end() :]
        page = f"{before}{make_table(file)}\n{after}"
    return page

# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/kernels.md, from the lists of kernel costs in recipes/*/kernels.tsv."""

import csv
import re
from collections import defaultdict
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


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _span(values: list[int]) -> str:
    """Return one number, or the smallest and the largest of several."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def make_table(file: Path) -> str:
    """Return the table of a list: one row for each kernel, with the range of its costs."""
    rows = defaultdict(list)
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            rows[row["name"]].append(row)
    lines = [_line(list(_HEAD)), _line(["---"] * len(_HEAD))]
    for name, kernels in rows.items():
        numbers = {
            cost: [int(kernel[cost]) for kernel in kernels]
            for cost in ("vgprs", "vgpr_spills", "scratch", "waves", "wmma", "lds")
        }
        cells = [
            f"`{name}`",
            str(len({kernel["configuration"] for kernel in kernels})),
            str(len(kernels)),
            _span(numbers["vgprs"]),
            _span(numbers["vgpr_spills"]),
            _span(numbers["scratch"]),
            _span([round(size / 1024) for size in numbers["lds"]]),
            _span(numbers["waves"]),
            _span(numbers["wmma"]),
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def with_tables(page: str, lists: list[Path]) -> str:
    """Return the page with the table of each list, below a heading `## PACKAGE`.

    Raises ForgeError for a list whose package has no table on the page.
    """
    for file in lists:
        heading = f"## {file.parent.name}"
        table = re.search(rf"(?<={re.escape(heading)}\n\n)(\|.*\n)+", page)
        if not table:
            raise ForgeError(f"{PAGE} has no table below {heading!r}: write one of two lines")
        page = f"{page[: table.start()]}{make_table(file)}\n{page[table.end() :]}"
    return page

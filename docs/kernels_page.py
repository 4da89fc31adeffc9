# SPDX-License-Identifier: BSD-3-Clause
"""Write the tables of docs/kernels.md from recipes/*/kernels.tsv; `--check` only compares.

Both are run from the repository's root: ``python docs/kernels_page.py``.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs/kernels.md"
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
    return str(low) if low == high else f"{low}–{high}"


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


def render(page: str) -> str:
    """Return the page with its tables as of now, each below a heading `## PACKAGE`."""
    for file in sorted(_ROOT.glob("recipes/*/kernels.tsv")):
        heading = f"## {file.parent.name}"
        table = re.compile(rf"(?<={re.escape(heading)}\n\n)(\|.*\n)+")
        if not table.search(page):
            raise SystemExit(f"{_PAGE} has no table below {heading!r}")
        text = make_table(file)
        page = table.sub(lambda _, text=text: f"{text}\n", page)
    return page


def main() -> None:
    """Write the page, or end with status 1 if it is not current."""
    page = _PAGE.read_text()
    current = render(page)
    if sys.argv[1:] == ["--check"]:
        if page != current:
            raise SystemExit("docs/kernels.md is not current: run python docs/kernels_page.py")
    else:
        _PAGE.write_text(current)


if __name__ == "__main__":
    main()

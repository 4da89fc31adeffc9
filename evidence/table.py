# SPDX-License-Identifier: BSD-3-Clause
"""Write README's table of packages: `python evidence/table.py`, in the tests' environment.

What was built, installed and run is in packages.toml; versions are the recipes'; the last column
is the records': a package ran on gfx1151 if one proves it (strix_validate's Record.proves).
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TABLE = re.compile(r"(?m)^\| Package \|(?:.*\n)+?(?=\n)")

#: The words of each column, best first; docs/packages.md defines them.
WORDS = {
    "built": ("yes", "rehearsed", "no"),
    "installed": ("yes", "rehearsed", "no"),
    "ran": ("emulated", "interpreted", "loads", "no"),
}


def claims() -> dict[str, dict[str, list[str]]]:
    """By package and column, a word and at most one page that shows it."""
    read = tomllib.loads((ROOT / "evidence/packages.toml").read_text())
    return {
        name: {column: [said] if isinstance(said, str) else said for column, said in row.items()}
        for name, row in read.items()
    }


def records(folder: Path = ROOT / "evidence") -> dict[str, Any]:
    """The records of runs on real hardware, by file name; a forged one is an error."""
    sys.path.insert(0, str(ROOT / "packages/strix-validate/src"))
    from strix_validate.reporting import record

    return {file.name: record.load(file) for file in sorted(folder.glob("*.json"))}


def shown_on_gfx1151(found: dict[str, Any]) -> dict[str, str]:
    """The latest record that proves it, for each package that ran on gfx1151.

    found: strix_validate's records by file.
    """
    return {
        package.name: file
        for file, record in found.items()
        for package in record.packages
        if record.proves(package.name)
    }


def render(
    rows: dict[str, dict[str, list[str]]], versions: dict[str, str], on_gpu: dict[str, str]
) -> str:
    """The table as Markdown: one word a cell, and a link where a page shows it."""
    lines = ["| Package | Version | Built | Installed | Ran | On gfx1151 |", "|" + " --- |" * 6]
    for name, row in rows.items():
        cells = [row[column] for column in WORDS]
        cells.append(["yes", f"evidence/{on_gpu[name]}"] if name in on_gpu else ["no"])
        words = [f"[{said[0]}]({said[1]})" if said[1:] else said[0] for said in cells]
        first = f"[{name}](docs/packages.md#{name})"
        lines.append("| " + " | ".join([first, versions.get(name, "?"), *words]) + " |")
    return "\n".join(lines) + "\n"


def recipe_versions() -> dict[str, str]:
    """The version of each recipe, as the driver reads it."""
    sys.path.insert(0, str(ROOT / "src"))
    from forge.bases import BaseName
    from forge.cli.context import Context

    recipes = Context(base_name=BaseName.CONDA_FORGE, root=ROOT).recipes.recipes
    return {name: recipe.version for name, recipe in recipes.items()}


def main() -> None:
    """Replace the table in README.md."""
    table = render(claims(), recipe_versions(), shown_on_gfx1151(records()))
    text, count = TABLE.subn(lambda _: table, README.read_text())
    if count != 1:
        raise SystemExit(f"{README}: {count} tables begin with '| Package |'; there must be one")
    README.write_text(text)


if __name__ == "__main__":
    main()

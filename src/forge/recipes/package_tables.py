# SPDX-License-Identifier: BSD-3-Clause
"""Tables and sections of pages about packages, made from what each recipe states in `extra`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forge.errors import ForgeError
from forge.recipes.cost import Cost
from forge.recipes.recipe import Recipe

# Words of each column of README's table, best first; docs/packages.md defines them.
STATES = {
    "built": ("yes", "rehearsed", "no"),
    "installed": ("yes", "rehearsed", "no"),
    "ran": ("emulated", "interpreted", "loads", "no"),
    "gfx1151": ("yes", "no"),
}
STATE_HEAD = ("Package", "Version", "Built", "Installed", "Ran", "On gfx1151")
COST_HEAD = ("recipe", "download", "disk while building", "memory per job", "CPU hours")
# What follows in docs/packages.md is generated.
SECTIONS = "<!-- The sections below are the `extra.notes` of the recipes; ./forge generate -->\n"


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_state(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Return the word of each column, and the page that shows it or "".

    Raises ForgeError if `extra.state` lacks a column or has another word.
    """
    where = f"{recipe.path}: extra.state"
    stated: dict[str, Any] = {"gfx1151": "no", **recipe.extra.get("state", {})}
    if stated.keys() != STATES.keys():
        raise ForgeError(f"{where} has {', '.join(stated)}, and not {', '.join(STATES)}")
    state = {}
    for column, words in STATES.items():
        value = stated[column]
        word, *pages = value if isinstance(value, list) else [value]
        if word not in words or len(pages) > 1:
            expected = f"one of {', '.join(words)}, or a list of it and a page"
            raise ForgeError(f"{where}.{column} is {value!r}; expected {expected}")
        state[column] = (str(word), str(pages[0]) if pages else "")
    return state


def make_state_table(recipes: Mapping[str, Recipe]) -> str:
    """Return README's table: how far each package has come, with links to what shows it."""
    rows = []
    for name, recipe in sorted(recipes.items()):
        cells = [f"[{name}](docs/packages.md#{name})", recipe.version]
        for word, page in read_state(recipe).values():
            cells.append(f"[{word}]({page})" if page else word)
        rows.append(cells)
    return format_table(STATE_HEAD, rows)


def make_cost_table(costs: Mapping[str, Cost]) -> str:
    """Return the table of docs/build.md: what building each recipe takes."""
    rows = []
    for name, cost in costs.items():
        sizes = [f"{size:g} GiB" for size in (cost.download, cost.disk, cost.memory)]
        rows.append([name, *sizes, f"{cost.cpu_hours:g}"])
    return format_table(COST_HEAD, rows)


def make_sections(recipes: Mapping[str, Recipe]) -> str:
    """Return the sections of docs/packages.md: the notes of each recipe."""
    sections = []
    for name, recipe in sorted(recipes.items()):
        notes = str(recipe.extra.get("notes", "")).strip()
        if not notes:
            raise ForgeError(
                f"{recipe.path}: extra.notes is missing: what does the package leave out?"
            )
        sections.append(f"## {name}\n{notes}\n")
    return SECTIONS + "\n" + "\n".join(sections)


def replace_table(page: str, head: Sequence[str], table: str, where: object) -> str:
    """Return a page with the table of this head replaced. Raises ForgeError unless it has one."""
    line = re.escape(f"| {' | '.join(head)} |\n")
    text, count = re.subn(rf"(?m)^{line}(?:\|.*\n)*", lambda _: table, page)
    if count != 1:
        raise ForgeError(f"{where}: {count} tables begin with {' | '.join(head)}; expected one")
    return text


def replace_sections(page: str, sections: str, where: object) -> str:
    """Return docs/packages.md with its generated sections. Raises ForgeError without the mark."""
    if SECTIONS not in page:
        raise ForgeError(f"{where} lacks the line {SECTIONS.strip()}")
    return page.partition(SECTIONS)[0] + sections

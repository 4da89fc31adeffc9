# SPDX-License-Identifier: BSD-3-Clause
"""Tables, sections and figures of pages about packages, made from `extra` of each recipe."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forge.errors import ForgeError
from forge.recipes.cost import Cost, add_costs
from forge.recipes.recipe import Recipe

# The allowed words for each state in README's table, the best first. docs/packages.md defines them.
STATES = {
    "built": ("yes", "rehearsed", "no"),
    "installed": ("yes", "rehearsed", "no"),
    "ran": ("emulated", "interpreted", "loads", "no"),
    "gfx1151": ("yes", "no"),
}
STATE_HEAD = (
    "Package",
    "Version",
    "Built",
    "Installed",
    "Ran",
    "On gfx1151",
)
COST_HEAD = (
    "recipe",
    "download",
    "disk while building",
    "memory per job",
    "CPU hours",
)
# The part of docs/packages.md below this line is generated.
SECTIONS = (
    "<!-- `./forge generate` writes the sections below from `extra.notes` of the recipes. -->\n"
)


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, which ends with a line break."""
    separator = ["---"] * len(head)
    table = ""
    for cells in (head, separator, *rows):
        table += f"| {' | '.join(cells)} |\n"
    return table


def read_state(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Read from `extra.state` whether a recipe's package was built, installed and run.

    Returns:
        For each key of STATES, the word of the recipe and the page that proves it. The page is ""
        if there is none.

    Raises:
        ForgeError: `extra.state` lacks a key of STATES other than gfx1151, has another key, or has
            a value that is not allowed.
    """
    where = f"{recipe.path}: extra.state"
    stated: dict[str, Any] = {"gfx1151": "no"}
    stated |= recipe.extra.get("state", {})
    if stated.keys() != STATES.keys():
        raise ForgeError(f"{where} has {', '.join(stated)}; expected {', '.join(STATES)}")
    state = {}
    for column, words in STATES.items():
        value = stated[column]
        word, *pages = value if isinstance(value, list) else [value]
        if word not in words or len(pages) > 1:
            expected = f"one of {', '.join(words)}, or a list of such a word and a page"
            raise ForgeError(f"{where}.{column} is {value!r}; expected {expected}")
        page = str(pages[0]) if pages else ""
        state[column] = (str(word), page)
    return state


def make_state_table(recipes: Mapping[str, Recipe]) -> str:
    """Return README's table of the states of packages, with links to the pages that prove them."""
    rows = []
    for name, recipe in sorted(recipes.items()):
        link = f"[{name}](docs/packages.md#{name})"
        cells = [link, recipe.version]
        for word, page in read_state(recipe).values():
            cells.append(f"[{word}]({page})" if page else word)
        rows.append(cells)
    return format_table(STATE_HEAD, rows)


def make_cost_table(costs: Mapping[str, Cost]) -> str:
    """Return the table of docs/build.md: the cost of building each recipe."""
    rows = []
    for name, cost in costs.items():
        rows.append(
            [
                name,
                f"{cost.download:g} GiB",
                f"{cost.disk:g} GiB",
                f"{cost.memory:g} GiB",
                f"{cost.cpu_hours:g}",
            ]
        )
    return format_table(COST_HEAD, rows)


def make_sections(recipes: Mapping[str, Recipe]) -> str:
    """Return the sections of docs/packages.md: the notes of each recipe.

    Raises:
        ForgeError: A recipe has no notes.
    """
    sections = []
    for name, recipe in sorted(recipes.items()):
        notes = str(recipe.extra.get("notes", "")).strip()
        if not notes:
            problem = "extra.notes is missing: describe what the package leaves out"
            raise ForgeError(f"{recipe.path}: {problem}")
        sections.append(f"## {name}\n{notes}\n")
    return SECTIONS + "\n" + "\n".join(sections)


def replace_table(
    page: str,
    head: Sequence[str],
    table: str,
    where: object,
) -> str:
    """Return a page in which the table with this head is replaced.

    Args:
        page: The text of the page.
        head: The cells of the table's first line.
        table: The new table.
        where: The name of the page, for error messages.

    Raises:
        ForgeError: The page does not have exactly one such table.
    """
    first_line = re.escape(f"| {' | '.join(head)} |\n")
    pattern = rf"(?m)^{first_line}(?:\|.*\n)*"
    text, count = re.subn(pattern, lambda _: table, page)
    if count != 1:
        raise ForgeError(f"{where}: {count} tables begin with {' | '.join(head)}; expected one")
    return text


def format_figures(
    recipes: Mapping[str, Recipe],
    costs: Iterable[Cost],
    host_costs: Iterable[Cost],
) -> dict[str, str]:
    """Return the figures that pages state about packages together, by the figure's name.

    Args:
        recipes: All recipes.
        costs: The costs of all recipes on the conda-forge base, in build order.
        host_costs: The costs of the host base, and of the recipes that are built on it.
    """
    total = add_costs(costs)
    on_host = add_costs(host_costs)
    built = [recipe for recipe in recipes.values() if is_built_on_host(recipe)]
    return {
        "packages": str(len(recipes)),
        "download": f"{total.download:.1f}",
        "disk": f"{math.ceil(round(total.disk, 1))}",
        "hours": f"{total.cpu_hours:.0f}",
        "hours_on_4_cores": f"{total.cpu_hours / 4:.0f}",
        "host_packages": str(len(built)),
        "host_download": f"{on_host.download:.1f}",
        "host_disk": f"{math.ceil(round(on_host.disk, 1))}",
        "host_hours": f"{on_host.cpu_hours:.1f}",
    }


def is_built_on_host(recipe: Recipe) -> bool:
    """Return whether a recipe's package has been built on the host base."""
    return read_state(recipe)["built"][0] == "yes"


def replace_figures(page: str, sentence: str, figures: Mapping[str, str], where: object) -> str:
    """Return a page with the figures of a sentence replaced.

    Args:
        page: The text of the page. A line may end at any space of the sentence.
        sentence: A part of a sentence, with {NAME} in place of each figure.
        figures: The figures by name.
        where: The name of the page, for error messages.

    Raises:
        ForgeError: The page does not have the sentence exactly once.
    """
    # The parts alternate: text, name of a figure, text, and so on.
    parts = re.split(r"\{(\w+)\}", sentence)
    pattern = ""
    for text in parts[::2]:
        pattern += "(" + r"\s+".join(map(re.escape, text.split(" "))) + r")[\d.]+"
    pattern = pattern.removesuffix(r"[\d.]+")

    def fill(match: re.Match[str]) -> str:
        filled = match[1]
        for name, text in zip(parts[1::2], match.groups()[1:], strict=True):
            filled += figures[name] + text
        return filled

    text, count = re.subn(pattern, fill, page)
    if count != 1:
        raise ForgeError(f"{where}: {count} sentences have {sentence!r}; expected one")
    return text


def replace_sections(page: str, sections: str, where: object) -> str:
    """Return docs/packages.md with new sections. Raise ForgeError if it lacks the SECTIONS line.

    Args:
        page: The text of the page.
        sections: The new sections, beginning with the SECTIONS line.
        where: The name of the page, for error messages.
    """
    if SECTIONS not in page:
        raise ForgeError(f"{where} lacks the line {SECTIONS.strip()}")
    handwritten = page.partition(SECTIONS)[0]
    return handwritten + sections

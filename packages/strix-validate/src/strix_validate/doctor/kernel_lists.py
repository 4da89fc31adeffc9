# SPDX-License-Identifier: BSD-3-Clause
"""The kernels that packages installed into an environment.

The channel's triton looks into share/triton-kernels/PACKAGE after the user's cache: a folder for
each kernel, named by its key, and kernels.json, which lists them with the sha256 of their files.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from strix_validate.json_file import small_file

#: In an environment; recipes/triton patches Triton to look here.
FOLDER = Path("share", "triton-kernels")
LIST = "kernels.json"


class Listed(BaseModel):
    """A kernel of a list: its name; types of arguments, constants and options by name."""

    model_config = ConfigDict(extra="allow")

    name: str
    types: dict[str, str]
    constants: dict[str, str]
    options: dict[str, int]


class List(BaseModel):
    """The file kernels.json: what a package holds, by key."""

    kernels: dict[str, Listed]


def installed(prefix: Path) -> dict[str, dict[str, dict]]:
    """Return the lists of an environment's packages: kernels by key, by package.

    A list that cannot be read is left out: Triton finds nothing there either.
    """
    lists = {}
    for file in sorted((prefix / FOLDER).glob(f"*/{LIST}")):
        try:
            found = List.model_validate_json(small_file(file), strict=True)
            lists[file.parent.name] = found.model_dump()["kernels"]
        except (OSError, ValueError):
            continue
    return lists


def describe(kernel: dict) -> str:
    """Describe a listed kernel in one line: name(argument types) constants."""
    types = ", ".join(kernel["types"].values())
    given = kernel["constants"] | kernel["options"]
    constants = " ".join(f"{name}={value}" for name, value in given.items() if value != "None")
    return f"{kernel['name']}({types}) {constants}"

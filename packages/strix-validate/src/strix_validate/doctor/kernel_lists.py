# SPDX-License-Identifier: BSD-3-Clause
"""List the Triton kernels that packages installed into an environment.

If a kernel is not in the user's cache, this repository's build of Triton looks for it in
share/triton-kernels/PACKAGE. There, each kernel has a folder that is named after its key, and
kernels.json lists the kernels with the sha256 of their files.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from strix_validate.json_file import read_small_file

#: The folder in an environment; recipes/triton patches Triton to look here.
FOLDER = Path("share", "triton-kernels")
LIST = "kernels.json"


class _Kernel(BaseModel):
    """A kernel of a list.

    Attributes:
        name: The name of its function.
        types: Types of arguments by name.
        constants: Constants by name.
        options: Options of the compiler by name.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    types: dict[str, str]
    constants: dict[str, str]
    options: dict[str, int]


class _List(BaseModel):
    """The file kernels.json.

    Attributes:
        kernels: The kernels of a package by key.
    """

    kernels: dict[str, _Kernel]


def read_lists(prefix: Path) -> dict[str, dict[str, dict]]:
    """Return the kernels of an environment, by package and by key.

    A list that cannot be read is left out, because Triton cannot use it either.
    """
    lists = {}
    for file in sorted((prefix / FOLDER).glob(f"*/{LIST}")):
        try:
            listed = _List.model_validate_json(read_small_file(file), strict=True)
        except (OSError, ValueError):
            continue
        lists[file.parent.name] = listed.model_dump()["kernels"]
    return lists


def describe(kernel: dict) -> str:
    """Describe a listed kernel in one line: name(argument types) constants and options."""
    types = ", ".join(kernel["types"].values())
    values = kernel["constants"] | kernel["options"]
    assignments = [f"{name}={value}" for name, value in values.items() if value != "None"]
    return f"{kernel['name']}({types}) {' '.join(assignments)}"

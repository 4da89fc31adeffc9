# SPDX-License-Identifier: BSD-3-Clause
"""Whose torch and triton an environment has: the channel's, conda-forge's or PyPI's."""

import json
from dataclasses import dataclass
from pathlib import Path

from strix_validate.json_file import small_text

#: Distribution, as its dist-info folder is named, to conda package.
_NAMES = {"torch": "pytorch", "triton": "triton", "torchvision": "torchvision"}
CONDA_FORGE = "conda-forge"


@dataclass(frozen=True)
class Installed:
    """A distribution or package; by: the program that installed it, "conda" for pixi's conda
    packages too, or "conda-forge" for a package of that channel."""

    name: str
    version: str
    by: str


def installed(prefix: Path) -> list[Installed]:
    """Return each torch, triton and torchvision of an environment.

    There are two of one name where one was put over the other. Distributions and conda packages
    that cannot be read are left out.
    """
    found = []
    for name, package in _NAMES.items():
        for folder in sorted(prefix.glob(f"lib/python3.*/site-packages/{name}-*.dist-info")):
            version = folder.name.removesuffix(".dist-info").removeprefix(f"{name}-")
            by = small_text(folder / "INSTALLER") or "an unknown tool"
            found.append(Installed(name, version, by))
        for file in sorted(prefix.glob(f"conda-meta/{package}-*.json")):
            try:
                record = json.loads(small_text(file) or "")
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict) or record.get("name") != package:
                continue
            if f"/{CONDA_FORGE}" in str(record.get("channel")):
                found.append(Installed(package, str(record.get("version")), CONDA_FORGE))
    return found

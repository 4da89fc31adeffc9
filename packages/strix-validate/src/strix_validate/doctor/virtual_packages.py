# SPDX-License-Identifier: BSD-3-Clause
"""Detect the virtual packages with which pixi's solver describes a machine's AMD GPUs.

This module detects them in the same way as rattler_virtual_packages 8.1.5 (pixi 0.82, py-rattler
0.28), which follows the draft in https://github.com/conda/ceps/pull/189. conda and mamba detect
none of them.
"""

import re

from strix_validate import TARGET
from strix_validate.doctor.tree import AMD, Node, Tree

#: The virtual packages that the stacks require. The version of `__amdgpu` is always 0.
REQUIRED = {
    "__amdgpu": "0",
    "__amdgpu_arch": ".".join((TARGET[3:-2], *TARGET[-2:])),
}
#: The variables that override what is detected.
VARIABLES = {
    "__amdgpu": "CONDA_OVERRIDE_AMDGPU",
    "__amdgpu_arch": "CONDA_OVERRIDE_AMDGPU_ARCH",
}
#: Patterns of the variables' values. Any other value makes pixi end with an error. An empty value
#: hides the package.
_ACCEPTED = {
    "__amdgpu": "0?",
    "__amdgpu_arch": r"([0-9]{1,9}(\.[0-9]{1,9}){2})?",
}


def detect(tree: Tree) -> dict[str, str]:
    """Return the versions of the machine's virtual packages of AMD GPUs, by name.

    The environment variables in VARIABLES take precedence over the machine's GPUs.
    """
    packages = {}
    if tree.gpus:
        # Of several GPUs, pixi uses the one with the most compute units. A GPU whose number of
        # units is unknown comes last.
        largest = max(tree.gpus, key=lambda node: (node.units or -1, node.version))
        packages["__amdgpu"] = "0"
        packages["__amdgpu_arch"] = _format_version(largest)
    elif _has_driver(tree):
        packages["__amdgpu"] = "0"
    packages |= _read_overrides(tree)
    packages = {name: version for name, version in packages.items() if version}
    return packages if "__amdgpu" in packages else {}


def _read_overrides(tree: Tree) -> dict[str, str]:
    """Return the versions from the environment variables in VARIABLES, by package."""
    overrides = {}
    for name, variable in VARIABLES.items():
        if variable in tree.environ:
            overrides[name] = tree.environ[variable]
    return overrides


def find_invalid_overrides(tree: Tree) -> dict[str, str]:
    """Return the overrides that are not valid versions of their package, by package."""
    return {
        name: version
        for name, version in _read_overrides(tree).items()
        if not re.fullmatch(_ACCEPTED[name], version)
    }


def _format_version(node: Node) -> str:
    """Return a GPU's architecture as `__amdgpu_arch` has it: 11.5.1 for gfx1151."""
    major = node.version // 10000 % 100
    minor = node.version // 100 % 100
    stepping = node.version % 100
    return f"{major}.{minor}.{stepping}"


def _has_driver(tree: Tree) -> bool:
    """Return whether an AMD display adapter, possibly not listed by KFD, has the driver amdgpu."""
    for folder in tree.glob("sys/class/drm/card*/device"):
        if not folder.parent.name.removeprefix("card").isdecimal():
            continue
        is_amd = tree.read_at(folder / "vendor") == AMD
        if is_amd and tree.link(folder / "driver") == "amdgpu":
            return True
    return False

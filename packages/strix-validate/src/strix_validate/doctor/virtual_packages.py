# SPDX-License-Identifier: BSD-3-Clause
"""The virtual packages that pixi's solver makes of a machine's AMD GPUs.

As rattler_virtual_packages 8.1.5 detects them (pixi 0.82, py-rattler 0.28), by the draft of
https://github.com/conda/ceps/pull/189; conda and mamba detect none.
"""

import re

from strix_validate import TARGET
from strix_validate.doctor.tree import AMD, Node, Tree

#: What the stacks ask for, and the variables that set it. `__amdgpu` has no other version than 0.
WANTED = {"__amdgpu": "0", "__amdgpu_arch": ".".join((TARGET[3:-2], *TARGET[-2:]))}
VARIABLES = {"__amdgpu": "CONDA_OVERRIDE_AMDGPU", "__amdgpu_arch": "CONDA_OVERRIDE_AMDGPU_ARCH"}
#: What the variables may hold: anything else ends pixi with an error. Empty hides the package.
_ACCEPTED = {"__amdgpu": "0?", "__amdgpu_arch": r"([0-9]{1,9}(\.[0-9]{1,9}){2})?"}


def detected(tree: Tree) -> dict[str, str]:
    """Return version by name of those that are there; the environment's overrides come first."""
    found = {}
    if tree.gpus:
        # of several GPUs the largest one; one whose size is unknown counts as smaller than any
        largest = max(tree.gpus, key=lambda node: (node.units or -1, node.version))
        found = {"__amdgpu": "0", "__amdgpu_arch": _version(largest)}
    elif _has_driver(tree):
        found = {"__amdgpu": "0"}
    found |= _overrides(tree)
    found = {name: value for name, value in found.items() if value}
    return found if "__amdgpu" in found else {}


def _overrides(tree: Tree) -> dict[str, str]:
    """Return by name what the environment says instead of the machine."""
    return {name: tree.environ[v] for name, v in VARIABLES.items() if v in tree.environ}


def refused(tree: Tree) -> dict[str, str]:
    """Return the overrides that are no version of their package."""
    return {n: v for n, v in _overrides(tree).items() if not re.fullmatch(_ACCEPTED[n], v)}


def _version(node: Node) -> str:
    """Return a GPU's architecture as `__amdgpu_arch` has it: 11.5.1 for gfx1151."""
    parts = node.version // 10000 % 100, node.version // 100 % 100, node.version % 100
    return ".".join(map(str, parts))


def _has_driver(tree: Tree) -> bool:
    """Return whether an AMD display adapter has the driver amdgpu: a GPU that KFD does not list."""
    return any(
        tree.read_at(folder / "vendor") == AMD and tree.link(folder / "driver") == "amdgpu"
        for folder in tree.glob("sys/class/drm/card*/device")
        if folder.parent.name.removeprefix("card").isdecimal()
    )

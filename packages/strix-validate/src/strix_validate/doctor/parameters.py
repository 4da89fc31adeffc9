# SPDX-License-Identifier: BSD-3-Clause
"""Options of kernel modules: their values, and the file or command line that sets them."""

import re
from dataclasses import dataclass

from strix_validate.doctor import _distribution
from strix_validate.doctor._verdicts import Fix
from strix_validate.doctor.tree import Tree

COMMAND_LINE = "the kernel's command line"
_FOLDERS = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d")


@dataclass(frozen=True)
class Setting:
    """An option that someone set.

    Attributes:
        value: The value in force; where the module does not tell it, the one that was set.
        place: COMMAND_LINE, or the path of a file below /etc/modprobe.d.
    """

    module: str
    name: str
    value: str
    place: str

    @property
    def argument(self) -> str:
        """The option as the kernel's command line has it, without its value."""
        return f"{self.module}.{self.name}"


def arguments(tree: Tree) -> list[str]:
    """Return the kernel's command line in words; empty if it cannot be read."""
    return (tree.read("proc/cmdline") or "").split()


def settings(tree: Tree, module: str) -> list[Setting]:
    """Return the options that files and the command line set, in the order of precedence."""
    places = [
        (COMMAND_LINE, match[1], match[2])
        for argument in arguments(tree)
        if (match := re.fullmatch(rf"{module}\.(\w+)=(\S*)", argument))
    ]
    for folder in _FOLDERS:
        for file in tree.glob(f"{folder}/*.conf"):
            place = f"/{file.relative_to(tree.root)}"
            for line in re.findall(rf"(?m)^\s*options\s+{module}\s+(.*)", tree.read_at(file) or ""):
                pairs = (word.split("=", 1) for word in line.split() if "=" in word)
                places += [(place, name, value) for name, value in pairs]
    return [
        Setting(module, name, tree.read(_file(module, name)) or value, place)
        for place, name, value in places
    ]


def setting(tree: Tree, module: str, name: str) -> Setting | None:
    """Return an option that someone set, or None if it has its default."""
    return next((each for each in settings(tree, module) if each.name == name), None)


def value_of(tree: Tree, module: str, name: str) -> str | None:
    """Return an option's value: the one in force, else the one that was set."""
    own = setting(tree, module, name)
    return tree.read(_file(module, name)) or (own.value if own else None)


def _file(module: str, name: str) -> str:
    return f"sys/module/{module}/parameters/{name}"


def removal(tree: Tree, *removed: Setting) -> Fix:
    """Return how to take options back, wherever each of them is set."""
    steps = []
    for each in removed:
        if each.place == COMMAND_LINE:
            steps.append(_distribution.without_argument(tree, f"{each.argument}={each.value}"))
        else:
            step = f"sudo sed -i '/^options {each.module} /s/ {each.name}=[^ ]*//' {each.place}"
            steps.append(_distribution.with_new_initramfs(tree, step))
    return Fix(" && ".join(dict.fromkeys(steps)), needs_reboot=True)

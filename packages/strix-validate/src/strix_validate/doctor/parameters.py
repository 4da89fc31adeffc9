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
        place: COMMAND_LINE, or the path of a file of modprobe.d.
        written: The value as that place has it.
    """

    module: str
    name: str
    value: str
    place: str
    written: str

    @property
    def argument(self) -> str:
        """The option as the kernel's command line has it."""
        return f"{self.module}.{self.name}={self.written}"


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
        Setting(module, name, tree.read(_file(module, name)) or value, place, value)
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
    arguments = [each.argument for each in removed if each.place == COMMAND_LINE]
    steps = [_distribution.without_arguments(tree, *arguments)] if arguments else []
    for place in dict.fromkeys(each.place for each in removed):
        here = [each for each in removed if each.place == place != COMMAND_LINE]
        expressions = [f"/^ *options *{s.module} /s/ {s.name}=[^ ]*//" for s in here]
        change = " and ".join(f"{s.name}={s.written}" for s in here)
        if here:
            steps.append(_distribution.edit_modprobe(tree, place, expressions, change))
    return Fix("; ".join(steps), needs_reboot=True)

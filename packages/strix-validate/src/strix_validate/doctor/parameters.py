# SPDX-License-Identifier: BSD-3-Clause
"""Options of kernel modules: their values, and the file or command line that sets them."""

import re
from dataclasses import dataclass
from pathlib import Path

from strix_validate.doctor import _distribution
from strix_validate.doctor._verdicts import Fix
from strix_validate.doctor.tree import Tree

COMMAND_LINE = "the kernel's command line"
_FOLDERS = (
    "etc/modprobe.d",
    "run/modprobe.d",
    "usr/lib/modprobe.d",
    "lib/modprobe.d",
)


@dataclass(frozen=True)
class Setting:
    """An option of a module that someone set.

    Attributes:
        module: The kernel module.
        name: The option.
        value: The value in force, or the written value if the module does not show the former.
        place: COMMAND_LINE, or the path of a file of modprobe.d.
        written: The value that is written in that place.
    """

    module: str
    name: str
    value: str
    place: str
    written: str

    @property
    def argument(self) -> str:
        """The option as it would be written on the kernel's command line."""
        return f"{self.module}.{self.name}={self.written}"


def read_arguments(tree: Tree) -> list[str]:
    """Return the words of the kernel's command line; empty if it cannot be read."""
    return (tree.read("proc/cmdline") or "").split()


def read_settings(tree: Tree, module: str) -> list[Setting]:
    """Return the options of a module that are set: those of the command line, then of files."""
    places = []
    for argument in read_arguments(tree):
        match = re.fullmatch(rf"{module}\.(\w+)=(\S*)", argument)
        if match:
            places.append((COMMAND_LINE, match[1], match[2]))
    for folder in _FOLDERS:
        for file in tree.glob(f"{folder}/*.conf"):
            place = f"/{file.relative_to(tree.root)}"
            for name, value in _read_options(tree, file, module):
                places.append((place, name, value))
    settings = []
    for place, name, written in places:
        value = tree.read(_parameter_file(module, name)) or written
        settings.append(Setting(module, name, value, place, written))
    return settings


def _read_options(tree: Tree, file: Path, module: str) -> list[tuple[str, str]]:
    """Return the names and values that a file of modprobe.d has for a module."""
    text = tree.read_at(file) or ""
    options = []
    for line in re.findall(rf"(?m)^\s*options\s+{module}\s+(.*)", text):
        for word in line.split():
            name, separator, value = word.partition("=")
            if separator:
                options.append((name, value))
    return options


def find_setting(tree: Tree, module: str, name: str) -> Setting | None:
    """Return an option that someone set, or None if nobody set it."""
    for setting in read_settings(tree, module):
        if setting.name == name:
            return setting
    return None


def read_value(tree: Tree, module: str, name: str) -> str | None:
    """Return an option's value in force, or the written value if the module does not show it."""
    value = tree.read(_parameter_file(module, name))
    if value:
        return value
    setting = find_setting(tree, module, name)
    return setting.value if setting else None


def list_ttm_modules(tree: Tree) -> list[str]:
    """Return the modules that may limit GTT: ttm and, with a driver of DKMS, also amdttm."""
    if tree.path("sys/module/amdttm").is_dir():
        return ["amdttm", "ttm"]
    return ["ttm"]


def read_pages_limit(tree: Tree) -> int | None:
    """Return the limit in pages of the TTM module that the loaded driver uses."""
    module = list_ttm_modules(tree)[0]
    return tree.number(f"sys/module/{module}/parameters/pages_limit")


def _parameter_file(module: str, name: str) -> str:
    return f"sys/module/{module}/parameters/{name}"


def suggest_removal(tree: Tree, *settings: Setting) -> Fix:
    """Return the commands that remove options from wherever each of them is set."""
    steps = []
    arguments = [setting.argument for setting in settings if setting.place == COMMAND_LINE]
    if arguments:
        steps.append(_distribution.suggest_removing_arguments(tree, *arguments))
    by_file: dict[str, list[Setting]] = {}
    for setting in settings:
        if setting.place != COMMAND_LINE:
            by_file.setdefault(setting.place, []).append(setting)
    for file, in_file in by_file.items():
        expressions = [f"/^ *options *{s.module} /s/ {s.name}=[^ ]*//" for s in in_file]
        change = " and ".join(f"{s.name}={s.written}" for s in in_file)
        steps.append(_distribution.suggest_modprobe_edit(tree, file, expressions, change))
    return Fix("; ".join(steps), needs_reboot=True)

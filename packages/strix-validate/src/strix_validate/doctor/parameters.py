# SPDX-License-Identifier: BSD-3-Clause
"""Options of kernel modules: their values, and the file or command line that sets them."""

import re
from dataclasses import dataclass
from pathlib import Path

from strix_validate.doctor import _distribution
from strix_validate.doctor._verdicts import Fix
from strix_validate.doctor.tree import Tree

COMMAND_LINE = "the kernel's command line"
#: Folders with files of module options. A file hides those of the same name in later folders.
_FOLDERS = (
    "etc/modprobe.d",
    "run/modprobe.d",
    "usr/local/lib/modprobe.d",
    "usr/lib/modprobe.d",
    "lib/modprobe.d",
)


@dataclass(frozen=True)
class Setting:
    """An option of a module that someone set.

    Attributes:
        module: The kernel module.
        name: The option.
        value: The value in force, or the written value if the module does not show its options.
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
    """Return the settings of a module's options.

    Of several values of an option, the last one counts. modprobe reads files in the order of their
    names, then the command line. The result is in reverse order: of the settings of an option, the
    one in force comes first.
    """
    places = []
    for file in _list_files(tree):
        place = f"/{file.relative_to(tree.root)}"
        for name, value in _read_options(tree, file, module):
            places.append((place, name, value))
    for argument in read_arguments(tree):
        match = re.fullmatch(rf"{module}\.(\w+)=(\S*)", argument)
        if match:
            places.append((COMMAND_LINE, match[1], match[2]))
    settings = []
    for place, name, written in reversed(places):
        value = tree.read(_parameter_file(module, name)) or written
        settings.append(Setting(module, name, value, place, written))
    return settings


def _list_files(tree: Tree) -> list[Path]:
    """Return the files of options that modprobe reads, in its order."""
    files: dict[str, Path] = {}
    for folder in _FOLDERS:
        for file in tree.glob(f"{folder}/*.conf"):
            files.setdefault(file.name, file)
    return [files[name] for name in sorted(files)]


def _read_options(tree: Tree, file: Path, module: str) -> list[tuple[str, str]]:
    """Return the names and values that a file of modprobe.d has for a module."""
    text = tree.read_at(file) or ""
    options = []
    for line in re.findall(rf"(?m)^[ \t]*options[ \t]+{module}[ \t]+(.*)", text):
        for word in line.split():
            name, separator, value = word.partition("=")
            if separator:
                options.append((name, value))
    return options


def find_settings(tree: Tree, module: str, name: str) -> list[Setting]:
    """Return each place that sets an option, the one in force first; empty if nobody set it."""
    return [setting for setting in read_settings(tree, module) if setting.name == name]


def read_value(tree: Tree, module: str, name: str) -> str | None:
    """Return an option's value in force, or the written value if the module does not show it."""
    value = tree.read(_parameter_file(module, name))
    if value:
        return value
    settings = find_settings(tree, module, name)
    return settings[0].value if settings else None


def list_ttm_modules(tree: Tree) -> list[str]:
    """Return the modules that may limit GTT: ttm; with a driver of DKMS, amdttm and then ttm."""
    if tree.path("sys/module/amdttm").is_dir():
        return ["amdttm", "ttm"]
    return ["ttm"]


def read_pages_limit(tree: Tree) -> int | None:
    """Return the limit of the TTM module that the loaded driver uses, in pages."""
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
        expressions = list(dict.fromkeys(expressions))
        steps.append(_distribution.suggest_modprobe_edit(tree, file, expressions, change))
    return Fix("; ".join(steps), needs_reboot=True)


def suggest_removal_of(tree: Tree, module: str, name: str) -> Fix:
    """Return how to remove an option from each place that sets it, or how to find that place."""
    settings = find_settings(tree, module, name)
    if settings:
        return suggest_removal(tree, *settings)
    search = f"find the file that sets it: grep -rn {name} /etc/modprobe.d /proc/cmdline"
    return Fix(search, needs_reboot=True)

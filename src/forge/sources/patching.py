# SPDX-License-Identifier: BSD-3-Clause
"""Patches on a source: applied by git, which takes no fuzz, and never beyond the source.

rattler-build's own patcher silently takes fuzz 2, and writes wherever a patch says.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from forge.conda.package import cache_folder, scratch
from forge.files import read_text
from forge.sources import git

HEADER = re.compile(r"^(?:---|\+\+\+|(?:rename|copy) (?:from|to)|diff --git) (.+)", re.M)
# `..` and absolute, also after the first part; and what git writes in quotes
UNSAFE = re.compile(r"(^|[ /])/|(^|[ /])\.\.(?![^/\s])|[\x00-\x1f\"\\]")
LONGEST = 500  # two paths on the line `diff --git`
# links and submodules, made or changed
LINK = re.compile(r"^(?:(?:new|old|deleted)(?: file)? mode|index \S+) 1[26]0000", re.M)


def touched(text: str) -> set[str]:
    """List the paths a patch reads or writes, without the first part (`a/`, `b/`), as written."""
    headers = re.findall(r"^--- ([^\t\n]+).*\n\+\+\+ ([^\t\n]+)", text, re.M)
    moves = re.findall(r"^(?:rename|copy) (?:from|to) (.+)$", text, re.M)
    sides = {side for pair in headers for side in pair} - {"/dev/null"}
    return {side.partition("/")[2] for side in sides} | set(moves)


def fault(text: str) -> str:
    """Say why no source may get this patch: any line that a patcher takes for a header counts."""
    for name in HEADER.findall(text):
        plain = name.partition("\t")[0].replace("/dev/null", "")
        if UNSAFE.search(plain) or len(plain) > LONGEST:
            return f"it names {name!r:.200}, which may lie outside of the source"
    return "it makes or changes a link" if LINK.search(text) else ""


def apply(tree: Path, files: list[Path]) -> str:
    """Apply patches, in order, to a copy of what they touch in `tree`.

    Returns what is wrong with the first that does not apply, or nothing. Raises as read_text does.
    """
    with scratch(cache_folder()) as folder:
        for path in files:
            text = read_text(path)
            if wrong := fault(text):
                return f"{path.name}: {wrong}"
            for name in touched(text):
                found, copy = Path(os.path.realpath(tree / name)), Path(folder, name)
                if not found.is_relative_to(os.path.realpath(tree)):
                    return f"{path.name}: the source's {name} is a link to {found}"
                if found.is_file() and not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(found, copy)
        for path in files:
            wrong = _git_apply(Path(folder), path)
            if wrong:
                return wrong
    return ""


def apply_in_place(tree: Path, files: list[Path]) -> str:
    """Apply patches, in order, to `tree` itself, if all apply to a copy.

    Returns what is wrong with the first that does not apply, or nothing. Raises as read_text does.
    """
    wrong = apply(tree, files)
    for path in files:
        wrong = wrong or _git_apply(tree, path)
    return wrong


def _git_apply(folder: Path, path: Path) -> str:
    """Apply a patch to a folder; returns what is wrong with it, or nothing."""
    alone = git.environment() | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "-C", str(folder), "apply", "-p1", str(path)]
    done = subprocess.run(command, text=True, capture_output=True, env=alone)
    if not done.returncode:
        return ""
    back = subprocess.run([*command, "--reverse", "--check"], capture_output=True, env=alone)
    why = done.stderr.strip() if back.returncode else "upstream has it: drop this patch"
    return f"{path.name}: {why:.1000}"

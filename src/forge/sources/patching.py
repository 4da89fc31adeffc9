# SPDX-License-Identifier: BSD-3-Clause
"""Apply patches to a source with git, without fuzz, and never outside the source.

rattler-build's own patcher silently allows a fuzz of 2, and writes to any path in a patch.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from forge.conda.scratch import cache_folder, scratch
from forge.errors import ForgeError
from forge.files import read_text
from forge.sources import git

HEADER = re.compile(r"^(?:---|\+\+\+|(?:rename|copy) (?:from|to)|diff --git) (.+)", re.M)
# An absolute path, a `..`, or a character that git writes in quotes. The first two are also unsafe
# after the first part of a path, because that part is removed.
UNSAFE = re.compile(r"(^|[ /])/|(^|[ /])\.\.(?![^/\s])|[\x00-\x1f\"\\]")
# Maximum characters of the path in a header line, or of both paths after `diff --git`.
LONGEST = 500
# Lines that show that a patch makes or changes a link or a submodule.
LINK = re.compile(r"^(?:(?:new|old|deleted)(?: file)? mode|index \S+) 1[26]0000", re.M)


def touched(text: str) -> set[str]:
    """Return the paths that a patch reads or writes, without the first part (`a/` or `b/`)."""
    paths = set(re.findall(r"^(?:rename|copy) (?:from|to) (.+)$", text, re.M))
    for old, new in re.findall(r"^--- ([^\t\n]+).*\n\+\+\+ ([^\t\n]+)", text, re.M):
        for side in (old, new):
            if side != "/dev/null":
                paths.add(side.partition("/")[2])
    return paths


def find_fault(text: str) -> str:
    """Return why a patch must not be applied to any source; an empty string if it may.

    Every line that some patch program could read as a header is checked.
    """
    for name in HEADER.findall(text):
        path = name.partition("\t")[0].replace("/dev/null", "")
        if UNSAFE.search(path) or len(path) > LONGEST:
            return f"it names {name!r:.200}, which is not a plain path inside the source"
    if LINK.search(text):
        return "it makes or changes a link"
    return ""


def apply(tree: Path, files: list[Path]) -> str:
    """Apply patches, in order, to a copy of those files of a source that the patches change.

    Args:
        tree: The source.
        files: The patches.

    Returns:
        The reason why the first failing patch does not apply, or must not be applied; empty if all
        patches apply.

    Raises:
        ForgeError: A patch cannot be read as text, or git is not installed.
    """
    root = os.path.realpath(tree)
    with scratch(cache_folder()) as folder:
        for patch in files:
            text = read_text(patch)
            reason = find_fault(text)
            if reason:
                return f"{patch.name}: {reason}"
            for name in touched(text):
                source = Path(os.path.realpath(tree / name))
                if not source.is_relative_to(root):
                    return f"{patch.name}: the source's {name} leads out of the source, to {source}"
                copy = Path(folder, name)
                if source.is_file() and not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, copy)
        return _apply_all(Path(folder), files)


def apply_in_place(tree: Path, files: list[Path]) -> str:
    """Apply patches, in order, to a source itself, if all of them apply to a copy.

    The arguments, the result and the exceptions are those of `apply`.
    """
    return apply(tree, files) or _apply_all(tree, files)


def _apply_all(folder: Path, files: list[Path]) -> str:
    """Apply patches in order. Stop at the first that does not apply, and return the reason."""
    for patch in files:
        reason = _git_apply(folder, patch)
        if reason:
            return reason
    return ""


def _git_apply(folder: Path, patch: Path) -> str:
    """Apply a patch to a folder. Return the reason if it does not apply, or an empty string.

    Raises:
        ForgeError: git is not installed.
    """
    # The folder may be inside a repository. GIT_CEILING_DIRECTORIES keeps git from using it.
    environment = git.environment() | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "-C", str(folder), "apply", "-p1", str(patch)]
    try:
        done = subprocess.run(command, text=True, capture_output=True, env=environment)
    except FileNotFoundError:
        raise ForgeError("git is not installed: install it, to apply patches") from None
    if not done.returncode:
        return ""
    reverse = [*command, "--reverse", "--check"]
    reversed_patch = subprocess.run(reverse, capture_output=True, env=environment)
    if reversed_patch.returncode:
        reason = done.stderr.strip()
    else:
        reason = "upstream has it: drop this patch"
    return f"{patch.name}: {reason:.1000}"

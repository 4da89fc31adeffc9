# SPDX-License-Identifier: BSD-3-Clause
"""Git sources: one full commit each, kept as a bare repository that holds that commit alone.

Git names content by its hash, so such a repository proves itself.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from forge_store.project import ForgeError, NotAttempted

BRANCH = "refs/heads/source"


def _git(repository: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", repository, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotAttempted("git is not installed") from None


def fetch(url: str, commit: str, repository: Path) -> None:
    """Fetch one commit without its history. Raises NotAttempted with git's reason."""
    partial = repository.with_name(repository.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    _git(partial, "init", "-q", "--bare")
    done = _git(partial, "fetch", "-q", "--depth", "1", url, f"{commit}:{BRANCH}")
    if done.returncode:
        raise NotAttempted(done.stderr.strip().rsplit("\n", 1)[-1])
    partial.replace(repository)


def intact(repository: Path, commit: str) -> bool:
    """Whether the repository holds exactly that commit, and every object of it hashes right."""
    tip = _git(repository, "rev-parse", BRANCH).stdout.strip()
    return tip == commit and _git(repository, "fsck", "--full").returncode == 0


def copy(repository: Path, commit: str, target: Path) -> None:
    """Copy a repository to `target`, whole or not at all. Raises ForgeError for a changed one."""
    if not intact(repository, commit):
        raise ForgeError(f"{repository} is not git commit {commit}; delete it and fetch again")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(repository, partial)
    partial.replace(target)


def check_out(repository: Path, target: Path) -> None:
    """The files of the commit in `target`, with a repository that rattler-build may ask."""
    command = ["git", "clone", "-q", "--branch", "source", repository, target]
    subprocess.run(command, check=True, capture_output=True)

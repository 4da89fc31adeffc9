# SPDX-License-Identifier: BSD-3-Clause
"""Git sources: one full commit each, kept as a bare repository that holds that commit alone.

Git names content by its hash, so such a repository proves itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from forge.errors import ForgeError, NotAttempted

BRANCH = "refs/heads/source"
# a host that asks for a name and password has no such repository; one that sends nothing is down
QUIET = {"GIT_TERMINAL_PROMPT": "0"}
IMPATIENT = ("-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=10")


def _git(repository: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["git", *IMPATIENT, "-C", repository, *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | QUIET
        )
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


def tags(url: str) -> dict[str, str]:
    """The tags of a repository with their commits. Raises NotAttempted with git's reason."""
    done = _git(Path(), "ls-remote", "--tags", url)
    if done.returncode:
        raise NotAttempted(done.stderr.strip().rsplit("\n", 1)[-1])
    found = {}
    for line in done.stdout.splitlines():
        commit, _, name = line.partition("\trefs/tags/")
        # an annotated tag is listed twice, last with ^{} and the commit that it stands for
        found[name.removesuffix("^{}")] = commit
    return found


def tree(url: str, commit: str) -> str:
    """The hash of a commit's tree. Raises NotAttempted with git's reason."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "probe.git")
        fetch(url, commit, repository)
        return _git(repository, "rev-parse", f"{BRANCH}^{{tree}}").stdout.strip()


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

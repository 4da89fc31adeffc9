# SPDX-License-Identifier: BSD-3-Clause
"""Git sources, each a bare repository of one full commit, which git's hashes prove."""

import os
import shutil
import subprocess
from pathlib import Path

from forge.errors import ForgeError, NotAttempted
from forge.network import LOWEST, patience

BRANCH = "refs/heads/source"


def _git(folder: Path, *words: str) -> str:
    # fail instead of asking for a password, or of waiting for a server that sends nothing
    pace = f"http.lowSpeedLimit={LOWEST}", "-c", f"http.lowSpeedTime={patience()}"
    command = ["git", "-c", *pace, "-C", str(folder), *words]
    env = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise ForgeError("git is not installed") from None
    if done.returncode:
        raise NotAttempted(done.stderr.strip().rpartition("\n")[2])
    return done.stdout


def fetch(url: str, commit: str, repository: Path) -> None:
    """Fetch one commit without its history. Raises NotAttempted with git's reason."""
    shutil.rmtree(repository, ignore_errors=True)  # a killed fetch left locks there
    _git(Path(), "init", "-q", "--bare", str(repository))
    _git(repository, "fetch", "-q", "--depth", "1", url, f"{commit}:{BRANCH}")


def tags(url: str) -> list[str]:
    """List the names of a repository's tags. Raises NotAttempted with git's reason."""
    lines = _git(Path(), "ls-remote", "--tags", "--refs", url).splitlines()
    return [line.partition("\trefs/tags/")[2] for line in lines]


def holds(repository: Path, commit: str, intact: bool = False) -> bool:
    """Return whether a repository, bare or not, has a commit and, if `intact`, whole objects."""
    try:
        _git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
        if intact:
            _git(repository, "fsck", "--full")
        return True
    except NotAttempted:
        return False


def check_out(repository: Path, target: Path) -> None:
    """Check the commit out into `target`, with a repository that rattler-build can query."""
    _git(repository, "clone", "-q", "--branch", "source", ".", str(target.absolute()))

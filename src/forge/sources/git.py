# SPDX-License-Identifier: BSD-3-Clause
"""Git sources, each a bare repository of one full commit, which git's hashes prove.

git runs what the configuration of a repository names: hooks, filters, a file monitor, a helper that
fetches missing objects. So it never opens a repository that somebody else made, the cache's own
included. It works in a new one that has the objects of the other, and nothing else of it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.conda.location import folder_of
from forge.conda.package import cache_folder, scratch
from forge.errors import ForgeError, NotAttempted
from forge.network import LOWEST, patience

BRANCH = "refs/heads/source"
SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "init.templateDir": "",
    "protocol.allow": "never",
    "submodule.recurse": "false",
}
# What of a person's configuration holds for a fetch: proxies and certificates, mirrors.
CARRIED = re.compile(r"(http|url)\.", re.I)
CERTIFICATES = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH")


def environment(settings: dict[str, str] | None = None) -> dict[str, str]:
    """Return the variables for git, without any configuration but `settings` and SETTINGS.

    Without `settings`, git may read and write files only: every transport is off.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in CERTIFICATES
    }
    own = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",  # fail instead of asking for a password
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }
    pairs = [*(settings or {}).items(), *SETTINGS.items()]
    for number, (key, value) in enumerate(pairs):
        own |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return kept | own | {"GIT_CONFIG_COUNT": str(len(pairs))}


def fetch(url: str, commit: str, repository: Path) -> None:
    """Fetch one commit without its history. Raises NotAttempted with git's reason."""
    shutil.rmtree(repository, ignore_errors=True)  # a killed fetch left locks there
    _git(repository, "init", "-q", "--bare", str(repository.absolute()))
    if folder := folder_of(url):
        with _view(folder, commit) as view:
            _copy(view, commit, repository)
    else:
        words = "fetch", "-q", "--depth", "1", "--no-tags", "--", url, f"{commit}:{BRANCH}"
        _git(repository, *words, settings=_network())


def tags(url: str) -> list[str]:
    """List the names of a repository's tags. Raises NotAttempted with git's reason."""
    lines = _git(None, "ls-remote", "--tags", "--refs", "--", url, settings=_network())
    return [line.partition("\trefs/tags/")[2] for line in lines.splitlines()]


def holds(repository: Path, commit: str, intact: bool = False) -> bool:
    """Return whether a repository, bare or not, has a commit and, if `intact`, whole objects."""
    try:
        with _view(repository, commit) as view:
            if intact:
                _git(view, "fsck", "--full", "--no-dangling")
        return True
    except NotAttempted:
        return False


def check_out(repository: Path, commit: str, target: Path) -> None:
    """Check the commit out into `target`, with a repository that rattler-build can query.

    The commit itself: a branch of the repository may have been moved to another.
    """
    inside = target / ".git"
    _git(inside, "init", "-q", str(target.absolute()))
    with _view(repository, commit) as view:
        _copy(view, commit, inside)
    tree = f"--work-tree={target.absolute()}"
    _git(inside, tree, "checkout", "-q", "--detach", commit)


@contextmanager
def _view(repository: Path, commit: str) -> Iterator[Path]:
    """Yield a new repository that has the objects of another, and a commit of it as its branch.

    Raises NotAttempted if the other has no such commit.
    """
    places = (repository / "objects", repository / ".git" / "objects")
    objects = next((str(place.resolve()) for place in places if place.is_dir()), "")
    if not objects or not objects.isprintable():
        raise NotAttempted(
            f"{repository} has no folder of objects: name a repository itself, not a worktree of it"
        )
    with scratch(cache_folder()) as folder:
        view = Path(folder, "view.git").absolute()
        _git(view, "init", "-q", "--bare", str(view))
        (view / "objects/info/alternates").write_text(f"{objects}\n")
        (view / "shallow").write_text(f"{commit}\n")  # where its history ends
        if _git(view, "cat-file", "-t", commit).strip() != "commit":
            raise NotAttempted(f"{commit} is not a commit")
        _git(view, "update-ref", BRANCH, commit)
        yield view


def _copy(view: Path, commit: str, repository: Path) -> None:
    """Fetch the commit of a view, every object hashed anew."""
    words = "fetch", "-q", "--depth", "1", "--no-tags", "--", view.as_uri(), f"{commit}:{BRANCH}"
    _git(repository, *words, settings={"protocol.file.allow": "always"})


def _network() -> dict[str, str]:
    """Return the settings of a fetch from a server, with those of the person who runs it."""
    clean = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}
    listed = _run(["git", "config", "--list", "-z"], clean)
    pairs = (entry.partition("\n") for entry in listed.split("\0") if entry)
    return {key: value for key, _, value in pairs if CARRIED.match(key)} | {
        "http.lowSpeedLimit": str(LOWEST),
        "http.lowSpeedTime": str(patience()),
        "protocol.http.allow": "always",
        "protocol.https.allow": "always",
    }


def _git(repository: Path | None, *words: str, settings: dict[str, str] | None = None) -> str:
    """Run git in a repository of ours, or in none; return what it prints."""
    where = [f"--git-dir={repository.absolute()}"] if repository and words[0] != "init" else []
    return _run(["git", *where, *words], environment(settings))


def _run(command: list[str], variables: dict[str, str]) -> str:
    try:
        # from /: git reads the configuration of a repository around the folder that it starts in
        done = subprocess.run(
            command, env=variables, cwd="/", capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise ForgeError("git is not installed") from None
    if done.returncode:
        raise NotAttempted(done.stderr.strip().rpartition("\n")[2])
    return done.stdout

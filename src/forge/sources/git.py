# SPDX-License-Identifier: BSD-3-Clause
"""Git sources. Each is kept as a bare repository with one commit, which is verified by its hashes.

git runs programs that a repository's configuration names: hooks, filters, a file monitor, or a
helper that fetches missing objects. So this module never opens a repository that it has not made
itself in the same process, not even one in the cache. It makes a new repository, and uses only the
objects of the existing one.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.conda.location import folder_of
from forge.conda.scratch import cache_folder, scratch
from forge.errors import ForgeError, NotAttempted
from forge.network import LOWEST_RATE, patience

BRANCH = "refs/heads/source"
FETCH = ("fetch", "-q", "--depth", "1", "--no-tags", "--")
SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "init.templateDir": "",
    "protocol.allow": "never",
    "submodule.recurse": "false",
}
# The settings of the user that are used to access a server: proxies, certificates and mirrors.
NETWORK_SETTING = re.compile(r"(http|url)\.", re.I)
CERTIFICATES = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH")
# Names of settings with their values. A name may occur several times.
Settings = Iterable[tuple[str, str]]
VARIABLES = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    # Fail instead of asking for a password.
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}


def environment(settings: Settings = ()) -> dict[str, str]:
    """Return environment variables with which git uses SETTINGS and `settings`.

    git then ignores the configuration files of the user and of the system, and inherited variables
    GIT_* other than CERTIFICATES.

    Args:
        settings: Further settings. Without them, git can only read and write files, because every
            transport is turned off.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in CERTIFICATES
    }
    variables |= VARIABLES
    pairs = [*settings, *SETTINGS.items()]
    for number, (key, value) in enumerate(pairs):
        variables[f"GIT_CONFIG_KEY_{number}"] = key
        variables[f"GIT_CONFIG_VALUE_{number}"] = value
    variables["GIT_CONFIG_COUNT"] = str(len(pairs))
    return variables


def fetch(url: str, commit: str, repository: Path) -> None:
    """Fetch one commit without its history. If git fails, raise NotAttempted with git's reason.

    Args:
        url: The URL of a repository on a server or on this machine.
        commit: The full hash of the commit.
        repository: The bare repository to make.
    """
    # A killed fetch may have left locks in the repository.
    shutil.rmtree(repository, ignore_errors=True)
    _git(repository, "init", "-q", "--bare", str(repository.absolute()))
    folder = folder_of(url)
    if folder:
        with _view(folder, commit) as view:
            _copy(view, commit, repository)
    else:
        _git(repository, *FETCH, url, f"{commit}:{BRANCH}", settings=_network_settings())


def list_tags(url: str) -> list[str]:
    """List the names of a repository's tags. If git fails, raise NotAttempted with git's reason."""
    command = ("ls-remote", "--tags", "--refs", "--", url)
    output = _git(None, *command, settings=_network_settings())
    return [line.partition("\trefs/tags/")[2] for line in output.splitlines()]


def has_commit(repository: Path, commit: str, intact: bool = False) -> bool:
    """Return whether a repository has a commit.

    Args:
        repository: The repository, bare or not.
        commit: The full hash of the commit.
        intact: Also require that the objects are not damaged.
    """
    try:
        with _view(repository, commit) as view:
            if intact:
                _git(view, "fsck", "--full", "--no-dangling")
        return True
    except NotAttempted:
        return False


def check_out(repository: Path, commit: str, target: Path) -> None:
    """Check a commit out into `target`, including a repository that rattler-build can query.

    The checkout uses the hash of the commit, because a branch could point to another commit.
    """
    git_folder = target / ".git"
    _git(git_folder, "init", "-q", str(target.absolute()))
    with _view(repository, commit) as view:
        _copy(view, commit, git_folder)
    tree = f"--work-tree={target.absolute()}"
    _git(git_folder, tree, "checkout", "-q", "--detach", commit)


@contextmanager
def _view(repository: Path, commit: str) -> Iterator[Path]:
    """Make a temporary repository that uses the objects of another one.

    Its only branch points to the commit. git ignores the commit's parents there.

    Yields:
        The new repository.

    Raises:
        NotAttempted: The other repository has no such commit, or its objects cannot be found.
    """
    objects = _find_objects(repository)
    with scratch(cache_folder()) as folder:
        view = Path(folder, "view.git").absolute()
        _git(view, "init", "-q", "--bare", str(view))
        (view / "objects/info/alternates").write_text(f"{objects}\n")
        # This makes git ignore the commit's parents.
        (view / "shallow").write_text(f"{commit}\n")
        kind = _git(view, "cat-file", "-t", commit).strip()
        if kind != "commit":
            raise NotAttempted(f"{commit} is not a commit")
        _git(view, "update-ref", BRANCH, commit)
        yield view


def _find_objects(repository: Path) -> Path:
    """Return the folder of a repository's objects.

    Raises:
        NotAttempted: There is no such folder, or its path has a character that cannot be printed.
    """
    for folder in (repository / "objects", repository / ".git" / "objects"):
        if folder.is_dir():
            objects = folder.resolve()
            # git reads paths from the file `alternates`, and a line break would end the path.
            if not str(objects).isprintable():
                reason = "has a character that cannot be printed: rename its folder"
                raise NotAttempted(f"{str(objects)!a} {reason}")
            return objects
    raise NotAttempted(
        f"{repository} has no folder `objects`: name the repository itself, not a worktree of it"
    )


def _copy(view: Path, commit: str, repository: Path) -> None:
    """Fetch a commit from a view into a repository. git checks the hash of every object."""
    settings = [("protocol.file.allow", "always")]
    _git(repository, *FETCH, view.as_uri(), f"{commit}:{BRANCH}", settings=settings)


def _network_settings() -> Settings:
    """Return the settings to access a server, including the user's network settings."""
    variables = dict(os.environ)
    variables.pop("GIT_DIR", None)
    settings = []
    for entry in _run(["git", "config", "--list", "-z"], variables).split("\0"):
        key, newline, value = entry.partition("\n")
        if NETWORK_SETTING.match(key):
            # In a configuration file, a name without `=` is true. An empty value is false.
            settings.append((key, value if newline else "true"))
    return [
        *settings,
        ("http.lowSpeedLimit", str(LOWEST_RATE)),
        ("http.lowSpeedTime", str(patience())),
        ("protocol.http.allow", "always"),
        ("protocol.https.allow", "always"),
    ]


def _git(repository: Path | None, *words: str, settings: Settings = ()) -> str:
    """Run git in a repository that this module has made, or in none, and return the output."""
    command = ["git"]
    if repository and words[0] != "init":
        command.append(f"--git-dir={repository.absolute()}")
    return _run([*command, *words], environment(settings))


def _run(command: list[str], variables: dict[str, str]) -> str:
    """Return git's output. If git fails, raise NotAttempted with the last line of its errors."""
    try:
        done = subprocess.run(
            command,
            env=variables,
            # Start git outside of any repository, because it would read that repository's settings.
            cwd="/",
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise ForgeError("git is not installed") from None
    if done.returncode:
        raise NotAttempted(done.stderr.strip().rpartition("\n")[2])
    return done.stdout

# SPDX-License-Identifier: BSD-3-Clause
"""Hash files, read them as text, replace them in one step, and lock folders."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from filelock import FileLock, Timeout
from pathspec import GitIgnoreSpec

from forge.errors import Failed, ForgeError
from forge.limits import read_bytes

# The number of bytes that a copy reads at once.
CHUNK = 1 << 20
# The end of a message about a file that cannot be read or written.
ADVICE = "Fix that and run the same command again"


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_tree(
    path: Path,
    root: Path,
    follow: bool = True,
    contents: Mapping[Path, bytes] = MappingProxyType({}),
) -> str:
    """Return one sha256 of the names, executable bits, link targets and bytes of files.

    Files that ROOT/.gitignore lists and git does not track are left out, because they are leftovers
    of editors and tools.

    Args:
        path: The file, or the folder with the files.
        root: The checkout.
        follow: Include the folder to which a link leads, unless that folder contains `path`.
        contents: For some files, bytes to hash instead of their content.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    skipped = _select_ignored(files, path, root)
    digest = hashlib.sha256()
    for file in files:
        is_link = file.is_symlink()
        if file in skipped or not (is_link or file.is_file()):
            continue
        digest.update(os.fsencode(file.relative_to(path)) + b" ")
        if is_link:
            digest.update(b"link " + os.fsencode(file.readlink()))
            leads_out = file.is_dir() and not path.resolve().is_relative_to(file.resolve())
            if follow and leads_out:
                target = digest_tree(file.resolve(), root, follow=False)
                digest.update(target.encode())
        if not file.is_file():
            continue
        if file in contents:
            sha256 = hashlib.sha256(contents[file]).hexdigest()
        else:
            sha256 = sha256_file(file)
        executable = file.stat().st_mode & 0o100
        digest.update(f"{executable:o} {sha256}\n".encode())
    return digest.hexdigest()


def _select_ignored(files: Iterable[Path], folder: Path, root: Path) -> set[Path]:
    """Return the files that ROOT/.gitignore lists and git does not track."""
    ignore_file = root / ".gitignore"
    if not ignore_file.exists():
        return set()
    patterns = GitIgnoreSpec.from_lines(read_text(ignore_file).splitlines())
    ignored = set()
    for file in files:
        start = root if file.is_relative_to(root) else folder
        if patterns.match_file(file.relative_to(start)):
            ignored.add(file)
    if not ignored:
        return ignored
    tracked = git(root, "ls-files", "-ciz", "--exclude-standard").split("\0")
    return ignored - {root / name for name in tracked}


def git(root: Path, *arguments: str) -> str:
    """Run git in the repository at `root`, never in a repository that contains `root`.

    Returns:
        The output of git; an empty string if git fails or is not installed.
    """
    command = ["git", "--git-dir", ".git", *arguments]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        output = subprocess.check_output(command, cwd=root, stderr=subprocess.DEVNULL)
        return os.fsdecode(output)
    return ""


def require_file(path: Path) -> Path:
    """Return the path. Raise ForgeError for a pipe or a device, which would block a reader."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ForgeError(f"{path} is not a file, but a pipe or a device")
    return path


def read_text(path: Path) -> str:
    """Read a small text file. Raise ForgeError if the file is large or not UTF-8."""
    require_file(path)
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ForgeError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


@contextlib.contextmanager
def open_whole(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file to write. When the block ends, it is synced and replaces `target`.

    Raises:
        Failed: The file cannot be written, for example on a full disk. `target` is unchanged.
    """
    partial = target.with_name(f".partial-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A killed process may have left it.
        partial.unlink(missing_ok=True)
        with partial.open("xb") as out:
            # Mode "x" never writes through a link.
            yield out
            out.flush()
            os.fsync(out.fileno())
            # A web server has to read the channel's files, whatever the umask of this process is.
            os.fchmod(out.fileno(), 0o644)
        partial.replace(target)
    except Failed:
        # The source of a copy cannot be read.
        remove_all([partial])
        raise
    except OSError as error:
        remove_all([partial])
        raise Failed(f"cannot write {target}: {error.strerror}. {ADVICE}") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step, so that no program reads half of it; or raise Failed."""
    with open_whole(path) as out:
        out.write(text.encode())


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file in one step, so that no program reads half of it; or raise Failed."""
    with open_whole(target) as out:
        for chunk in _read_chunks(source):
            out.write(chunk)


def _read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in parts. Raise Failed if the file cannot be read."""
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
    except OSError as error:
        raise Failed(f"cannot read {path}: {error.strerror}. {ADVICE}") from None


def move_whole(source: Path, target: Path) -> None:
    """Copy a file in one step, then remove `source`. If copying fails, raise Failed and keep it."""
    copy_whole(source, target)
    source.unlink()


def remove_if_unlocked(lock: Path, leftovers: Iterable[Path]) -> list[Path]:
    """Remove leftovers of killed processes, unless a running process holds their lock.

    Args:
        lock: The lock file. Nothing is removed if it does not exist.
        leftovers: Files and folders to remove. The iterable is consumed while the lock is held.

    Returns:
        The paths that were removed.
    """
    with contextlib.suppress(OSError), lock_if_free(lock) as is_locked:
        if is_locked:
            return remove_all(leftovers)
    return []


@contextlib.contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Lock an existing file while the block runs, unless another process holds its lock.

    Yields:
        Whether this process holds the lock now; False if the file does not exist.
    """
    try:
        file = path.open("rb")
    except OSError:
        yield False
        return
    with file:
        try:
            # FileLock may empty the file, but the lock files of rattler and pixi have content.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def remove_all(paths: Iterable[Path]) -> list[Path]:
    """Remove files and folders as far as possible, and return the paths that no longer exist."""
    paths = list(paths)
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return [path for path in paths if not os.path.lexists(path)]


@contextlib.contextmanager
def hold(
    folder: Path,
    doing: str,
    say: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold the operating system's lock on the file FOLDER/.lock while the block runs.

    Args:
        folder: The folder. It is made if it does not exist.
        doing: A description of the block for messages, such as "publishing to".
        say: If another process holds the lock, `say` is called with a line that names that process,
            and this process waits. Without `say`, this process does not wait.

    Raises:
        ForgeError: The folder is not writable, or another process holds the lock and `say` is None.
    """
    path = folder / ".lock"
    lock = FileLock(path, mode=0o644)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            acquired = lock.acquire(blocking=False)
        except Timeout:
            process = path.read_text().strip() or "unknown"
            holder = f"process {process} is {doing} {folder}."
            if say is None:
                raise ForgeError(f"{holder} Wait for it, or choose another folder") from None
            say(f"{holder} Waiting for it")
            acquired = lock.acquire()
        path.write_text(f"{os.getpid()}\n")
    except OSError as error:
        reason = f"cannot write to {error.filename or folder}: {error.strerror}"
        raise ForgeError(f"{reason}. Make it writable or choose another folder") from None
    with acquired:
        yield

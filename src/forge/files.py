# SPDX-License-Identifier: BSD-3-Clause
"""Files: hashed, read as text, written so that nobody sees half of one; and locks on folders."""

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
    """Hash the names, executable bits, link targets and bytes of a file or folder into one sha256.

    Files that ROOT/.gitignore lists and git does not track are left out: editors and tools leave
    them there.

    Args:
        path: The file or folder.
        root: The checkout.
        follow: Include the target of a link that leads out of the folder.
        contents: Bytes to hash in place of those of a file.
    """
    ignore_file = root / ".gitignore"
    patterns = read_text(ignore_file).splitlines() if ignore_file.exists() else []
    ignored = GitIgnoreSpec.from_lines(patterns)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    skipped = set()
    for file in files:
        place = file.relative_to(root if file.is_relative_to(root) else path)
        if ignored.match_file(place):
            skipped.add(file)
    if skipped:
        tracked = git(root, "ls-files", "-ciz", "--exclude-standard").split("\0")
        skipped -= {root / name for name in tracked}
    digest = hashlib.sha256()
    for file in files:
        if file in skipped or not (file.is_symlink() or file.is_file()):
            continue
        digest.update(os.fsencode(file.relative_to(path)) + b" ")
        if file.is_symlink():
            digest.update(b"link " + os.fsencode(file.readlink()))
            if follow and file.is_dir() and not path.resolve().is_relative_to(file.resolve()):
                digest.update(digest_tree(file.resolve(), root, follow=False).encode())
        if file.is_file():
            if file in contents:
                sha256 = hashlib.sha256(contents[file]).hexdigest()
            else:
                sha256 = sha256_file(file)
            digest.update(f"{file.stat().st_mode & 0o100:o} {sha256}\n".encode())
    return digest.hexdigest()


def git(root: Path, *arguments: str) -> str:
    """Return what git says of the repository at `root`, not of one around it; or nothing."""
    command = ["git", "--git-dir", ".git", *arguments]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        return os.fsdecode(subprocess.check_output(command, cwd=root, stderr=subprocess.DEVNULL))
    return ""


def require_file(path: Path) -> Path:
    """Return the path. Raises ForgeError for a pipe or a device, which would be read for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ForgeError(f"{path} is not a file, but a pipe or a device")
    return path


def read_text(path: Path) -> str:
    """Read a small text file. Raises ForgeError for one that is large or not UTF-8."""
    require_file(path)
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ForgeError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


@contextlib.contextmanager
def written(target: Path) -> Iterator[BinaryIO]:
    """Open a file to write that becomes `target`, whole and on the disk, when the block ends.

    Raises Failed when there is no room or no permission; `target` is then as it was.
    """
    partial = target.with_name(f".partial-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # of a killed process
        with partial.open("xb") as out:  # never through a link that somebody left
            yield out
            out.flush()
            os.fsync(out.fileno())
            # rattler-build writes packages with mode 0600, which a web server cannot read
            os.fchmod(out.fileno(), 0o644)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        advice = "Mend that and run the same command again"
        raise Failed(f"cannot write {target}: {error.strerror}. {advice}") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half written. Raises Failed."""
    with written(path) as out:
        out.write(text.encode())


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file to `target`, never seen half written. Raises Failed."""
    with source.open("rb") as stream, written(target) as out:
        shutil.copyfileobj(stream, out)


def move_whole(source: Path, target: Path) -> None:
    """Move a file to `target`, never seen half written. Raises Failed and then keeps it."""
    copy_whole(source, target)
    source.unlink()


def swept(lock: Path, left: Iterable[Path]) -> list[Path]:
    """Remove and return what killed processes left, listed when nobody holds their lock."""
    with contextlib.suppress(OSError), lock.open("rb") as file:
        # filelock may empty the file, which may be rattler's or pixi's and say something
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return removed(left)
    return []


def removed(paths: Iterable[Path]) -> list[Path]:
    """Remove files and folders, as far as that can be; returns what is gone."""
    for path in (every := list(paths)):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return [path for path in every if not path.exists()]


@contextlib.contextmanager
def hold(folder: Path, doing: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Be the only one who is `doing` something to FOLDER, by a kernel lock on FOLDER/.lock.

    While another is, say so and wait; without `say` raises ForgeError, as for one not writable.
    """
    lock = FileLock(path := folder / ".lock", mode=0o644)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            holder = f"process {path.read_text().strip() or 'unknown'} is {doing} {folder}."
            if say is None:
                raise ForgeError(f"{holder} Wait for it, or choose another folder") from None
            say(f"{holder} Waiting for it")
            held = lock.acquire()
        path.write_text(f"{os.getpid()}\n")
    except OSError as error:
        why = f"cannot write to {error.filename or folder}: {error.strerror}"
        raise ForgeError(f"{why}. Make it writable or choose another folder") from None
    with held:
        yield

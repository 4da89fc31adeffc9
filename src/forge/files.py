# SPDX-License-Identifier: BSD-3-Clause
"""Files: hashed, read as text, and written so that nobody sees half of one."""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from forge.errors import BuildFailed, ForgeError


def sha256_file(path: Path) -> str:
    """The sha256 of a file, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_tree(folder: Path) -> str:
    """One sha256 over the names, executable bits, link targets and bytes below `folder`.

    Byte code and packaging leftovers are not content: they appear by merely using the folder.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part == "__pycache__" or part.endswith(".egg-info") for part in relative.parts):
            continue
        if path.is_symlink():
            total.update(f"{relative} link {path.readlink()}\n".encode())
        elif path.is_file():
            executable = path.stat().st_mode & 0o100
            total.update(f"{relative} {executable:o} {sha256_file(path)}\n".encode())
    return total.hexdigest()


def read_text(path: Path) -> str:
    """A small text file. Raises ForgeError for one that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ForgeError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(text)
    partial.replace(path)


def move_whole(source: Path, target: Path) -> None:
    """Move a file to `target` so that `target` is never seen half written.

    Raises BuildFailed when there is no room or no permission; `source` is then still there.
    """
    partial = target.with_name(f".partial-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as stream, partial.open("wb") as out:
            shutil.copyfileobj(stream, out)
            out.flush()
            os.fsync(out.fileno())
        # rattler-build writes packages with mode 0600, which a web server cannot read
        partial.chmod(0o644)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        advice = "Mend that and run the same command again"
        raise BuildFailed(f"cannot write {target}: {error.strerror}. {advice}") from None
    source.unlink()

# SPDX-License-Identifier: BSD-3-Clause
"""Scratch folders: temporary folders. If a process is killed, a later one removes its folders."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from forge.files import lock_if_free, remove_if_unlocked

PREFIX = ".forge-"


def cache_folder() -> Path:
    """Return the folder in which rattler unpacks packages by default."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = os.environ.get("RATTLER_CACHE_DIR") or Path(user, "rattler", "cache")
    return Path(cache, "pkgs")


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder with a lock. Its process holds the lock until the process ends."""

    def __init__(self, parent: Path) -> None:
        super().__init__(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        self._lock = FileLock(Path(self.name, ".lock"), thread_local=False)
        self._lock.acquire()


def scratch(parent: Path) -> ScratchFolder:
    """Make a scratch folder, and remove the scratch folders of killed processes in `parent`."""
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / ".forge.lock"):
        _remove_abandoned(parent)
        return ScratchFolder(parent)


def _remove_abandoned(parent: Path) -> list[Path]:
    """Remove the scratch folders whose processes have ended, and return their paths."""
    abandoned = []
    for folder in parent.glob(f"{PREFIX}*"):
        # The folder's process may be removing it right now.
        with suppress(OSError):
            # The folder may have no lock file, because rattler continues to write for a while after
            # an error, and so makes the removed folder again.
            (folder / ".lock").touch()
            abandoned += remove_if_unlocked(folder / ".lock", [folder])
    return abandoned


def remove_cache_leftovers(cache: Path) -> list[Path]:
    """Remove the folders in which killed processes unpacked packages, and return their paths.

    These are our scratch folders and rattler's temporary folders.
    """
    folders = []
    with lock_if_free(cache / ".forge.lock") as is_locked:
        if is_locked:
            folders += _remove_abandoned(cache)
    with lock_if_free(cache / ".cache.lock") as is_locked:
        if is_locked:
            folders += _remove_unpacking(cache)
    return folders


def _remove_unpacking(cache: Path) -> list[Path]:
    """Remove the folders in which rattler was unpacking when it was killed; return their paths.

    rattler unpacks NAME into .NAMExxxxxx. Meanwhile it holds NAME.lock or the lock of the cache.
    """
    folders = []
    for folder in cache.glob(".*-*-*"):
        if folder.is_dir():
            name = folder.name[1:-6]
            folders += remove_if_unlocked(cache / f"{name}.lock", [folder])
    return folders

# SPDX-License-Identifier: BSD-3-Clause
"""Scratch folders: temporary folders that the next process removes if theirs is killed."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from forge.files import lock_if_free, swept

PREFIX = ".forge-"


def cache_folder() -> Path:
    """Return the folder in which rattler unpacks packages by default."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = os.environ.get("RATTLER_CACHE_DIR") or Path(user, "rattler", "cache")
    return Path(cache, "pkgs")


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder with a lock, which its process holds as long as it lives."""

    def __init__(self, parent: Path) -> None:
        super().__init__(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        self._lock = FileLock(Path(self.name, ".lock"), thread_local=False)
        self._lock.acquire()


def scratch(parent: Path) -> ScratchFolder:
    """Make a scratch folder, and remove those that killed processes left in the same place."""
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / ".forge.lock"):
        _remove_abandoned(parent)
        return ScratchFolder(parent)


def _remove_abandoned(parent: Path) -> list[Path]:
    """Remove the scratch folders whose processes have ended; return them."""
    abandoned = []
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # its process may end right now
            # A folder may have no lock file: rattler writes on for a while after its error, and
            # makes a removed folder again.
            (folder / ".lock").touch()
            abandoned += swept(folder / ".lock", [folder])
    return abandoned


def remove_cache_leftovers(cache: Path) -> list[Path]:
    """Remove the folders in which killed processes unpacked packages; return them.

    They are our scratch folders and those of rattler.
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
    """Remove the folders in which rattler was unpacking when it was killed; return them.

    rattler unpacks NAME into .NAMExxxxxx. Meanwhile it holds NAME.lock, or the whole cache's lock.
    """
    folders = []
    for folder in cache.glob(".*-*-*"):
        if folder.is_dir():
            name = folder.name[1:-6]
            folders += swept(cache / f"{name}.lock", [folder])
    return folders

# SPDX-License-Identifier: BSD-3-Clause
"""Kernel locks on folders: one builder, one publisher, one installer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from forge.errors import ForgeError


@contextlib.contextmanager
def hold(folder: Path, doing: str) -> Iterator[None]:
    """Be the only one who is `doing` something to FOLDER, by a kernel lock on FOLDER/.lock.

    Raises ForgeError when another live process is, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ForgeError(
            f"cannot write to {error.filename}: {error.strerror}. "
            "Make it writable or choose another folder (--output, --to)"
        ) from None
    with os.fdopen(descriptor, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(32).strip() or "unknown"
            raise ForgeError(
                f"process {holder} is {doing} {folder}. Wait for it, or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield

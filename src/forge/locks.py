# SPDX-License-Identifier: BSD-3-Clause
"""Kernel locks on folders: one builder, one publisher, one installer at a time."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from forge.errors import ForgeError


@contextlib.contextmanager
def hold(folder: Path, doing: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Be the only one who is `doing` something to FOLDER, by a kernel lock on FOLDER/.lock.

    While another live process is, say so and wait. Raises ForgeError then without `say`, and when
    the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why = f"cannot write to {error.filename}: {error.strerror}"
        raise ForgeError(f"{why}. Make it writable or choose another folder") from None
    with os.fdopen(descriptor, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = f"process {lock.read(32).strip() or 'unknown'} is {doing} {folder}."
            if say is None:
                raise ForgeError(f"{holder} Wait for it, or choose another folder") from None
            say(f"{holder} Waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield

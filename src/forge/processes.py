# SPDX-License-Identifier: BSD-3-Clause
"""Processes: how many compilers may run at once, and those that a killed build left behind."""

import contextlib
import os
import signal
from pathlib import Path

from forge.errors import ForgeError

GIB_PER_JOB = 2.0  # one C++ or HIP compiler process of PyTorch's size at its peak


def kill_leftovers(folder: Path) -> None:
    """Kill processes whose working directory is inside `folder`.

    A compiler started by a build that was killed with SIGKILL lives on and writes into the folder
    that the next build uses. Whoever holds the lock is the only builder, so they are all stale.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    os.kill(int(entry.name), signal.SIGKILL)


def max_jobs() -> int:
    """Compiler processes a build may run: one per core, and GIB_PER_JOB of memory for each.

    MAX_JOBS in the environment overrides it.
    """
    if jobs := os.environ.get("MAX_JOBS"):
        if not jobs.isdigit() or int(jobs) < 1:
            raise ForgeError(f"MAX_JOBS={jobs!r} is not a positive number")
        return int(jobs)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIB_PER_JOB)))

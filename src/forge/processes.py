# SPDX-License-Identifier: BSD-3-Clause
"""Processes: how many compilers may run at once, and those that a killed build left behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Set
from itertools import chain
from pathlib import Path

from forge.errors import ForgeError

POLL_SECONDS = 0.1
SESSION = "session"  # file with the number of a job's session, in its output folder
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL
GIB_PER_JOB = 2.0  # one C++ or HIP compiler process of PyTorch's size at its peak


def kill_leftovers(folder: Path) -> None:
    """Kill what lives on of builds in `folder`, by the sessions that FOLDER/*/SESSION names.

    A compiler of a build that was killed with SIGKILL would write into the folder that the next
    build uses. A person's shell in there is of another session; numbers may have been used again.
    """
    sessions = {file.read_bytes().decode(errors="replace") for file in folder.glob(f"*/{SESSION}")}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = (entry / "cwd").readlink().is_relative_to(folder.resolve())
            if inside and str(os.getsid(int(entry.name))) in sessions:
                kill({int(entry.name)})


def kill(processes: Set[int]) -> None:
    """Kill those that still run."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def end_job(engine: subprocess.Popen[bytes], output: Path) -> None:
    """End a job, whose engine leads its session: first what it runs, by SIGTERM, then all.

    At SIGTERM ninja removes the files of unfinished steps, and ccache its temporary ones. They have
    GRACE_SECONDS. The engine goes last, because a script whose output nobody reads would end by
    SIGPIPE before it has cleaned up.

    Args:
        engine: The engine's process, which may have ended.
        output: The job's output folder.
    """
    terminated = set[int]()
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        processes = {*job_processes(engine.pid, output)} - {engine.pid}
        if not processes:
            break
        for process in processes - terminated:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGTERM)
        terminated |= processes
        time.sleep(POLL_SECONDS)
    if engine.poll() is None:
        engine.kill()
    engine.wait()
    deadline = time.monotonic() + GRACE_SECONDS  # a process that waits for a disk dies later
    while time.monotonic() < deadline:
        processes = {*job_processes(engine.pid, output)}  # again: one may have started another
        if not processes:
            break
        kill(processes)
        time.sleep(POLL_SECONDS)


def job_processes(session: int, output: Path) -> Iterator[int]:
    """Yield the processes of a job that run: of its session, or with its folder in the environment.

    Not by process group: ninja gives each compiler one of its own. A script may start a daemon,
    which has a session of its own.
    """
    folder = b"%s/" % bytes(output)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(entry.name)
            is_zombie = (entry / "stat").read_text().rpartition(") ")[2].startswith("Z")
            if process == os.getpid() or is_zombie:
                continue
            if os.getsid(process) == session or folder in (entry / "environ").read_bytes():
                yield process


def left_behind(job: int) -> set[int] | None:
    """Find what holds a job's output open after its script has ended; None while that runs."""
    holders: dict[int, set[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):  # psutil's open_files lists no pipes
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == job and state != "Z":
                return None
            links = {str(link.readlink()) for link in (entry / "fd").iterdir()}
            holders[int(entry.name)] = {link for link in links if link.startswith("pipe:")}
    pipes = holders.pop(job, set())
    return {process for process, held in holders.items() if held & pipes}


def named_pipe(output: Path) -> Path | None:
    """Find a named pipe in what a script installed: rattler-build would wait there for ever."""
    walks = chain.from_iterable(map(os.walk, output.glob("bld/*/host_env*")))
    files = (Path(place, name) for place, _, names in walks for name in names)
    return next(filter(Path.is_fifo, files), None)


def max_jobs() -> int:
    """Count the compilers a build may run: MAX_JOBS, or one per core and GIB_PER_JOB of memory."""
    if jobs := os.environ.get("MAX_JOBS"):
        if not jobs.isdecimal() or len(jobs) > 9 or int(jobs) < 1:
            raise ForgeError(f"MAX_JOBS={jobs!r:.40} is not a positive number")
        return int(jobs)
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib() / GIB_PER_JOB)))


def memory_gib() -> float:
    """Return the memory of this machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30

# SPDX-License-Identifier: BSD-3-Clause
"""Processes of builds: how many compilers may run at once, and how a build's processes end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Set
from pathlib import Path

from forge.errors import ForgeError

PROC = Path("/proc")
POLL_SECONDS = 0.1
SESSION = "session"  # file with the number of a job's session, in the job's output folder
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL
GIB_PER_JOB = 2.0  # the peak of one C++ or HIP compiler process with code of PyTorch's size


def kill_leftovers(folder: Path) -> None:
    """Kill the processes that killed builds in `folder` left behind.

    A compiler of a build that was killed with SIGKILL would write into the folder that the next
    build uses. Only processes are killed that work in `folder` and whose session is in a file
    FOLDER/*/SESSION: a person's shell there has another session, and the system may have given the
    number of a session to another process.
    """
    sessions = set()
    for file in folder.glob(f"*/{SESSION}"):
        sessions.add(file.read_bytes().decode(errors="replace"))
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(entry.name)
            working_folder = (entry / "cwd").readlink()
            if not working_folder.is_relative_to(folder.resolve()):
                continue
            if str(os.getsid(process)) in sessions:
                kill({process})


def kill(processes: Set[int]) -> None:
    """Kill processes; those that have ended already are no error."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def end_job(engine: subprocess.Popen[bytes], output: Path) -> None:
    """End a job: first the processes that its engine started, by SIGTERM, then all that is left.

    At SIGTERM ninja removes the files of unfinished steps, and ccache its temporary files. They
    have GRACE_SECONDS for it. The engine is the last, because a script whose output nobody reads
    would end by SIGPIPE before it has cleaned up.

    Args:
        engine: The engine's process, which leads its session and may have ended.
        output: The job's output folder.
    """
    terminated = set[int]()
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        processes = set(job_processes(engine.pid, output)) - {engine.pid}
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
    # A process that waits for a disk dies later, and one may have started another in between.
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        processes = set(job_processes(engine.pid, output))
        if not processes:
            break
        kill(processes)
        time.sleep(POLL_SECONDS)


def job_processes(session: int, output: Path) -> Iterator[int]:
    """Yield the running processes of a job, but for this process.

    They are those of its session, and those with its output folder in their environment: a script
    may start a daemon, which has a session of its own. Process groups do not tell, because ninja
    gives each compiler a group of its own.

    Args:
        session: The number of the job's session.
        output: The job's output folder.
    """
    folder = b"%s/" % bytes(output)
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(entry.name)
            state, _ = _read_state(entry)
            if process == os.getpid() or state == "Z":
                continue
            if os.getsid(process) == session or folder in (entry / "environ").read_bytes():
                yield process


def find_output_holders(job: int) -> set[int] | None:
    """Return the processes that hold a job's output open after its script has ended.

    Args:
        job: The process whose child the script is, and which reads the script's output.

    Returns:
        None as long as the script runs.
    """
    pipes: dict[int, set[str]] = {}
    for entry in PROC.glob("[0-9]*"):  # psutil's open_files lists no pipes
        with contextlib.suppress(OSError):
            state, parent = _read_state(entry)
            if parent == job and state != "Z":
                return None
            links = {str(link.readlink()) for link in (entry / "fd").iterdir()}
            pipes[int(entry.name)] = {link for link in links if link.startswith("pipe:")}
    job_pipes = pipes.pop(job, set())
    return {process for process, open_pipes in pipes.items() if open_pipes & job_pipes}


def _read_state(entry: Path) -> tuple[str, int]:
    """Return the state of a process, such as "Z" for a zombie, and the number of its parent.

    Args:
        entry: Its folder in /proc.
    """
    # the name of the program stands before, in parentheses, and may have some itself
    fields = (entry / "stat").read_text().rpartition(") ")[2].split()
    return fields[0], int(fields[1])


def find_named_pipe(output: Path) -> Path | None:
    """Return a named pipe among the files that a script installed, if there is one.

    rattler-build would wait for ever for somebody to write to it.
    """
    for environment in output.glob("bld/*/host_env*"):
        for folder, _, names in os.walk(environment):
            for name in names:
                file = Path(folder, name)
                if file.is_fifo():
                    return file
    return None


def max_jobs() -> int:
    """Return how many compilers a build may run: MAX_JOBS, or what cores and memory allow.

    Without MAX_JOBS that is one for each core and each GIB_PER_JOB of memory, and at least one.
    """
    setting = os.environ.get("MAX_JOBS")
    if setting:
        if not setting.isdecimal() or len(setting) > 9 or int(setting) < 1:
            raise ForgeError(f"MAX_JOBS={setting!r:.40} is not a positive number")
        return int(setting)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(memory_gib() / GIB_PER_JOB)))


def memory_gib() -> float:
    """Return the memory of this machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30

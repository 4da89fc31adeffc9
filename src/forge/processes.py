# SPDX-License-Identifier: BSD-3-Clause
"""Limit the number of compilers that run at once, and find and end the processes of builds."""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Set
from pathlib import Path

from forge.errors import ForgeError

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
POLL_SECONDS = 0.1
# The file in a job's output folder that has the id of the job's session.
SESSION = "session"
# A shell sets these variables for each command.
OF_SHELLS = (b"PWD=", b"OLDPWD=", b"_=")
# The longest time between SIGTERM and SIGKILL.
GRACE_SECONDS = 30.0
# The peak memory of one C++ or HIP compiler process for code such as PyTorch's.
GIB_PER_JOB = 2.0


def kill_leftovers(folder: Path) -> None:
    """Kill processes that are left over from killed builds in `folder`.

    If a build was killed with SIGKILL, its compilers may still write into the folder that the next
    build uses. A process is killed only if its working folder is in `folder`, and a file
    FOLDER/*/SESSION has the id of its session. The id alone does not suffice, because the system
    may have given it to another session. The working folder alone does not suffice, because a
    person's shell may work in `folder`.
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
    """Kill processes, and ignore those that have already ended."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def end_job(engine: subprocess.Popen[bytes], output: Path) -> None:
    """End a job: send SIGTERM to the processes that its engine started, then kill all that remain.

    On SIGTERM, ninja removes the files of unfinished steps, and ccache removes its temporary files.
    All processes have GRACE_SECONDS to end. The engine is killed only after that, because it reads
    the output of the build script. Without this reader, SIGPIPE would end the script before it has
    cleaned up.

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
    # Search for processes again and again, because a process that waits for a disk ends later, and
    # other processes may have been started since.
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        processes = set(job_processes(engine.pid, output))
        if not processes:
            break
        kill(processes)
        time.sleep(POLL_SECONDS)


def job_processes(session: int, output: Path) -> Iterator[int]:
    """Yield the running processes of a job, except for this process.

    These are the processes of its session, and all processes with its output folder in their
    environment, because a daemon that a script starts has its own session. Process groups would not
    help, because ninja starts each compiler in a new group. Variables that only name the working
    folder or the program do not count, because a person may have started an editor in the folder.

    Args:
        session: The id of the job's session.
        output: The job's output folder.
    """
    folder = b"%s/" % bytes(output)
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(entry.name)
            state, _ = _read_state(entry)
            if process == os.getpid() or state == "Z":
                continue
            if os.getsid(process) == session:
                yield process
                continue
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if folder in variable and not variable.startswith(OF_SHELLS):
                    yield process
                    break


def find_output_holders(job: int) -> set[int] | None:
    """Return the processes that keep a job's output open although the job's script has ended.

    Args:
        job: The id of the process that started the script and reads its output.

    Returns:
        The ids of the processes; None while the script is running.
    """
    pipes: dict[int, set[str]] = {}
    for entry in PROC.glob("[0-9]*"):
        # psutil is not used, because its open_files lists no pipes.
        with contextlib.suppress(OSError):
            state, parent = _read_state(entry)
            if parent == job and state != "Z":
                return None
            links = {str(link.readlink()) for link in (entry / "fd").iterdir()}
            pipes[int(entry.name)] = {link for link in links if link.startswith("pipe:")}
    job_pipes = pipes.pop(job, set())
    return {process for process, open_pipes in pipes.items() if open_pipes & job_pipes}


def _read_state(entry: Path) -> tuple[str, int]:
    """Return the state of a process, such as "Z" for a zombie, and the id of its parent.

    Args:
        entry: The folder of the process in /proc.
    """
    # The state follows the program's name in parentheses. The name itself may have parentheses.
    fields = (entry / "stat").read_text().rpartition(") ")[2].split()
    return fields[0], int(fields[1])


def find_named_pipe(output: Path) -> Path | None:
    """Return a named pipe among the files that a script installed, or None.

    rattler-build would read the pipe and wait for ever.
    """
    for environment in output.glob("bld/*/host_env*"):
        for folder, _, names in os.walk(environment):
            for name in names:
                file = Path(folder, name)
                if file.is_fifo():
                    return file
    return None


def max_jobs() -> int:
    """Return how many compilers a build may run at once.

    This is the environment variable MAX_JOBS. Without it, the number is limited to one per core and
    one per GIB_PER_JOB of memory, but it is at least 1. Only cores and memory that this process may
    use count.
    """
    setting = os.environ.get("MAX_JOBS")
    if setting:
        if not setting.isdecimal() or len(setting) > 9 or int(setting) < 1:
            raise ForgeError(f"MAX_JOBS={setting!r:.40} is not a positive whole number")
        return int(setting)
    cores = len(os.sched_getaffinity(0))
    for limit in _read_limits("cpu.max"):
        quota, period = limit.split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, min(cores, int(memory_gib() / GIB_PER_JOB)))


def memory_gib() -> float:
    """Return the memory that this process may use, in GiB.

    This is the memory of the machine, or the limit of a control group, such as that of a container,
    if this limit is lower.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [*_read_limits("memory.max"), *_read_limits("memory.limit_in_bytes", "memory")]
    for limit in limits:
        if limit != "max":
            memory = min(memory, int(limit))
    return memory / 2**30


def _read_limits(name: str, controller: str = "") -> Iterator[str]:
    """Yield the content of a file in each control group (cgroup) that contains this process.

    Args:
        name: The name of the file.
        controller: The controller for version 1 of control groups; empty for version 2.
    """
    groups = PROC / "self" / "cgroup"
    if not groups.exists():
        # The kernel was built without control groups.
        return
    # The name of a control group may be any bytes.
    for line in map(os.fsdecode, groups.read_bytes().splitlines()):
        _, controllers, group = line.split(":", 2)
        if controllers != controller:
            continue
        folder = CONTROL_GROUPS / controller / group.lstrip("/")
        for parent in (folder, *folder.parents):
            with contextlib.suppress(OSError):
                yield (parent / name).read_text().strip()

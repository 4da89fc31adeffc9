# SPDX-License-Identifier: BSD-3-Clause
"""Run an engine job in a child process, and copy the job's output to a log."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from forge.errors import Failed
from forge.files import ADVICE
from forge.limits import last_lines
from forge.processes import (
    POLL_SECONDS,
    SESSION,
    end_job,
    find_named_pipe,
    find_output_holders,
    kill,
)
from forge.project import DONE, FAILED, FORGE_CACHE, STOPPED, WORK_FOLDERS, Project

# recipes/checks/stages.sh creates a file of this pattern for each stage that has finished.
MARKS = "bld/*/work/.done-*"
# rattler-build writes this file before it runs the script of an output.
SCRIPTS = "bld/*/work/conda_build.sh"
# The folder in which stages.sh finds the work tree of a run that was stopped.
STOPPED_TREE = "stopped"
# Number of polls between two searches for processes that a script has left running.
POLLS_PER_SEARCH = 50
TAIL_LINES = 40
ENGINE_LOG = "engine.log"
SCRIPT_LOGS = "bld/*/work/conda_build.log"
STAGED_LOGS = "build_cache/*/work_dir/conda_build.log"
# A disk with fewer bytes free than this counts as full.
FULL_DISK_BYTES = 1 << 16

ShowLine = Callable[[str], None]
Job = dict[str, Any]


def run_job(
    project: Project,
    cpus: int,
    show_line: ShowLine,
    stop: threading.Event,
    job: Job,
    log: Path,
) -> None:
    """Run an engine job.

    Args:
        project: The checkout, for its folders.
        cpus: Maximum number of compiler processes of the job.
        show_line: Called with each line of the job's output.
        stop: Set this event to end the job.
        job: The engine's arguments, with `action`; see `forge.building.engine`. The member
            `environment` is not one of these arguments. It has variables that are added to the
            engine's environment variables.
        log: The log file. A build starts a new log; the other actions append to it.

    Raises:
        Failed: The job failed, its script made a named pipe, or the log cannot be written. If the
            job failed, the message has the path and the last lines of the log.
        KeyboardInterrupt: `stop` was set.
    """
    action = job["action"]
    test_folder = project.staging / f"_test-{log.stem}"
    output = Path(job.get("output_dir", test_folder))
    if action == "test":
        # A killed run may have left test environments in the output folder.
        shutil.rmtree(output, ignore_errors=True)
    if action == "build":
        log.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    file = output / "job.json"
    child = _start_engine(project, cpus, job, output, file)
    try:
        _wait(child, output, LogFollower(output, log, show_line), stop)
    finally:
        if child.poll() is None:
            end_job(child, output)
    if child.returncode == -signal.SIGALRM:
        # The timeout ended only the engine, not the processes of the test.
        end_job(child, output)
    if child.returncode:
        file.rename(output / FAILED)
        raise Failed(_describe_failure(action, child.returncode, output, log))
    if action == "test":
        shutil.rmtree(output, ignore_errors=True)


def _start_engine(
    project: Project,
    cpus: int,
    job: Job,
    output: Path,
    file: Path,
) -> subprocess.Popen[bytes]:
    """Write the job's file, and start the engine with it in a new session."""
    arguments = dict(job)
    environment = os.environ | arguments.pop("environment", {})
    environment["CPU_COUNT"] = str(cpus)
    environment["TMPDIR"] = str(output)
    environment[FORGE_CACHE] = str(project.cache)
    file.write_text(json.dumps(arguments))
    command = [sys.executable, "-P", "-m", "forge.building.engine", str(file)]
    with (output / ENGINE_LOG).open("wb") as stream:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,
        )
    (output / SESSION).write_text(str(child.pid))
    return child


def _wait(
    child: subprocess.Popen[bytes],
    output: Path,
    follower: "LogFollower",
    stop: threading.Event,
) -> None:
    """Copy the logs until the engine ends. Raise KeyboardInterrupt once `stop` is set."""
    holders: set[int] = set()
    for polls in itertools.count(1):
        has_ended = child.poll() is not None
        follower.update()
        if has_ended:
            return
        if stop.wait(POLL_SECONDS):
            end_job(child, output)
            _mark_stopped(output)
            raise KeyboardInterrupt
        if polls % POLLS_PER_SEARCH == 0:
            holders = _kill_holders(child.pid, output, holders)


def _mark_stopped(output: Path) -> None:
    """Rename the job's file to STOPPED if the next run can continue the job."""
    marks = [*output.glob(MARKS), *output.glob(f"{DONE}*")]
    # Before the script begins, STOPPED_TREE is still as `resume` left it: the tree of an earlier
    # run that was stopped. The next run can continue in it.
    if not any(output.glob(SCRIPTS)):
        marks += output.glob(STOPPED_TREE)
    if marks:
        (output / "job.json").rename(output / STOPPED)


def _kill_holders(engine: int, output: Path, earlier: set[int]) -> set[int]:
    """Kill processes that keep the engine's output open although their script has ended.

    The engine would wait for these processes. A process is killed only if the previous search found
    it, too, because a process that was found only once may still end by itself.

    Args:
        engine: The id of the engine's process.
        output: The job's output folder.
        earlier: The result of the previous search.

    Returns:
        The ids of the processes that keep the output open; empty while a script is running.

    Raises:
        Failed: The script made a named pipe. The engine would read it for ever.
    """
    holders = find_output_holders(engine)
    if holders is None:
        # The script is still running.
        return set()
    kill(earlier & holders)
    pipe = find_named_pipe(output)
    if pipe:
        raise Failed(f"its script made a named pipe, {pipe.name}, which no package may contain")
    return holders


def _describe_failure(action: str, returncode: int, output: Path, log: Path) -> str:
    """Return the message of a failed job: the reason, the end of the log and the work folder."""
    reason = ""
    if returncode == -signal.SIGALRM:
        test = "".join(last_lines(log, 1)).removeprefix("== ")
        reason = f" ({test}: it took longer)"
    elif returncode < 0:
        reason = f" (killed by signal {-returncode}; out of memory?)"
    # On a full disk the log may lack the error.
    if shutil.disk_usage(output).free < FULL_DISK_BYTES:
        reason = f" (No space left on device: {output})"
    lines = [f"{action} failed{reason}; the last lines of {log}:"]
    for line in last_lines(log, TAIL_LINES):
        lines.append(f"  | {line}")
    lines.append(f"  work folder: {output}")
    return "\n".join(lines)


def resume(output: Path, job: Job) -> None:
    """Prepare a build folder, so that a stopped run of the same job is continued.

    Two things are kept: the packages of the Pythons that were finished, and the work tree of the
    script that was running. If the script had finished a stage, its tree is moved to
    OUTPUT/stopped, where recipes/checks/stages.sh finds it. Otherwise the tree that an earlier
    stopped run left there is kept. Other packages and WORK_FOLDERS are removed. If the folder is
    not of a stopped run of the same job, all of it is removed.
    """
    trees = [mark.parent for mark in output.glob(MARKS)]
    stopped = output / STOPPED
    if not stopped.exists() or json.loads(stopped.read_bytes()) != job:
        shutil.rmtree(output, ignore_errors=True)
        return
    stopped.unlink()
    if trees:
        shutil.rmtree(output / STOPPED_TREE, ignore_errors=True)
        trees[0].rename(output / STOPPED_TREE)
    for name in WORK_FOLDERS:
        shutil.rmtree(output / name, ignore_errors=True)
    complete: set[str] = set()
    for done in output.glob(f"{DONE}*"):
        complete.update(done.read_text().splitlines())
    for package in output.glob("*/*.conda"):
        if str(package.relative_to(output)) not in complete:
            package.unlink()


class LogFollower:
    """Copies the output of the scripts and of the engine to the job's log while the job runs.

    Attributes:
        output: The job's output folder.
        log: The job's log.
        show_line: Called with each line.
    """

    def __init__(self, output: Path, log: Path, show_line: ShowLine) -> None:
        self.output = output
        self.log = log
        self.show_line = show_line
        # The key is the path with the inode, because several outputs of a recipe write their logs
        # to the same path, and each new file replaces the previous file.
        self._streams: dict[tuple[Path, int], BinaryIO] = {}
        log.touch()

    def update(self) -> None:
        """Copy new output to the log, and remove the folder of each output that is packed.

        rattler-build keeps these folders because of their logs. For rocm-sdk, each has gigabytes.
        """
        packed = self._list_packed()
        self.copy_new()
        for folder in packed:
            shutil.rmtree(folder, ignore_errors=True)

    def copy_new(self) -> None:
        """Copy the new lines of the scripts' logs, then those of the engine's log.

        In this order, the engine's error is the last line.
        """
        self._open_logs()
        engine_last = sorted(
            self._streams,
            key=lambda stream: stream[0].name == ENGINE_LOG,
        )
        for key in engine_last:
            text = self._read_new(self._streams[key])
            try:
                with self.log.open("ab") as log:
                    log.write(text)
            except OSError as error:
                reason = f"cannot write {self.log}: {error.strerror}"
                raise Failed(f"{reason}. {ADVICE}") from None
            for line in text.decode(errors="replace").splitlines():
                self.show_line(line)

    def _open_logs(self) -> None:
        scripts = [path for path in self.output.glob(SCRIPT_LOGS) if path.is_file()]
        for path in [*scripts, self.output / ENGINE_LOG]:
            try:
                stream = path.open("rb")
            except FileNotFoundError:
                # rattler-build has replaced the folder since it was listed.
                continue
            key = (path, os.fstat(stream.fileno()).st_ino)
            if key in self._streams:
                stream.close()
            else:
                self._streams[key] = stream

    def _read_new(self, stream: BinaryIO) -> bytes:
        """Return the new part of an output's log, without the copy of its staging output's log.

        rattler-build begins the log of an output with a copy of its staging output's log.
        """
        start = stream.tell()
        text = stream.read()
        if start or not text:
            return text
        for staged in self.output.glob(STAGED_LOGS):
            copied = staged.read_bytes()
            if copied not in self.log.read_bytes():
                continue
            if copied.startswith(text):
                # The copy may still be incomplete, so read it again later.
                stream.seek(0)
            text = text.removeprefix(copied[: len(text)])
        return text

    def _list_packed(self) -> list[Path]:
        """List the folders of the packed outputs: all except the one that changed last."""
        works = self.output.glob("bld/*/work")
        with contextlib.suppress(FileNotFoundError):
            # rattler-build may be replacing a folder.
            by_time = sorted(works, key=lambda work: work.stat().st_ctime_ns)
            return [work.parent for work in by_time[:-1]]
        return []

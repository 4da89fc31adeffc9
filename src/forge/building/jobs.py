# SPDX-License-Identifier: BSD-3-Clause
"""Run one engine job in a child process and copy its output to a log."""

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
from forge.limits import last_lines
from forge.processes import (
    POLL_SECONDS,
    SESSION,
    end_job,
    find_named_pipe,
    find_output_holders,
    kill,
)
from forge.project import DONE, FAILED, FORGE_CACHE, MADE, STOPPED, Project

# recipes/checks/stages.sh leaves one for each stage that it has finished.
MARKS = "bld/*/work/.done-*"
# Polls between two looks for processes that a script has left running.
POLLS_OF_PATIENCE = 50
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
        cpus: How many compiler processes the job may run.
        show_line: Gets each line of the job's output.
        stop: Ends the job once it is set.
        job: The engine's arguments, among them `action`; see `forge.building.engine`. What it has
            under `environment` is added to the engine's environment variables.
        log: Gets the output; a build begins a new log, a test adds to that of its build.

    Raises:
        Failed: The job failed; the message has the last lines and the path of the log.
        KeyboardInterrupt: `stop` was set.
    """
    action = job["action"]
    test_folder = project.staging / f"_test-{log.stem}"
    output = Path(job.get("output_dir", test_folder))
    if action == "test":  # a killed run may have left environments there
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
        end_job(child, output)  # the processes that the test was waiting for
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
    """Write the job's file and start the engine with it, in a session of its own."""
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
    """Follow the logs until the engine ends. Raises KeyboardInterrupt if it is stopped."""
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
        if polls % POLLS_OF_PATIENCE == 0:
            holders = _kill_holders(child.pid, output, holders)


def _mark_stopped(output: Path) -> None:
    """Keep the job's file as STOPPED if the next run can continue its work."""
    marks = [*output.glob(MARKS), *output.glob(f"{DONE}*")]
    if marks:
        (output / "job.json").rename(output / STOPPED)


def _kill_holders(engine: int, output: Path, earlier: set[int]) -> set[int]:
    """Kill processes that hold the engine's output open though their script has ended.

    The engine would wait for them. One that was not there at the check before may still end.

    Args:
        engine: The engine's process.
        output: The job's output folder.
        earlier: The processes that the check before has returned.

    Returns:
        The processes that hold it open now.

    Raises:
        Failed: The script made a named pipe, which the engine would read for ever.
    """
    holders = find_output_holders(engine)
    if holders is None:  # the script is still running
        return set()
    kill(earlier & holders)
    pipe = find_named_pipe(output)
    if pipe:
        raise Failed(f"its script made a named pipe, {pipe.name}: no package has one")
    return holders


def _describe_failure(action: str, returncode: int, output: Path, log: Path) -> str:
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
    """Prepare a build folder: keep what a stopped run of the same job can continue.

    That is the packages of the Pythons that it finished, and the tree of the script that it was
    running: recipes/checks/stages.sh continues in that tree, moved to OUTPUT/stopped. Everything
    else is removed.
    """
    trees = [mark.parent for mark in output.glob(MARKS)]
    stopped = output / STOPPED
    if not stopped.exists() or json.loads(stopped.read_bytes()) != job:
        shutil.rmtree(output, ignore_errors=True)
        return
    stopped.unlink()
    if trees:
        trees[0].rename(output / "stopped")
    for name in MADE:
        shutil.rmtree(output / name, ignore_errors=True)
    complete: set[str] = set()
    for done in output.glob(f"{DONE}*"):
        complete.update(done.read_text().splitlines())
    for package in output.glob("*/*.conda"):
        if str(package.relative_to(output)) not in complete:
            package.unlink()


class LogFollower:
    """Copies what the scripts and the engine write to the log of their job, as they write it.

    Attributes:
        output: The job's output folder.
        log: The file that gets everything.
        show_line: Gets each line.
    """

    def __init__(self, output: Path, log: Path, show_line: ShowLine) -> None:
        self.output = output
        self.log = log
        self.show_line = show_line
        # By path and inode: the log of a further output replaces the one before, at its path.
        self._streams: dict[tuple[Path, int], BinaryIO] = {}
        log.touch()

    def update(self) -> None:
        """Copy what is new, and remove the folder of each output that is packed.

        rattler-build keeps these folders for their logs: gigabytes each with rocm-sdk.
        """
        packed = self._list_packed()
        self.copy_new()
        for folder in packed:
            shutil.rmtree(folder, ignore_errors=True)

    def copy_new(self) -> None:
        """Copy what is new in the scripts' logs, then in the engine's: its error comes last."""
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
                raise Failed(f"cannot write {self.log}: {error.strerror}. Make room") from None
            for line in text.decode(errors="replace").splitlines():
                self.show_line(line)

    def _open_logs(self) -> None:
        scripts = [path for path in self.output.glob(SCRIPT_LOGS) if path.is_file()]
        for path in [*scripts, self.output / ENGINE_LOG]:
            try:
                stream = path.open("rb")
            except FileNotFoundError:  # its output has ended meanwhile
                continue
            key = (path, os.fstat(stream.fileno()).st_ino)
            if key in self._streams:
                stream.close()
            else:
                self._streams[key] = stream

    def _read_new(self, stream: BinaryIO) -> bytes:
        """Return what is new in a log, without the part that its staging output has logged.

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
            if copied.startswith(text):  # the copy may be incomplete: read it again
                stream.seek(0)
            text = text.removeprefix(copied[: len(text)])
        return text

    def _list_packed(self) -> list[Path]:
        """List the folders of all outputs but the one that was worked on last."""
        works = self.output.glob("bld/*/work")
        with contextlib.suppress(FileNotFoundError):  # one of them is being replaced
            by_time = sorted(works, key=lambda work: work.stat().st_ctime_ns)
            return [work.parent for work in by_time[:-1]]
        return []

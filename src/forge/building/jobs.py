# SPDX-License-Identifier: BSD-3-Clause
"""One engine job in a child process, its output followed into a log."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from forge.errors import Failed
from forge.limits import last_lines
from forge.processes import POLL_SECONDS, SESSION, end_job, kill, left_behind, named_pipe
from forge.project import DONE, FAILED, FORGE_CACHE, MADE, STOPPED, Project

MARKS = "bld/*/work/.done-*"  # of recipes/checks/stages.sh
POLLS_OF_PATIENCE = 50
TAIL_LINES = 40
ENGINE_LOG, STAGED_LOG = "engine.log", "build_cache/*/work_dir/conda_build.log"
FULL = 1 << 16  # bytes free on a full disk, at most


def run_job(  # noqa: C901 (a job from its start to its end)
    project: Project, cpus: int, line: Callable[[str], None], stop: threading.Event,
    job: dict[str, Any], log: Path,
) -> None:  # fmt: skip
    """Run an engine job with `cpus` compiler processes; `line` gets each line of its output.

    Raises Failed with the log's last lines and path, KeyboardInterrupt once `stop` is set.
    """
    output = Path(job.get("output_dir", project.staging / f"_test-{log.stem}"))
    if job["action"] == "test":  # environments that a killed run left there
        shutil.rmtree(output, ignore_errors=True)
    if job["action"] == "build":
        log.unlink(missing_ok=True)
    for folder in (output, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    own = job.pop("environment", {}) | {
        "CPU_COUNT": str(cpus), "TMPDIR": str(output), FORGE_CACHE: str(project.cache)
    }  # fmt: skip
    file = output / "job.json"
    file.write_text(json.dumps(job))
    with (output / ENGINE_LOG).open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "forge.building.engine", str(file)],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            env=os.environ | own, start_new_session=True,
        )  # fmt: skip
    (output / SESSION).write_text(str(child.pid))
    try:
        follower, seen = _watch(output, log, line), set[int]()
        for polls in itertools.count(1):
            ended = child.poll() is not None
            next(follower)
            if ended:
                break
            if stop.wait(POLL_SECONDS):
                end_job(child, output)
                if any(chain(output.glob(MARKS), output.glob(f"{DONE}*"))):
                    file.rename(output / STOPPED)
                raise KeyboardInterrupt
            if polls % POLLS_OF_PATIENCE == 0:
                waited_for, before = left_behind(child.pid), seen
                kill(before & (seen := waited_for or set()))
                if waited_for is not None and (pipe := named_pipe(output)):
                    raise Failed(f"its script made a named pipe, {pipe.name}: no package has one")
    finally:
        if child.poll() is None:
            end_job(child, output)
    if child.returncode == -signal.SIGALRM:
        end_job(child, output)  # what the test waited for
    if child.returncode:
        file.rename(output / FAILED)
        killed = f" (killed by signal {-child.returncode}; out of memory?)"
        reason = killed if child.returncode < 0 else ""
        if child.returncode == -signal.SIGALRM:
            test = "".join(last_lines(log, 1)).removeprefix("== ")
            reason = f" ({test}: it took longer)"
        if shutil.disk_usage(output).free < FULL:  # and then the log may say nothing
            reason = f" (No space left on device: {output})"
        tail = "".join(f"  | {text}\n" for text in last_lines(log, TAIL_LINES))
        failure = f"{job['action']} failed{reason}; the last lines of {log}:"
        raise Failed(f"{failure}\n{tail}  work folder: {output}")
    if job["action"] == "test":
        shutil.rmtree(output, ignore_errors=True)


def resume(output: Path, job: dict[str, Any]) -> None:
    """Keep what a stopped run of the same job left in `output`: its packages and a script's tree.

    recipes/checks/stages.sh goes on in that tree. Everything else is removed.
    """
    trees = [mark.parent for mark in output.glob(MARKS)]
    stopped = output / STOPPED
    if not stopped.exists() or json.loads(stopped.read_bytes()) != job:
        shutil.rmtree(output, ignore_errors=True)
        return
    stopped.unlink()
    if trees:
        trees[0].rename(output / "stopped")
    for made in MADE:
        shutil.rmtree(output / made, ignore_errors=True)
    whole = {name for done in output.glob(f"{DONE}*") for name in done.read_text().splitlines()}
    for package in output.glob("*/*.conda"):
        if str(package.relative_to(output)) not in whole:
            package.unlink()


def _follow(output: Path, log: Path, line: Callable[[str], None]) -> Iterator[None]:
    """Copy what is new in the scripts' logs, then the engine's, to `log`, and its lines to `line`.

    In this order, so that the closing error stands last. A further output's log takes the place of
    the one before and begins with a copy of its staging's: left out where that was read in time.
    """
    streams: dict[tuple[Path, int], BinaryIO] = {}
    log.touch()
    while True:
        logs = filter(Path.is_file, output.glob("bld/*/work/conda_build.log"))
        for file in [*logs, output / ENGINE_LOG]:
            with contextlib.suppress(FileNotFoundError):  # its output has ended
                opened = file.open("rb")
                if streams.setdefault((file, os.fstat(opened.fileno()).st_ino), opened) != opened:
                    opened.close()
        for _, stream in sorted(streams.items(), key=lambda i: i[0][0].name == ENGINE_LOG):
            start, new = stream.tell(), stream.read()
            for staged in output.glob(STAGED_LOG) if new and not start else ():
                if (said := staged.read_bytes()) in log.read_bytes():
                    if said.startswith(new):  # not copied to its end yet
                        stream.seek(0)
                    new = new.removeprefix(said[: len(new)])
            try:
                with log.open("ab") as out:
                    out.write(new)
            except OSError as error:
                raise Failed(f"cannot write {log}: {error.strerror}. Make room") from None
            for text in new.decode(errors="replace").splitlines():
                line(text)
        yield


def _watch(output: Path, log: Path, line: Callable[[str], None]) -> Iterator[None]:
    """Follow the logs, and remove the folder of each output that is packed, once its log is read.

    rattler-build keeps them all, for the logs: gigabytes each with rocm-sdk.
    """
    follower = _follow(output, log, line)
    while True:
        packed = _packed(output)
        next(follower)
        for folder in packed:
            shutil.rmtree(folder, ignore_errors=True)
        yield


def _packed(output: Path) -> list[Path]:
    """List the folders of all outputs but the one that was worked on last."""
    with contextlib.suppress(FileNotFoundError):  # one of them is just made anew
        works = sorted(output.glob("bld/*/work"), key=lambda work: work.stat().st_ctime_ns)
        return [work.parent for work in works[:-1]]
    return []

# SPDX-License-Identifier: BSD-3-Clause
"""One engine job in a child process, its output followed into a log."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forge.errors import Failed
from forge.processes import SESSION, kill, left_behind
from forge.project import FORGE_CACHE, Project

POLL_SECONDS = 0.1
POLLS_OF_PATIENCE = 50
TAIL_LINES = 40
ENGINE_LOG = "engine.log"
FULL = 1 << 16  # bytes free on a full disk, at most


def run_job(
    project: Project, cpus: int, line: Callable[[str], None], job: dict[str, Any], log: Path
) -> None:
    """Run an engine job with `cpus` compiler processes; `line` gets each line of its output.

    Raises Failed with the last lines and the path of the log.
    """
    output = Path(job.get("output_dir", project.staging / "test"))
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
        follower = _follow(output, log)
        polls, seen = 0, set[int]()
        while child.poll() is None:
            for text in next(follower):
                line(text)
            time.sleep(POLL_SECONDS)
            polls += 1
            if polls % POLLS_OF_PATIENCE == 0:
                before, seen = seen, left_behind(child.pid)
                kill(before & seen)
        for text in next(follower):
            line(text)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode:
        killed = f" (killed by signal {-child.returncode}; out of memory?)"
        reason = killed if child.returncode < 0 else ""
        if shutil.disk_usage(output).free < FULL:  # and then the log may say nothing
            reason = f" (No space left on device: {output})"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        tail = "".join(f"  | {text}\n" for text in lines[-TAIL_LINES:])
        failure = f"{job['action']} failed{reason}; the last lines of {log}:"
        raise Failed(f"{failure}\n{tail}  work folder: {output}")


def _follow(output: Path, log: Path) -> Iterator[list[str]]:
    """Copy what is new in the scripts' logs, then the engine's, to `log`; yields its lines.

    In this order, so that the closing error stands last.
    """
    offsets: dict[tuple[Path, int], int] = {}
    while True:
        new: list[str] = []
        for file in [*output.glob("bld/*/work/conda_build.log"), output / ENGINE_LOG]:
            with file.open("rb") as stream:
                # another inode is the next output's log, which begins with that of its staging
                key = file, os.fstat(stream.fileno()).st_ino
                stream.seek(offsets.get(key, 0))
                data = stream.read()
                offsets[key] = stream.tell()
            if data:
                with log.open("ab") as out:
                    out.write(data)
                new += data.decode(errors="replace").splitlines()
        yield new

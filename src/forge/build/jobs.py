# SPDX-License-Identifier: BSD-3-Clause
"""One engine job in a child process, its output followed into a log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.errors import BuildFailed
from forge.project import FORGE_CACHE, Project

POLL_SECONDS = 0.1
TAIL_LINES = 40
ENGINE_LOG = "engine.log"
FULL = 1 << 16  # bytes free on a full disk, at most


def run_job(
    project: Project, job: dict[str, Any], log: Path, cpus: int, line: Callable[[str], None]
) -> None:
    """Run an engine job with `cpus` compiler processes; `line` gets the last line of its output.

    Raises BuildFailed with the last lines and the path of the log.
    """
    output = Path(job.get("output_dir", project.staging / "test"))
    if job["action"] == "test":  # environments that a killed run left there
        shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps(job))
    if job["action"] == "build":
        log.unlink(missing_ok=True)
    own = {"CPU_COUNT": str(cpus), "TMPDIR": str(output), FORGE_CACHE: str(project.cache)}
    with (output / ENGINE_LOG).open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-m", "forge.build.engine", str(output / "job.json")],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            env=os.environ | own, start_new_session=True,
        )  # fmt: skip
    try:
        follower = _Follower(output, log)
        while child.poll() is None:
            line(follower.advance())
            time.sleep(POLL_SECONDS)
        follower.advance()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode:
        reason = f" (killed by signal {-child.returncode}; out of memory?)"
        reason = reason if child.returncode < 0 else ""
        if shutil.disk_usage(output).free < FULL:  # and then the log may say nothing
            reason = f" (No space left on device: {output})"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        tail = "\n".join(f"  | {text}" for text in lines[-TAIL_LINES:])
        raise BuildFailed(
            f"{job['action']} failed{reason}; the last lines of {log}:\n{tail}\n"
            f"  whole log: {log}\n  work folder: {output}"
        )


class _Follower:
    """Copies the scripts' logs, then the engine's, to ours: so the closing error stands last."""

    def __init__(self, output: Path, log: Path) -> None:
        self.output, self.log = output, log
        self.offsets: dict[tuple[Path, int], int] = {}
        self.last = ""

    def advance(self) -> str:
        """Take over what is new; returns the last line so far."""
        for file in [*self.output.glob("bld/*/work/conda_build.log"), self.output / ENGINE_LOG]:
            with file.open("rb") as stream:
                # another inode is the next output's log, which begins with that of its staging
                key = file, os.fstat(stream.fileno()).st_ino
                stream.seek(self.offsets.get(key, 0))
                data = stream.read()
                self.offsets[key] = stream.tell()
            if data:
                with self.log.open("ab") as out:
                    out.write(data)
                self.last = data.decode(errors="replace").rstrip().rsplit("\n", 1)[-1]
        return self.last

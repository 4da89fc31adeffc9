# SPDX-License-Identifier: BSD-3-Clause
"""One call of the system that fails, or at which the driver is killed (faults.c).

Commands run in forks of one process that has imported the driver, which takes a second and more.
As a program this file is that process: a line of JSON for each command, and one for its end.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
DRIVER = Path(__file__).parents[2] / "src"
KILL = 0  # in the place of an errno
LONGEST = 600  # seconds; a command that takes more hangs


@dataclass(frozen=True)
class Ended:
    """How a command ended: its code, negative for a signal, and what it printed."""

    code: int
    said: str


def library(folder: Path) -> Path:
    """Compile faults.c."""
    made = folder / "faults.so"
    words = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"]
    subprocess.run(words, check=True)
    return made


class Forks:
    """The process that forks; a context manager."""

    def __init__(self, preload: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | environment | {"LD_PRELOAD": str(preload), "PYTHONPATH": str(DRIVER)},
        )  # fmt: skip

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def __call__(self, *words: str, fault: str = "", trace: str = "", **environment: str) -> Ended:
        """Run the driver with FAULT (see faults.c); FAULT in `environment` is its children's."""
        asked: dict[str, Any] = {"words": words, "fault": fault, "trace": trace}
        print(json.dumps(asked | {"environment": environment}), file=self.process.stdin, flush=True)
        return Ended(**json.loads(self.process.stdout.readline()))


def main() -> None:
    from forge.cli import main as driver

    arm = ctypes.CDLL(os.environ["LD_PRELOAD"]).faults_arm

    def run(words: list[str], fault: str, trace: str, environment: dict[str, str], out: int) -> int:
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.environ |= environment
        sys.argv = ["forge", *words]
        signal.alarm(LONGEST)
        arm(fault.encode() or None, trace.encode() or None)
        code = driver.run()
        arm(None, None)
        sys.stdout.flush()
        return code

    for line in sys.stdin:
        with tempfile.TemporaryFile() as said:
            if not (child := os.fork()):
                os.setpgid(0, 0)
                code = 70
                try:
                    code = run(**json.loads(line), out=said.fileno())
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            text = said.read().decode(errors="replace")
        print(json.dumps({"code": code, "said": text}), flush=True)


def reset(template: Path, world: Path) -> None:
    """Have the folder as it was before a command."""
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(template, world, symlinks=True)


if __name__ == "__main__":
    main()

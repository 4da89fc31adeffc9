# SPDX-License-Identifier: BSD-3-Clause
"""The driver's commands, in forks of one process that has imported it, which takes half a second.

In a fork one call of the system can fail, or be the one at which the driver is killed (faults.c).
As a program this file is that process: a line of JSON for each command, and one for its end.
"""

import ctypes
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

SOURCE = Path(__file__).with_suffix(".c")
DRIVER = Path(__file__).parents[2] / "src"
KILL = 0  # in the place of an errno
LONGEST = 600  # seconds; a command that takes more hangs


@dataclass(frozen=True)
class Ended:
    """How a command ended: its code, negative for a signal, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


def library(folder: Path) -> Path:
    """Compile faults.c."""
    made = folder / "faults.so"
    words = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"]
    subprocess.run(words, check=True)
    return made


class Forks:
    """The process that forks; a context manager. preload: of faults.c, if calls have to fail."""

    def __init__(self, preload: Path | None, environment: dict[str, str]) -> None:
        faults = {"LD_PRELOAD": str(preload)} if preload else {}
        self.environment = os.environ | environment | faults | {"PYTHONPATH": str(DRIVER)}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=self.environment,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def __call__(self, *words: str, fault: str = "", trace: str = "", **environment: str) -> Ended:
        """Run the driver with FAULT (see faults.c); FAULT in `environment` is its children's."""
        asked: dict[str, Any] = {"words": words, "fault": fault, "trace": trace}
        asked["environment"] = self.environment | environment
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return Ended(**json.loads(self.process.stdout.readline()))


def main() -> None:
    import forge
    from forge.cli import main as driver

    for found in pkgutil.walk_packages(forge.__path__, "forge."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    preloaded = os.environ.get("LD_PRELOAD", "")
    arm = ctypes.CDLL(preloaded).faults_arm if preloaded else lambda *_: None

    def run(words: list[str], fault: str, trace: str, environment: dict[str, str]) -> int:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["forge", *words]
        signal.alarm(LONGEST)
        arm(fault.encode() or None, trace.encode() or None)
        code = driver.run()
        arm(None, None)
        sys.stdout.flush()
        return code

    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            if not (child := os.fork()):
                os.setpgid(0, 0)
                for descriptor, file in enumerate((out, err), 1):
                    os.dup2(file.fileno(), descriptor)
                code = 70
                try:
                    code = run(**json.loads(line))
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        print(json.dumps({"code": code, "out": said[0], "err": said[1]}), flush=True)


def reset(template: Path, world: Path) -> None:
    """Have the folder as it was before a command."""
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(template, world, symlinks=True)


if __name__ == "__main__":
    main()

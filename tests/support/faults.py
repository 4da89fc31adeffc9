# SPDX-License-Identifier: BSD-3-Clause
"""Run the driver's commands in forks of one process that has already imported the driver.

Importing the driver takes half a second; a fork saves this time. In a fork, faults.c can make one
call of the C library fail, or kill the driver at that call.

If this file is run as a program, it is the process that forks. It reads one line of JSON for each
command, and writes one line of JSON for each result.
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
KILL = 0  # The number in a fault that kills the process. See faults.c for other numbers.
LONGEST = 600  # Seconds after which a command is killed, because it is assumed to hang.


@dataclass(frozen=True)
class Ended:
    """The result of a command.

    Attributes:
        code: The exit code, or the negative number of the signal that killed it.
        out: Its standard output.
        err: Its standard error.
    """

    code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        """Return standard output, followed by standard error."""
        return self.out + self.err


def library(folder: Path) -> Path:
    """Compile faults.c and return the shared library."""
    target = folder / "faults.so"
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return target


class Forks:
    """A context manager for the process that runs each command in a fork of itself.

    Args:
        preload: The compiled faults.c, or None if no call has to fail.
        environment: Environment variables of every command, beside those of this process.
    """

    def __init__(self, preload: Path | None, environment: dict[str, str]) -> None:
        faults = {"LD_PRELOAD": str(preload)} if preload else {}
        self.environment = os.environ | environment | faults | {"PYTHONPATH": str(DRIVER)}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def __call__(self, *words: str, fault: str = "", trace: str = "", **environment: str) -> Ended:
        """Run a command of the driver, by default without a fault, and return its result.

        Args:
            words: The command line.
            fault: The fault of the driver itself, in the form of FAULT in faults.c. Programs that
                the driver starts have no fault, unless `environment` has FAULT.
            trace: The file to which faults.c appends the calls.
            environment: Further environment variables of this command.
        """
        request: dict[str, Any] = {"words": words, "fault": fault, "trace": trace}
        request["environment"] = self.environment | environment
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return Ended(**json.loads(self.process.stdout.readline()))


def main() -> None:
    """Read commands from standard input and run each in a fork."""
    import forge
    from forge.cli import main as driver

    for module in pkgutil.walk_packages(forge.__path__, "forge."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    preloaded = os.environ.get("LD_PRELOAD", "")
    injector = ctypes.CDLL(preloaded) if preloaded else None

    def arm(fault: bytes | None, trace: bytes | None) -> None:
        if injector:
            injector.faults_arm(fault, trace)

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
            child = os.fork()
            if not child:
                os.setpgid(0, 0)
                for descriptor, file in enumerate((out, err), 1):
                    os.dup2(file.fileno(), descriptor)
                code = 70
                try:
                    code = run(**json.loads(line))
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            outputs = []
            for file in (out, err):
                file.seek(0)
                outputs.append(file.read().decode(errors="replace"))
        print(json.dumps({"code": code, "out": outputs[0], "err": outputs[1]}), flush=True)


def reset(template: Path, world: Path) -> None:
    """Replace the folder `world` by a copy of `template`."""
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(template, world, symlinks=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: BSD-3-Clause
"""Run checks in a child process that may crash, hang, or lose its GPU.

An illegal access spoils every later call of its process, and a crash would end the run. So a child
stops at its first failure, and the checks after it go on in a fresh one.
"""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from strix_validate.checks import Check, Result, RunOptions, State
from strix_validate.limits import last_lines
from strix_validate.tiers import run_each

#: Seconds in which a child must end or answer a check: MIOpen's search may lock up the GPU
#: (https://github.com/ROCm/TheRock/issues/5581).
_LIMIT = 900.0


def run(
    module: str,
    wanted: list[Check],
    options: RunOptions,
    environment: Mapping[str, str] | None = None,
    limit: float = _LIMIT,
) -> Iterator[Result]:
    """Yield one result per wanted check, from the functions that the module's checks() gives.

    Args:
        environment: variables to set in the child.
        limit: seconds in which a child must end or answer a check.
    """
    while wanted:
        found, ended = _child(module, wanted, options, environment or {}, limit)
        yield from found
        wanted = wanted[len(found) :]
        if wanted and not (found and found[-1].state is State.FAILED):
            yield Result(wanted[0], State.FAILED, f"the process {ended}")
            wanted = wanted[1:]


def _child(
    module: str,
    wanted: list[Check],
    options: RunOptions,
    environment: Mapping[str, str],
    limit: float,
) -> tuple[list[Result], str]:
    """Run checks in a child process; return the results that it got to, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, log = (Path(folder, name) for name in ("asked", "answered", "log"))
        asked.write_bytes(pickle.dumps((module, wanted, options)))
        answered.touch()
        with log.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, asked, answered],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                | dict(environment),
                stdout=stream,
                stderr=stream,
            )
            try:
                ended = _wait(child, answered, limit)
            finally:  # also of an interrupted run
                child.kill()
                child.wait()
        found = []
        with answered.open("rb") as stream:
            while True:
                try:
                    found.append(pickle.load(stream))
                except (EOFError, pickle.UnpicklingError):  # the last one may be cut off
                    break
        last = last_lines(log, 3)
    return found, f"{ended}: {last}".removesuffix(": ")


def _wait(child: subprocess.Popen, answered: Path, limit: float) -> str:
    """Wait for the child for as long as it goes on to answer; return how it ended."""
    before = -1
    while before < (size := answered.stat().st_size):
        before = size
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ended with status {child.wait(limit)}"
    return f"gave no answer within {limit:.0f} s"


def _main(asked: str, answered: str) -> None:
    # the parent process wrote this file
    module, wanted, options = pickle.loads(Path(asked).read_bytes())
    bodies = importlib.import_module(module).checks()
    with Path(answered).open("wb") as stream:
        for result in run_each(wanted, options, bodies):
            pickle.dump(result, stream)
            stream.flush()
            if result.state is State.FAILED:
                return


if __name__ == "__main__":
    _main(*sys.argv[1:])

# SPDX-License-Identifier: BSD-3-Clause
"""Run checks in a child process that may crash, hang, or lose its GPU.

After an illegal memory access, every later GPU call of the same process fails, and a crash would
end the run. So a child stops at its first failure, and a new child runs the remaining checks.
"""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from strix_validate.checks import Check, Result, RunOptions, State
from strix_validate.limits import read_last_lines
from strix_validate.tiers import run_each

#: Seconds within which a child must end or write its next result. Without a limit, a lock-up of the
#: GPU in MIOpen's search would stop the run: https://github.com/ROCm/TheRock/issues/5581.
_LIMIT = 900.0


@dataclass(frozen=True)
class _Request:
    """The checks that a child process runs.

    Attributes:
        module: Name of a module whose checks() maps each check to its function.
        checks: Checks to run, in order.
        options: Argument of each function.
    """

    module: str
    checks: list[Check]
    options: RunOptions


def run(
    module: str,
    selected: list[Check],
    options: RunOptions,
    environment: Mapping[str, str] | None = None,
    limit: float = _LIMIT,
) -> Iterator[Result]:
    """Run the selected checks of a module in child processes; yield one result per check.

    Args:
        module: Name of a module whose checks() maps each check to its function.
        selected: Checks to run, in order.
        options: Argument of each function.
        environment: Variables to set in the child.
        limit: Seconds within which a child must end or write its next result.
    """
    remaining = selected
    while remaining:
        request = _Request(module, remaining, options)
        results, ending = _run_child(request, environment or {}, limit)
        yield from results
        remaining = remaining[len(results) :]
        stopped_at_failure = results and results[-1].state is State.FAILED
        if remaining and not stopped_at_failure:
            yield Result(remaining[0], State.FAILED, f"the process {ending}")
            remaining = remaining[1:]


def _run_child(
    request: _Request,
    environment: Mapping[str, str],
    limit: float,
) -> tuple[list[Result], str]:
    """Run checks in a child process; return its results, and how it ended, with its last output."""
    with tempfile.TemporaryDirectory() as folder:
        request_file = Path(folder, "request")
        result_file = Path(folder, "results")
        log = Path(folder, "log")
        request_file.write_bytes(pickle.dumps(request))
        result_file.touch()
        search_path = os.pathsep.join(filter(None, sys.path))
        with log.open("wb") as stream:
            child = subprocess.Popen(
                # Without -P, the child would import libraries from the current folder.
                [sys.executable, "-P", "-m", __name__, request_file, result_file],
                env={**os.environ, "PYTHONPATH": search_path, **environment},
                stdout=stream,
                stderr=stream,
            )
            try:
                ending = _wait(child, result_file, limit)
            finally:  # kill the child also when the run is interrupted
                child.kill()
                child.wait()
        results = _read_results(result_file)
        last = read_last_lines(log, 3)
    return results, f"{ending}: {last}".removesuffix(": ")


def _read_results(file: Path) -> list[Result]:
    results = []
    with file.open("rb") as stream:
        while True:
            try:
                results.append(pickle.load(stream))
            except (EOFError, pickle.UnpicklingError):  # a killed child leaves part of a result
                return results


def _wait(
    child: subprocess.Popen,
    result_file: Path,
    limit: float,
) -> str:
    """Wait until the child ends, or writes nothing for `limit` seconds; return how it ended."""
    size_before = -1
    size = result_file.stat().st_size
    while size > size_before:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ended with status {child.wait(limit)}"
        size_before = size
        size = result_file.stat().st_size
    return f"gave no answer within {limit:.0f} s"


def _main(request_file: str, result_file: str) -> None:
    # unpickling is safe, because the parent process wrote this file
    request = pickle.loads(Path(request_file).read_bytes())
    bodies = importlib.import_module(request.module).checks()
    with Path(result_file).open("wb") as stream:
        for result in run_each(request.checks, request.options, bodies):
            pickle.dump(result, stream)
            stream.flush()
            if result.state is State.FAILED:
                return


if __name__ == "__main__":
    _main(*sys.argv[1:])

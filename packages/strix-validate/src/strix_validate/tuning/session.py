# SPDX-License-Identifier: BSD-3-Clause
"""Compile and measure one problem after another, on a GPU that no other program uses."""

import json
import pickle
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from strix_validate.soak.processes import LineProcess
from strix_validate.soak.verdicts import CLOCK_SHARE
from strix_validate.tuning.record import Store, Trial, Tuned

#: Number of rounds of a problem. Each round times every configuration with right results once.
ROUNDS = 9
#: Maximum median load of the GPU before a measurement, in percent, and number of readings of the
#: load.
_MAX_BUSY = 5.0
_READINGS = 3
#: Maximum time in seconds until the worker's first line, and between two lines. In this time, the
#: worker imports torch (before the first line only) and compiles kernels.
_MAX_SILENCE = 300.0
#: Number of last rounds whose median clock is compared with the highest clock of earlier rounds.
_LAST_ROUNDS = 3
_WORKER = "strix_validate.tuning.worker"
_SENSORS = "strix_validate.soak.telemetry"

#: Prints a line.
Print = Callable[[str], None]


class Refused(Exception):
    """The GPU is not in a state to be measured; the message is the reason."""


class Sensors:
    """The newest reading of the GPU's sensors.

    Args:
        log: File for the messages of the process that reads the sensors.
        arguments: Arguments of Python that start this process.
    """

    def __init__(self, log: Path, arguments: Sequence[str] = ("-m", _SENSORS)) -> None:
        self._process = LineProcess(arguments, log)
        self.latest: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the newest reading."""
        for line in self._process.lines():
            with suppress(ValueError):
                self.latest = json.loads(line)
        return self.latest

    def readings(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield readings, a new one each second.

        If no new reading comes within 5 seconds, or if the sensors end, repeat the last reading.

        Args:
            number: Number of readings.
        """
        self.read()
        for _ in range(number):
            with suppress(TimeoutError):
                for line in self._process.wait_for_lines(5):
                    self.latest = json.loads(line)
            yield self.latest

    def close(self) -> None:
        """End the process."""
        self._process.stop(0)


def refuse_if_busy(readings: Sequence[dict[str, Any]]) -> None:
    """Raise Refused if another program uses the GPU.

    Args:
        readings: Readings of the sensors while this program does not use the GPU. If no reading has
            the GPU's load, nothing is raised.
    """
    loads = []
    for reading in readings:
        load = reading.get("busy_percent")
        if load is not None:
            loads.append(load)
    if not loads:
        return
    median = statistics.median(loads)
    if median > _MAX_BUSY:
        raise Refused(
            f"the GPU is {median:.0f} % busy: the desktop or another program uses it. Close the "
            f"program, or switch to a text console, and run this again"
        )


def refuse_if_throttled(clocks: Sequence[float], limits: str) -> None:
    """Raise Refused if a temperature limit is active, or if the GPU's clock has fallen.

    Args:
        clocks: MHz of the rounds so far.
        limits: The active limits, see soak.telemetry. A power limit is a property of the machine,
            and no reason to refuse.
    """
    hot = [name for name in limits.split(", ") if "temperature" in name or name == "PROCHOT"]
    if hot:
        raise Refused(f"the GPU is throttled by {', '.join(hot)}: let it cool, and run this again")
    if len(clocks) <= _LAST_ROUNDS:
        return
    now = statistics.median(clocks[-_LAST_ROUNDS:])
    before = max(clocks[:-_LAST_ROUNDS])
    if now < CLOCK_SHARE * before:
        raise Refused(f"the GPU is throttled: its clock fell from {before:.0f} to {now:.0f} MHz")


class Session:
    """Tunes problems one by one, and writes the record after each step.

    Args:
        store: The folder with the record.
        device: "cuda", or "cpu" for Triton's interpreter.
        cache: Triton's cache. Kernels that are compiled for the selection are reused when they are
            measured.
        jobs: Number of processes that compile; None for the number of cores.
        print_line: Prints a line.
        sensors: The sensors; with None, a busy or throttled GPU is not refused.
        worker: Arguments of Python that start the worker.
        rounds: Number of rounds for each problem.
    """

    def __init__(
        self,
        store: Store,
        device: str,
        cache: Path,
        jobs: int | None,
        print_line: Print,
        sensors: Sensors | None = None,
        worker: Sequence[str | Path] = ("-m", _WORKER),
        rounds: int = ROUNDS,
    ) -> None:
        self._store = store
        self._device = device
        self._cache = cache
        self._jobs = jobs
        self._print_line = print_line
        self._sensors = sensors
        self._worker = worker
        self._rounds = rounds

    def is_done(self, problem: Any) -> bool:
        """Return whether a problem was tuned in all rounds, by this run or an earlier one."""
        tuned = self._store.record.tuned.get(problem.name)
        return tuned is not None and tuned.is_done

    def tune(self, problem: Any, most: int) -> Tuned:
        """Tune a problem, or continue where an earlier run stopped.

        Args:
            problem: The problem to tune.
            most: Maximum number of configurations to measure besides the packaged one.

        Raises:
            Refused: Another program uses the GPU, or the GPU is throttled.
            OSError: The record cannot be written.
            RuntimeError: The packaged configuration was not compiled, the library ignores all other
                configurations, or the worker hung or ended early.
        """
        from strix_validate.tuning.candidates import short_list

        tuned = self._store.record.tuned.get(problem.name)
        if tuned is None:
            count = len(problem.configurations)
            self._print_line(f"{problem.name}: compiling {count} configurations")
            trials = short_list(problem, self._cache, self._jobs, most)
            tuned = Tuned(library=problem.library, key=problem.key, trials=trials)
            self._store.record.tuned[problem.name] = tuned
            self._store.write()
        if not tuned.is_done:
            self._measure(problem, tuned)
        return tuned

    def _measure(self, problem: Any, tuned: Tuned) -> None:
        from strix_validate.tuning.worker import Request

        if self._sensors:
            refuse_if_busy(list(self._sensors.readings(_READINGS)))
        trials = [trial for trial in tuned.trials if not trial.reason]
        configurations = tuple(trial.configuration for trial in trials)
        first_round = len(tuned.clocks)
        request = Request(problem, configurations, self._device, first_round, self._rounds)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "request")
            log = Path(folder, "log")
            file.write_bytes(pickle.dumps(request))
            process = LineProcess([*self._worker, file], log)
            try:
                for line in process.lines_until_end(_MAX_SILENCE):
                    self._record(json.loads(line), tuned, trials)
            except TimeoutError as error:
                raise RuntimeError(f"{problem.name}: the worker hangs: {error}") from error
            finally:
                process.stop(1)
            if len(tuned.clocks) < self._rounds:
                last_line = log.read_text(errors="replace").strip().splitlines()[-1:]
                message = " ".join(last_line)[:300]
                raise RuntimeError(f"{problem.name}: the worker ended: {message}")
        tuned.is_done = True
        self._store.write()

    def _record(self, line: dict[str, Any], tuned: Tuned, trials: list[Trial]) -> None:
        """Add a line of the worker's output to the record, and write the record.

        Args:
            line: The line; worker.py describes its format.
            tuned: The problem.
            trials: The problem's trials that are measured, in the worker's order.
        """
        if "fault" in line:
            trials[line["configuration"]].fault = line["fault"]
        elif "file" in line:
            tuned.file = line["file"]
            tuned.packaged = line["packaged"]
        else:
            self._record_round(line["round"], tuned, trials)
        self._store.write()

    def _record_round(
        self,
        times: dict[str, float],
        tuned: Tuned,
        trials: list[Trial],
    ) -> None:
        reading = self._sensors.read() if self._sensors else {}
        tuned.clocks.append(reading.get("clock_mhz") or 0.0)
        for i, milliseconds in times.items():
            trials[int(i)].milliseconds.append(milliseconds)
        try:
            refuse_if_throttled(tuned.clocks, reading.get("limited_by") or "")
        except Refused:
            tuned.forget_rounds()
            self._store.write()
            raise

# SPDX-License-Identifier: BSD-3-Clause
"""Compile and measure one problem after the other, on a GPU that no other program uses."""

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

#: Rounds of a problem, in each of which every configuration is timed once.
ROUNDS = 9
#: The GPU's largest load in percent, before a measurement, and the readings that are taken of it.
_MAX_BUSY = 5.0
_READINGS = 3
#: The longest time in seconds without a line from the worker, which imports torch and compiles
#: kernels in between.
_MAX_SILENCE = 300.0
#: Rounds whose median clock is compared with the earlier ones.
_LAST_ROUNDS = 3
_WORKER = "strix_validate.tuning.worker"
_SENSORS = "strix_validate.soak.telemetry"

#: Prints a line.
Print = Callable[[str], None]


class Refused(Exception):
    """The GPU is in no state to be measured, for the reason in the message."""


class Sensors:
    """The newest reading of the GPU's sensors.

    Args:
        log: File for messages of the process that reads the sensors.
        arguments: Arguments of Python that start that process.
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
        """Yield the next readings, one each second; the last one again if the sensors end."""
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
        readings: Of the sensors, while this program does not use it.
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
            f"the GPU is {median:.0f} % busy: the desktop or another program uses it. Close it, or "
            f"switch to a text console, and run this again"
        )


def refuse_if_throttled(clocks: Sequence[float], limits: str) -> None:
    """Raise Refused if the GPU reduces its clock.

    Args:
        clocks: MHz of the rounds so far.
        limits: Limits that are active, see soak.telemetry. A power limit is the machine's own, and
            no reason.
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
        store: Keeps the record.
        device: "cuda", or "cpu" in Triton's interpreter.
        cache: Triton's cache; what is compiled for the list is reused when it is measured.
        jobs: Processes that compile, None for the cores.
        print_line: Prints a line.
        sensors: None does not refuse a busy or throttled GPU.
        worker: Arguments of Python that start the worker.
        rounds: Of each problem.
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
        """Return whether an earlier run tuned a problem."""
        tuned = self._store.record.tuned.get(problem.name)
        return tuned is not None and tuned.is_done

    def tune(self, problem: Any, most: int) -> Tuned:
        """Tune a problem, or continue where an earlier run stopped.

        Args:
            problem: What is tuned.
            most: How many configurations may be measured besides the packaged one.

        Raises:
            Refused: The GPU is used by others, or throttled.
            OSError: The record cannot be written.
            RuntimeError: Nothing could be compiled, or the worker ended.
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
        """Add a line of the worker's to the record, and write it.

        Args:
            line: See worker.
            tuned: The problem.
            trials: Its trials that are measured, in the worker's order.
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

# SPDX-License-Identifier: BSD-3-Clause
"""Compile and measure one problem after the other, on a GPU that nobody else uses."""

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

#: Rounds of a problem, in each of which every configuration has its turn.
ROUNDS = 9
#: Percent that the GPU may be busy, without us, for a measurement; readings that say so.
_BUSY, _READINGS = 5.0, 3
#: Seconds without a line of the worker: it imports torch and compiles a kernel in between.
_SILENCE = 300.0
_WORKER, _SENSORS = "strix_validate.tuning.worker", "strix_validate.soak.telemetry"

Say = Callable[[str], None]


class Refused(Exception):
    """The GPU is in no state to be measured; the message says why."""


class Sensors:
    """The newest reading of the GPU's sensors.

    Args:
        log: Where messages of the process that reads go.
        arguments: Of Python, that start it.
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
        """Yield the next readings, one each second; fewer if the sensors end."""
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
    """Raise Refused if another program uses the GPU while we do not."""
    shares = [x["busy_percent"] for x in readings if x.get("busy_percent") is not None]
    if shares and statistics.median(shares) > _BUSY:
        raise Refused(
            f"the GPU is {statistics.median(shares):.0f} % busy: the desktop or another program "
            f"uses it. Close it, or switch to a text console, and run this again"
        )


def refuse_if_throttled(clocks: Sequence[float], limits: str) -> None:
    """Raise Refused if the GPU slows itself down.

    Args:
        clocks: MHz of the rounds so far.
        limits: What telemetry names, see soak.telemetry; a power limit is the machine's own.
    """
    hot = [name for name in limits.split(", ") if "temperature" in name or name == "PROCHOT"]
    if hot:
        raise Refused(f"the GPU is throttled by {', '.join(hot)}: let it cool, and run this again")
    if len(clocks) < 4:
        return
    now, before = statistics.median(clocks[-3:]), max(clocks[:-3])
    if now < CLOCK_SHARE * before:
        raise Refused(f"the GPU is throttled: its clock fell from {before:.0f} to {now:.0f} MHz")


class Session:
    """Tunes problems one by one, and writes the record after each step.

    Args:
        store: Keeps the record.
        cache: Triton's cache; what is compiled for the list is found there when it is measured.
        jobs: Processes that compile.
        say: Prints a line.
        worker: Arguments of Python that start the worker.
    """

    def __init__(
        self,
        store: Store,
        device: str,
        cache: Path,
        jobs: int | None,
        say: Say,
        sensors: Sensors | None = None,
        worker: Sequence[str | Path] = ("-m", _WORKER),
        rounds: int = ROUNDS,
    ) -> None:
        self._store, self._device, self._cache, self._jobs = store, device, cache, jobs
        self._say, self._sensors, self._worker, self._rounds = say, sensors, worker, rounds

    def is_done(self, problem: Any) -> bool:
        """Return whether an earlier run tuned a problem."""
        tuned = self._store.record.tuned.get(problem.name)
        return tuned is not None and tuned.is_done

    def tune(self, problem: Any, most: int) -> Tuned:
        """Tune a problem, from where an earlier run left it.

        Raises:
            Refused: The GPU is used by others, or throttled. OSError: The record cannot be written.
            RuntimeError: Nothing could be compiled, or the worker ended.
        """
        from strix_validate.tuning.candidates import short_list

        tuned = self._store.record.tuned.get(problem.name)
        if tuned is None:
            self._say(f"{problem.name}: compiling {len(problem.configurations)} configurations")
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
        request = Request(problem, configurations, self._device, len(tuned.clocks), self._rounds)
        with tempfile.TemporaryDirectory() as folder:
            file, log = Path(folder, "request"), Path(folder, "log")
            file.write_bytes(pickle.dumps(request))
            process = LineProcess([*self._worker, file], log)
            try:
                for line in process.lines_until_end(_SILENCE):
                    self._take(json.loads(line), tuned, trials)
            except TimeoutError as error:
                raise RuntimeError(f"{problem.name}: the worker hangs: {error}") from error
            finally:
                process.stop(1)
            if len(tuned.clocks) < self._rounds:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"{problem.name}: the worker ended: {' '.join(last)[:300]}")
        tuned.is_done = True
        self._store.write()

    def _take(self, line: dict[str, Any], tuned: Tuned, trials: list[Trial]) -> None:
        """Add what the worker says to the record, and keep it."""
        if "fault" in line:
            trials[line["configuration"]].fault = line["fault"]
        elif "file" in line:
            tuned.file, tuned.packaged = line["file"], line["packaged"]
        else:
            reading = self._sensors.read() if self._sensors else {}
            tuned.clocks.append(reading.get("clock_mhz") or 0.0)
            for i, milliseconds in line["round"].items():
                trials[int(i)].milliseconds.append(milliseconds)
            try:
                refuse_if_throttled(tuned.clocks, reading.get("limited_by") or "")
            except Refused:
                tuned.forget_rounds()
                self._store.write()
                raise
        self._store.write()

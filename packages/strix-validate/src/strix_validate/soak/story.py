# SPDX-License-Identifier: BSD-3-Clause
"""The course of a soak: steps of the loads, readings of sensors, and the kernel's faults."""

import json
from dataclasses import dataclass, field

from strix_validate.reporting.record import Device

#: The loads, in the order of their turns.
LOADS = ("attention", "product", "copy", "server")
#: The columns of a row that the summary shows, with their formats.
_SHOWN = {
    "temperature_c": "{:.0f} °C",
    "clock_mhz": "{:.0f} MHz",
    "power_w": "{:.0f} W",
    "gpu_memory_mib": "{:.0f} MiB",
}


@dataclass
class StepRecord:
    """A step of a load.

    Attributes:
        at: The second in which the step ended.
        turn: The number of the turn, counted over all loads.
        rate: The speed of the step, in the unit of the load.
        results: Number of results that were compared.
        changed: See loads.Step.
        error: See loads.Step.
        fault: See loads.Step.
    """

    at: float
    turn: int
    rate: float
    results: int
    changed: int | None
    error: float | None
    fault: str = ""

    @property
    def is_faulty(self) -> bool:
        """Whether a result is wrong.

        Its error exceeds the bound, it is not a number, it differs from a value that it must equal,
        or the load describes another fault.
        """
        if self.fault or self.error is None:
            return True
        return self.error > 1 or bool(self.changed)


@dataclass
class Story:
    """The course of a soak; verdicts.py judges it.

    Attributes:
        device: The device of the loads.
        absent: The reason why a load does not run, by name of the load.
        descriptions: The description of a load, by name of the load.
        units: The unit of a load's rate, by name of the load.
        steps: The steps of each load.
        number_of_steps: The number of steps of all loads.
        number_of_faults: The number of faulty steps of all loads.
        samples: One row for each second, with the columns of recorder.TABLE.
        load: The name of the load in the current turn.
        turn: The number of the current turn.
        running: A description of the load or the preparation that runs.
        progress_at: The second of the last sign of progress.
        prepared_at: The second in which all loads were prepared; None before that second.
        kernel: The kernel's messages of faults, each with its second.
        kernel_absent: The reason why the kernel's messages cannot be read.
        sensors_absent: The reason why the sensors cannot be read.
        failure: The exception that ended the worker, as text; "" if the worker reported none.
        unable: The reason why no load can run here.
        ending: Why the loads ended early, and which load was running; empty if they ended in time.
        advice: Advice for a hang or a crash.
        is_whole: Whether the loads ran for the whole time.
    """

    device: Device
    absent: dict[str, str] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    steps: dict[str, list[StepRecord]] = field(default_factory=dict)
    number_of_steps: int = 0
    number_of_faults: int = 0
    samples: list[dict] = field(default_factory=list)
    load: str = ""
    turn: int = -1
    running: str = "nothing yet"
    progress_at: float = 0.0
    prepared_at: float | None = None
    kernel: list[tuple[float, str]] = field(default_factory=list)
    kernel_absent: str = ""
    sensors_absent: str = ""
    failure: str = ""
    unable: str = ""
    ending: str = ""
    advice: str = ""
    is_whole: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the soak ended, and was not interrupted."""
        return bool(self.is_whole or self.ending or self.unable)

    def add_line(self, line: str, at: float) -> None:
        """Add a line of the worker's output, whose format worker.py describes.

        Args:
            line: A JSON object.
            at: The second in which the line was read.
        """
        try:
            message = json.loads(line)
        except ValueError:
            # A killed worker may leave an incomplete last line, which is ignored.
            return
        self.progress_at = at
        if "device" in message:
            self.device = Device(**message["device"])
        elif "prepare" in message:
            self._add_load(message)
        elif "turn" in message:
            self._add_turn(message, at)
        elif "step" in message:
            self._add_step(message, at)
        elif "failed" in message:
            self.failure = message["failed"]
        elif "unable" in message:
            self.unable = message["unable"]

    def _add_load(self, message: dict) -> None:
        name = message["prepare"]
        self.descriptions[name] = message["description"]
        self.units[name] = message["unit"]
        self.steps[name] = []
        self.running = f"the preparation of {name}: {message['description']}"

    def _add_turn(self, message: dict, at: float) -> None:
        if self.prepared_at is None:
            self.prepared_at = at
        self.load = message["load"]
        self.turn = message["turn"]
        self._describe_running()

    def _add_step(self, message: dict, at: float) -> None:
        step = StepRecord(
            at,
            self.turn,
            rate=message["rate"],
            results=message["results"],
            changed=message["changed"],
            error=message["error"],
            fault=message["fault"],
        )
        self.steps[message["load"]].append(step)
        self.number_of_steps += 1
        self.number_of_faults += step.is_faulty
        self._describe_running()

    def _describe_running(self) -> None:
        number = len(self.steps[self.load]) + 1
        self.running = f"{self.load}, its step {number}: {self.descriptions[self.load]}"

    def summary(self) -> str:
        """Return a line about the newest second, for the terminal."""
        if not self.samples:
            return self.running
        row = self.samples[-1]
        minutes, seconds = divmod(int(row["seconds"]), 60)
        running = self.running
        if self.load:
            running = f"{self.load}, step {row['steps']}"
        parts = [f"{minutes:3}:{seconds:02} {running}"]
        for name, form in _SHOWN.items():
            if row.get(name) is not None:
                parts.append(form.format(row[name]))
        return ", ".join(parts)

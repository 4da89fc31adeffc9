# SPDX-License-Identifier: BSD-3-Clause
"""What happened in a soak so far: steps of the loads, readings of sensors, the kernel's faults."""

import json
from dataclasses import dataclass, field

from strix_validate.reporting.record import Device

#: The loads, in the order of their turns.
LOADS = ("attention", "product", "copy", "server")


@dataclass
class StepRecord:
    """A step of a load, see loads.Step; at: seconds since the begin; turn: of all loads."""

    at: float
    turn: int
    rate: float
    results: int
    changed: int | None
    error: float | None
    fault: str = ""

    @property
    def is_faulty(self) -> bool:
        """Whether a result is wrong: over its bound, no number, or changed where none may."""
        return bool(self.fault or self.error is None or self.error > 1 or self.changed)


@dataclass
class Story:
    """The course of a soak; verdicts.py judges it.

    Attributes:
        device: What the loads run on.
        absent: The reason why a load does not run, by its name.
        what: What a load is, by its name; and the unit of its rate in units.
        steps: The steps of each load; number_of_steps and number_of_faults count those of all.
        samples: One row each second: seconds, turn, load, steps, numbers of the sensors.
        running: What runs, in words; for load and turn it is a name and a number.
        progress_at: Seconds until the last sign of progress.
        prepared_at: Seconds until every load was prepared, None before.
        kernel: Messages of faults, each with its second.
        kernel_absent, sensors_absent: The reason why they cannot be read.
        failure: What the worker said before it ended.
        unable: Why nothing can be loaded here.
        ending: Why the loads ended early, with what was running; empty if they did not.
        advice: What may help against it.
        is_whole: The loads ran for the whole time.
    """

    device: Device
    absent: dict[str, str] = field(default_factory=dict)
    what: dict[str, str] = field(default_factory=dict)
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
        """Whether the soak came to an end that is no interruption."""
        return bool(self.is_whole or self.ending or self.unable)

    def take(self, line: str, at: float) -> None:
        """Add a line of the worker, which came after so many seconds."""
        try:
            message = json.loads(line)
        except ValueError:
            return  # a killed worker's last line may be cut off
        self.progress_at = at
        if "device" in message:
            self.device = Device(**message["device"])
        elif "prepare" in message:
            name = message["prepare"]
            self.what[name], self.units[name] = message["what"], message["unit"]
            self.steps[name] = []
            self.running = f"the preparation of {name}: {message['what']}"
        elif "turn" in message:
            self.prepared_at = at if self.prepared_at is None else self.prepared_at
            self.load, self.turn = message["load"], message["turn"]
            self._name_running()
        elif "step" in message:
            self._add_step(message, at)
        elif "failed" in message:
            self.failure = message["failed"]
        elif "unable" in message:
            self.unable = message["unable"]

    def _add_step(self, message: dict, at: float) -> None:
        names = ("rate", "results", "changed", "error", "fault")
        values = {name: message[name] for name in names}
        step = StepRecord(at, self.turn, **values)
        self.steps[message["load"]].append(step)
        self.number_of_steps += 1
        self.number_of_faults += step.is_faulty
        self._name_running()

    def _name_running(self) -> None:
        number = len(self.steps[self.load]) + 1
        self.running = f"{self.load}, its step {number}: {self.what[self.load]}"

    def summary(self) -> str:
        """Return the newest second in a line, for the terminal."""
        if not self.samples:
            return self.running
        row = self.samples[-1]
        shown = (
            ("temperature_c", "{:.0f} °C"),
            ("clock_mhz", "{:.0f} MHz"),
            ("power_w", "{:.0f} W"),
            ("gpu_memory_mib", "{:.0f} MiB"),
        )
        parts = [form.format(row[name]) for name, form in shown if row.get(name) is not None]
        minutes, seconds = divmod(int(row["seconds"]), 60)
        doing = f"{self.load}, step {row['steps']}" if self.load else self.running
        return ", ".join([f"{minutes:3}:{seconds:02} {doing}", *parts])

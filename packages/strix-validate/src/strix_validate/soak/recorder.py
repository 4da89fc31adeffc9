# SPDX-License-Identifier: BSD-3-Clause
"""The loop of the recorder, which reads its child processes once a second and cannot block."""

import csv
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strix_validate.doctor.tree import Tree
from strix_validate.soak.processes import LineProcess
from strix_validate.soak.story import Story
from strix_validate.soak.telemetry import COLUMNS, resident_mib

#: Seconds after which a reading is too old to be recorded.
_STALE = 5.0
#: Seconds without progress that are allowed before the first turn. In this time, torch is imported,
#: kernels are compiled, and the CPU computes the references.
PREPARE_LIMIT = 600.0
#: The columns of the table, which has one row for each second.
TABLE = (
    "seconds",
    "load",
    "turn",
    "steps",
    *COLUMNS,
    "limited_by",
    "process_mib",
    "available_mib",
    "event",
)
#: Meanings of signals that end a process.
_SIGNALS = {
    6: "abort",
    7: "bus error",
    9: "killed from outside, or for lack of memory",
    11: "crash",
}


class Clock:
    """The machine's clock; tests use a clock of their own."""

    def now(self) -> float:
        """Return the seconds since an arbitrary moment."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Wait until this moment. Return at once if it has passed."""
        time.sleep(max(0.0, moment - self.now()))


class Table:
    """A CSV file that syncs each row to the disk, because the machine may crash at any time."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("x", newline="")
        self._writer = csv.DictWriter(self._stream, TABLE, extrasaction="ignore")
        self._writer.writeheader()

    def add(self, row: dict) -> None:
        """Write a row to the disk."""
        self._writer.writerow(row)
        self._stream.flush()
        # A pipe cannot be synchronised, nor can files of some file systems.
        with suppress(OSError):
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class Recorder:
    """Watches the worker until the time is over, or until the worker hangs or ends.

    Args:
        story: The story to which all events are added.
        worker: The child process that loads the GPU.
        sensors: The child process that reads the sensors.
        kernel_faults: Returns the kernel's messages of faults since its last call.
        on_row: Called with each second's row, after the row was added to the story.
        clock: The clock.
        tree: The machine.
    """

    def __init__(
        self,
        story: Story,
        worker: LineProcess,
        sensors: LineProcess,
        kernel_faults: Callable[[], list[str]],
        on_row: Callable[[dict], None],
        clock: Clock | None = None,
        tree: Tree | None = None,
    ) -> None:
        self._story = story
        self._worker = worker
        self._sensors = sensors
        self._kernel_faults = kernel_faults
        self._on_row = on_row
        self._clock = clock or Clock()
        self._tree = tree or Tree()
        self._reading: dict = {}
        self._read_at = 0.0

    def run(self, seconds: float, hang_after: float) -> None:
        """Record until a load makes progress after `seconds`, or the worker hangs or ends.

        Args:
            seconds: Minimum time to record, unless the worker hangs or ends.
            hang_after: Seconds without progress after which the worker counts as hung.
        """
        story = self._story
        begin = self._clock.now()
        second = 0
        while True:
            at = self._clock.now() - begin
            event = self._read_children(at)
            story.ending = self._describe_end(at, hang_after)
            # The soak is whole only once a load makes progress after the soak's time is over.
            # Without this progress, the last load may have hung.
            story.is_whole = story.progress_at >= seconds and not story.ending
            if story.ending:
                event = f"{event}; {story.ending}".removeprefix("; ")
            self._on_row(self._add_row(at, event))
            if story.is_over:
                return
            second = max(second, int(at)) + 1
            self._clock.wait_until(begin + second)

    def _read_children(self, at: float) -> str:
        """Add new output of the child processes and of the kernel to the story.

        Returns:
            The new events, such as a wrong result or a message of the kernel, as text.
        """
        story = self._story
        faults_before = story.number_of_faults
        for line in self._worker.lines():
            story.add_line(line, at)
        for line in self._sensors.lines():
            with suppress(ValueError):
                self._reading = json.loads(line)
                self._read_at = at
        story.sensors_absent = self._reading.get("absent", "")
        events = []
        for message in self._kernel_faults():
            story.kernel.append((at, message))
            events.append(f"kernel: {message}")
        if story.number_of_faults > faults_before:
            events.append(f"wrong results of {story.load}")
        return "; ".join(events)

    def _describe_end(self, at: float, hang_after: float) -> str:
        """Return how the worker failed, exited or hung; "" if it runs, or if no load can run."""
        status = self._worker.status()
        if status is not None:
            return self._describe_exit(status, at)
        return self._describe_hang(at, hang_after)

    def _describe_exit(self, status: int, at: float) -> str:
        story = self._story
        # The worker may have written lines since they were last read.
        for line in self._worker.lines():
            story.add_line(line, at)
        if story.unable:
            return ""
        cause = story.failure or f"it ended {describe_status(status)}"
        minutes = f"{at / 60:.1f} minutes"
        return f"the worker process failed after {minutes} in {story.running}: {cause}"

    def _describe_hang(self, at: float, hang_after: float) -> str:
        story = self._story
        limit = hang_after
        if story.prepared_at is None:
            limit = max(hang_after, PREPARE_LIMIT)
        silence = at - story.progress_at
        if silence <= limit:
            return ""
        minute = story.progress_at / 60
        text = f"no progress for {silence:.0f} s, since minute {minute:.1f}, in {story.running}"
        state = self._worker.kernel_state()
        if state:
            text += f"; the process is in state {state}"
        return text

    def _add_row(self, at: float, event: str) -> dict:
        """Add this second's row to the story, and return it."""
        story = self._story
        reading = self._reading if at - self._read_at <= _STALE else {}
        # A Tree caches the values that it reads, so each second needs a new Tree.
        available = Tree(self._tree.root).available
        row = {
            "seconds": round(at, 1),
            "load": story.load,
            "turn": story.turn,
            "steps": story.number_of_steps,
        }
        for name in (*COLUMNS, "limited_by"):
            row[name] = reading.get(name)
        row["process_mib"] = resident_mib(self._tree, self._worker.pid)
        row["available_mib"] = None if available is None else available // 2**20
        row["event"] = event
        story.samples.append(row)
        return row


def describe_status(status: int) -> str:
    """Return an exit status in words, such as "by signal 11 (crash)"."""
    if status >= 0:
        return f"with status {status}"
    meaning = _SIGNALS.get(-status)
    if meaning:
        return f"by signal {-status} ({meaning})"
    return f"by signal {-status}"

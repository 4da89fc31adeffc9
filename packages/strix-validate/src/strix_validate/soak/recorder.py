# SPDX-License-Identifier: BSD-3-Clause
"""The loop of the recorder: once a second it reads its children, and nothing that may block."""

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

#: Seconds after which a reading is too old to stand for the present.
_STALE = 5.0
#: Seconds without progress before the first turn: torch is imported, kernels are compiled, and the
#: references are computed on the CPU.
PREPARE_LIMIT = 600.0
#: The columns of the table, one row each second.
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


class Clock:
    """The machine's clock. Tests drive one of their own."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Return at this moment, or at once if it has passed."""
        time.sleep(max(0.0, moment - self.now()))


class Table:
    """A CSV file that keeps each row, also when the machine ends in the next second."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("x", newline="")
        self._writer = csv.DictWriter(self._stream, TABLE, extrasaction="ignore")
        self._writer.writeheader()

    def add(self, row: dict) -> None:
        """Write a row to the disk."""
        self._writer.writerow(row)
        self._stream.flush()
        with suppress(OSError):  # a pipe, or a file system that cannot
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class Recorder:
    """Watches the worker until the time is over, or it hangs or ends.

    Args:
        story: What is added to.
        worker, sensors: The child processes.
        kernel_faults: Returns the kernel's messages of faults since its last call.
        keep: Called with each second's row, when the story has it.
    """

    def __init__(
        self,
        story: Story,
        worker: LineProcess,
        sensors: LineProcess,
        kernel_faults: Callable[[], list[str]],
        keep: Callable[[dict], None],
        clock: Clock | None = None,
        tree: Tree | None = None,
    ) -> None:
        self._story, self._worker, self._sensors = story, worker, sensors
        self._kernel_faults, self._keep = kernel_faults, keep
        self._clock, self._tree = clock or Clock(), tree or Tree()
        self._reading: dict = {}
        self._read_at = 0.0

    def run(self, seconds: float, hang_after: float) -> None:
        """Record for so many seconds, or until the worker makes no progress for hang_after."""
        begin = self._clock.now()
        second = 0
        while True:
            at = self._clock.now() - begin
            event = self._look(at)
            self._story.ending = self._describe_end(at, hang_after)
            # a load that hangs at the end has made no progress after it
            self._story.is_whole = self._story.progress_at >= seconds and not self._story.ending
            if self._story.ending:
                event = f"{event}; {self._story.ending}".removeprefix("; ")
            self._keep(self._add_row(at, event))
            if self._story.is_over:
                return
            second = max(second + 1, int(at) + 1)
            self._clock.wait_until(begin + second)

    def _look(self, at: float) -> str:
        """Take what the children and the kernel wrote; return what of it is an event."""
        story = self._story
        faults = story.number_of_faults
        for line in self._worker.lines():
            story.take(line, at)
        for line in self._sensors.lines():
            with suppress(ValueError):
                self._reading, self._read_at = json.loads(line), at
        story.sensors_absent = self._reading.get("absent", "")
        events = [f"kernel: {message}" for message in self._kernel_faults()]
        story.kernel += [(at, event.removeprefix("kernel: ")) for event in events]
        if story.number_of_faults > faults:
            events.append(f"wrong results of {story.load}")
        return "; ".join(events)

    def _describe_end(self, at: float, hang_after: float) -> str:
        """Say how the worker came to its end, if it did: a failure, an exit, or a hang."""
        story, status = self._story, self._worker.status()
        if status is not None:
            for line in self._worker.lines():  # written between the last look and the end
                story.take(line, at)
            if story.unable:
                return ""
            how = story.failure or f"it ended {describe_status(status)}"
            minutes = f"{at / 60:.1f} minutes"
            return f"the worker process failed after {minutes} in {story.running}: {how}"
        limit = hang_after if story.prepared_at is not None else max(hang_after, PREPARE_LIMIT)
        silent = at - story.progress_at
        if silent <= limit:
            return ""
        state = self._worker.kernel_state()
        place = f"; the process is in state {state}" if state else ""
        minutes = f"{story.progress_at / 60:.1f} minutes"
        return (
            f"no progress for {silent:.0f} s, {minutes} after the begin, in {story.running}{place}"
        )

    def _add_row(self, at: float, event: str) -> dict:
        story = self._story
        reading = self._reading if at - self._read_at <= _STALE else {}
        available = Tree(self._tree.root).available  # a tree keeps what it read
        row = {
            "seconds": round(at, 1),
            "load": story.load,
            "turn": story.turn,
            "steps": story.number_of_steps,
            **{name: reading.get(name) for name in (*COLUMNS, "limited_by")},
            "process_mib": resident_mib(self._tree, self._worker.pid),
            "available_mib": None if available is None else available // 2**20,
            "event": event,
        }
        story.samples.append(row)
        return row


def describe_status(status: int) -> str:
    """Return an exit status in words: "by signal 9 (killed from outside, or out of memory)"."""
    if status >= 0:
        return f"with status {status}"
    meanings = {6: "abort", 7: "bus error", 9: "killed, from outside or for memory", 11: "crash"}
    meaning = meanings.get(-status, "")
    return f"by signal {-status}" + (f" ({meaning})" if meaning else "")

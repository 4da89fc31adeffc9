# SPDX-License-Identifier: BSD-3-Clause
"""Plans: the effect of consecutive steps, which C executes, on the wait counters.

The effect depends only on the code and on the counters before the steps, not on data. So it is
computed once for each state of the counters.
"""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import waits
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.tags import atomic_tags, store_tags
from strix_emulate.memory.waves import Waves
from strix_emulate.native import library as native


class LoggedTouch:
    """A `shadow.Touch` that C logged. Its attributes are computed when they are needed."""

    def __init__(
        self,
        memories,
        rows: np.ndarray,
        row: int,
        wave_tags,
        op: native.COp,
    ):
        """Refer to one row of a log.

        Args:
            memories: The memories of the launch.
            rows: The log.
            row: Number of the row.
            wave_tags: Tags of the waves.
            op: The operation that logged the row.
        """
        self._memories = memories
        self._rows = rows
        self._row = row
        self._wave_tags = wave_tags
        self._op = op

    @cached_property
    def _lanes(self) -> np.ndarray | slice:
        header = self._rows[self._row, 0]
        at = self._rows[self._row, 1:]
        if not header & 1:
            return np.zeros(0, np.int64)
        active = at >= 0
        return slice(None) if active.all() else np.flatnonzero(active)

    @cached_property
    def at(self) -> np.ndarray:
        """Offsets of the active lanes."""
        return self._rows[self._row, 1:][self._lanes]

    @property
    def issue_tags(self) -> np.ndarray:
        """Tags of the active lanes when the instruction was issued."""
        width = (self._rows.shape[1] - 1) // len(self._wave_tags)
        return np.repeat(self._wave_tags, width)[self._lanes]

    @cached_property
    def tags(self) -> np.ndarray:
        """Tags that the access left in the shadow."""
        is_global = self._rows[self._row, 0] >> 1 == 0
        if not self.write or self.returns or not is_global:
            return self.issue_tags
        return atomic_tags(self.issue_tags) if self.atomic else store_tags(self.issue_tags)

    @property
    def memory(self) -> Memory:
        """The memory."""
        return self._memories[self._rows[self._row, 0] >> 1]

    @property
    def size(self) -> int:
        """Bytes of each access."""
        return self._op.size

    @property
    def write(self) -> bool:
        """Whether the access is a store or an atomic."""
        return self.atomic or self._op.handler == native.HANDLERS["store"]

    @cached_property
    def atomic(self) -> bool:
        """Whether the access is an atomic. Each release asks this of all outstanding accesses."""
        return self._op.handler == native.HANDLERS["atomic"]

    @property
    def returns(self) -> bool:
        """Whether the access is an atomic that returns the old value."""
        return self.atomic and self._op.polls > 0


class _Change:
    """The change of one counter's queue.

    Attributes:
        remaining: Numbers of the old entries that remain in the queue.
        added: New entries. Each is a list of (operation, row of the log).
    """

    __slots__ = ("added", "remaining")

    def __init__(self, remaining: list[int], added: list[list[tuple[int, int]]]):
        self.remaining = remaining
        self.added = added


class Plan:
    """Which instructions are outstanding after consecutive steps, for several possible last steps.

    Attributes:
        rows: Number of rows of the log. Each operation that may be outstanding has a row, and so
            has a last operation that orders other accesses.
        log_rows: Address of an array with the number of each operation's row, or -1 for an
            operation without a row.
    """

    def __init__(
        self,
        behind: dict[int, waits.Queues],
        ops: Sequence[range],
        count: int,
        orders: bool,
        is_atomic: bool = False,
    ):
        """Make a plan.

        Args:
            behind: Queues by end, as `follow_counters` returns them. An end is the number of the
                step before which the waves may stop.
            ops: Numbers of the operations of each step.
            count: Number of operations of all steps.
            orders: Whether the last operation orders other accesses. If so, the first row of the
                log is for this operation.
            is_atomic: Whether the last operation is an atomic. A barrier postpones atomics, but not
                loads with GLC.
        """
        self._is_atomic = is_atomic
        self._rows_of_ops = (ctypes.c_int32 * count)(*[-1] * count)
        self.log_rows = ctypes.addressof(self._rows_of_ops)
        self.rows = 0
        if orders:
            self._add_row(count - 1)
        self._entries: dict[int, list[tuple[int, int]]] = {}
        self._changes = {}
        for end, queues in behind.items():
            changes = [self._plan_queue(touched, ops) for touched in queues.touched]
            self._changes[end] = (queues.state, changes)

    def _plan_queue(self, touched: list, ops: Sequence[range]) -> _Change:
        """Return how the steps change one queue.

        Args:
            touched: The queue after the steps, as in `touched` of a result of `follow_counters`.
            ops: Numbers of the operations of each step.
        """
        change = _Change([], [])
        for entry in touched:
            if isinstance(entry, int):
                change.remaining.append(entry)
                continue
            rows = []
            for step in entry:
                rows += self._rows_of_step(step, ops)
            change.added.append(rows)
        return change

    def _rows_of_step(self, step: int, ops: Sequence[range]) -> list[tuple[int, int]]:
        if step not in self._entries:
            self._entries[step] = []
            for op in ops[step]:
                if self._rows_of_ops[op] < 0:
                    self._entries[step].append(self._add_row(op))
                elif self._is_atomic:
                    self._entries[step].append((op, self._rows_of_ops[op]))
        return self._entries[step]

    def _add_row(self, op: int) -> tuple[int, int]:
        row = self.rows
        self._rows_of_ops[op] = row
        self.rows += 1
        return op, row

    def apply(self, g: Waves, end: int, memories, ops, log) -> None:
        """Set the wait counters of waves to their state at `end`, one of the plan's ends."""
        g.queues.state, changes = self._changes[end]
        for counter, change in enumerate(changes):
            old = g.queues.touched[counter]
            if not change.added and len(change.remaining) == len(old):
                continue
            touched = [old[i] for i in change.remaining]
            for rows in change.added:
                touches = [LoggedTouch(memories, log, row, g.tags, ops[op]) for op, row in rows]
                touched.append(tuple(touches))
            g.queues.touched[counter] = touched


def follow_counters(
    steps: Sequence[Step],
    first: int,
    state: waits.State,
    ends: Iterable[int],
    checks: Findings,
) -> dict[int, waits.Queues] | None:
    """Return the wait counters after consecutive steps, for `Plan`. No step is executed.

    Args:
        steps: The steps.
        first: Number of the first step to follow.
        state: State of the counters before that step.
        ends: Numbers of steps. The result has the queues before each of these steps.
        checks: The checks. A finding must raise Trap.

    Returns:
        The queues by end, or None if a wait is missing. `touched` of these queues has no accesses:
        an old entry has its number in the old queue instead, and a new entry has a tuple of its
        steps. The tuple is empty if a wait for another counter guarantees the result.
    """
    numbers = [list(range(len(queue))) for queue in state.queues]
    waves: Any = SimpleNamespace(queues=waits.Queues(state, numbers))
    behind = {}
    try:
        for number in range(first, len(steps) + 1):
            if number in ends:
                touched = list(waves.queues.touched)
                behind[number] = waits.Queues(waves.queues.state, touched)
            if number < len(steps):
                steps[number].check(waves, checks)
                steps[number].issue(waves, (number,))
    except Trap:
        return None
    return behind

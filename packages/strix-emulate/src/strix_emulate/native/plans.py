# SPDX-License-Identifier: BSD-3-Clause
"""What steps that C executes in a row do to the wait counters.

That depends on the code alone, not on data: it is worked out once for each state of the counters in
which waves come to the steps.
"""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import waits
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import Waves
from strix_emulate.native import library as native


class Logged:
    """A Touch that C noted, worked out when it is asked for.

    rows: what C wrote; tags: of the waves; op: the operation to which the row belongs.
    """

    def __init__(self, memories, rows: np.ndarray, row: int, tags, op: native.COp):
        self._memories, self._rows, self._row, self._tags, self._op = memories, rows, row, tags, op

    @cached_property
    def _lanes(self) -> np.ndarray | slice:
        found, at = self._rows[self._row, 0], self._rows[self._row, 1:]
        if not found & 1:
            return np.zeros(0, np.int64)
        active = at >= 0
        return slice(None) if active.all() else np.flatnonzero(active)

    @cached_property
    def at(self) -> np.ndarray:
        """As of a Touch; so are the others."""
        return self._rows[self._row, 1:][self._lanes]

    @cached_property
    def marks(self) -> np.ndarray:  # noqa: D102
        width = (self._rows.shape[1] - 1) // len(self._tags)
        return np.repeat(self._tags, width)[self._lanes]

    @property
    def memory(self) -> Memory:  # noqa: D102
        return self._memories[self._rows[self._row, 0] >> 1]

    @property
    def size(self) -> int:  # noqa: D102
        return self._op.size

    @property
    def write(self) -> bool:  # noqa: D102
        return self._op.handler == native.HANDLERS["store"]


class Plan:
    """What is outstanding behind each of some ends of the steps: of what was, and of what is new.

    The log has a row for each operation that may be outstanding there. array: for each operation
    its row, or -1; kept: the array's address; rows: how many.
    """

    def __init__(
        self, behind: dict[int, waits.Queues], ops: Sequence[range], count: int, orders: bool
    ):
        """Take behind: queues by end, with an old entry's number or (step,) for what was touched,
        or () where that is another counter's.

        ops: numbers of the operations of each step, of count in all; orders: whether the last one
        orders others. Its row is the first: it is no access that a barrier would postpone.
        """
        self.array = (ctypes.c_int32 * count)(*[-1] * count)
        self.kept, self.rows = ctypes.addressof(self.array), 0
        if orders:
            self._row(count - 1)
        entries: dict[int, list[tuple[int, int]]] = {}
        self._changes = {}
        for end, queues in behind.items():
            changes = []
            for touched in queues.touched:
                new = [steps for steps in touched if isinstance(steps, tuple)]
                for step in chain(*new):
                    if step not in entries:
                        entries[step] = [self._row(i) for i in ops[step] if self.array[i] < 0]
                left = [old for old in touched if isinstance(old, int)]
                changes.append((left, [[x for i in steps for x in entries[i]] for steps in new]))
            self._changes[end] = queues.state, changes

    def _row(self, op: int) -> tuple[int, int]:
        self.array[op] = self.rows
        self.rows += 1
        return op, self.array[op]

    def leave(self, g: Waves, end: int, memories, ops, log) -> None:
        """Leave the wait counters as they are behind that end."""
        g.queues.state, changes = self._changes[end]
        for number, (left, new) in enumerate(changes):
            old = g.queues.touched[number]
            if new or len(left) < len(old):
                g.queues.touched[number] = [old[i] for i in left] + [
                    tuple([Logged(memories, log, row, g.tags, ops[op]) for op, row in some])
                    for some in new
                ]


def behind(
    steps: Sequence[Step], first: int, state: waits.State, ends: Iterable[int], checks: Findings
) -> dict[int, waits.Queues] | None:
    """Follow the counters through steps from the first on, for :class:`Plan`.

    Return None if a wait is missing.
    """
    # in the place of what they touched, the old entries' numbers and the new ones' steps
    places = [list(range(len(queue))) for queue in state.queues]
    ghost: Any = SimpleNamespace(queues=waits.Queues(state, places))
    found = {}
    try:
        for number in range(first, len(steps) + 1):
            if number in ends:
                found[number] = waits.Queues(ghost.queues.state, list(ghost.queues.touched))
            if number < len(steps):
                steps[number].check(ghost, checks)
                steps[number].issue(ghost, (number,))
    except Trap:
        return None
    return found

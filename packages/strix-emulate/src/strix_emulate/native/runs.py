# SPDX-License-Identifier: BSD-3-Clause
"""Parts of basic blocks: steps that numpy executes, and runs of steps that C does.

What waits guarantee depends on the code alone, not on data: it is worked out once for each state of
the wait counters in which waves come to a run.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from strix_emulate.code.decode import Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import waits
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import LANES, Waves
from strix_emulate.native import library as native


class Session:
    """What C needs of a launch: its memories, and room for so many lanes."""

    def __init__(
        self, library: native.Library, spaces: Spaces, lanes: int, registers: int, checks: bool
    ):
        """Take registers, how many vector registers the waves have."""
        self.compiled, self.spaces, self.checks = library, spaces, checks
        self.registers = registers
        self.memories = (spaces.arena, spaces.lds, spaces.scratch)
        self.state = state = native.CState()
        self._room = np.zeros(9 * lanes, np.uint64)
        start = self._room.ctypes.data
        state.masks = start + 8 * 8 * lanes
        state.spare[:] = [start + 8 * lanes * i for i in range(8)]
        for memory, c in zip(self.memories, state.memory, strict=True):
            c.bytes, c.strict = memory.bytes.ctypes.data, memory.strict
            c.shift = memory.cell.bit_length() - 1
        self._address, self._tags = ctypes.addressof(state), None
        self._waves: Waves | None = None
        arena, lds, scratch = state.memory
        self._lds, self._scratch = lds, scratch
        self._order: Any = spaces.arena.order
        self._known: Any = None
        if self._order is not None:
            self._asked = native.ORDER(self._order.told)
            state.order = ctypes.cast(self._asked, ctypes.c_void_p).value
        self._ranges = spaces.arena.ranges()
        arena.ranges, arena.range_count = self._ranges.ctypes.data, len(self._ranges)
        lds.size, lds.stride = spaces.lds_size, spaces.lds_stride
        scratch.size, scratch.stride = spaces.scratch_size, spaces.scratch_size

    def start(self) -> None:
        """Tell C where the shadows are, after they were cleared."""
        for memory, c in zip(self.memories, self.state.memory, strict=True):
            if memory.checked:
                c.written, c.read = memory.written.ctypes.data, memory.read.ctypes.data
                c.writers = memory.writers.ctypes.data
                c.places = memory.places.ctypes.data if memory.code else None

    def run(self, g: Waves, ops: int, count: int, kept: int | None = None, log: Any = None) -> int:
        """Execute operations at that address; return how many, less than count if C stopped.

        kept: the address of the rows of the log by operation, if there is one.
        """
        state = self.state
        if self._waves is not g:
            state.v, state.s, state.scc, self._lds.slots, self._scratch.slots = (
                x.ctypes.data for x in (g.V, g.S, g.scc, g.lds_slot, g.slot)
            )
            state.n, state.halves = g.n, g.width // LANES
            self._waves, self._tags = g, None
        if self.checks:
            if self._tags is not g.tags:
                state.tags, self._tags = g.tags.ctypes.data, g.tags
            known = self._order.idle, *[len(memory.copies) for memory in self.memories]
            if known != self._known:
                self._known = known
                state.ordered = not known[0]
                for c, copies in zip(state.memory, known[1:], strict=True):
                    c.copies = copies
            if log is not None:
                state.log = log.ctypes.data
        done = self.compiled.run(self._address, ops, count, kept)
        if state.exec_changed:
            g.exec_changed()
        return done


class Logged:
    """A Touch that C noted, worked out when it is asked for.

    rows: what C wrote; tags: of the waves; op: the operation to which the row belongs.
    """

    def __init__(self, memories, rows: np.ndarray, row: int, tags, op: native.COp):
        self._memories, self._rows, self._row, self._tags, self._op = memories, rows, row, tags, op

    @cached_property
    def _lanes(self) -> np.ndarray:
        changing, at = self._rows[self._row, 0], self._rows[self._row, 1:]
        return np.flatnonzero(at >= 0) if changing else np.zeros(0, np.int64)

    @cached_property
    def at(self) -> np.ndarray:
        """As of a Touch; so are the others."""
        return self._rows[self._row, 1:][self._lanes]

    @cached_property
    def marks(self) -> np.ndarray:  # noqa: D102
        width = (self._rows.shape[1] - 1) // len(self._tags)
        return self._tags[self._lanes // width]

    @property
    def memory(self) -> Memory:  # noqa: D102
        return self._memories[self._op.memory]

    @property
    def size(self) -> int:  # noqa: D102
        return self._op.size

    @property
    def write(self) -> bool:  # noqa: D102
        return self._op.form == _STORE


_OP, _STORE = ctypes.sizeof(native.COp), native.SHAPES["store"]


@dataclass
class Plan:
    """What a run does to the wait counters.

    after: the state behind it. changes: of each queue that changes, its number, which of its
    entries are left, and of each new one its operations, with the rows that they have in the log.
    kept, array: for each operation its row, or -1; rows: how many. ordering: whether the last step
    orders others; its row is the first.
    """

    after: waits.State
    changes: list[tuple[int, list[int], list[list[tuple[int, int]]]]]
    kept: int
    rows: int
    ordering: bool
    array: object


class Run:
    """Steps in a row that C executes; only the last one may order what other waves do."""

    def __init__(self, session: Session, steps: list[Step], ops: list[list[native.COp]]):
        self.session: Any = session  # None between launches
        self.steps = steps
        flat = [op for part in ops for op in part]
        self.ops = (native.COp * len(flat))(*flat)
        self._first = ctypes.addressof(self.ops)
        self.starts = [0]
        for part in ops:
            self.starts.append(self.starts[-1] + len(part))
        for number, part in enumerate(ops):
            for i in range(self.starts[number], self.starts[number] + len(part)):
                self.ops[i].step, self.ops[i].place = number, steps[number].instruction.address
        self.orders: Any = steps[-1].known.executable.orders
        self._plans: dict[tuple, Plan | None] = {}

    def execute(self, g: Waves, checks: Findings | None, first: int = 0) -> None:
        """Execute the steps from the first: in C where what they need is known, else one by one."""
        count, session, start = len(self.ops), self.session, self.starts[first]
        while first < len(self.steps):
            plan = log = kept = None
            if checks:
                key = (first, g.queues.state)
                if key not in self._plans:
                    self._plans[key] = self._make(g, first, Findings(checks.off))
                plan = self._plans[key]
                if plan is None:
                    # a wait is missing, or waves that met have different counters
                    for step in self.steps[first:]:
                        step.execute(g, checks)
                    return
                if plan.rows:
                    log = np.empty((plan.rows, 1 + g.width * g.n), np.int64)
                    kept = plan.kept + 4 * start
            done = count - start
            if done:
                done = session.run(g, self._first + start * _OP, done, kept, log)
            start += done
            if start == count:
                if checks and plan:
                    self._leave(g, plan, log, checks)
                return
            stopped = self.ops[start].step
            self.by_numpy(g, checks, first, stopped)
            first = stopped + 1
            start = self.starts[first]

    def by_numpy(self, g: Waves, checks: Findings | None, first: int, stopped: int) -> None:
        """Execute the step in front of which C stopped after it had begun with the first."""
        if checks:
            for step in self.steps[first:stopped]:
                step.issue(g)
        self.steps[stopped].execute(g, checks)

    def _make(self, g: Waves, first: int, checks: Findings) -> Plan | None:
        # in the place of what they touched, the old entries' numbers and the new ones' steps
        state = g.queues.state
        places = [[(i, None) for i in range(len(queue))] for queue in state.queues]
        ghost: Any = SimpleNamespace(queues=waits.Queues(state, places))
        try:
            for number in range(first, len(self.steps)):
                self.steps[number].check(ghost, checks)
                self.steps[number].issue(ghost, (None, number))
        except Trap:
            return None
        kept = (ctypes.c_int32 * len(self.ops))(*[-1] * len(self.ops))
        rows = 0
        if self.orders:
            kept[len(self.ops) - 1] = 0
            rows = 1
        changes = []
        for number, touched in enumerate(ghost.queues.touched):
            left = [old for old, _ in touched if old is not None]
            new: list[list[tuple[int, int]]] = []
            for step in [step for _, step in touched if step is not None]:
                new.append([])
                for op in range(self.starts[step], self.starts[step + 1]):
                    # what orders others is no access that a barrier would postpone
                    if kept[op] < 0:
                        new[-1].append((op, rows))
                        kept[op] = rows
                        rows += 1
            if new or len(left) < len(state.queues[number]):
                changes.append((number, left, new))
        return Plan(
            ghost.queues.state, changes, ctypes.addressof(kept), rows, bool(self.orders), kept
        )

    def _leave(self, g: Waves, plan: Plan, rows, checks: Findings) -> None:
        queues, memories, ops, tags = g.queues, self.session.memories, self.ops, g.tags
        queues.state = plan.after
        for number, left, new in plan.changes:
            old = queues.touched[number]
            queues.touched[number] = [old[i] for i in left] + [
                tuple([Logged(memories, rows, row, tags, ops[op]) for op, row in some])
                for some in new
            ]
        if plan.ordering:
            checks.at = self.steps[-1].instruction
            last = Logged(memories, rows, 0, tags, ops[-1])
            self.orders(g, last.memory, last.at, last.size, last.marks)


def encoded(step: Step, library: native.Library) -> list | Literal[False]:
    """Return what C executes of a step; False if it cannot."""
    known = step.known
    if known.ops is None:
        try:
            forms = known.executable.forms
            known.ops = False if forms is None else native.encode_step(forms, library.functions)
        except Unknown:
            known.ops = False
    return known.ops


def parts(steps: list[Step], session: Session | None) -> list[Step | Run]:
    """Return the steps of a block, with runs of those that C knows in their place."""
    if session is None:
        return list(steps)
    found: list[Step | Run] = []
    waiting: list[tuple[Step, list]] = []

    def close():
        if any(ops for _, ops in waiting):
            found.append(Run(session, [s for s, _ in waiting], [o for _, o in waiting]))
        else:
            found.extend(step for step, _ in waiting)
        waiting.clear()

    for step in steps:
        ops = encoded(step, session.compiled)
        if ops is False or any(op.highest >= session.registers for op in ops):
            close()
            found.append(step)
        else:
            waiting.append((step, ops))
            if step.known.executable.orders:
                close()
    close()
    return found

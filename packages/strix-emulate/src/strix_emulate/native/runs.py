# SPDX-License-Identifier: BSD-3-Clause
"""Parts of basic blocks: steps that numpy executes, and runs of steps that C does.

What waits guarantee depends on the code alone, not on data: it is worked out once for each state of
the wait counters in which waves come to a run.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from strix_emulate.code.decode import Instruction, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions.forms import Executable
from strix_emulate.memory import waits
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.arena import Touch
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waves import LANES, Waves
from strix_emulate.native import library as native


@dataclass
class Known:
    """Of an instruction: bits of the registers it touches; target: those of a load's own.

    ops: what C executes; None until it is worked out, False if C cannot.
    """

    reads: int
    target: int
    counter: int
    executable: Executable
    ops: list | Literal[False] | None = None


class Step:
    """One instruction of a kernel; home: its blocks, which know the memories of the launch."""

    def __init__(
        self, instruction: Instruction, known: Known, make: Callable[[Spaces], Callable], home
    ):
        self.instruction, self.known, self._make, self._home = instruction, known, make, home

    @property
    def run(self) -> Callable:
        """numpy's function on Waves; made when a launch needs it."""
        run = self._home.made.get(self)
        if run is None:
            run = self._home.made[self] = self._make(self._home.spaces)
        return run

    def execute(self, g: Waves, checks: Findings | None) -> None:
        """By numpy. A trap knows the instruction."""
        try:
            if checks:
                checks.at = self.instruction
                self.check(g, checks)
            elif g.queues[0] or g.queues[1] or g.queues[2]:
                g.queues[0].clear(), g.queues[1].clear(), g.queues[2].clear()
            self.run(g)
        except Trap as trap:
            trap.instruction = trap.instruction or self.instruction
            raise

    def check(self, g, checks: Findings) -> None:
        """Finds a wait that it needs and that is not there."""
        known = self.known
        if g.pending and g.pending & (known.reads | known.target) and checks.on("pending"):
            waits.check(g, known.reads, known.target, known.counter, checks)

    def issue(self, g, place: tuple[bool, int] | None = None) -> None:
        """What it does to the wait counters, without touching memory."""
        issued = self.known.executable.issues
        if issued is not None:
            waits.issue(g, issued[0], issued[1].at(place) if place else issued[1])
        elif self.known.executable.waits:
            self.run(g)

    def ops(self, library: native.Library) -> list | Literal[False]:
        """What C executes; False if it cannot."""
        known = self.known
        if known.ops is None:
            try:
                forms = known.executable.forms
                known.ops = False if forms is None else native.encode_step(forms, library.functions)
            except Unknown:
                known.ops = False
        return known.ops


class Session:
    """What C needs of a launch: its memories, and room for so many lanes."""

    def __init__(
        self, library: native.Library, spaces: Spaces, lanes: int, registers: int, checks: bool
    ):
        """registers: how many vector registers the waves have."""
        self.compiled, self.spaces, self.checks = library, spaces, checks
        self.registers = registers
        self.memories = (spaces.arena, spaces.lds, spaces.scratch)
        self.state = state = native.CState()
        self._room = np.zeros(9 * lanes, np.uint64)
        start = self._room.ctypes.data
        state.masks = start + 8 * 8 * lanes
        state.spare[:] = [start + 8 * lanes * i for i in range(8)]
        self._log = np.zeros(0, np.int64)
        self._kept: list = []
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
            self._asked = native.ORDER(self._order.orders)
            state.order = ctypes.cast(self._asked, ctypes.c_void_p).value
        self._ranges = spaces.arena.ranges()
        arena.ranges, arena.range_count = self._ranges.ctypes.data, len(self._ranges)
        lds.size, lds.stride = spaces.lds_size, spaces.lds_stride
        scratch.size, scratch.stride = spaces.scratch_size, spaces.scratch_size

    def start(self) -> None:
        """After the shadows were cleared."""
        for memory, c in zip(self.memories, self.state.memory, strict=True):
            if memory.checked:
                c.written, c.read = memory.written.ctypes.data, memory.read.ctypes.data
                c.writers = memory.writers.ctypes.data

    def run(self, g: Waves, ops, first: int, count: int, kept=None, logs: int = 0) -> int:
        """Executes operations from the first on; gives how many, less than count if C stopped."""
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
            known = self._order.idle, [len(memory.copies) for memory in self.memories]
            if known != self._known:
                self._known = known
                state.ordered = not known[0]
                for c, copies in zip(state.memory, known[1], strict=True):
                    c.copies = copies
            if logs:
                if len(self._log) < logs * (1 + 2 * g.width * g.n):
                    self._log = np.zeros(logs * (1 + 2 * g.width * g.n), np.int64)
                state.log = self._log.ctypes.data
        done = self.compiled.run(
            self._address, ops + first * _OP, count, None if kept is None else kept + 4 * first
        )
        if state.exec_changed:
            g.exec_changed()
        return done

    def touch(self, g: Waves, log: int, op: native.COp) -> Touch:
        """What a load or store noted there."""
        at = log * (1 + 2 * g.width * g.n)
        noted = self._log[at + 1 : at + 1 + 2 * self._log[at]].copy()
        memory, stores = self.memories[op.memory], op.form == _STORE
        return Touch(memory, noted[::2], noted[1::2], op.size, stores)


_OP, _STORE = ctypes.sizeof(native.COp), native.SHAPES["store"]


@dataclass
class Plan:
    """What a run does to the wait counters.

    queues: the entries that are left; the place of each says whether it was there before, and its
    number in its queue, or else that of the step that issued it. ends: for each queue whose old
    entries are left from one on, as they were, where they begin and how many they are, else None.
    kept, array: for each operation
    the log of what it touches, or -1; logs: those of each step. ordering: the log of a last step
    that orders others, or -1.
    """

    queues: list[list[waits.Outstanding]]
    ends: list[tuple[int, int] | None]
    pending: int
    kept: int
    logs: dict[int, list[int]]
    logged: int
    ordering: int
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
                self.ops[i].step = number
        self._orders: Any = steps[-1].known.executable.orders
        self._plans: dict[tuple, Plan | None] = {}

    def execute(self, g: Waves, checks: Findings | None) -> None:
        """Execute the steps: in C where all that they need is known, else one by one."""
        first = 0
        while first < len(self.steps):
            plan = self._plan(g, first, checks) if checks else None
            if checks and plan is None:
                # a wait is missing, or waves that met have different counters
                for step in self.steps[first:]:
                    step.execute(g, checks)
                return
            start = self.starts[first]
            count = len(self.ops) - start
            kept, logs = (plan.kept, plan.logged) if plan and plan.logged else (None, 0)
            done = self.session.run(g, self._first, start, count, kept, logs) if count else 0
            if done == count:
                if plan:
                    self._leave(g, plan)
                return
            stopped = self.ops[start + done].step
            if checks:
                for step in self.steps[first:stopped]:
                    step.issue(g)
            self.steps[stopped].execute(g, checks)
            first = stopped + 1

    def _plan(self, g: Waves, first: int, checks: Findings) -> Plan | None:
        key = (first, *(tuple([e.state for e in queue]) for queue in g.queues))
        if key not in self._plans:
            self._plans[key] = self._make(g, first, Findings(checks.off))
        return self._plans[key]

    def _make(self, g: Waves, first: int, checks: Findings) -> Plan | None:
        # without what they touched: plans outlive the launch and its memory
        queues = [[e.touching(()).at((True, i)) for i, e in enumerate(queue)] for queue in g.queues]
        ghost = SimpleNamespace(queues=queues, pending=g.pending, n=g.n)
        try:
            for number in range(first, len(self.steps)):
                self.steps[number].check(ghost, checks)
                self.steps[number].issue(ghost, (False, number))
        except Trap:
            return None
        logs: dict[int, list[int]] = {}
        logged = 0
        kept = (ctypes.c_int32 * len(self.ops))(*[-1] * len(self.ops))
        ordering = -1
        if self._orders:
            kept[len(self.ops) - 1] = ordering = 0
            logs[len(self.steps) - 1] = []
            logged = 1
        for queue in queues:
            for entry in queue:
                is_old, number = entry.place
                if is_old or number in logs:
                    continue
                for op in range(self.starts[number], self.starts[number + 1]):
                    kept[op] = logged
                    logs.setdefault(number, []).append(logged)
                    logged += 1
        ends = [_end(old, queue) for old, queue in zip(g.queues, queues, strict=True)]
        return Plan(
            queues, ends, ghost.pending, ctypes.addressof(kept), logs, logged, ordering, kept
        )

    def _leave(self, g: Waves, plan: Plan) -> None:
        for old, left, end in zip(g.queues, plan.queues, plan.ends, strict=True):
            queue = old[end[0] :] if end else []
            for entry in left[end[1] :] if end else left:
                is_old, number = entry.place
                if is_old:
                    mine = old[number]
                    queue.append(mine if mine.who is entry.who else mine.of(entry.who))
                    continue
                logs, first = plan.logs.get(number, ()), self.starts[number]
                touches = [
                    self.session.touch(g, x, self.ops[first + i]) for i, x in enumerate(logs)
                ]
                queue.append(entry.touching(tuple(touches)) if touches else entry)
            old[:] = queue
        g.pending = plan.pending
        if plan.ordering >= 0:
            last = self.session.touch(g, plan.ordering, self.ops[len(self.ops) - 1])
            self._orders(g, last.memory, last.at, last.size, last.marks)


def _end(old: list[waits.Outstanding], left: list[waits.Outstanding]) -> tuple[int, int] | None:
    """See :class:`Plan`."""
    places = [entry.place[1] for entry in left if entry.place[0]]
    first = len(old) - len(places)
    same = places == [*range(first, len(old))] and all(
        entry.who is old[number].who for entry, number in zip(left, places, strict=False)
    )
    return (first, len(places)) if same else None


def parts(steps: list[Step], session: Session | None) -> list[Step | Run]:
    """The steps of a block, with runs of those that C knows in their place."""
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
        ops = step.ops(session.compiled)
        if ops is False or any(op.highest >= session.registers for op in ops):
            close()
            found.append(step)
        else:
            waiting.append((step, ops))
            if step.known.executable.orders:
                close()
    close()
    return found

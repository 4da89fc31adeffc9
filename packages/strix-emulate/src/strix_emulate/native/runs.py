# SPDX-License-Identifier: BSD-3-Clause
"""Parts of basic blocks: steps that numpy executes, and runs of steps that C does."""

import ctypes
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from strix_emulate.code.decode import Unknown
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import polls
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waits import State
from strix_emulate.memory.waves import LANES, Waves
from strix_emulate.native import library as native
from strix_emulate.native import plans
from strix_emulate.native.plans import Logged, Plan


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
        self._polled, self._records = np.zeros(lanes, np.int64), False
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
        self._told: Any = None
        self._doubts = spaces.arena.doubts
        if self._doubts is not None:
            state.touched = self._doubts.touched.ctypes.data
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
            state.v, state.s, state.scc, row = (
                x.ctypes.data for x in (g.V, g.S, g.scc, g.identity)
            )
            state.n, state.halves = g.n, g.width // LANES
            size = 8 * g.n
            self._scratch.slots, self._lds.slots = row + 2 * size, row + 3 * size
            if self._doubts is not None:
                state.stored = row + 5 * size
            self._waves, self._tags = g, None
        if self.checks:
            if self._tags is not g.tags:
                state.tags, self._tags = g.tags.ctypes.data, g.tags
            order = self._order.idle, *[len(memory.copies) for memory in self.memories]
            if order != self._told:
                self._told = order
                state.ordered = not order[0]
                for c, copies in zip(state.memory, order[1:], strict=True):
                    c.copies = copies
            if log is not None:
                state.log = log.ctypes.data
        if g.records != self._records:
            self._records = g.records
            state.polled = self._polled.ctypes.data if g.records else None
        done = self.compiled.run(self._address, ops, count, kept)
        if state.exec_changed:
            g.exec_changed()
        return done

    def note_poll(self, g: Waves, op: native.COp) -> None:
        """Note what waves saw where the last operation asked for memory that others change."""
        at = self._polled[: g.n * g.width]
        lanes = np.flatnonzero(at >= 0)
        target = range(op.target.index, op.target.index + op.words)
        memory = self.memories[self.state.polled_memory]
        polls.note(g, memory, at[lanes], op.size, lanes, target, op.polls > 1)


_OP = ctypes.sizeof(native.COp)


class Run:
    """Steps in a row that C executes; only the last one may order what other waves do."""

    def __init__(self, session: Session, steps: list[Step], ops: list[list[native.COp]]):
        self.session: Any = session  # None between launches
        self.steps = steps
        flat = [op for part in ops for op in part]
        self.ops = (native.COp * len(flat))(*flat)
        self._first = ctypes.addressof(self.ops)
        self._starts = [0, *accumulate(map(len, ops))]
        self._of = [range(*pair) for pair in pairwise(self._starts)]
        for number, (step, numbers) in enumerate(zip(steps, self._of, strict=True)):
            for i in numbers:
                self.ops[i].step = number
                step.tell(self.ops[i])
        self._polls = self.ops[-1].polls if flat else False
        self.orders: Any = steps[-1].traits.executable.orders
        self._plans: dict[tuple, Plan | None] = {}

    def execute(self, g: Waves, checks: Findings | None, first: int = 0) -> None:
        """Execute the steps from the first: in C where what they need is known, else one by one."""
        count, session, start = len(self.ops), self.session, self._starts[first]
        while first < len(self.steps):
            plan = log = kept = None
            if checks:
                plan = self._plan(g.queues.state, first, checks)
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
                if g.records and done and self._polls:
                    session.note_poll(g, self.ops[-1])
                if checks and plan:
                    self._leave(g, checks, plan, log)
                return
            stopped = self.ops[start].step
            self.by_numpy(g, checks, first, stopped)
            first = stopped + 1
            start = self._starts[first]

    def _leave(self, g: Waves, checks: Findings, plan: Plan, log: Any) -> None:
        """Note for the checks what C has done."""
        memories = self.session.memories
        plan.leave(g, len(self.steps), memories, self.ops, log)
        if self.orders:
            checks.at = self.steps[-1].instruction
            last = Logged(memories, log, 0, g.tags, self.ops[-1])
            if last.memory.of_lanes:
                return
            self.orders(g, last.memory, last.at, last.size, last.marks)

    def by_numpy(self, g: Waves, checks: Findings | None, first: int, stopped: int) -> None:
        """Execute the step in front of which C stopped after it had begun with the first."""
        if checks:
            for step in self.steps[first:stopped]:
                step.issue(g)
        self.steps[stopped].execute(g, checks)

    def _plan(self, state: State, first: int, checks: Findings) -> Plan | None:
        key = (first, state)
        if key not in self._plans:
            end = len(self.steps)
            found = plans.behind(self.steps, first, state, [end], Findings(checks.off))
            self._plans[key] = (
                None if found is None
                else Plan(found, self._of, len(self.ops), bool(self.orders)))  # fmt: skip
        return self._plans[key]


def encoded(step: Step, library: native.Library) -> list | Literal[False]:
    """Return what C executes of a step; False if it cannot."""
    traits = step.traits
    if traits.ops is None:
        try:
            micros = traits.executable.micros
            traits.ops = False if micros is None else native.encode_step(micros, library.functions)
        except Unknown:
            traits.ops = False
    return traits.ops


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
            if step.traits.executable.orders:
                close()
    close()
    return found

# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a basic block: steps that numpy executes, and runs of steps that C executes."""

import ctypes
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from strix_emulate.code.decode import Unknown
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import polls
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waits import State
from strix_emulate.memory.waves import LANES, Waves
from strix_emulate.native import library as native
from strix_emulate.native import plans
from strix_emulate.native.plans import LoggedTouch, Plan

#: Number of spare registers of C. Each is an array with a 64-bit word for each lane.
_SPARE_REGISTERS = 8


class Session:
    """The data of a launch that C needs: its memories, and working memory for the lanes.

    Attributes:
        compiled: The library.
        registers: Number of vector registers of each wave.
        memories: Global memory, LDS, scratch.
        state: The state that C reads.
    """

    def __init__(
        self,
        library: native.Library,
        spaces: Spaces,
        lanes: int,
        registers: int,
        checks: bool,
    ):
        """Prepare a launch.

        Args:
            library: The library.
            spaces: The memories.
            lanes: Maximum number of lanes of the waves that run at a time.
            registers: Number of vector registers of each wave.
            checks: Whether the launch is checked.
        """
        self.compiled = library
        self.registers = registers
        self.memories: tuple[Memory, ...] = (spaces.arena, spaces.lds, spaces.scratch)
        self._checks = checks
        self.state = native.CState()
        self._ranges = spaces.arena.ranges()
        self._describe_memories(spaces)
        self._waves: Waves | None = None
        self._tags: Any = None
        self._records_polls = False
        self._last_order: Any = None
        self._order: Any = spaces.arena.order
        self._doubts = spaces.arena.doubts
        self._polled = np.zeros(lanes, np.int64)
        # The spare registers are followed by 32-bit masks of all lanes.
        self._room = np.zeros((_SPARE_REGISTERS + 1) * lanes, np.uint64)
        room = self._room.ctypes.data
        state = self.state
        state.spare[:] = [room + 8 * lanes * i for i in range(_SPARE_REGISTERS)]
        state.masks = room + 8 * lanes * _SPARE_REGISTERS
        self._address = ctypes.addressof(state)
        if self._doubts is not None:
            state.loaded_ranges = self._doubts.touched.ctypes.data
        if self._order is not None:
            self._classify = native.CLASSIFY(self._order.classify)
            state.classify = ctypes.cast(self._classify, ctypes.c_void_p).value

    def _describe_memories(self, spaces: Spaces) -> None:
        for memory, c in zip(self.memories, self.state.memory, strict=True):
            c.bytes = memory.bytes.ctypes.data
            c.strict = memory.strict
            c.shift = memory.cell.bit_length() - 1
        arena, lds, scratch = self.state.memory
        arena.ranges = self._ranges.ctypes.data
        arena.range_count = len(self._ranges)
        lds.size = spaces.lds_size
        lds.stride = spaces.lds_stride
        scratch.size = spaces.scratch_size
        scratch.stride = spaces.scratch_size
        self._lds = lds
        self._scratch = scratch

    def update_shadows(self) -> None:
        """Pass the addresses of the shadows to C, after the shadows were cleared."""
        for memory, c in zip(self.memories, self.state.memory, strict=True):
            if not memory.checked:
                continue
            c.written = memory.written.ctypes.data
            c.read = memory.read.ctypes.data
            c.writers = memory.writers.ctypes.data
            c.store_addresses = memory.store_addresses.ctypes.data if memory.stores else None

    def run(
        self,
        g: Waves,
        ops: int,
        count: int,
        log_rows: int | None = None,
        log: Any = None,
    ) -> int:
        """Execute operations.

        Args:
            g: The waves.
            ops: Address of the first operation.
            count: Number of operations.
            log_rows: Address of an array with the number of each operation's row in the log, or
                None without a log.
            log: The log, (rows, 1 + lanes) int64, or None.

        Returns:
            Number of operations that were executed. It is less than count if C stopped.
        """
        state = self.state
        if self._waves is not g:
            self._set_waves(g)
        if self._checks:
            if self._tags is not g.tags:
                state.tags = g.tags.ctypes.data
                self._tags = g.tags
            order = self._order.idle, *[len(memory.co_writers) for memory in self.memories]
            if order != self._last_order:
                self._set_order(order)
            if log is not None:
                state.log = log.ctypes.data
        if g.records_polls != self._records_polls:
            self._records_polls = g.records_polls
            state.polled = self._polled.ctypes.data if g.records_polls else None
        executed = self.compiled.run(self._address, ops, count, log_rows)
        if state.exec_changed:
            g.exec_changed()
        return executed

    def _set_waves(self, g: Waves) -> None:
        state = self.state
        state.v = g.V.ctypes.data
        state.s = g.S.ctypes.data
        state.scc = g.scc.ctypes.data
        state.n = g.n
        state.halves = g.width // LANES
        identity = g.identity.ctypes.data
        # These numbers are rows of Waves.identity.
        size = 8 * g.n
        self._scratch.slots = identity + 2 * size
        self._lds.slots = identity + 3 * size
        if self._doubts is not None:
            state.stored = identity + 5 * size
        self._waves = g
        self._tags = None

    def _set_order(self, order: tuple) -> None:
        """Pass to C whether atomics order accesses, and how many cells have co-writers."""
        self._last_order = order
        is_idle, *co_writers = order
        self.state.atomics_order = not is_idle
        for c, count in zip(self.state.memory, co_writers, strict=True):
            c.co_writers = count

    def note_poll(self, g: Waves, op: native.COp) -> None:
        """Record the poll that waves made by the last operation."""
        at = self._polled[: g.n * g.width]
        lanes = np.flatnonzero(at >= 0)
        target = range(op.target.index, op.target.index + op.words)
        memory = self.memories[self.state.polled_memory]
        polls.note(
            g,
            memory,
            at[lanes],
            op.size,
            lanes,
            target,
            compares=op.polls > 1,
        )


_OP_SIZE = ctypes.sizeof(native.COp)


class Run:
    """Consecutive steps that C executes. Only the last one may order accesses of other waves.

    Attributes:
        session: The session of the launch, or None between launches.
        steps: The steps.
        ops: Their operations.
        orders: Function that records for the checks which accesses the last step orders, or None.
    """

    def __init__(
        self,
        session: Session,
        steps: list[Step],
        ops: list[list[native.COp]],
    ):
        self.session: Any = session
        self.steps = steps
        flat = [op for ops_of_step in ops for op in ops_of_step]
        self.ops = (native.COp * len(flat))(*flat)
        self._address = ctypes.addressof(self.ops)
        #: Number of the first operation of each step, followed by the number of all operations.
        self._starts = [0, *accumulate(map(len, ops))]
        self._ops_of_steps = [range(start, end) for start, end in pairwise(self._starts)]
        for number, (step, numbers) in enumerate(zip(steps, self._ops_of_steps, strict=True)):
            for i in numbers:
                self.ops[i].step = number
                step.describe_to_c(self.ops[i])
        self._polls = self.ops[-1].polls if flat else False
        self.orders: Any = steps[-1].traits.executable.orders
        self._plans: dict[tuple, Plan | None] = {}

    def execute(
        self,
        g: Waves,
        checks: Findings | None,
        first: int = 0,
    ) -> None:
        """Execute the steps from `first` on in C.

        numpy executes a step at which C stops, and all remaining steps if a wait is missing.
        """
        count = len(self.ops)
        session = self.session
        start = self._starts[first]
        while first < len(self.steps):
            plan = log = log_rows = None
            if checks:
                plan = self._plan(g.queues.state, first, checks)
                if plan is None:
                    # A wait is missing. numpy executes the steps one by one, and the check of a
                    # step reports the missing wait.
                    for step in self.steps[first:]:
                        step.execute(g, checks)
                    return
                if plan.rows:
                    log = np.empty((plan.rows, 1 + g.width * g.n), np.int64)
                    log_rows = plan.log_rows + 4 * start
            executed = count - start
            if executed:
                address = self._address + start * _OP_SIZE
                executed = session.run(g, address, executed, log_rows, log)
            start += executed
            if start == count:
                if g.records_polls and executed and self._polls:
                    session.note_poll(g, self.ops[-1])
                if checks and plan:
                    self._finish(g, checks, plan, log)
                return
            stopped = self.ops[start].step
            self.execute_in_numpy(g, checks, first, stopped)
            first = stopped + 1
            start = self._starts[first]

    def _finish(
        self,
        g: Waves,
        checks: Findings,
        plan: Plan,
        log: Any,
    ) -> None:
        """Update the wait counters, and record for the checks what the last step orders."""
        memories = self.session.memories
        plan.apply(g, len(self.steps), memories, self.ops, log)
        if self.orders:
            checks.instruction = self.steps[-1].instruction
            last = LoggedTouch(memories, log, 0, g.tags, self.ops[-1])
            if not last.memory.of_lanes:
                self.orders(g, last.memory, last.at, last.size, last.issue_tags)

    def execute_in_numpy(
        self,
        g: Waves,
        checks: Findings | None,
        first: int,
        stopped: int,
    ) -> None:
        """Execute the step with the number `stopped`, which C did not execute.

        C executed the steps from `first` up to that step.
        """
        if checks:
            for step in self.steps[first:stopped]:
                step.issue(g)
        self.steps[stopped].execute(g, checks)

    def _plan(
        self,
        state: State,
        first: int,
        checks: Findings,
    ) -> Plan | None:
        key = (first, state)
        if key not in self._plans:
            end = len(self.steps)
            behind = plans.follow_counters(
                self.steps,
                first,
                state,
                [end],
                Findings(checks.disabled_checks),
            )
            plan = None
            if behind is not None:
                plan = Plan(
                    behind,
                    self._ops_of_steps,
                    len(self.ops),
                    bool(self.orders),
                    self.ops[-1].handler == native.HANDLERS["atomic"],
                )
            self._plans[key] = plan
        return self._plans[key]


def encode(step: Step, library: native.Library) -> list | Literal[False]:
    """Return the operations with which C executes a step, or False if C cannot execute it."""
    traits = step.traits
    if traits.c_operations is None:
        micros = traits.executable.micros
        traits.c_operations = False
        if micros is not None:
            with suppress(Unknown):
                traits.c_operations = native.encode_step(micros, library.functions)
    return traits.c_operations


def split_steps(steps: list[Step], session: Session | None) -> list[Step | Run]:
    """Return the steps of a block, with steps that C can execute grouped into runs."""
    if session is None:
        return list(steps)
    parts: list[Step | Run] = []
    collected: list[Step] = []
    for step in steps:
        ops = encode(step, session.compiled)
        if ops is False or any(op.highest >= session.registers for op in ops):
            parts += _make_run(collected, session)
            collected = []
            parts.append(step)
            continue
        collected.append(step)
        if step.traits.executable.orders:
            parts += _make_run(collected, session)
            collected = []
    return parts + _make_run(collected, session)


def _make_run(steps: list[Step], session: Session) -> list[Step] | list[Run]:
    """Return [a run of the steps], or the steps themselves if C has no operations for them."""
    ops: Any = [step.traits.c_operations for step in steps]
    if any(ops):
        return [Run(session, steps, ops)]
    return steps

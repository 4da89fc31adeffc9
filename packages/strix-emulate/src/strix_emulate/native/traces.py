# SPDX-License-Identifier: BSD-3-Clause
"""Traces: sequences of basic blocks that C executes in one call.

A trace has the blocks through which waves went before. Each block that ends with a conditional
branch, except the last one, is followed by a guard: if a wave does not continue with the next block
of the trace, C stops, and the scheduler continues as after any block. So traces only reduce the
number of calls of C.
"""

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from strix_emulate.code.decode import EXEC, VCC
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waits import Queues, State
from strix_emulate.memory.waves import Waves
from strix_emulate.native import library as native
from strix_emulate.native import plans
from strix_emulate.native.plans import Plan
from strix_emulate.native.runs import Run, Session

#: A block is traced after waves have entered it this number of times. A trace may be given up after
#: waves have left it early more than this number of times.
_ENTRIES_BEFORE_TRACE = 8
#: Maximum number of blocks of a trace.
_MAX_BLOCKS = 64
#: Maximum number of attempts to trace a block. An attempt fails if the trace would have fewer than
#: two blocks, or if waves leave it early more often than not.
_MAX_ATTEMPTS = 4
#: Maximum number of plans that a trace keeps. Waves that have been joined come with many states of
#: the wait counters.
_MAX_PLANS = 32


@dataclass(frozen=True)
class _Condition:
    """The condition of a branch.

    Attributes:
        file: Kind of the register that the branch reads: "scc", or "mask" for a lane mask.
        register: Number of the register.
        jumps_if_set: Whether the branch jumps if the register is not 0. Otherwise it jumps if the
            register is 0.
    """

    file: str
    register: int
    jumps_if_set: bool


_CONDITIONS = {
    "s_cbranch_scc0": _Condition("scc", 0, False),
    "s_cbranch_scc1": _Condition("scc", 0, True),
    "s_cbranch_vccz": _Condition("mask", VCC, False),
    "s_cbranch_vccnz": _Condition("mask", VCC, True),
    "s_cbranch_execz": _Condition("mask", EXEC, False),
    "s_cbranch_execnz": _Condition("mask", EXEC, True),
}


class Trace:
    """Consecutive blocks that C executes in one call.

    Attributes:
        session: The session of the launch, or None between launches.
        blocks: The blocks.
        length: Number of instructions that a wave executes in the whole trace.
        highest: Highest start address of the blocks except the first one.
        ops: The operations of all blocks, with the guards between them.
        entered: Number of times that waves entered the trace.
        early_exits: Number of times that C stopped before the end of the trace.
    """

    def __init__(self, session: Session | None, blocks: list):
        self.session: Any = session
        self.blocks = blocks
        self.length = sum(block.length for block in blocks)
        self.highest = max(block.start for block in blocks[1:])
        self.entered = 0
        self.early_exits = 0
        self._plans: dict[State, Plan | None] = {}
        self._steps = [step for block in blocks for step in block.steps]
        #: Number of steps before each block, followed by the number of all steps.
        self._ends = [0, *accumulate(len(block.steps) for block in blocks)]
        #: Numbers of the operations of each step.
        self._ops_of_steps: list[range] = []
        #: For each operation, the index of its block and the index of its step in the block. The
        #: index of a guard's step is -1.
        self._places: list[tuple[int, int]] = []
        ops = self._collect_ops()
        self.ops = (native.COp * len(ops))(*ops)
        self._address = ctypes.addressof(self.ops)
        for step, numbers in zip(self._steps, self._ops_of_steps, strict=True):
            for i in numbers:
                step.describe_to_c(self.ops[i])

    def _collect_ops(self) -> list[native.COp]:
        ops: list[native.COp] = []
        for number, block in enumerate(self.blocks):
            for i, step in enumerate(block.steps):
                step_ops = step.traits.c_operations
                self._ops_of_steps.append(range(len(ops), len(ops) + len(step_ops)))
                self._places += [(number, i)] * len(step_ops)
                ops += step_ops
            is_last = number + 1 == len(self.blocks)
            if block.condition and not is_last:
                ops.append(_make_guard(block, self.blocks[number + 1].start))
                self._places.append((number, -1))
        return ops

    def execute(self, g: Waves, checks: Findings | None) -> int:
        """Execute the trace.

        Returns:
            Number of the last block whose steps were executed, or -1 if none was. numpy may have
            executed some steps of this block.
        """
        plan = log = log_rows = None
        if checks:
            plan = self._plan(g.queues.state, checks)
            if plan is None:
                return -1
            if plan.rows:
                log = np.empty((plan.rows, 1 + g.width * g.n), np.int64)
                log_rows = plan.log_rows
        executed = 0
        if self.ops:
            executed = self.session.run(
                g,
                self._address,
                len(self.ops),
                log_rows,
                log,
            )
        self.entered += 1
        last = len(self.blocks) - 1
        step = -1
        if executed < len(self.ops):
            last, step = self._places[executed]
            self.early_exits += 1
        if plan:
            # `end` is the end of the last block, or its start if C stopped in the middle of it.
            end = self._ends[last + 1] if step < 0 else self._ends[last]
            plan.apply(g, end, self.session.memories, self.ops, log)
        if step >= 0:
            (run,) = self.blocks[last].parts
            run.execute_in_numpy(g, checks, 0, step)
            run.execute(g, checks, step + 1)
        return last

    def _plan(self, state: State, checks: Findings) -> Plan | None:
        """Return the plan of the counters up to the end of each block.

        If a wait is missing, return None. The blocks are then executed without the trace, and the
        check reports the missing wait if waves reach it.
        """
        if state not in self._plans:
            if len(self._plans) == _MAX_PLANS:
                self._plans.clear()
            findings = Findings(checks.disabled_checks)
            behind = plans.follow_counters(
                self._steps,
                0,
                state,
                self._ends,
                findings,
            )
            plan = None
            if behind is not None and not self._misses_wait(behind):
                plan = Plan(
                    behind,
                    self._ops_of_steps,
                    len(self.ops),
                    orders=False,
                )
            self._plans[state] = plan
        return self._plans[state]

    def _misses_wait(self, behind: dict[int, Queues]) -> bool:
        """Return whether a block ends with a use of a register that has yet to be loaded.

        Args:
            behind: The counters at the end of each block.
        """
        for block, end in zip(self.blocks, self._ends[1:], strict=True):
            if block.end_registers & behind[end].state.pending:
                return True
        return False

    @property
    def is_useless(self) -> bool:
        """Whether waves have left the trace early several times, and more often than not."""
        return self.early_exits > _ENTRIES_BEFORE_TRACE and 2 * self.early_exits > self.entered


def _make_guard(block, following: int) -> native.COp:
    """Return an operation that stops C if not all waves continue with the following block."""
    condition = _CONDITIONS[block.end.name]
    guard = native.COp(handler=native.HANDLERS["guard"])
    guard.target = native.COperand(
        file=native.FILES[condition.file],
        index=condition.register,
    )
    follows_jump = following == block.taken
    guard.words = condition.jumps_if_set == follows_jump
    return guard


def grow(blocks: dict, head, session: Session | None) -> Trace | None:
    """Return a trace of the blocks that the last waves executed from `head` on.

    Return None if it would have fewer than two blocks.
    """
    chain: list = []
    block = head
    while len(chain) < _MAX_BLOCKS and block not in chain and _is_traceable(block):
        chain.append(block)
        following = _following(block)
        if following < 0 or following not in blocks:
            break
        block = blocks[following]
    return Trace(session, chain) if len(chain) > 1 else None


def _following(block) -> int:
    """Return the address of the block that the last waves executed after this one.

    After a conditional branch, only waves that did not diverge count. Return -1 if the address is
    not known.
    """
    if block.condition:
        return block.went
    if block.end is None:
        return block.next
    if block.end.name == "s_branch":
        return block.taken
    return -1


def _is_traceable(block) -> bool:
    """Return whether C can execute all of a block, and no step orders accesses of other waves."""
    if block.parts is None:
        return False
    if len(block.parts) == 1 and isinstance(block.parts[0], Run):
        return not block.parts[0].orders
    return all(not isinstance(part, Run) and part.traits.c_operations == [] for part in block.parts)


def find(blocks: dict, block, session: Session | None) -> Trace | None:
    """Return the trace that begins at a block, or None. Make one if the block is frequent."""
    trace = block.trace
    if trace is not None and trace.is_useless:
        trace = None
        block.trace = None
        block.untraced_entries = 0
        block.trace_attempts += 1
    if trace is None and block.trace_attempts < _MAX_ATTEMPTS:
        block.untraced_entries += 1
        if block.untraced_entries >= _ENTRIES_BEFORE_TRACE:
            trace = grow(blocks, block, session)
            block.trace = trace
            block.untraced_entries = 0
            if trace is None:
                block.trace_attempts += 1
    return trace

# SPDX-License-Identifier: BSD-3-Clause
"""Blocks in a row that C executes at once, as waves went through them before.

Between two blocks stands a guard: where not all waves go on to the next one, C stops, and the
machine decides as it does behind each block. So a trace changes nothing but how often C is called.
"""

import ctypes
from itertools import accumulate
from typing import Any

import numpy as np

from strix_emulate.code.decode import EXEC, VCC
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waits import State
from strix_emulate.memory.waves import Waves
from strix_emulate.native import library as native
from strix_emulate.native import plans
from strix_emulate.native.plans import Plan
from strix_emulate.native.runs import Run, Session

#: How often waves begin at a block before it gets a trace, how many blocks that has, and how often
#: another one is tried where waves leave it early.
_OFTEN, _LONGEST, _TRIES = 8, 64, 4
#: Plans of a trace that are kept: waves that met come with many states.
_STATES = 32
#: What branches ask, and whether they jump where it is not 0.
_ASKS = {
    "s_cbranch_scc0": ("scc", 0, False), "s_cbranch_scc1": ("scc", 0, True),
    "s_cbranch_vccz": ("mask", VCC, False), "s_cbranch_vccnz": ("mask", VCC, True),
    "s_cbranch_execz": ("mask", EXEC, False), "s_cbranch_execnz": ("mask", EXEC, True),
}  # fmt: skip


class Trace:
    """length: how many wave-instructions a wave executes in it; highest: the highest address behind
    the first block."""

    def __init__(self, session: Session | None, blocks: list):
        self.session: Any = session  # None between launches
        self.blocks = blocks
        self.length = sum(len(block.steps) + 1 for block in blocks)
        self.highest = max(block.start for block in blocks[1:])
        steps = [step for block in blocks for step in block.steps]
        #: steps in front of each block, and behind the last
        self._ends = [0, *accumulate(len(block.steps) for block in blocks)]
        #: of each operation: block and step; -1 for a guard
        self._places: list[tuple[int, int]] = []
        of: list[range] = []
        flat: list[native.COp] = []
        for number, block in enumerate(blocks):
            for i, step in enumerate(block.steps):
                of.append(range(len(flat), len(flat) + len(step.traits.ops)))
                flat += step.traits.ops
                self._places += [(number, i)] * len(step.traits.ops)
            if number + 1 < len(blocks) and block.condition:
                flat.append(_guard(block, blocks[number + 1].start))
                self._places.append((number, -1))
        self.ops = (native.COp * len(flat))(*flat)
        for step, numbers in zip(steps, of, strict=True):
            for i in numbers:
                step.tell(self.ops[i])
        self._first, self._steps, self._of = ctypes.addressof(self.ops), steps, of
        self._plans: dict[State, Plan | None] = {}
        self.entered = self.left = 0

    def execute(self, g: Waves, checks: Findings | None) -> int:
        """Run it; return the number of the last block whose steps were executed; -1 if none was."""
        plan = log = kept = None
        if checks:
            plan = self._plan(g.queues.state, checks)
            if plan is None:
                return -1
            if plan.rows:
                log, kept = np.empty((plan.rows, 1 + g.width * g.n), np.int64), plan.kept
        done = self.session.run(g, self._first, len(self.ops), kept, log) if self.ops else 0
        self.entered += 1
        last, step = len(self.blocks) - 1, -1
        if done < len(self.ops):
            last, step = self._places[done]
            self.left += 1
        if plan:
            end = self._ends[last + (step < 0)]
            plan.leave(g, end, self.session.memories, self.ops, log)
        if step >= 0:
            (run,) = self.blocks[last].parts
            run.by_numpy(g, checks, 0, step)
            run.execute(g, checks, step + 1)
        return last

    def _plan(self, state: State, checks: Findings) -> Plan | None:
        """Plan it up to each of its blocks; None if a wait is missing: then the blocks find it."""
        if state not in self._plans:
            if len(self._plans) == _STATES:
                self._plans.clear()
            found = plans.behind(self._steps, 0, state, self._ends, Findings(checks.off))
            self._plans[state] = (
                None if found is None else Plan(found, self._of, len(self.ops), False)
            )
        return self._plans[state]

    @property
    def useless(self) -> bool:
        """Whether waves leave it early more often than not."""
        return self.left > _OFTEN and 2 * self.left > self.entered


def _guard(block, following: int) -> native.COp:
    """Make an operation that stops C where not all waves go from the block to the following one."""
    kind, register, jumps = _ASKS[block.end.name]
    guard = native.COp(handler=native.HANDLERS["guard"])
    guard.target = native.COperand(file=native.FILES[kind], index=register)
    guard.words = jumps == (following == block.taken)
    return guard


def grow(blocks: dict, head, session: Session | None) -> Trace | None:
    """Grow a trace from the block on, the way that waves went last."""
    found: list = []
    block = head
    while len(found) < _LONGEST and block not in found and _suits(block):
        found.append(block)
        following = block.went if block.condition else block.next if block.end is None else -1
        if block.end is not None and block.end.name == "s_branch":
            following = block.taken
        if following < 0 or following not in blocks:
            break
        block = blocks[following]
    return Trace(session, found) if len(found) > 1 else None


def _suits(block) -> bool:
    """Return whether C executes all of it, and nothing in it orders what other waves do."""
    if block.parts is None:
        return False
    if len(block.parts) == 1 and isinstance(block.parts[0], Run):
        return not block.parts[0].orders
    return all(not isinstance(part, Run) and part.traits.ops == [] for part in block.parts)


def find(blocks: dict, block, session: Session | None) -> Trace | None:
    """Find the trace that begins at the block, if it has one by now."""
    trace = block.trace
    if trace is not None and trace.useless:
        trace = block.trace = None
        block.begun = 0
        block.tried += 1
    if trace is None and block.tried < _TRIES:
        block.begun += 1
        if block.begun >= _OFTEN:
            trace = block.trace = grow(blocks, block, session)
            block.tried += trace is None
            block.begun = 0
    return trace

# SPDX-License-Identifier: BSD-3-Clause
"""Blocks in a row that C executes at once, as waves went through them before.

Between two blocks stands a guard: where not all waves go on to the next one, C stops, and the
machine decides as it does behind each block. So a trace changes nothing but how often C is called.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from strix_emulate.code.decode import EXEC, VCC
from strix_emulate.errors import Trap
from strix_emulate.memory import waits
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waves import Waves
from strix_emulate.native import library as native
from strix_emulate.native.runs import Logged, Run, Session

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
    """steps: how many wave-instructions a wave executes in it; highest: the highest address behind
    the first block."""

    def __init__(self, session: Session | None, blocks: list):
        self.session: Any = session  # None between launches
        self.blocks = blocks
        self.steps = sum(len(block.steps) + 1 for block in blocks)
        self.highest = max(block.start for block in blocks[1:])
        self.starts: list[int] = []
        self._places: list[tuple[int, int]] = []
        flat: list[native.COp] = []
        for number, block in enumerate(blocks):
            self.starts.append(len(flat))
            for step, known in enumerate(block.steps):
                flat += known.known.ops
                self._places += [(number, step)] * len(known.known.ops)
            if number + 1 < len(blocks) and block.condition:
                flat.append(_guard(block, blocks[number + 1].start))
                self._places.append((number, -1))
        self.ops = (native.COp * len(flat))(*flat)
        self._first = ctypes.addressof(self.ops)
        self._plans: dict[waits.State, _Plan | None] = {}
        self.entered = self.left = 0

    def execute(self, g: Waves, checks: Findings | None) -> int:
        """Run it; return the number of the last block whose steps were executed; -1 if none was."""
        plan = log = kept = None
        if checks:
            state = g.queues.state
            if state not in self._plans:
                if len(self._plans) == _STATES:
                    self._plans.clear()
                self._plans[state] = _plan(self, state, Findings(checks.off))
            plan = self._plans[state]
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
            plan.leave(g, last + (step < 0), self, log)
        if step >= 0:
            run = self.blocks[last].parts[0]
            run.by_numpy(g, checks, 0, step)
            run.execute(g, checks, step + 1)
        return last

    @property
    def useless(self) -> bool:
        """Whether waves leave it early more often than not."""
        return self.left > _OFTEN and 2 * self.left > self.entered


class _Plan:
    """What a trace does to the wait counters, up to each of its blocks; see :class:`runs.Plan`.

    rows: how many the log has.
    """

    def __init__(self, trace: Trace, behind: list[waits.Queues]):
        self._behind = behind
        self._rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._changes: dict[int, list] = {}
        self.array = (ctypes.c_int32 * len(trace.ops))(*[-1] * len(trace.ops))
        self.kept, self.rows = ctypes.addressof(self.array), 0
        for queues in behind:
            for touched in queues.touched:
                for old, place in touched:
                    if old is None and place not in self._rows:
                        self._rows[place] = self._of(trace, *place)

    def _of(self, trace: Trace, number: int, step: int) -> list[tuple[int, int]]:
        run = trace.blocks[number].parts[0]
        found = []
        for op in range(run.starts[step], run.starts[step + 1]):
            at = trace.starts[number] + op
            self.array[at] = self.rows
            found.append((at, self.rows))
            self.rows += 1
        return found

    def leave(self, g: Waves, count: int, trace: Trace, log) -> None:
        """Leave the wait counters as they are behind so many blocks."""
        queues, end = g.queues, self._behind[count]
        queues.state = end.state
        if count not in self._changes:
            self._changes[count] = [
                ([i for i, _ in touched if i is not None],
                 [self._rows[place] for i, place in touched if i is None])
                for touched in end.touched
            ]  # fmt: skip
        memories, ops, tags = trace.session.memories, trace.ops, g.tags
        for number, (left, new) in enumerate(self._changes[count]):
            old = queues.touched[number]
            if new or len(left) < len(old):
                queues.touched[number] = [old[i] for i in left] + [
                    tuple([Logged(memories, log, row, tags, ops[op]) for op, row in some])
                    for some in new
                ]


def _plan(trace: Trace, state: waits.State, checks: Findings) -> _Plan | None:
    """Plan a trace; return None if a wait is missing: then the blocks find it."""
    places = [[(i, None) for i in range(len(queue))] for queue in state.queues]
    ghost: Any = SimpleNamespace(queues=waits.Queues(state, places))
    behind = [waits.Queues(state, list(places))]
    try:
        for number, block in enumerate(trace.blocks):
            for i, step in enumerate(block.steps):
                step.check(ghost, checks)
                step.issue(ghost, (None, (number, i)))
            behind.append(waits.Queues(ghost.queues.state, list(ghost.queues.touched)))
    except Trap:
        return None
    return _Plan(trace, behind)


def _guard(block, following: int) -> native.COp:
    """Make an operation that stops C where not all waves go from the block to the following one."""
    kind, register, jumps = _ASKS[block.end.name]
    guard = native.COp(form=native.SHAPES["guard"])
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
    return all(not isinstance(part, Run) and part.known.ops == [] for part in block.parts)


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

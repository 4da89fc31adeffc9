# SPDX-License-Identifier: BSD-3-Clause
"""The scheduler. It selects the waves that proceed when waves diverge, rejoin or wait."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import Trap
from strix_emulate.memory import waits
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.tags import make_tags
from strix_emulate.memory.waves import Waves, reader, scalar_writer
from strix_emulate.native import traces
from strix_emulate.native.runs import Session, split_steps
from strix_emulate.run.meeting import Barriers, join, select
from strix_emulate.run.options import Options
from strix_emulate.run.program import BARRIERS, CALLS, Block
from strix_emulate.run.sleep import Sleepers

#: Number of polling iterations before the scheduler switches to other waves. Without the switch,
#: the wave that has a lock might never release it.
PATIENCE = 8
#: In a loop that does not poll, this number of iterations counts as one polling iteration, because
#: the loop may wait for other waves with plain loads.
_ITERATIONS_PER_POLL = 512
#: The limit for `_advance` if no other ready waves are ahead in the code. It is larger than every
#: address of code.
_NO_LIMIT = 1 << 62


@dataclass(slots=True)
class Event:
    """The reason why waves stopped.

    Attributes:
        name: "end", the mnemonic of a barrier, "yield", "part" if the waves diverged, or "meet" if
            they reached other waves or at least one of them sleeps.
        ready: The waves that can proceed. Empty for "end" and for barriers.
    """

    name: str
    ready: list[Waves]


class Scheduler:
    """Executes batches of workgroups of one launch.

    Attributes:
        blocks: Basic blocks by address.
        code: Address of the kernel's first instruction.
        total: Number of workgroups of the launch.
        resident: Number of workgroups that run at a time.
        deadline: Value of time.monotonic() at which the launch counts as hung.
        executed: Wave-instructions so far.
        last_control: The control instruction of the last block, or None if it has none.
        service: Function that answers the kernel's hostcalls while waves wait for them, or None.
    """

    def __init__(
        self,
        options: Options,
        arena: Arena,
        findings: Findings | None,
        code: int,
    ):
        self._options = options
        self._arena = arena
        self._findings = findings
        self.code = code
        self.blocks: dict[int, Block] = {}
        self.total = 0
        self.resident = 0
        self.executed = 0
        self.deadline = time.monotonic() + options.seconds
        self.last_control: Instruction | None = None
        self.service: Callable[[], None] | None = None
        self._session: Session | None = None
        self._sleepers = Sleepers((), is_closed=False)
        self._uses_traces = False
        self._is_alone = False

    def attach(
        self,
        blocks: dict[int, Block],
        session: Session | None,
        polls: bool,
    ) -> None:
        """Set the blocks of a launch, its session in C, and whether the kernel may poll."""
        self.blocks = blocks
        self._session = session
        # A trace counts its blocks only after they have been executed. If waves may poll, or run
        # one at a time, each block must be counted when it is entered.
        self._uses_traces = session is not None and not polls and self._options.lockstep

    def detach(self) -> None:
        """Release the launch's session."""
        self._session = None

    def run_batch(
        self,
        start: Waves,
        waves: int,
        sleepers: Sleepers,
    ) -> None:
        """Execute some workgroups.

        Args:
            start: Their waves.
            waves: Waves of a workgroup.
            sleepers: Holds the waves that sleep. At the start no wave sleeps.

        Raises:
            Trap: The kernel did something forbidden or unsupported, or hangs.
        """
        self._sleepers = sleepers
        barriers = Barriers(
            start,
            waves,
            self._arena,
            self._findings,
            is_grid=self._options.cooperative and start.n == self.total * waves,
            on_clear=self.update_shadows,
        )
        ready = self._split([start])
        while ready or sleepers or not barriers.empty:
            if not ready:
                ready = self._split(self._resume(barriers))
                continue
            g = self._pop_next(ready)
            limit = min((x.pc for x in ready if x.pc > g.pc), default=_NO_LIMIT)
            self._is_alone = not ready and not sleepers
            event = self._advance(g, limit)
            if event.name == "end":
                if self._arena.doubts is not None:
                    self._arena.doubts.note_end(g)
                ready += self._split(barriers.end(g))
            elif event.name == "s_barrier":
                ready += self._split(barriers.arrive(g))
            elif event.name == "ds_gws_barrier":
                ready += self._split(barriers.arrive_for_grid(g))
            else:
                ready += event.ready
                if event.name == "yield":
                    ready += self._split(sleepers.wake_changed())

    def _pop_next(self, ready: list[Waves]) -> Waves:
        """Remove from `ready` the waves to execute next, and return them.

        Of the waves that have yielded least often, these are the ones with the lowest address, so
        that they catch up with the others. Waves that yield may be waiting for other waves.
        """
        first = min(range(len(ready)), key=lambda i: (ready[i].yields, ready[i].pc))
        g = ready.pop(first)
        if self._options.lockstep:
            for other in [x for x in ready if x.pc == g.pc]:
                ready.remove(other)
                g = join(g, other)
        return g

    def _resume(self, barriers: Barriers) -> list[Waves]:
        """Return the waves that continue when all waves sleep or wait at barriers."""
        if not self._sleepers:
            return barriers.pass_stuck(self.last_control)
        if self.service:
            self.service()
        return self._sleepers.wake(self._deadlock)

    def update_shadows(self) -> None:
        """Pass the new addresses of cleared shadows to the C library."""
        if self._session:
            self._session.update_shadows()

    def _split(self, sets: list[Waves]) -> list[Waves]:
        """Split sets of waves into single waves, unless the launch is in lockstep."""
        if self._options.lockstep:
            return sets
        single = []
        for g in sets:
            single += [select(g, np.arange(g.n) == i) for i in range(g.n)]
        return single

    def _advance(self, g: Waves, limit: int) -> Event:
        """Execute blocks until the waves diverge, end, yield, sleep, or reach a barrier or `limit`.

        `limit` is the lowest address of other waves ahead of these.
        """
        if g.tags is None:
            g.tags = make_tags(g.workgroup, g.epoch, g.wave)
        while True:
            block = self.blocks[g.pc]
            last = self._run_trace(block, g, limit) if self._uses_traces else None
            if last is None:
                block.entered += g.n
                self.executed += g.n * block.length
            self._check_budget(g)
            if last is None:
                self._execute(block, g)
            else:
                block = last
            self.last_control = block.end
            g.has_polled |= block.polls
            event = self._leave(block, g)
            if event is None and g.pc >= limit:
                return Event("meet", [g])
            if event is None and g.pc <= block.start:
                event = self._end_iteration(g)
            if event is not None:
                return event

    def _execute(self, block: Block, g: Waves) -> None:
        if block.parts is None:
            block.parts = split_steps(block.steps, self._session)
        for part in block.parts:
            part.execute(g, self._findings)

    def _leave(self, block: Block, g: Waves) -> Event | None:
        """Set the address of the next block, or return the event that stops the waves."""
        self._check_end(block, g)
        end = block.end
        if end is None:
            g.pc = block.next
        elif end.name == "s_endpgm":
            return Event("end", [])
        elif end.name in BARRIERS:
            g.pc = block.next
            if not self._options.barriers_wait:
                waits.at_barrier(g)
            return Event(end.name, [])
        elif end.name in CALLS:
            parts = self._call(end, g)
            if len(parts) > 1:
                return self._part(block, parts)
        elif block.condition is None:
            g.pc = block.taken
        else:
            return self._branch(block, block.condition(g), g)
        return None

    def _check_end(self, block: Block, g: Waves) -> None:
        """Report a missing wait, if `block.end` uses a register that has yet to be loaded."""
        findings = self._findings
        if not findings or not block.end_registers & g.queues.state.pending:
            return
        findings.instruction = block.end
        waits.check_pending(g, block.end_registers, 0, -1, findings)

    def _branch(
        self,
        block: Block,
        jump: np.ndarray,
        g: Waves,
    ) -> Event | None:
        if 0 < np.count_nonzero(jump) < g.n:
            jumping = select(g, jump)
            falling = select(g, ~jump)
            jumping.pc = block.taken
            falling.pc = block.next
            return self._part(block, [jumping, falling])
        block.went = block.taken if jump[0] else block.next
        g.pc = block.went
        return None

    def _part(self, block: Block, parts: list[Waves]) -> Event:
        """Return the event of waves that diverged at the end of a block."""
        ready = []
        for g in parts:
            event = self._end_iteration(g) if g.pc <= block.start else None
            ready += [g] if event is None else event.ready
        return Event("part", ready)

    def _end_iteration(self, g: Waves) -> Event | None:
        """End an iteration of a loop. Waves that wait for other waves are put to sleep.

        Returns:
            None if all these waves continue. Otherwise an event with the waves that stay awake.
        """
        awake = None
        if g.has_polled:
            if self.service:
                self.service()
            awake = self._sleepers.put_to_sleep(g)
        g.iterations += _ITERATIONS_PER_POLL if g.has_polled else 1
        g.has_polled = False
        if awake is not None:
            return Event("meet", awake)
        if g.iterations < PATIENCE * _ITERATIONS_PER_POLL or self._is_alone:
            return None
        g.iterations = 0
        g.yields += 1
        return Event("yield", [g])

    def _run_trace(
        self,
        block: Block,
        g: Waves,
        limit: int,
    ) -> Block | None:
        """Execute several blocks at once in C if possible. Return the last one, or None."""
        trace = traces.find(self.blocks, block, self._session)
        if trace is None or trace.highest >= limit:
            return None
        if self.executed + g.n * trace.length > self._options.budget:
            return None
        last = trace.execute(g, self._findings)
        for entered in trace.blocks[: last + 1]:
            entered.entered += g.n
            self.executed += g.n * entered.length
        return trace.blocks[last] if last >= 0 else None

    def _call(self, ins: Instruction, g: Waves) -> list[Waves]:
        """Execute S_SETPC, S_SWAPPC, or S_CALL. Return one set of waves for each destination."""
        following = ins.address + ins.size
        if ins.name == "s_call_b64":
            places = np.full(g.n, following + 4 * int(ins.operands[1].value))
        else:
            target = reader(ins.operands[-1], "u64")(g).ravel()
            places = (target - np.uint64(self.code)).view(np.int64)
        if ins.name != "s_setpc_b64":
            write = scalar_writer(ins.operands[0], "u64")
            write(g, np.full((g.n, 1), self.code + following, np.uint64))
        parts = []
        for place in np.unique(places):
            part = select(g, places == place)
            part.pc = int(place)
            parts.append(part)
        if len(parts) == 1:
            g.tags = make_tags(g.workgroup, g.epoch, g.wave)
        return parts

    def _check_budget(self, g: Waves) -> None:
        """Raise Trap if the waves exceed the budget or the time limit."""
        if self.executed > self._options.budget:
            raise self._hung(f"{self._options.budget} wave-instructions", g)
        if time.monotonic() > self.deadline:
            raise self._hung(f"{self._options.seconds:g} seconds", g)

    def _hung(self, limit: str, g: Waves) -> Trap:
        if self._sleepers.idle:
            limit += ", and all waves wait for memory that none of them changes"
        return Trap("budget", f"more than {limit}{self._describe_residents()}; {_place(g)}")

    def _deadlock(self, g: Waves, count: int) -> Trap:
        message = f"{count} waves wait for memory that no wave changes any more"
        return Trap("budget", f"{message}{self._describe_residents()}; {_place(g)}")

    def _describe_residents(self) -> str:
        if self.resident >= self.total:
            return ""
        residents = f"{self.resident} of {self.total} workgroups run at a time"
        return f" ({residents}: a workgroup that waits for a later one never ends)"


def _place(g: Waves) -> str:
    return f"wave {int(g.wave[0])} of workgroup {int(g.workgroup[0])} is at {g.pc:#x}"

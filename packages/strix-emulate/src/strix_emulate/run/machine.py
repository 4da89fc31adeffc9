# SPDX-License-Identifier: BSD-3-Clause
"""Runs a grid of workgroups: which waves proceed, diverge, rejoin, and wait for each other."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strix_emulate.code.decode import EXEC, Instruction
from strix_emulate.code.hidden import missing
from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap
from strix_emulate.memory import waits
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.doubts import Doubts
from strix_emulate.memory.findings import CHECKS, Findings, Note, where
from strix_emulate.memory.happens_before import WORKGROUP, tags
from strix_emulate.memory.scratch import Scratch
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import LANES, SCALARS, Waves, pack, reader, scalar_writer
from strix_emulate.native import library as native
from strix_emulate.native import traces
from strix_emulate.native.runs import Session, parts
from strix_emulate.run import parallel
from strix_emulate.run.meeting import Barriers, join, select
from strix_emulate.run.program import BARRIERS, CALLS, Block, Program
from strix_emulate.run.sleep import Sleepers

#: Fills registers, LDS and scratch: a NaN in float32, and in both halves as float16.
POISON = 0x7FB5_7FB5


#: How often waves go round a loop in which they ask for memory that others change, before it is
#: the turn of others: a lock would never be released.
PATIENCE = 8
#: So many rounds of any other loop count as one of those: it may wait by plain loads.
_ASKING = 512


#: Waves at a time. In C as many as take so many bytes of a cache.
_BATCH, _FEWEST_IN_C, _MOST_IN_C, _CACHE = 128, 32, 512, 1 << 20


@dataclass(frozen=True)
class Options:
    """How a launch is run.

    checks: find races, missing waits and reads of what nothing wrote; off: those that are not made
    (:data:`findings.CHECKS`); lenient: what they find is noted, and the launch goes on; noted:
    so is what these find.
    batch: waves at a time, at most, but at least one workgroup; by default 128, or for C, if no
    wave waits for others, 32 to 512, so that a cache holds their registers. lockstep: waves at the
    same instruction are one operation; or, the naive way, each wave runs alone. budget:
    wave-instructions before a kernel counts as hung; seconds: of the clock. native: in C, where
    libstrix-emulate is installed. cores: how many may be used, where workgroups do not wait for
    each other and there is enough to do (:mod:`run.parallel`). cooperative: workgroups
    may wait for each other. drains: a barrier waits for what its waves have outstanding, as if the
    code had that s_waitcnt.
    """

    checks: bool = True
    batch: int | None = None
    lockstep: bool = True
    budget: int = 200_000_000
    seconds: float = 1800
    poison: int = POISON
    native: bool = True
    cores: int = 1
    off: frozenset[str] = frozenset()
    lenient: bool = False
    noted: frozenset[str] = frozenset()
    cooperative: bool = False
    drains: bool = False


@dataclass
class Outcome:
    """executed: wave-instructions; blocks: with how many waves entered each; notes: what checks
    found, where that did not end the launch.

    seconds: of CPU time in other processes; cores, one_core: see :class:`launches.Launch`.
    """

    executed: int
    blocks: dict[int, Block]
    seconds: float = 0.0
    cores: int = 1
    one_core: str = ""
    notes: list[Note] = field(default_factory=list)


class Machine:
    """One launch: kernel, its arguments' address, grid and block as (x, y, z)."""

    def __init__(
        self, kernel: Kernel, program: Program, arena: Arena, options: Options, lds: int,
        code: int = 0, packet: int = 0, queue: int = 0,
    ):  # fmt: skip
        """Take code, packet, queue: addresses of the kernel's code, dispatch packet and queue."""
        self.kernel, self.arena, self.options, self.lds = kernel, arena, options, lds
        self.code, self.pointers = code, {"dispatch": packet, "queue": queue}
        self.program = program
        self.executed = 0
        self.deadline = time.monotonic() + options.seconds
        self.where: Instruction | None = None
        #: what the host does while waves wait for it
        self.service: Callable[[], None] | None = None
        told = options.off, options.lenient, options.noted
        self.findings = Findings(*told) if options.checks else None

    def run(self, kernarg: int, grid: tuple[int, ...], block: tuple[int, ...]) -> Outcome:
        """Execute all workgroups. Raise Trap, with the place in its message."""
        threads = block[0] * block[1] * block[2]
        waves, lanes = -(-threads // self.kernel.width), self.kernel.width
        total = self.total = grid[0] * grid[1] * grid[2]
        library = native.loaded() if self.options.native else None
        first, groups = self._at_once(waves, bool(library and not self.program.polls))
        self.resident = groups
        spaces = self._spaces(groups, waves * lanes)
        self.session = None
        self._doubt(waves)
        if library:
            lanes = groups * waves * lanes
            self.session = Session(library, spaces, lanes, self._registers(), self.options.checks)
        # where waves let others go first, or run one by one, each block counts
        self.traces = bool(library) and not self.program.polls and self.options.lockstep
        blocks = self.program.blocks(self.kernel, spaces, self.session)

        def run_batch(first: int, end: int) -> None:
            """Run workgroups from the first up to the end."""
            self._clear(spaces)
            start = self._start(np.arange(first, end), waves, kernarg, grid, block)
            try:
                self._run_batch(blocks, start, waves)
                if self.arena.doubts:
                    self.arena.doubts.judge()
            except Trap as trap:
                trap.hint = trap.hint or missing(self.kernel, trap)
                if not trap.where:
                    here = where(trap.instruction or self.where)
                    trap.where = f"{self.kernel.name} at {here}: "
                raise

        outcome = Outcome(0, blocks)
        try:
            with np.errstate(all="ignore"):
                run_batch(0, first)
                if self.options.cores == 1 or not self._spread(run_batch, first, total, outcome):
                    for start in range(first, total, groups):
                        run_batch(start, min(start + groups, total))
        finally:
            self._release(spaces)
        if self.arena.doubts:
            self.arena.doubts.note()
        outcome.executed = self.executed
        outcome.notes = self.findings.notes if self.findings else []
        return outcome

    def _release(self, spaces: Spaces) -> None:
        """Release memory that the program or this machine would keep after the launch."""
        self.program.release()
        self.session = None
        for memory in (self.arena, spaces.lds, spaces.scratch):
            memory.leave_tags()

    def _doubt(self, waves: int) -> None:
        """Judge races by what loads are of use, where all of the code is known."""
        uses = self.program.uses
        if self.findings and uses.complete and not self.program.partial:
            ranges = self.arena.ranges()
            self.arena.doubts = Doubts(uses, self.findings, ranges, waves, self.total)

    def _clear(self, spaces: Spaces) -> None:
        """Prepare memory for the next workgroups."""
        for memory in (spaces.lds, spaces.scratch):
            if self.executed:
                memory.clear_tags_in_place()
            memory.views[4][:] = self.options.poison
        memories = (self.arena, spaces.lds, spaces.scratch)
        self.sleepers = Sleepers(memories, lonely=not self.arena.peers)
        self._shadows_anew()

    def _at_once(self, waves: int, in_c: bool) -> tuple[int, int]:
        """Return how many workgroups of so many waves run at a time: the first ones, the others.

        The first ones tell whether the others are worth several cores.
        """
        least, most = (_FEWEST_IN_C, _MOST_IN_C) if in_c else (_BATCH, _BATCH)
        wave = (4 * self._registers() + self.kernel.scratch) * LANES + self.lds // waves
        most = max(least, min(most, _CACHE // wave))
        least, most = (
            max(1, min(self.total, (self.options.batch or x * LANES // self.kernel.width) // waves))
            for x in (least, most)
        )
        return most if self.options.cores == 1 else least, most

    def _spaces(self, groups: int, threads: int) -> Spaces:
        """Make LDS and scratch for workgroups of so many lanes; all memory has the same checks."""
        cell, checks = self.program.cell, self.options.checks
        stride, scratch = (self.lds + 15) // 16 * 16, self.kernel.scratch
        spaces = Spaces(
            self.arena,
            Memory("LDS", groups * stride, cell, checks, checks), self.lds, stride,
            Scratch("scratch", groups * threads * scratch, cell, checks, checks), scratch,
            self.code, lambda: self.executed, self.kernel.target, self.program.polls,
        )  # fmt: skip
        spaces.lds.order = self.arena.order
        if self.arena.order is not None:
            self.arena.order.one_cache = not self.kernel.two_units
            if self.program.orders:
                self.arena.know(self.program.instructions)
        for memory in (self.arena, spaces.lds, spaces.scratch):
            memory.findings = self.findings or Findings(frozenset(CHECKS))
        return spaces

    def _spread(self, batch: Callable, first: int, total: int, outcome: Outcome) -> bool:
        """Run workgroups from the first on on several cores; False: they are still to be run."""
        outcome.one_core = parallel.one_core(self.program.communicates)
        left = self.executed / first * (total - first)
        if self.arena.doubts or outcome.one_core or not parallel.worth(left, self.arena):
            return False
        size = min(first, -(-(total - first) // self.options.cores))
        starts = range(first, total, size)
        blocks, before = outcome.blocks, self.executed

        def execute(share: list[int]) -> parallel.Answer:
            if self.findings:
                # what one finds is noted by one core, in order
                self.findings.lenient, self.findings.noted = False, frozenset()
            if self.arena.doubts is not None:
                self.arena.doubts.refused = True
            entered = {start: block.entered for start, block in blocks.items()}
            for start in share:
                batch(start, min(start + size, total))
            more = {at: block.entered - entered.get(at, 0) for at, block in blocks.items()}
            return parallel.Answer(self.executed - before, more, time.process_time())

        shares = parallel.deal(starts, self.options.cores)
        since = (first + 1) << WORKGROUP
        answers = parallel.split(shares, execute, self.arena, since, self.options.budget - before)
        if answers is None:
            return False
        outcome.cores = len(answers)
        for answer in answers:
            self.executed += answer.executed
            outcome.seconds += answer.seconds
            for at, waves in answer.entered.items():
                blocks[at].entered += waves
        return True

    def _registers(self) -> int:
        return max(self.kernel.vgprs, 8)

    def _start(self, numbers, waves: int, kernarg: int, grid, block) -> Waves:
        """Make waves with initial registers: LLVM's guide, "Initial Kernel Execution State"."""
        kernel, n = self.kernel, len(numbers) * waves
        workgroup, wave = np.repeat(numbers, waves), np.tile(np.arange(waves), len(numbers))
        V = np.full((self._registers(), n, kernel.width), self.options.poison, np.uint32)
        S = np.full((SCALARS, n, 1), self.options.poison, np.uint32)
        thread = np.arange(waves * kernel.width).reshape(waves, kernel.width)
        x, y, z = thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1])
        V[0].reshape(len(numbers), waves, -1)[:] = x | y << 10 | z << 20
        alive = pack(thread < block[0] * block[1] * block[2])
        S[EXEC + 1] = 0
        S[EXEC : EXEC + kernel.width // LANES, :, 0] = np.tile(alive, (len(numbers), 1)).T
        at = 0
        for name, count in kernel.user_sgprs:
            if name == "kernarg":
                S[at], S[at + 1] = kernarg & 0xFFFFFFFF, kernarg >> 32
            elif pointer := self.pointers.get(name):
                S[at], S[at + 1] = pointer & 0xFFFFFFFF, pointer >> 32
            elif name == "dispatch_id":
                S[at], S[at + 1] = 0, 0
            elif name != "private_size":
                raise Trap("unknown", f"the kernel wants `{name}` in its first scalar registers")
            at += count
        at = max(at, kernel.user_count)
        ids = (
            workgroup % grid[0],
            workgroup // grid[0] % grid[1],
            workgroup // (grid[0] * grid[1]),
        )
        for wanted, number in zip(kernel.workgroup_ids, ids, strict=True):
            if wanted:
                S[at, :, 0] = number
                at += 1
        identity = np.zeros((8, n), np.int64)
        identity[:4] = workgroup, wave, np.arange(n), np.repeat(np.arange(len(numbers)), waves)
        started = Waves(V, S, np.zeros((n, 1), bool), 0, identity, waits.Queues())
        started.scalars = max(at, self.program.scalars)
        return started

    def _run_batch(self, blocks: dict[int, Block], start: Waves, waves: int) -> None:
        whole = self.options.cooperative and start.n == self.total * waves
        barriers = Barriers(start, waves, self.arena, self.findings, whole, self._shadows_anew)
        ready = self._scheduled(start)
        sleepers = self.sleepers
        while ready or sleepers or not barriers.empty:
            if not ready:
                ready = self._one_by_one(self._next(barriers))
                continue
            # the waves that are farthest behind go on, so that the others can meet them, unless
            # they only wait for what another one is to do
            g = ready.pop(min(range(len(ready)), key=lambda i: (ready[i].turn, ready[i].pc)))
            for other in [x for x in ready if x.pc == g.pc and self.options.lockstep]:
                ready.remove(other)
                g = join(g, other)
            limit = min((x.pc for x in ready if x.pc > g.pc), default=1 << 62)
            self.alone = not ready and not sleepers
            event, gone = self._advance(blocks, g, limit)
            if event == "end":
                if self.arena.doubts is not None:
                    self.arena.doubts.ended(g)
                ready += self._one_by_one(barriers.end(g))
            elif event == "s_barrier":
                ready += self._one_by_one(barriers.arrive(g))
            elif event == "ds_gws_barrier":
                ready += self._one_by_one(barriers.arrive_for_grid(g))
            elif event == "yield":
                ready += gone
                ready += self._one_by_one(sleepers.eligible())
            else:
                ready += gone

    def _next(self, barriers: Barriers) -> list[Waves]:
        """Return the waves that go on where all sleep or stand at barriers."""
        if not self.sleepers:
            return barriers.stuck(self.where)
        if self.service:
            self.service()
        return self.sleepers.wake(self._deadlock)

    def _shadows_anew(self) -> None:
        if self.session:
            self.session.start()

    def _one_by_one(self, sets: list[Waves]) -> list[Waves]:
        return [part for g in sets for part in self._scheduled(g)]

    def _scheduled(self, g: Waves) -> list[Waves]:
        """Split waves that stand together as they run: together, or one by one."""
        if self.options.lockstep:
            return [g]
        return [select(g, np.arange(g.n) == i) for i in range(g.n)]

    def _advance(self, blocks: dict[int, Block], g: Waves, limit: int) -> tuple[str, list[Waves]]:
        """Run blocks until the waves part, end, reach a barrier, or reach waves that are ahead."""
        if g.tags is None:
            g.tags = tags(g.workgroup, g.epoch, g.wave)
        while True:
            block = blocks[g.pc]
            traced = self._trace(blocks, block, g, limit) if self.traces else None
            if traced is None:
                block.entered += g.n
                self.executed += g.n * (len(block.steps) + 1)
            self._stop_hung(g)
            if traced is None:
                self._execute(block, g)
            block = traced or block
            self.where = block.end
            g.asks |= block.polls
            gone = self._leave(block, g)
            if gone is None and g.pc >= limit:
                return "meet", [g]
            if gone is None and g.pc <= block.start:
                gone = self._end_turn(g)
            if gone is not None:
                return gone

    def _execute(self, block: Block, g: Waves) -> None:
        if block.parts is None:
            block.parts = parts(block.steps, self.session)
        for part in block.parts:
            part.execute(g, self.findings)

    def _leave(self, block: Block, g: Waves) -> tuple[str, list[Waves]] | None:
        """Go to the next block, or return what happened instead."""
        end = block.end
        if end is None:
            g.pc = block.next
        elif end.name == "s_endpgm":
            return "end", []
        elif end.name in BARRIERS:
            g.pc = block.next
            if not self.options.drains:
                waits.at_barrier(g)
            return end.name, []
        elif end.name in CALLS:
            gone = self._call(end, g)
            return self._end_turns(block, gone) if len(gone) > 1 else None
        elif block.condition is None:
            g.pc = block.taken
        else:
            jump = block.condition(g)
            if 0 < np.count_nonzero(jump) < g.n:
                gone = [select(g, jump), select(g, ~jump)]
                gone[0].pc, gone[1].pc = block.taken, block.next
                return self._end_turns(block, gone)
            g.pc = block.went = block.taken if jump[0] else block.next
        return None

    def _end_turns(self, block: Block, gone: list[Waves]) -> tuple[str, list[Waves]]:
        """Return the waves that are ready after some have parted behind the block."""
        ready = []
        for g in gone:
            turn = self._end_turn(g) if g.pc <= block.start else None
            ready += [g] if turn is None else turn[1]
        return "part", ready

    def _end_turn(self, g: Waves) -> tuple[str, list[Waves]] | None:
        """Return, at the end of a loop's turn, the waves that are ready if others go first.

        None: they go on. Those that wait for others sleep.
        """
        if g.asks and self.service:
            self.service()
        left = self.sleepers.look(g) if g.asks else None
        g.asks, g.polls = False, g.polls + (_ASKING if g.asks else 1)
        if left is not None:
            return "meet", left
        if g.polls < PATIENCE * _ASKING or self.alone:
            return None
        g.polls, g.turn = 0, g.turn + 1
        return "yield", [g]

    def _trace(self, blocks: dict[int, Block], block: Block, g: Waves, limit: int) -> Block | None:
        """Execute several blocks at once in C, if they can be; return the last one."""
        trace = traces.find(blocks, block, self.session)
        if trace is None or trace.highest >= limit:
            return None
        if self.executed + g.n * trace.length > self.options.budget:
            return None
        last = trace.execute(g, self.findings)
        for done in trace.blocks[: last + 1]:
            done.entered += g.n
            self.executed += g.n * (len(done.steps) + 1)
        return trace.blocks[last] if last >= 0 else None

    def _stop_hung(self, g: Waves) -> None:
        """Trap when the budget or the time is spent."""
        if self.executed > self.options.budget:
            raise self._hung(f"{self.options.budget} wave-instructions", g)
        if time.monotonic() > self.deadline:
            raise self._hung(f"{self.options.seconds:g} seconds", g)

    def _hung(self, what: str, g: Waves) -> Trap:
        if self.sleepers.idle:
            what += ", and all waves wait for memory that none of them changes"
        return Trap("budget", f"more than {what}{self._residents()}; {_place(g)}")

    def _deadlock(self, g: Waves, count: int) -> Trap:
        what = f"{count} waves wait for memory that no wave changes any more"
        return Trap("budget", f"{what}{self._residents()}; {_place(g)}")

    def _residents(self) -> str:
        if self.resident >= self.total:
            return ""
        few = f"{self.resident} of {self.total} workgroups run at a time"
        return f" ({few}: one that waits for a later one waits for ever)"

    def _call(self, ins: Instruction, g: Waves) -> list[Waves]:
        """Execute S_SETPC, S_SWAPPC, S_CALL; return waves by where they go."""
        behind = ins.address + ins.size
        if ins.name == "s_call_b64":
            places = np.full(g.n, behind + 4 * int(ins.operands[1].value))
        else:
            target = reader(ins.operands[-1], "u64")(g).ravel()
            places = (target - np.uint64(self.code)).view(np.int64)
        if ins.name != "s_setpc_b64":
            write = scalar_writer(ins.operands[0], "u64")
            write(g, np.full((g.n, 1), self.code + behind, np.uint64))
        gone = []
        for place in np.unique(places):
            part = select(g, places == place)
            part.pc = int(place)
            gone.append(part)
        if len(gone) == 1:
            g.tags = tags(g.workgroup, g.epoch, g.wave)
        return gone


def _place(g: Waves) -> str:
    return f"wave {int(g.wave[0])} of workgroup {int(g.workgroup[0])} is at {g.pc:#x}"

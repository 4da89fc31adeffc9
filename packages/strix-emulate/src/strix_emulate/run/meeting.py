# SPDX-License-Identifier: BSD-3-Clause
"""Where waves part and meet: sets of waves, barriers of a workgroup, barriers of the grid."""

from collections.abc import Callable
from functools import reduce

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.memory import polls, waits
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.happens_before import after_barrier, tags
from strix_emulate.memory.waves import Waves, take_scalars


class Barriers:
    """Waves that wait for others of their workgroups, or for all of the grid."""

    def __init__(
        self, start: Waves, waves: int, arena: Arena, findings: Findings | None, whole: bool,
        cleared: Callable,
    ):  # fmt: skip
        """Take start: all waves; waves: of a workgroup; whole: they are those of the whole grid.
        cleared: called after the race shadow of global memory began anew."""
        self._first = int(start.workgroup[0])
        self._alive = np.full(int(start.workgroup[-1]) - self._first + 1, waves)
        self._all_alive = start.n
        self._arena, self._findings, self._whole = arena, findings, whole
        self._cleared = cleared
        #: by the address behind the barrier
        self._waiting: dict[int, _Gathered] = {}
        self._for_grid: list[Waves] = []

    @property
    def empty(self) -> bool:
        """Whether no wave waits."""
        return not (self._waiting or self._for_grid)

    def end(self, g: Waves) -> list[Waves]:
        """Note waves that have ended; return those for whom that is enough to go on."""
        np.subtract.at(self._alive, g.workgroup - self._first, 1)
        self._all_alive -= g.n
        return self._pass()

    def arrive(self, g: Waves) -> list[Waves]:
        """Let waves arrive at an S_BARRIER; return those that go on."""
        if g.n == self._all_alive:
            self._go_on(g)
            return [g]
        if g.pc not in self._waiting:
            self._waiting[g.pc] = _Gathered(self._first, len(self._alive))
        self._waiting[g.pc].add(g)
        return self._pass()

    def arrive_for_grid(self, g: Waves) -> list[Waves]:
        """Let waves arrive at a DS_GWS_BARRIER, a cooperative launch's; return those that go on."""
        if not self._whole:
            raise Trap(
                "unknown", "grid.sync() in a launch that is not cooperative, or of too many waves"
            )
        for other in [x for x in self._for_grid if x.pc == g.pc]:
            self._for_grid.remove(other)
            g = join(g, other)
        self._for_grid.append(g)
        return self._pass()

    def stuck(self, where) -> list[Waves]:
        """Let waves at different barriers go on if no other can, a finding; return those that do.
        The hardware does not tell one barrier from another. where: the last instruction."""
        sets = [gathered.all() for gathered in self._waiting.values()] + self._for_grid
        g = sets[0]
        places = sorted({hex(x.pc) for x in sets})
        text = (
            f"wave {int(g.wave[0])} of workgroup {int(g.workgroup[0])} waits at a barrier "
            f"(before {', '.join(places)}) that not all living waves of its "
            f"{'grid' if self._for_grid else 'workgroup'} reach"
        )
        if self._for_grid or self._findings is None:
            raise Trap("barrier", text)
        self._findings.at = where
        self._findings.found("barrier", text)
        return self._pass(same=False)

    def _pass(self, same: bool = True) -> list[Waves]:
        """Return waves that go on; keep the others.

        "If some waves in the threadgroup have already terminated, this waits on only the surviving
        waves" (ISA, S_BARRIER). same: all have to stand at the same barrier, as HIP asks.
        """
        same &= self._findings is not None and self._findings.on("barrier")
        counts = [gathered.count for gathered in self._waiting.values()]
        if not same and counts:
            counts = [sum(counts)] * len(counts)
        complete = [count == self._alive for count in counts]
        passed = []
        for gathered, groups in zip(list(self._waiting.values()), complete, strict=True):
            passed += gathered.take(groups)
            if not gathered.count.any():
                del self._waiting[gathered.pc]
        for g in passed:
            self._go_on(g)
        if self._for_grid and sum(g.n for g in self._for_grid) == self._alive.sum():
            # what came before it is ordered with all that comes after it
            self._arena.clear_tags()
            self._cleared()
            for g in self._for_grid:
                self._go_on(g)
            passed, self._for_grid = passed + self._for_grid, []
        return passed

    def _go_on(self, g: Waves) -> None:
        g.epoch[:] = after_barrier(g.epoch)
        g.tags = tags(g.workgroup, g.epoch, g.wave)
        if self._arena.order is not None:
            self._arena.order.barrier(g.tags)


class _Gathered:
    """Waves at one barrier. Those of one workgroup are copied when they go on, the others stay.

    Attributes:
        pc: The address behind the barrier.
        count: By workgroup, how many waves wait.
    """

    def __init__(self, first: int, groups: int):
        """Take first: the first workgroup's number; groups: how many there are."""
        self._first = first
        self.pc = -1
        self.count = np.zeros(groups, np.int64)
        #: with which of their waves still wait
        self._sets: list[tuple[Waves, np.ndarray]] = []

    def add(self, g: Waves) -> None:
        """Add waves that arrive."""
        self.pc = g.pc
        self.count += np.bincount(g.workgroup - self._first, minlength=len(self.count))
        self._sets.append((g, np.ones(g.n, bool)))

    def all(self) -> Waves:
        """Return all waves that wait."""
        return reduce(join, [select(g, waiting) for g, waiting in self._sets])

    def take(self, groups: np.ndarray) -> list[Waves]:
        """Return the waves of these workgroups as one set, if there are any, and forget them."""
        if not (groups & (self.count > 0)).any():
            return []
        taken, left = [], []
        for g, waiting in self._sets:
            chosen = waiting & groups[g.workgroup - self._first]
            if chosen.any():
                taken.append(select(g, chosen))
                waiting &= ~chosen
            count = np.count_nonzero(waiting)
            if 0 < 2 * count < g.n:
                left.append((select(g, waiting), np.ones(count, bool)))
            elif count:
                left.append((g, waiting))
        self._sets = left
        self.count[groups] = 0
        return [reduce(join, taken)]


def select(g: Waves, chosen) -> Waves:
    """Select the waves for which `chosen` is True."""
    if chosen.all():
        g.tags = None
        return g
    index = np.flatnonzero(chosen)
    part = Waves(
        np.take(g.V, index, 1), take_scalars([g], index), g.scc[index], g.pc,
        np.take(g.identity, index, 1), waits.select(g.queues, index),
    )  # fmt: skip
    part.scalars = g.scalars
    part.turn, part.polls, part.asks = g.turn, g.polls, g.asks
    part.records, part.pause, part.skips, part.woken = g.records, g.pause, g.skips, g.woken
    if g.watch:
        part.watch = polls.select(g.watch, index, g.n)
    return part


def join(a: Waves, b: Waves) -> Waves:
    """Join two sets of waves at the same instruction to one, in the order of their numbers."""
    order = np.argsort(np.concatenate([a.slot, b.slot]), kind="stable")
    identity = np.concatenate([a.identity, b.identity], axis=1)
    queues = waits.join(a.queues, a.n, b.queues, b.n)
    joined = Waves(
        np.take(np.concatenate([a.V, b.V], axis=1), order, 1),
        take_scalars([a, b], order),
        np.concatenate([a.scc, b.scc])[order], a.pc, np.take(identity, order, 1),
        waits.select(queues, order),
    )  # fmt: skip
    joined.scalars = max(a.scalars, b.scalars)
    joined.turn, joined.polls = max(a.turn, b.turn), max(a.polls, b.polls)
    joined.asks = a.asks or b.asks
    joined.records = a.records or b.records
    joined.pause, joined.skips = max(a.pause, b.pause), min(a.skips, b.skips)
    joined.woken = a.woken or b.woken
    if a.watch or b.watch:
        rows = np.argsort(order)
        joined.watch = [seen.chosen(rows) for seen in a.watch]
        joined.watch += [seen.chosen(rows[a.n :]) for seen in b.watch]
    return joined

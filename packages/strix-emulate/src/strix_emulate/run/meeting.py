# SPDX-License-Identifier: BSD-3-Clause
"""Barriers of a workgroup and of the grid, and functions that split and join sets of waves."""

from collections.abc import Callable
from functools import reduce

import numpy as np

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import Trap
from strix_emulate.memory import polls, waits
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.tags import epoch_after_barrier, make_tags
from strix_emulate.memory.waves import Waves, take_scalars


class Barriers:
    """Waves that wait for others of their workgroups, or for all waves of the grid."""

    def __init__(
        self,
        start: Waves,
        waves: int,
        arena: Arena,
        findings: Findings | None,
        is_grid: bool,
        on_clear: Callable,
    ):
        """Begin with all waves running.

        Args:
            start: The waves.
            waves: Waves of a workgroup.
            arena: Global memory.
            findings: Receives findings, or None if nothing is checked.
            is_grid: Whether these are all waves of a cooperative launch.
            on_clear: Called after the shadow of global memory has been cleared.
        """
        self._first = int(start.workgroup[0])
        groups = int(start.workgroup[-1]) - self._first + 1
        self._alive = np.full(groups, waves)
        self._all_alive = start.n
        self._arena = arena
        self._findings = findings
        self._is_grid = is_grid
        self._on_clear = on_clear
        #: Waiting waves by the address of the instruction after their barrier.
        self._waiting: dict[int, _Gathered] = {}
        self._for_grid: list[Waves] = []

    @property
    def empty(self) -> bool:
        """Whether no wave waits."""
        return not (self._waiting or self._for_grid)

    def end(self, g: Waves) -> list[Waves]:
        """Remove waves that have ended. Return the waves that can continue as a result."""
        np.subtract.at(self._alive, g.workgroup - self._first, 1)
        self._all_alive -= g.n
        return self._pass()

    def arrive(self, g: Waves) -> list[Waves]:
        """Let waves arrive at an S_BARRIER. Return the waves that can continue."""
        if g.n == self._all_alive:
            self._go_on(g)
            return [g]
        if g.pc not in self._waiting:
            self._waiting[g.pc] = _Gathered(self._first, len(self._alive))
        self._waiting[g.pc].add(g)
        return self._pass()

    def arrive_for_grid(self, g: Waves) -> list[Waves]:
        """Let waves arrive at a grid barrier (DS_GWS_BARRIER). Return those that can continue."""
        if not self._is_grid:
            message = "grid.sync() in a launch that is not cooperative, or that has too many waves"
            raise Trap("unknown", message)
        for other in [x for x in self._for_grid if x.pc == g.pc]:
            self._for_grid.remove(other)
            g = join(g, other)
        self._for_grid.append(g)
        return self._pass()

    def pass_stuck(self, last_control: Instruction | None) -> list[Waves]:
        """Report that waves wait at barriers that not all living waves reach.

        No other wave can continue. The hardware does not distinguish barriers. So if the finding
        does not end the launch, the waves continue.

        Args:
            last_control: The control instruction that was executed last.

        Returns:
            The waves that can continue.

        Raises:
            Trap: The finding ends the launch. It always does if a wave waits for the grid, or if
                nothing is checked.
        """
        sets = [gathered.join_all() for gathered in self._waiting.values()]
        sets += self._for_grid
        g = sets[0]
        places = sorted({hex(x.pc) for x in sets})
        scope = "grid" if self._for_grid else "workgroup"
        message = (
            f"wave {int(g.wave[0])} of workgroup {int(g.workgroup[0])} waits at a barrier "
            f"(before {', '.join(places)}) that not all living waves of its {scope} reach"
        )
        if self._for_grid or self._findings is None:
            raise Trap("barrier", message)
        self._findings.instruction = last_control
        self._findings.report("barrier", message)
        return self._pass(same=False)

    def _pass(self, same: bool = True) -> list[Waves]:
        """Return the waves that can continue, and keep the others.

        "If some waves in the threadgroup have already terminated, this waits on only the surviving
        waves" (ISA, S_BARRIER).

        Args:
            same: Whether all waves of a workgroup must wait at the same barrier, as HIP requires.
        """
        if self._findings is None or not self._findings.is_enabled("barrier"):
            same = False
        counts = [gathered.count for gathered in self._waiting.values()]
        if not same and counts:
            counts = [sum(counts)] * len(counts)
        complete = [count == self._alive for count in counts]
        passed = []
        for gathered, groups in zip(
            list(self._waiting.values()),
            complete,
            strict=True,
        ):
            passed += gathered.take(groups)
            if not gathered.count.any():
                del self._waiting[gathered.pc]
        for g in passed:
            self._go_on(g)
        if self._for_grid and sum(g.n for g in self._for_grid) == self._alive.sum():
            passed += self._pass_grid()
        return passed

    def _pass_grid(self) -> list[Waves]:
        # All accesses so far are ordered before all later ones, so no tag is needed any more.
        self._arena.clear_tags_at_grid_barrier()
        self._on_clear()
        passed = self._for_grid
        self._for_grid = []
        for g in passed:
            self._go_on(g)
        return passed

    def _go_on(self, g: Waves) -> None:
        g.epoch[:] = epoch_after_barrier(g.epoch)
        g.tags = make_tags(g.workgroup, g.epoch, g.wave)
        if self._arena.order is not None:
            self._arena.order.barrier(g.tags)


class _Gathered:
    """Waves at one barrier. If only some waves of a set leave the barrier, they are copied.

    Attributes:
        pc: The address of the instruction after the barrier.
        count: Number of waves that wait, by workgroup.
    """

    def __init__(self, first: int, groups: int):
        """Begin without waves.

        Args:
            first: Number, in the grid, of the first workgroup of the batch.
            groups: Number of workgroups of the batch.
        """
        self._first = first
        self.pc = -1
        self.count = np.zeros(groups, np.int64)
        #: Sets of waves, each with flags of the waves that still wait.
        self._sets: list[tuple[Waves, np.ndarray]] = []

    def add(self, g: Waves) -> None:
        """Add waves that arrive at the barrier."""
        self.pc = g.pc
        self.count += np.bincount(g.workgroup - self._first, minlength=len(self.count))
        self._sets.append((g, np.ones(g.n, bool)))

    def join_all(self) -> Waves:
        """Return all waves that wait as one set."""
        return reduce(join, [select(g, waiting) for g, waiting in self._sets])

    def take(self, groups: np.ndarray) -> list[Waves]:
        """Remove the waves of the flagged workgroups. Return [] or a list with one set of them."""
        if not (groups & (self.count > 0)).any():
            return []
        passing = []
        staying = []
        for g, waiting in self._sets:
            selected = waiting & groups[g.workgroup - self._first]
            if selected.any():
                passing.append(select(g, selected))
                waiting &= ~selected
            count = np.count_nonzero(waiting)
            if 0 < 2 * count < g.n:
                staying.append((select(g, waiting), np.ones(count, bool)))
            elif count:
                staying.append((g, waiting))
        self._sets = staying
        self.count[groups] = 0
        return [reduce(join, passing)]


def select(g: Waves, flags) -> Waves:
    """Return the waves whose flag is True: `g` itself if all flags are True."""
    if flags.all():
        g.tags = None
        return g
    index = np.flatnonzero(flags)
    part = Waves(
        np.take(g.V, index, 1),
        take_scalars([g], index),
        g.scc[index],
        g.pc,
        np.take(g.identity, index, 1),
        waits.select(g.queues, index),
    )
    part.scalars = g.scalars
    part.yields = g.yields
    part.iterations = g.iterations
    part.has_polled = g.has_polled
    part.records_polls = g.records_polls
    part.pause = g.pause
    part.skips = g.skips
    part.slept_with = g.slept_with
    if g.polled:
        part.polled = polls.select(g.polled, index, g.n)
    return part


def join(a: Waves, b: Waves) -> Waves:
    """Join two sets of waves at the same instruction, in the order of their numbers."""
    order = np.argsort(np.concatenate([a.slot, b.slot]), kind="stable")
    identity = np.concatenate([a.identity, b.identity], axis=1)
    queues = waits.join(a.queues, a.n, b.queues, b.n)
    joined = Waves(
        np.take(np.concatenate([a.V, b.V], axis=1), order, 1),
        take_scalars([a, b], order),
        np.concatenate([a.scc, b.scc])[order],
        a.pc,
        np.take(identity, order, 1),
        waits.select(queues, order),
    )
    joined.scalars = max(a.scalars, b.scalars)
    joined.yields = max(a.yields, b.yields)
    joined.iterations = max(a.iterations, b.iterations)
    joined.has_polled = a.has_polled or b.has_polled
    joined.records_polls = a.records_polls or b.records_polls
    joined.pause = max(a.pause, b.pause)
    joined.skips = min(a.skips, b.skips)
    joined.slept_with = a.slept_with or b.slept_with
    if a.polled or b.polled:
        rows = np.argsort(order)
        joined.polled = [poll.of_waves(rows) for poll in a.polled]
        joined.polled += [poll.of_waves(rows[a.n :]) for poll in b.polled]
    return joined

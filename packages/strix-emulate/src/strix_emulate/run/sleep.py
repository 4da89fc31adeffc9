# SPDX-License-Identifier: BSD-3-Clause
"""Waves that wait for others: they sleep until what they saw in memory is no longer there.

A wave may be late by any time, so to wake one later, or for nothing, changes no result. As long as
others can go on nobody is woken: so a lock goes from wave to wave, and what is woken for it is one.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.memory.polls import Seen
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import Waves
from strix_emulate.run.meeting import select

#: Turns between two looks at what a wave sees, where it saw something new; twice as many each time.
_MOST_TURNS = 8
#: Turns for which all waves go on when none can be woken; twice as many each time.
_MOST_IDLE = 1 << 12
#: Bytes of memory that are compared to be sure that nothing changes any more.
_COMPARED = 1 << 26


@dataclass
class _Group:
    """Waves that saw the same.

    Attributes:
        next: How many are woken at the next change.
        last: What stood there when some were woken last.
        taken: Whether those changed it as they looked.
    """

    watch: list[Seen]
    sets: deque[Waves] = field(default_factory=deque)
    next: int = 1
    last: bytes = b""
    taken: bool = False

    def note(self, seen: Seen) -> None:
        """Note what one that was woken sees."""
        first = self.watch[0]
        if seen.memory is first.memory and seen.at[0] == first.at[0]:
            self.taken |= seen.words[:, 0].tobytes() not in self.last

    @property
    def changed(self) -> bool:
        return any(seen.changed for seen in self.watch)

    def take(self) -> list[Waves]:
        """Return the waves to wake.

        One for each change: it may be a lock, and all others would find it taken. If that one
        leaves what stands there, it was none, and twice as many are woken the next time.
        """
        now = b"".join(seen.memory.load(seen.at, seen.size)[:, 0].tobytes() for seen in self.watch)
        self.next = 2 * self.next if now == self.last and not self.taken else 1
        self.last, self.taken = now, False
        taken, left = [], self.next
        while left and self.sets:
            g = self.sets.popleft()
            while g.n > left:
                first = np.arange(g.n) < (g.n + 1) // 2
                self.sets.appendleft(select(g, ~first))
                g = select(g, first)
            g.woken = self
            taken.append(g)
            left -= g.n
        return taken


class Sleepers:
    """The waves that sleep.

    Args:
        memories: What waves can change.
        lonely: Whether nothing but these waves changes memory.
    """

    def __init__(self, memories: tuple[Memory, ...], lonely: bool) -> None:
        self._memories, self._lonely = memories, lonely
        self._groups: dict[int, _Group] = {}
        self._state, self._idle = 0, 1

    @property
    def idle(self) -> bool:
        """Whether all waves slept the last time, and none could be woken."""
        return self._idle > 1

    def __bool__(self) -> bool:
        return bool(self._groups)

    def look(self, g: Waves) -> list[Waves] | None:
        """Let those waves sleep that saw nothing new in a turn of a loop.

        Return the others; or None, if none sleeps.
        """
        if not g.records:
            g.skips -= 1
            g.records = g.skips <= 0
            return None
        same = (g.look == g.seen) & (g.look != 0)
        if any(seen.compares for seen in g.watch):
            # of several whose swaps failed for the same reason only one can succeed now
            number, first, count = np.unique(g.look, return_index=True, return_counts=True)
            rivals = np.isin(g.look, number[(count > 1) & (number != 0)])
            rivals[first] = False
            same |= rivals
        fresh = not g.seen.any()
        g.seen[:] = g.look
        if not same.any():
            g.look[:] = 0
            g.watch = []
            if not fresh:
                g.pause = min(2 * g.pause, _MOST_TURNS)
                g.skips, g.records = g.pause, False
            return None
        others = [] if same.all() else [select(g, ~same)]
        for number in np.unique(g.look[same]).tolist():
            self._add(number, select(g, same & (g.seen == number)))
        for other in others:
            other.look[:] = 0
            other.watch = []
        return others

    def _add(self, number: int, g: Waves) -> None:
        if number not in self._groups:
            self._groups[number] = _Group(g.watch)
        g.look[:] = 0
        g.watch, g.pause, g.woken = [], 1, None
        self._groups[number].sets.append(g)

    def wake(self, stuck: Callable[[Waves, int], Trap]) -> list[Waves]:
        """Return the waves that go on now that no other can.

        stuck: makes the trap if they wait for ever, of one of them and of how many.
        """
        woken = self.eligible()
        if woken:
            return woken
        sets = [g for group in self._groups.values() for g in group.sets]
        if self._lonely:
            state = self._digest(sets)
            exact = sum(memory.size for memory in self._memories) <= _COMPARED
            if state == self._state and (exact or self._idle >= _MOST_IDLE):
                raise stuck(sets[0], sum(g.n for g in sets))
            self._state = state
        else:
            time.sleep(0.001)
        self._groups.clear()
        for g in sets:
            # they may count their turns
            g.skips, g.records = self._idle, False
        self._idle = min(2 * self._idle, _MOST_IDLE)
        return sets

    def eligible(self) -> list[Waves]:
        """Return some of the waves for whom something has changed."""
        woken = []
        for number, group in list(self._groups.items()):
            if group.changed:
                woken += group.take()
                if not group.sets:
                    del self._groups[number]
        if woken:
            self._state, self._idle = 0, 1
        return woken

    def _digest(self, sets: list[Waves]) -> int:
        """Digest the state of the waves, and of memory if it is not too much."""
        total = 1
        for g in sets:
            for i in range(g.n):
                key = int(g.workgroup[i]) << 8 | int(g.wave[i])
                state = zlib.crc32(np.ascontiguousarray(g.V[:, i]), key)
                state = zlib.crc32(np.ascontiguousarray(g.S[:, i]), state)
                total += zlib.crc32(bytes([bool(g.scc[i, 0])]), state) * (2 * key + 1)
        if sum(memory.size for memory in self._memories) <= _COMPARED:
            for memory in self._memories:
                total = total * 31 + zlib.crc32(memory.bytes[: memory.size])
        return total

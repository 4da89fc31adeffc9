# SPDX-License-Identifier: BSD-3-Clause
"""Waves that wait for other waves. They sleep until the values that they polled have changed.

Waves may run at any speed, so no result changes if a wave is woken late or without need. Waves are
woken when no other wave can continue, or when other waves yield. Usually one wave is woken for a
change, because the polled cell may be a lock, which only one wave can take.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.memory.polls import Poll
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import Waves
from strix_emulate.run.meeting import select

#: Maximum number of iterations between two recordings of polls. The number doubles while a wave
#: polls new values.
_MOST_SKIPS = 8
#: Maximum number of iterations for which all waves continue if no polled value has changed. The
#: number doubles each time.
_MOST_IDLE = 1 << 12
#: If the memories have at most this many bytes in all, they are compared to find out whether
#: anything still changes.
_COMPARED = 1 << 26


@dataclass
class _Group:
    """Waves that polled the same values.

    Attributes:
        polled: The polls of the first waves that joined the group.
        sets: The waves.
        count: Maximum number of waves woken at the last change.
        last_values: The value in the first cell of each poll when waves were last woken.
        was_changed: Whether a woken wave has since found or left another value in the first polled
            cell.
    """

    polled: list[Poll]
    sets: deque[Waves] = field(default_factory=deque)
    count: int = 1
    last_values: bytes = b""
    was_changed: bool = False

    def note_poll(self, poll: Poll) -> None:
        """Record a poll of a wave that was woken from this group."""
        first = self.polled[0]
        if poll.memory is first.memory and poll.at[0] == first.at[0]:
            self.was_changed |= poll.words[:, 0].tobytes() not in self.last_values

    @property
    def has_changed(self) -> bool:
        """Whether any polled value has changed."""
        return any(poll.has_changed for poll in self.polled)

    def take(self) -> list[Waves]:
        """Remove and return the waves to wake.

        At first, one wave is woken for each change, because the cell may be a lock, which only one
        wave can take. If the values are the same as at the last change, and no woken wave has
        changed them, the cell is not a lock. Then twice as many waves are woken as the last time.
        """
        values = b"".join(
            poll.memory.load(poll.at, poll.size)[:, 0].tobytes() for poll in self.polled
        )
        if values == self.last_values and not self.was_changed:
            self.count *= 2
        else:
            self.count = 1
        self.last_values = values
        self.was_changed = False
        woken = []
        remaining = self.count
        while remaining and self.sets:
            g = self.sets.popleft()
            while g.n > remaining:
                first_half = np.arange(g.n) < (g.n + 1) // 2
                self.sets.appendleft(select(g, ~first_half))
                g = select(g, first_half)
            g.slept_with = self
            woken.append(g)
            remaining -= g.n
        return woken


class Sleepers:
    """The waves that sleep."""

    def __init__(self, memories: tuple[Memory, ...], is_closed: bool) -> None:
        """Begin with no wave asleep.

        Args:
            memories: The memories that waves can change.
            is_closed: Whether only these waves change the memories.
        """
        self._memories = memories
        self._is_closed = is_closed
        self._groups: dict[int, _Group] = {}
        self._digest = 0
        self._idle_iterations = 1

    @property
    def idle(self) -> bool:
        """Whether no polled value had changed at the last call of `wake`, nor since."""
        return self._idle_iterations > 1

    def __bool__(self) -> bool:
        return bool(self._groups)

    def put_to_sleep(self, g: Waves) -> list[Waves] | None:
        """Put the waves to sleep that polled nothing new in an iteration of a loop.

        Waves that `_find_rivals` flags sleep too.

        Returns:
            The waves that stay awake, or None if no wave was put to sleep.
        """
        if not g.records_polls:
            g.skips -= 1
            g.records_polls = g.skips <= 0
            return None
        is_same = (g.poll_hash == g.last_poll_hash) & (g.poll_hash != 0)
        if any(poll.compares for poll in g.polled):
            is_same |= _find_rivals(g)
        is_first = not g.last_poll_hash.any()
        g.last_poll_hash[:] = g.poll_hash
        if not is_same.any():
            _clear_polls(g)
            if not is_first:
                g.pause = min(2 * g.pause, _MOST_SKIPS)
                g.skips = g.pause
                g.records_polls = False
            return None
        others = [] if is_same.all() else [select(g, ~is_same)]
        for number in np.unique(g.poll_hash[is_same]).tolist():
            sleeping = is_same & (g.last_poll_hash == number)
            self._add(number, select(g, sleeping))
        for other in others:
            _clear_polls(other)
        return others

    def _add(self, number: int, g: Waves) -> None:
        group = self._groups.get(number)
        if group is None:
            group = _Group(g.polled)
            self._groups[number] = group
        _clear_polls(g)
        g.pause = 1
        g.slept_with = None
        group.sets.append(g)

    def wake(self, make_trap: Callable[[Waves, int], Trap]) -> list[Waves]:
        """Wake waves, because no other wave can continue. Return the woken waves.

        Args:
            make_trap: Returns the trap for waves that wait forever. Its arguments are one set of
                these waves, and the number of all of them.

        Raises:
            Trap: The values that the waves wait for can no longer change.
        """
        woken = self.wake_changed()
        if woken:
            return woken
        sets = [g for group in self._groups.values() for g in group.sets]
        if self._is_closed:
            digest = self._compute_digest(sets)
            is_exact = self._compares_memory()
            if digest == self._digest and (is_exact or self._idle_iterations >= _MOST_IDLE):
                raise make_trap(sets[0], sum(g.n for g in sets))
            self._digest = digest
        else:
            time.sleep(0.001)
        self._groups.clear()
        for g in sets:
            # Let the waves continue for a while: their loop may count its iterations and give up.
            g.skips = self._idle_iterations
            g.records_polls = False
        self._idle_iterations = min(2 * self._idle_iterations, _MOST_IDLE)
        return sets

    def wake_changed(self) -> list[Waves]:
        """Wake and return some of the waves whose polled values have changed."""
        woken = []
        for number, group in list(self._groups.items()):
            if group.has_changed:
                woken += group.take()
                if not group.sets:
                    del self._groups[number]
        if woken:
            self._digest = 0
            self._idle_iterations = 1
        return woken

    def _compares_memory(self) -> bool:
        return sum(memory.size for memory in self._memories) <= _COMPARED

    def _compute_digest(self, sets: list[Waves]) -> int:
        """Return a digest of the waves' registers, and of memory if it is not too large."""
        total = 1
        for g in sets:
            for i in range(g.n):
                key = int(g.workgroup[i]) << 8 | int(g.wave[i])
                state = zlib.crc32(np.ascontiguousarray(g.V[:, i]), key)
                state = zlib.crc32(np.ascontiguousarray(g.S[:, i]), state)
                scc = bytes([bool(g.scc[i, 0])])
                total += zlib.crc32(scc, state) * (2 * key + 1)
        if self._compares_memory():
            for memory in self._memories:
                total = total * 31 + zlib.crc32(memory.bytes[: memory.size])
        return total


def _find_rivals(g: Waves) -> np.ndarray:
    """Return by wave whether it polled the same values as a wave with a lower row.

    The polls include a compare-and-swap. Of the waves with the same values, only one can succeed
    next, so the others can sleep.
    """
    number, first, count = np.unique(
        g.poll_hash,
        return_index=True,
        return_counts=True,
    )
    shared = number[(count > 1) & (number != 0)]
    rivals = np.isin(g.poll_hash, shared)
    rivals[first] = False
    return rivals


def _clear_polls(g: Waves) -> None:
    g.poll_hash[:] = 0
    g.polled = []

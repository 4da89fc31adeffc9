# SPDX-License-Identifier: BSD-3-Clause
"""Happens-before through atomics. Locks, flags and counters order the accesses around them.

Acquires are atomics, and loads with GLC. Releases are atomics, and stores whose value an acquire
reads. A release does not cover accesses that are still outstanding (LLVM's guide, "Memory Model
GFX10-GFX11"). Some cases are not exact, because the clock of a wave advances only at a wait for
stores, an atomic or a barrier. Until then, a store also covers loads that are outstanding or come
later, and a store to LDS covers all accesses of its wave to LDS. A release also covers outstanding
atomics that return a value, atomics of LDS, and atomics before the last one. Events are queued in
order. They are merged into vector clocks when two accesses look like a race, or when the queue is
full.

Order is not visibility: after an acquire, a plain load may still read an older value from a cache.
buffer_gl1_inv empties GL1, the cache that several workgroups share. buffer_gl0_inv empties GL0, the
cache of a compute unit. An acquire of agent scope executes these two instructions, in this order.
To see stores of its own workgroup, a wave needs only buffer_gl0_inv. In CU mode, where a
workgroup is on one compute unit, a wave needs neither instruction for such stores.
"""

from dataclasses import dataclass

import numpy as np

from strix_emulate.memory.tags import CLOCK, SEVERAL, WORKGROUP, barriers_of, wave_of

#: Clocks of waves and workgroups, in one dict for every sixteen workgroups. When a lock passes from
#: wave to wave, most of these dicts are identical objects, which need no merging.
Clocks = dict[int, dict[int, int]]
_CHUNK = WORKGROUP + 4
_NOTHING: Clocks = {}
#: Maximum number of events in the queue. When there are this many, the events are merged.
_QUEUE_LIMIT = 2000


@dataclass(slots=True)
class _Accesses:
    """Atomics, or loads that bypass the caches.

    Attributes:
        memory: Name of the memory.
        cells: Cell numbers, in the order of the accesses.
        tags: Tag of each access.
        writers: For each cell, a tag of the wave that last wrote the cell, or 0. The write released
            the accesses of this wave up to the tag.
        releases: Whether these are atomics.
        swaps: For swaps and compare-and-swaps that return the old value: the values that they left
            in the cells, and whether the last earlier write of each cell was an atomic. None for
            other accesses.
    """

    memory: str
    cells: np.ndarray
    tags: np.ndarray
    writers: np.ndarray
    releases: bool
    swaps: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(slots=True)
class _Invalidation:
    """Waves that emptied a cache: GL1 if `gl1` is true, otherwise GL0."""

    tags: np.ndarray
    gl1: bool


@dataclass(slots=True)
class _Barrier:
    """Waves that passed a barrier."""

    tags: np.ndarray


class Order:
    """The vector clocks of waves. A wave is identified by its tag without the clock.

    Attributes:
        one_cache: Whether all waves of a workgroup are on one compute unit.
    """

    def __init__(self):
        self.one_cache = False
        self._events: list[_Accesses | _Invalidation | _Barrier] = []
        #: For each wave, clocks of the accesses that happened before its next access.
        self._clocks: dict[int, Clocks] = {}
        #: Like `_clocks`, but only for accesses that GL1 cannot hide from the wave.
        self._visible_past_gl1: dict[int, Clocks] = {}
        #: Like `_clocks`, but only for accesses that neither GL1 nor GL0 can hide from the wave.
        self._visible: dict[int, Clocks] = {}
        #: The clocks that a wave gets from an acquire, by memory and cell.
        self._released: dict[tuple[str, int], Clocks] = {}
        #: The value that a swap left in a cell, and the wave whose swap last changed the cell, by
        #: memory and cell. Other atomics on the cell remove the entry.
        self._holders: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether only barriers have ordered accesses so far."""
        return not (self._events or self._clocks)

    def atomic(
        self,
        memory: str,
        cells,
        tags,
        writers,
        swaps=None,
    ) -> None:
        """Put atomics into the queue, in order of execution. See `_Accesses` for the arguments."""
        self._add(_Accesses(memory, cells, tags, writers, True, swaps))

    def acquire(self, memory: str, cells, tags, writers) -> None:
        """Put loads that bypass the caches into the queue. See `_Accesses` for the arguments."""
        self._add(_Accesses(memory, cells, tags, writers, False))

    def invalidate(self, tags, gl1: bool) -> None:
        """Queue the invalidation of a cache by these waves: GL1 if `gl1` is true, otherwise GL0."""
        if not self.idle:
            self._add(_Invalidation(tags, gl1))

    def barrier(self, tags) -> None:
        """Queue a barrier that these waves passed. The waves of a workgroup then share clocks."""
        if not self.idle:
            self._add(_Barrier(tags))

    def _add(self, event: _Accesses | _Invalidation | _Barrier) -> None:
        self._events.append(event)
        if len(self._events) >= _QUEUE_LIMIT:
            self._merge_events()

    def ordered(self, old, new):
        """Return by element whether an access with the old tag happened before one with the new."""
        return self._for_each_pair(self.orders, old, new)

    def visible(self, old, new):
        """Return by element whether a plain load with the new tag sees the old tag's store."""
        return self._for_each_pair(self.sees, old, new)

    def _for_each_pair(self, decide, old, new):
        # The lanes have few different pairs. numpy.unique would sort them, which takes ten times as
        # long.
        pairs = list(zip(old.tolist(), new.tolist(), strict=True))
        results = {pair: decide(*pair) for pair in dict.fromkeys(pairs)}
        return np.array([results[pair] for pair in pairs], bool)

    def orders(self, old: int, new: int) -> bool:
        """Return whether an access with the old tag happened before one with the new tag."""
        self._merge_events()
        return _covers(self._clocks.get(wave_of(new), _NOTHING), old)

    def sees(self, old: int, new: int) -> bool:
        """Return whether a plain load with the new tag sees the store with the old tag."""
        self._merge_events()
        if self.one_cache and old >> WORKGROUP == new >> WORKGROUP:
            return self.orders(old, new)
        return _covers(self._visible.get(wave_of(new), _NOTHING), old)

    def classify(self, old: int, new: int) -> int:
        """Return a number for C that says how accesses with two tags are ordered.

        0: They are unordered. 1: They are ordered. 2: They are ordered, but a cache may hide the
        store with the old tag.
        """
        if not self.orders(old, new):
            return 0
        return 1 if self.sees(old, new) else 2

    def holds(self, memory: str, cell: int, tag: int) -> bool:
        """Return whether a cell still has the value that the tag's wave swapped in.

        The cell is then a lock that the wave has taken, because later swaps by other waves have not
        changed the cell.
        """
        self._merge_events()
        _, holder = self._holders.get((memory, cell), (0, 0))
        return holder == wave_of(tag)

    def _merge_events(self) -> None:
        if not self._events:
            return
        events = self._events
        self._events = []
        merge = _Merge()
        for event in events:
            if isinstance(event, _Barrier):
                self._merge_barrier(event, merge)
            elif isinstance(event, _Invalidation):
                self._merge_invalidation(event, merge)
            else:
                if event.releases and (event.swaps or self._holders):
                    self._update_holders(event)
                self._merge_accesses(event, merge)

    def _merge_accesses(self, event: _Accesses, merge: "_Merge") -> None:
        last_access = (0, 0)
        last_acquired = _NOTHING
        last_released = _NOTHING
        accesses = zip(
            event.cells.tolist(),
            event.tags.tolist(),
            event.writers.tolist(),
            strict=True,
        )
        for cell, tag, writer in dict.fromkeys(accesses):
            place = (event.memory, cell)
            acquired = self._released.get(place, _NOTHING)
            if acquired is last_acquired and (tag, writer) == last_access:
                # Most lanes acquire the same clocks as the previous lane, so there is nothing to
                # merge.
                if event.releases:
                    self._released[place] = last_released
                continue
            last_access = (tag, writer)
            last_acquired = acquired
            wave = wave_of(tag)
            clocks = merge(self._clocks.get(wave, _NOTHING), acquired)
            if writer and writer & 0xFF != SEVERAL:
                clocks = merge(clocks, self._clocks.get(wave_of(writer), _NOTHING))
                clocks = merge(clocks, merge.own_clock(writer))
            self._clocks[wave] = clocks
            if event.releases:
                last_released = merge(clocks, merge.own_clock(tag))
                self._released[place] = last_released

    def _update_holders(self, event: _Accesses) -> None:
        if event.swaps is None:
            for cell in event.cells.tolist():
                self._holders.pop((event.memory, cell), None)
            return
        values, by_atomic = event.swaps
        swaps = zip(
            event.cells.tolist(),
            event.tags.tolist(),
            values.tolist(),
            by_atomic.tolist(),
            strict=True,
        )
        places = set()
        for cell, tag, value, was_atomic in swaps:
            place = (event.memory, cell)
            # If several lanes swap one cell, only the first swap counts: if the cell is a lock, no
            # later one can have taken it.
            if place in places:
                continue
            places.add(place)
            previous, _ = self._holders.get(place, (None, 0))
            if not was_atomic or previous != value:
                self._holders[place] = (value, wave_of(tag))

    def _merge_barrier(self, event: _Barrier, merge: "_Merge") -> None:
        groups: dict[int, list[int]] = {}
        for tag in event.tags.tolist():
            groups.setdefault(tag >> WORKGROUP, []).append(wave_of(tag))
        # The waves of a workgroup share one GL1.
        shared = [self._clocks, self._visible_past_gl1]
        if self.one_cache:
            shared.append(self._visible)
        for clocks_of in shared:
            for waves in groups.values():
                merged = _NOTHING
                for wave in waves:
                    merged = merge(merged, clocks_of.get(wave, _NOTHING))
                if merged:
                    clocks_of |= dict.fromkeys(waves, merged)

    def _merge_invalidation(self, event: _Invalidation, merge: "_Merge") -> None:
        for tag in event.tags.tolist():
            wave = wave_of(tag)
            clocks = self._clocks.get(wave, _NOTHING)
            if event.gl1:
                self._visible_past_gl1[wave] = clocks
                continue
            own_workgroup = merge.own_workgroup(clocks, wave)
            past_gl1 = self._visible_past_gl1.get(wave, _NOTHING)
            self._visible[wave] = merge(own_workgroup, past_gl1)


def _covers(clocks: Clocks, old: int) -> bool:
    """Return whether the clocks include an access with this tag."""
    chunk = clocks.get(old >> _CHUNK)
    if chunk is None:
        return False
    if chunk.get(_workgroup_key(old), -1) > barriers_of(old):
        return True
    return old & 0xFF != SEVERAL and chunk.get(wave_of(old), -1) >= old & CLOCK


def _workgroup_key(tag: int) -> int:
    """Return the key under which `Clocks` has the barriers that the tag's workgroup passed."""
    return -(tag >> WORKGROUP)


class _Merge:
    """Merges clocks. The result has the later clock of each wave.

    `Clocks` objects are never modified, so results are cached.
    """

    def __init__(self) -> None:
        # Results are cached by the ids of the arguments. The arguments are stored too, so that no
        # other dict can get one of these ids.
        self._results: dict[tuple[int, int], tuple[Clocks, Clocks, Clocks]] = {}
        self._own_clocks: dict[int, Clocks] = {}
        self._own_workgroups: dict[tuple[int, int], tuple[Clocks, Clocks]] = {}

    def own_clock(self, tag: int) -> Clocks:
        """Return the clocks that the tag contains: its wave's, and the workgroup's barriers."""
        if tag not in self._own_clocks:
            own = {
                wave_of(tag): tag & CLOCK,
                _workgroup_key(tag): barriers_of(tag),
            }
            self._own_clocks[tag] = {tag >> _CHUNK: own}
        return self._own_clocks[tag]

    def own_workgroup(self, clocks: Clocks, wave: int) -> Clocks:
        """Return the clocks of the wave's own workgroup."""
        group = wave >> WORKGROUP
        key = (id(clocks), group)
        if key not in self._own_workgroups:
            own = {}
            for name, clock in clocks.get(wave >> _CHUNK, {}).items():
                group_of_name = -name if name < 0 else name >> WORKGROUP
                if group_of_name == group:
                    own[name] = clock
            self._own_workgroups[key] = (clocks, {wave >> _CHUNK: own})
        return self._own_workgroups[key][1]

    def __call__(self, a: Clocks, b: Clocks) -> Clocks:
        if len(a) < len(b):
            # The smaller dict comes second, because _merge_chunks loops over its second argument.
            a, b = b, a
        if a is b or not b:
            return a
        key = (id(a), id(b))
        if key not in self._results:
            self._results[key] = (a, b, _merge_chunks(a, b))
        return self._results[key][2]


def _merge_chunks(a: Clocks, b: Clocks) -> Clocks:
    changes = {}
    for place, chunk in b.items():
        other = a.get(place)
        if other is chunk:
            continue
        merged = chunk if other is None else _later(other, chunk)
        if merged is not other:
            changes[place] = merged
    return a | changes if changes else a


def _later(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """Merge two dicts of clocks by wave. Each wave gets the later of its two clocks."""
    if len(a) < len(b):
        a, b = b, a
    changes = {wave: clock for wave, clock in b.items() if a.get(wave, -1) < clock}
    return a | changes if changes else a

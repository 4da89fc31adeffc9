# SPDX-License-Identifier: BSD-3-Clause
"""Happens-before through atomics: locks, flags and counters order what waves do around them.

An atomic that returns a value, and a load with GLC, acquire; an atomic, and a store whose value
such a load sees, release. What a wave has still outstanding is not released (LLVM's guide, "Memory
Model GFX10-GFX11"). Only when accesses look like a race are the events, which are kept in order,
worked off into vector clocks.

What a wave knows of is not yet what its plain loads see: they may find an older line in the caches.
buffer_gl1_inv empties the one of several workgroups, buffer_gl0_inv that of a compute unit, in
this order, as an acquire of agent scope has them; of its own workgroup a wave needs the second one
only, and not even that in a kernel in CU mode, whose workgroup is on one compute unit.

A tag, from high to low: workgroup + 1, barriers passed + 1, releases since, wave. The two in the
middle are the wave's clock. See :mod:`strix_emulate.memory.shadow`.
"""

import numpy as np

WORKGROUP, BARRIER, RELEASE = 40, 22, 8
#: In the place of a wave, several readers: their numbers modulo 8 are bits in that of the releases.
SEVERAL, READERS = 0xFF, 7
#: A tag of readers in several workgroups.
EVERYONE = 2**62
_CLOCK = (1 << WORKGROUP) - 1 & ~0xFF
_RELEASES = (1 << (BARRIER - RELEASE)) - 1
_KEPT = 2000


def tags(workgroup, epoch, wave):
    """Return the tags of waves' accesses; they grow with the epoch, and 0 is no access."""
    clock = epoch + (1 << (BARRIER - RELEASE))
    return ((workgroup.astype(np.int64) + 1) << WORKGROUP) | clock << RELEASE | wave


def after_barrier(epoch):
    """Return the epoch of waves behind a barrier."""
    return (epoch >> (BARRIER - RELEASE)) + 1 << (BARRIER - RELEASE)


def after_release(epoch):
    """Return the epoch of waves behind a release; the last one that can be counted stays."""
    return epoch + ((epoch & _RELEASES) < _RELEASES)


def who(tag):
    """Return the wave of a tag: without its clock."""
    return tag >> WORKGROUP << WORKGROUP | tag & 0xFF


def barriers(tag):
    """Return workgroup and barriers passed."""
    return tag >> BARRIER


class Order:
    """What each wave (a tag without clock) knows of the clocks of others.

    one_cache: the waves of a workgroup are on one compute unit.
    """

    def __init__(self):
        self.one_cache = False
        self._events: list[tuple] = []
        self._known: dict[int, Clocks] = {}
        #: the same, less what the caches may hide: GL1, and both
        self._behind_gl1: dict[int, Clocks] = {}
        self._fresh: dict[int, Clocks] = {}
        self._released: dict[tuple[str, int], Clocks] = {}
        #: what an atomic left at a place, and which wave's it was that changed it last
        self._holders: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing but barriers has ordered anything so far."""
        return not (self._events or self._known)

    def atomic(self, memory: str, cells, marks, written, takes=None) -> None:
        """Note atomics, in this order; marks: the tags of waves; written: of the last stores.

        takes: of swaps whose result a wave gets, as of a lock, what they left there, and whether an
        atomic was the last to write there.
        """
        self._note((memory, cells, marks, written, True, takes))

    def acquire(self, memory: str, cells, marks, written) -> None:
        """Note loads that go past the caches."""
        self._note((memory, cells, marks, written, False, None))

    def emptied(self, marks, gl1: bool) -> None:
        """Note that waves emptied a cache, GL1 or else GL0."""
        if self._events or self._known:
            self._note((_GL1 if gl1 else _GL0, None, marks, None, False, None))

    def barrier(self, marks) -> None:
        """Let waves that passed a barrier know what the others of their workgroup know."""
        if self._events or self._known:
            self._note(("", None, marks, None, False, None))

    def _note(self, event: tuple) -> None:
        self._events.append(event)
        if len(self._events) >= _KEPT:
            self._work_off()

    def ordered(self, old, new, seen: bool = False):
        """Return for tags of earlier and later accesses whether something orders them.

        seen: and whether a plain load that comes later sees what was stored.
        """
        pairs, back = np.unique(np.stack([old, new]), axis=1, return_inverse=True)
        decide = self.sees if seen else self.orders
        found = [decide(a, b) for a, b in pairs.T.tolist()]
        return np.array(found, bool)[back.ravel()]

    def orders(self, old: int, new: int) -> bool:
        """Return whether something orders an access with one tag and a later one with another."""
        if self._events:
            self._work_off()
        return _knows(self._known.get(who(new), _NOTHING), old)

    def sees(self, old: int, new: int) -> bool:
        """Return whether a plain load with the later tag sees a store with the earlier one."""
        if self._events:
            self._work_off()
        if self.one_cache and old >> WORKGROUP == new >> WORKGROUP:
            return self.orders(old, new)
        return _knows(self._fresh.get(who(new), _NOTHING), old)

    def told(self, old: int, new: int) -> int:
        """Return for C 0 where nothing orders them, 2 where a cache may hide it, and else 1."""
        return int(self.orders(old, new)) and 2 - int(self.sees(old, new))

    def holds(self, memory: str, cell: int, mark: int) -> bool:
        """Return whether the wave of the tag swapped a value in there, and it still stands there.

        That is a lock: the swaps of others changed nothing.
        """
        if self._events:
            self._work_off()
        return self._holders.get((memory, cell), (0, 0))[1] == who(mark)

    def _work_off(self) -> None:
        events, self._events = self._events, []
        merge = _Merge()
        for memory, cells, marks, written, releases, takes in events:
            if cells is None:
                if memory:
                    self._empty(marks.tolist(), memory == _GL1, merge)
                else:
                    self._meet(marks.tolist(), merge)
                continue
            if releases and (takes or self._holders):
                self._hold(memory, cells.tolist(), marks.tolist(), takes)
            last: tuple = (0, 0)
            seen = kept = _NOTHING
            for cell, mark, writer in dict.fromkeys(
                zip(cells.tolist(), marks.tolist(), written.tolist(), strict=True)
            ):
                place, wave = (memory, cell), who(mark)
                found = self._released.get(place, _NOTHING)
                if found is seen and (mark, writer) == last:
                    # nothing new for the wave, as in most lanes
                    if releases:
                        self._released[place] = kept
                    continue
                last, seen = (mark, writer), found
                known = merge(self._known.get(wave, _NOTHING), found)
                if writer and writer & 0xFF != SEVERAL:
                    known = merge(known, self._known.get(who(writer), _NOTHING))
                    known = merge(known, merge.own(writer))
                self._known[wave] = known
                if releases:
                    self._released[place] = kept = merge(known, merge.own(mark))

    def _hold(self, memory: str, cells: list[int], marks: list[int], takes) -> None:
        if takes is None:
            for cell in cells:
                self._holders.pop((memory, cell), None)
            return
        done = set()
        for cell, mark, value, kept in zip(
            cells, marks, *map(np.ndarray.tolist, takes), strict=True
        ):
            place = memory, cell
            # of several lanes the first one changed it, if any did
            if place not in done:
                done.add(place)
                if not kept or self._holders.get(place, (None, 0))[0] != value:
                    self._holders[place] = value, who(mark)

    def _meet(self, marks: list[int], merge: "_Merge") -> None:
        groups: dict[int, list[int]] = {}
        for mark in marks:
            groups.setdefault(mark >> WORKGROUP, []).append(who(mark))
        # the waves of a workgroup have one GL1
        for known in (self._known, self._behind_gl1, *([self._fresh] if self.one_cache else [])):
            for waves in groups.values():
                everything = _NOTHING
                for wave in waves:
                    everything = merge(everything, known.get(wave, _NOTHING))
                if everything:
                    known |= dict.fromkeys(waves, everything)

    def _empty(self, marks: list[int], gl1: bool, merge: "_Merge") -> None:
        for wave in map(who, marks):
            known = self._known.get(wave, _NOTHING)
            if gl1:
                self._behind_gl1[wave] = known
            else:
                near = merge.near(known, wave)
                self._fresh[wave] = merge(near, self._behind_gl1.get(wave, _NOTHING))


def _knows(known: "Clocks", old: int) -> bool:
    near = known.get(old >> _CHUNK)
    if near is None:
        return False
    if near.get(_workgroup(old), -1) > barriers(old):
        return True
    return old & 0xFF != SEVERAL and near.get(who(old), -1) >= old & _CLOCK


def _workgroup(tag: int) -> int:
    """Return the key under which the barriers of a whole workgroup are known."""
    return -(tag >> WORKGROUP)


#: Clocks of waves and workgroups, of sixteen workgroups each. Where a lock goes from wave to wave,
#: all that is known of most workgroups is the same object, and costs nothing.
Clocks = dict[int, dict[int, int]]
_CHUNK = WORKGROUP + 4
_NOTHING: Clocks = {}
#: caches, in the place of a memory's name
_GL0, _GL1 = "GL0", "GL1"


class _Merge:
    """The later clocks of two, which are never changed: what two of them give is kept."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[Clocks, Clocks, Clocks]] = {}
        self._own: dict[int, Clocks] = {}
        self._near: dict[tuple[int, int], tuple[Clocks, Clocks]] = {}

    def own(self, mark: int) -> Clocks:
        """Return what a wave with this tag did itself: its clock, and its workgroup's barriers."""
        if mark not in self._own:
            own = {who(mark): mark & _CLOCK, _workgroup(mark): barriers(mark)}
            self._own[mark] = {mark >> _CHUNK: own}
        return self._own[mark]

    def near(self, known: Clocks, wave: int) -> Clocks:
        """Return what is known of the wave's own workgroup."""
        group = wave >> WORKGROUP
        key = id(known), group
        if key not in self._near:
            chunk = known.get(wave >> _CHUNK, {})
            own = {k: v for k, v in chunk.items() if (-k if k < 0 else k >> WORKGROUP) == group}
            self._near[key] = known, {wave >> _CHUNK: own}
        return self._near[key][1]

    def __call__(self, a: Clocks, b: Clocks) -> Clocks:
        if len(a) < len(b):
            # the loop below is over the smaller one
            a, b = b, a
        if a is b or not b:
            return a
        key = id(a), id(b)
        if key not in self._found:
            later = {}
            for place, theirs in b.items():
                mine = a.get(place)
                if mine is theirs:
                    continue
                merged = theirs if mine is None else _later(mine, theirs)
                if merged is not mine:
                    later[place] = merged
            # with both, so that no other dict gets one of these numbers
            self._found[key] = a, b, a | later if later else a
        return self._found[key][2]


def _later(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """Return the later clock of each wave."""
    if len(a) < len(b):
        a, b = b, a
    later = {wave: clock for wave, clock in b.items() if a.get(wave, -1) < clock}
    return a | later if later else a

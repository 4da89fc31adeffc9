# SPDX-License-Identifier: BSD-3-Clause
"""Happens-before through atomics: locks, flags and counters order what waves do around them.

An atomic that returns a value, and a load with GLC, acquire; an atomic, and a store whose value
such a load sees, release. What a wave has still outstanding is not released (LLVM's guide, "Memory
Model GFX10-GFX11"). Only when accesses look like a race are the events, which are kept in order,
worked off into vector clocks. Caches are not modelled: an acquire needs no buffer_gl0_inv here.

A tag, from high to low: workgroup + 1, barriers passed + 1, releases since, wave. The two in the
middle are the wave's clock. See :mod:`strix_emulate.memory.arena`.
"""

import numpy as np

WORKGROUP, BARRIER, RELEASE = 40, 22, 8
SEVERAL = 0xFF
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
    """What each wave knows of the clocks of others, as dicts by wave (a tag without clock)."""

    def __init__(self):
        self._events: list[tuple] = []
        self._known: dict[int, dict[int, int]] = {}
        self._released: dict[tuple[str, int], dict[int, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing but barriers has ordered anything so far."""
        return not (self._events or self._known)

    def atomic(self, memory: str, cells, marks, written) -> None:
        """Note atomics, in this order; marks: the tags of waves; written: of the last stores."""
        self._note((memory, cells, marks, written, True))

    def acquire(self, memory: str, cells, marks, written) -> None:
        """Note loads that go past the caches."""
        self._note((memory, cells, marks, written, False))

    def barrier(self, marks) -> None:
        """Let waves that passed a barrier know what the others of their workgroup know."""
        if self._events or self._known:
            self._note(("", None, marks, None, False))

    def _note(self, event: tuple) -> None:
        self._events.append(event)
        if len(self._events) >= _KEPT:
            self._work_off()

    def ordered(self, old, new):
        """Return for tags of earlier and later accesses whether something orders them."""
        pairs, back = np.unique(np.stack([old, new]), axis=1, return_inverse=True)
        found = [self.orders(a, b) for a, b in pairs.T.tolist()]
        return np.array(found, bool)[back.ravel()]

    def orders(self, old: int, new: int) -> bool:
        """Return the same for one tag and another."""
        if self._events:
            self._work_off()
        known = self._known.get(who(new), {})
        if known.get(_workgroup(old), -1) > barriers(old):
            return True
        return old & 0xFF != SEVERAL and known.get(who(old), -1) >= old & _CLOCK

    def _work_off(self) -> None:
        events, self._events = self._events, []
        merge = _Merge()
        for memory, cells, marks, written, releases in events:
            if cells is None:
                self._meet(marks.tolist(), merge)
                continue
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

    def _meet(self, marks: list[int], merge: "_Merge") -> None:
        groups: dict[int, list[int]] = {}
        for mark in marks:
            groups.setdefault(mark >> WORKGROUP, []).append(who(mark))
        for waves in groups.values():
            everything = _NOTHING
            for wave in waves:
                everything = merge(everything, self._known.get(wave, _NOTHING))
            if everything:
                self._known |= dict.fromkeys(waves, everything)


def _workgroup(tag: int) -> int:
    """Return the key under which the barriers of a whole workgroup are known."""
    return -(tag >> WORKGROUP)


_NOTHING: dict[int, int] = {}


class _Merge:
    """The later clocks of two dicts, which are never changed: what two of them give is kept."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[dict, dict, dict]] = {}
        self._own: dict[int, dict[int, int]] = {}

    def own(self, mark: int) -> dict[int, int]:
        """Return what a wave with this tag did itself: its clock, and its workgroup's barriers."""
        if mark not in self._own:
            self._own[mark] = {who(mark): mark & _CLOCK, _workgroup(mark): barriers(mark)}
        return self._own[mark]

    def __call__(self, a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
        key = id(a), id(b)
        if key not in self._found:
            later = {wave: clock for wave, clock in b.items() if a.get(wave, -1) < clock}
            # with both, so that no other dict gets one of these numbers
            self._found[key] = a, b, a | later if later else a
        return self._found[key][2]

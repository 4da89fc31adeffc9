# SPDX-License-Identifier: BSD-3-Clause
"""Memory as bytes with a shadow: what may be touched, what was written, and by whom.

Race detection is happens-before over barriers. The shadow of a cell (the smallest access of the
kernel, 1 to 4 bytes) holds a tag of the last write and of the last read: workgroup, barriers
passed, wave. Two accesses of different waves, one of them a write, with no barrier between them are
a race; so are those of different workgroups. An access that still runs when its wave arrives at a
barrier is not ordered by it: its tag is moved behind the barrier (:meth:`Memory.postpone`). What
looks like a race may still be ordered by atomics (:mod:`strix_emulate.memory.happens_before`).
"""

import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strix_emulate.code.decode import Instruction
from strix_emulate.memory.findings import Findings, where
from strix_emulate.memory.happens_before import (
    BARRIER,
    EVERYONE,
    READERS,
    RELEASE,
    SEVERAL,
    WORKGROUP,
    Order,
    barriers,
    who,
)


@dataclass
class Touch:
    """What one memory instruction touched, kept while it is outstanding: offsets and their tags."""

    memory: "Memory"
    at: np.ndarray
    marks: np.ndarray
    size: int
    write: bool


def shared_zeros(size: int) -> np.ndarray:
    """Make bytes that processes forked later have in common."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)


_RELEASES = (1 << BARRIER) - (1 << RELEASE)
#: MAP_NORESERVE of Linux, which Python 3.11 does not name.
_NORESERVE = 0x4000
#: Bytes of a shadow's array from which it is mapped, and of those that are kept for later launches.
_MAPPED, _KEPT = 1 << 20, 1 << 26
#: Pages of arrays that launches left, by their size, a power of two.
_LEFT: dict[int, list[np.ndarray]] = {}
_PAGE = mmap.PAGESIZE


def _zeros(count: int, dtype) -> tuple[np.ndarray, np.ndarray | None]:
    """Return zeros that cost nothing until they are touched, and their pages if they are mapped.

    A page fault costs more than a launch that touches much memory once does there, so pages that a
    launch left are used again. Nor are mapped ones counted as memory: behind the pool, where other
    processes' memory is, cells by the byte are many times what a machine has.
    """
    size = count * np.dtype(dtype).itemsize
    if size < _MAPPED or sys.platform != "linux":
        return np.zeros(count, dtype), None
    room = 1 << (size - 1).bit_length()
    left = _LEFT.get(room)
    if left:
        pages = left.pop()
        _clear(pages)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        pages = np.frombuffer(mmap.mmap(-1, room, flags), np.uint8)
    return pages[:size].view(dtype), pages


def _clear(pages: np.ndarray) -> None:
    """Clear the pages that were touched, by the word that /proc/self/pagemap has of each.

    Sandboxes hide that file; then all pages are cleared.
    """
    count = len(pages) // _PAGE
    first = pages.ctypes.data // _PAGE
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            words = np.frombuffer(os.pread(file.fileno(), 8 * count, 8 * first), np.uint64)
    except OSError:
        words = np.empty(0, np.uint64)
    if len(words) != count:
        pages[:] = 0
        return
    # bits 62 and 63: swapped, present
    pages.reshape(count, _PAGE)[np.flatnonzero(words >> np.uint64(62))] = 0


class Memory:
    """size bytes at offset 0.

    of_lanes: each cell belongs to one lane (:mod:`memory.scratch`).

    checked: keep tags and find races; strict: reading what was never written is a trap; shared:
    among forked processes.
    """

    of_lanes = False

    def __init__(
        self, name: str, size: int, cell: int = 4, checked: bool = True, strict: bool = True,
        shared: bool = False,
    ):  # fmt: skip
        self.name, self.cell, self.checked, self.strict = name, cell, checked, strict
        # room for an access that starts at the last byte; numpy's zeros cost nothing until touched
        self.size = size
        room = (size + 31) // 16 * 16
        self.bytes = shared_zeros(room) if shared else np.zeros(room, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)} | {
            16: self.bytes.view("c16")
        }
        self._pages: list[np.ndarray] = []
        #: what becomes of what is found
        self.findings = Findings()
        #: how atomics order waves, or None where nothing is checked
        self.order: Order | None = None
        #: races that may be of loads that nothing uses, or None where all are found at once
        self.doubts: Any = None
        #: for cells to which waves of several workgroups wrote one value: who did
        self.copies: dict[int, set[int]] = {}
        #: by cell, where caches may hide what is stored, the instruction that did: its address in
        #: the kernel's code
        self.places, self.code = np.zeros(0, np.int32), dict[int, Instruction]()
        #: whether a cell belongs to one workgroup alone, as in LDS and scratch, which have no cache
        self.one_workgroup = True
        self.clear_tags()

    def clear_tags(self) -> None:
        """Forget who wrote and read what."""
        cells = self.size // self.cell + 1 if self.checked else 0
        self.written, self.read = self._zeros(cells, np.int64), self._zeros(cells, np.int64)
        #: the tags in `written` that are of atomics
        self.swapped = self._zeros(cells, np.int64)
        #: by cell, as bits: the waves of the last writer's workgroup that wrote what stands there
        self.writers = self._zeros(cells, np.uint32)
        self._has_swaps = False
        self.copies.clear()

    def _zeros(self, count: int, dtype) -> np.ndarray:
        zeros, pages = _zeros(count, dtype)
        if pages is not None:
            self._pages.append(pages)
        return zeros

    def leave_tags(self) -> None:
        """Leave the shadow's pages to later launches: this one has ended."""
        self.written = self.read = self.swapped = np.zeros(0, np.int64)
        self.writers, self.places = np.zeros(0, np.uint32), np.zeros(0, np.int32)
        for pages in self._pages:
            kept = sum(size * len(left) for size, left in _LEFT.items())
            if kept + len(pages) <= _KEPT:
                _LEFT.setdefault(len(pages), []).append(pages)
        self._pages = []

    def clear_tags_in_place(self) -> None:
        """Forget the same where most of the memory is touched again: it needs no new pages."""
        self.copies.clear()
        self.written.fill(0)
        if not self.of_lanes:
            self.read.fill(0)
            self.writers.fill(0)
        if self._has_swaps:
            self.swapped.fill(0)

    def know(self, instructions: list[Instruction]) -> None:
        """Note from now on which of these, too, stores to a cell."""
        if not self.code:
            self.places = self._zeros(len(self.written), np.int32)
        self.code |= {ins.address: ins for ins in instructions}

    def _placed(self, cells) -> None:
        if self.code and self.findings.at:
            self.places[cells] = self.findings.at.address

    def load(self, at, size: int):
        """Load size bytes at each offset: (words, len(at)) uint32, 1 and 2 bytes zero-extended."""
        aligned = not (at & (min(size, 16) - 1)).any() if size != 12 else False
        if aligned:
            got = np.take(self.views[size], at // size, mode="clip")
            if size < 4:
                return got.astype(np.uint32)[None]
            return got.view(np.uint32).reshape(len(at), size // 4).T
        if size >= 4 and not (at & 3).any():
            words = (at >> 2) + np.arange(size // 4)[:, None]
            return np.take(self.views[4], words, mode="clip")
        raw = np.take(self.bytes, at + np.arange(size)[:, None], mode="clip").astype(np.uint32)
        if size < 4:
            return sum(raw[i] << np.uint32(8 * i) for i in range(size))[None]
        return sum(raw[i::4] << np.uint32(8 * i) for i in range(4))

    def store(self, at, data, size: int) -> None:
        """Store the low `size` bytes of data (words, len(at)) at each offset."""
        if size < 4:
            if size == 2 and not (at & 1).any():
                self.views[2][at >> 1] = data[0].astype(np.uint16)
                return
            for i in range(size):
                self.bytes[at + i] = (data[0] >> np.uint32(8 * i)).astype(np.uint8)
        elif not (at & 3).any():
            for i in range(size // 4):
                self.views[4][(at >> 2) + i] = data[i]
        else:
            for i in range(size):
                self.bytes[at + i] = (data[i // 4] >> np.uint32(8 * (i % 4))).astype(np.uint8)

    def track(self, at, size: int, marks, swap_words: int = 0) -> Touch | None:
        """Check a load against earlier stores and note it. Trap on a race.

        at: offsets, flat; marks: the tag of each; swap_words: words of each that a compare-and-swap
        compares, as bits. There what atomics wrote is no race, and nothing is too old.
        """
        if not self.checked:
            return None
        touch = Touch(self, at, marks, size, False)
        cells, marks = self._cells(at, size, marks)
        before = np.take(self.written, cells)
        if self.strict and self.one_workgroup and not before.all():
            self.findings.found("uninitialised", f"{self.name} is read before it is written")
        if self._recent(before, marks):
            conflict = self._unordered(before, marks)
            if conflict.any():
                conflict &= ~self._wrote(cells, before, marks, conflict)
            compared = self._in_words(swap_words, size, len(at))
            conflict &= ~compared | (before != self.swapped[cells])
            self._race(conflict, before, marks, "a write", cells, marks)
            self._stale(cells[~compared], before[~compared], marks[~compared])
        seen = np.take(self.read, cells)
        if self._recent(seen, marks):
            self.read[cells] = np.where(self._unordered(seen, marks), _merge(seen, marks), marks)
        else:
            self.read[cells] = marks
        now = np.take(self.read, cells)
        lost = np.flatnonzero(now != marks)
        if len(lost):
            lost = lost[self._unordered(now[lost], marks[lost])]
            self._merge_readers(cells[lost], marks[lost])
        return touch

    def _merge_readers(self, cells, marks) -> None:
        """Note several reads of a cell at once, besides the one that is noted there."""
        order = np.argsort(cells, kind="stable")
        cells, marks = cells[order], marks[order]
        first = np.flatnonzero(np.diff(cells, prepend=-1))
        if not len(first):
            return
        cells = cells[first]
        now = self.read[cells]
        least, most = np.minimum.reduceat(marks, first), np.maximum.reduceat(marks, first)
        bits = np.bitwise_or.reduceat(_readers(marks), first) | _readers(now) | SEVERAL
        passed = np.maximum(barriers(most), barriers(now)) << BARRIER
        near = _same_group(least, most) & _same_group(most, now)
        self.read[cells] = np.where(near, passed | bits, np.int64(EVERYONE))

    def track_acquire(self, at, size: int, marks) -> None:
        """Note a load past the wave's own cache: what it sees orders, and it is no race."""
        if self.order is not None:
            cells, marks = self._cells(at, size, marks)
            self.order.acquire(self.name, cells, marks, np.take(self.written, cells))

    def track_atomic(self, at, size: int, marks, takes: bool = False) -> None:
        """Note an atomic of these lanes, after it; takes: it may be how they take a lock."""
        self._has_swaps = True
        cells, marks = self._cells(at, size, marks)
        if self.order is not None:
            before, found = np.take(self.written, cells), None
            if takes:
                left = np.tile(np.take(self.views[size], at // size), len(cells) // max(1, len(at)))
                found = left, before == np.take(self.swapped, cells)
            self.order.atomic(self.name, cells, marks, before, found)
        self.written[cells] = self.swapped[cells] = marks
        self.writers[cells] = _bit(marks)
        self._placed(cells)

    def _unordered(self, old, new):
        conflict = _unordered(old, new)
        if self.order is not None and conflict.any():
            at = np.flatnonzero(conflict)
            conflict[at] = ~self.order.ordered(old[at], new[at])
        return conflict

    def _wrote(self, cells, before, marks, asked):
        """Return where a wave reads a value that it wrote itself, though others wrote the same."""
        found = _same_group(before, marks) & (self.writers[cells] & _bit(marks) != 0)
        for i in np.flatnonzero(asked & ~found).tolist() if self.copies else ():
            found[i] = who(int(marks[i])) in self.copies.get(int(cells[i]), ())
        return found

    def _released(self, cells, before, marks, asked):
        """Return where a store is how a wave gives back the lock that it took by an atomic.

        In the code it looks like any other store; by the memory model it is an atomic one, as are
        the attempts of others to take the lock.
        """
        found = asked & (before == self.swapped[cells])
        for i in np.flatnonzero(found).tolist():
            found[i] = self.order is not None and self.order.holds(
                self.name, int(cells[i]), int(marks[i])
            )
        return found

    def _stale(self, cells, before, marks) -> None:
        """Find loads of what is known to be written, and may still be older in a cache."""
        if self.one_workgroup or self.order is None or self.order.idle:
            return
        at = np.flatnonzero(_unordered(before, marks))
        old, new = before[at], marks[at]
        hidden = np.flatnonzero(
            self.order.ordered(old, new) & ~self.order.ordered(old, new, seen=True)
        )
        if len(hidden):
            wrote, reads = int(old[hidden[0]]), int(new[hidden[0]])
            near = wrote >> WORKGROUP == reads >> WORKGROUP
            store = self.code.get(int(self.places[cells[at[hidden[0]]]]))
            self.findings.found(
                "stale",
                f"{_who(reads)} reads what {_who(wrote)} wrote at {where(store)}, which something "
                f"orders, but no {'' if near else 'buffer_gl1_inv and '}buffer_gl0_inv behind that "
                "lets it see: a cache may hold what stood there before",
            )

    def _recent(self, held, marks) -> bool:
        """Return, at a quick look, whether any cell's tag could be unordered with the access.

        In LDS and scratch all tags of a cell are of one workgroup, so older epochs are ordered.
        """
        if not self.one_workgroup:
            return bool(held.any())
        return bool((held >= marks >> BARRIER << BARRIER).any())

    def track_store(self, at, data, size: int, marks) -> Touch | None:
        """Store, and note it, with the checks of :meth:`track`.

        Several waves may write the same value to the same cell: compilers let all threads that hold
        a copy of a value store it.
        """
        if not self.checked:
            self.store(at, data, size)
            return None
        cells, cell_marks = self._cells(at, size, marks)
        before = np.take(self.read, cells)
        if self._recent(before, cell_marks):
            conflict = self._unordered(before, cell_marks)
            conflict &= ~self._repeated(cells, at, data, size, before, conflict)
            self._race(conflict, before, cell_marks, "a read", cells, before)
        before = np.take(self.written, cells)
        conflict = (
            self._unordered(before, cell_marks) if self._recent(before, cell_marks) else before[:0]
        )
        if conflict.any():
            conflict &= ~self._released(cells, before, cell_marks, conflict)
            lanes = np.flatnonzero(conflict.reshape(-1, len(at)).any(axis=0))
            if self._differs(at[lanes], data[:, lanes], size):
                self._race(conflict, before, cell_marks, "another write of another value")
        if self.copies:
            for cell in cells[~conflict].tolist() if len(conflict) else cells.tolist():
                self.copies.pop(cell, None)
        writers = _bit(cell_marks)
        if conflict.any():
            near = conflict & _same_group(before, cell_marks)
            writers = np.where(near, self.writers[cells] | writers, writers)
            far = conflict & ~near
            self._copied(cells[far], before[far], cell_marks[far])
        self.store(at, data, size)
        self.written[cells], self.writers[cells] = cell_marks, writers
        self._placed(cells)
        # several waves in one instruction: the last one stands there
        lost = self.written[cells] != cell_marks
        if lost.any():
            lanes = np.flatnonzero(lost.reshape(-1, len(at)).any(axis=0))
            if self._differs(at[lanes], data[:, lanes], size):
                self.findings.found(
                    "race", f"two waves write different values to one {self.name} cell at once"
                )
            here = np.isin(cells, cells[lost])
            np.bitwise_or.at(self.writers, cells[here], writers[here])
            here &= ~_same_group(self.written[cells], cell_marks)
            self._copied(cells[here], self.written[cells[here]], cell_marks[here])
        return Touch(self, at, marks, size, True)

    def _repeated(self, cells, at, data, size: int, readers, asked):
        """Return where a store repeats a value that the wave which read it had written itself.

        Workgroups that share a head of keys each append the same ones and read them back. Of others
        that read the cell, each was a race when it did.
        """
        if self.one_workgroup or not asked.any():
            return np.zeros(len(cells), bool)
        repeated = asked & (who(readers) == who(self.written[cells]))
        for i in np.flatnonzero(asked & ~repeated).tolist() if self.copies else ():
            repeated[i] = int(cells[i]) in self.copies
        lanes = np.flatnonzero(repeated.reshape(-1, len(at)).any(axis=0))
        if self._differs(at[lanes], data[:, lanes], size):
            repeated[:] = False
        return repeated

    def _copied(self, cells, first, second) -> None:
        """Note that waves with these tags wrote the same value to these cells."""
        for cell, a, b in zip(cells.tolist(), first.tolist(), second.tolist(), strict=True):
            self.copies.setdefault(cell, set()).update((who(a), who(b)))

    def _cells(self, at, size: int, marks):
        count = max(1, size // self.cell)
        cells = at >> (self.cell.bit_length() - 1)
        if count > 1:
            cells = (cells + np.arange(count)[:, None]).ravel()
            marks = np.broadcast_to(marks, (count, len(at))).ravel()
        return cells, marks

    def _in_words(self, words: int, size: int, lanes: int) -> np.ndarray:
        """Return which cells of accesses by so many lanes are in these words of each."""
        first = np.arange(max(1, size // self.cell)) * self.cell // 4
        return np.repeat((words >> first & 1).astype(bool), lanes)

    def _differs(self, at, data, size: int) -> bool:
        if size < 4:
            data = data & np.uint32((1 << 8 * size) - 1)
        return not np.array_equal(self.load(at, size), data)

    def _race(self, conflict, before, marks, what: str, cells=None, readers=None) -> None:
        """Find a race.

        cells, readers: of one between a load and a store, the tags of the load.
        """
        if not conflict.any():
            return
        first = int(np.flatnonzero(conflict)[0])
        old, new = int(before[first]), int(marks[first])
        message = (
            f"{self.name} cell is touched by {_who(new)} and, with no barrier between, had "
            f"{what} by {_who(old)}"
        )
        if self.doubts is not None and readers is not None:
            reads = readers is marks
            writers = before if reads else marks
            places = cells[conflict] * self.cell
            if self.doubts.postpone(message, places, readers[conflict], writers[conflict], reads):
                return
        self.findings.found("race", message)

    def postpone(self, touch: Touch, waves, unit: int) -> None:
        """Move an access that outlives a barrier or a release behind it, for these waves.

        waves: without clock; unit: 1 << BARRIER or 1 << RELEASE.
        """
        held = self.written if touch.write else self.read
        mine = np.isin(who(touch.marks), waves)
        cells, marks = self._cells(touch.at[mine], touch.size, touch.marks[mine])
        here = held[cells]
        same = here >> RELEASE == marks >> RELEASE
        if unit == 1 << BARRIER:
            # of readers in common only the barriers are known
            same |= (here & 0xFF == SEVERAL) & (barriers(here) == barriers(marks))
        held[cells[same]] += unit
        touch.marks = np.where(mine, touch.marks + unit, touch.marks)


def _same_group(old, new):
    return old >> WORKGROUP == new >> WORKGROUP


def _bit(tag):
    """Return the bit of a wave among the up to 32 of its workgroup."""
    return np.uint32(1) << (tag & 31).astype(np.uint32)


def _unordered(old, new):
    """Return whether an access tagged old and a later one tagged new could come in reverse."""
    if len(old) == 0 or not old.any():
        return np.zeros(len(old), bool)
    return np.where(
        _same_group(old, new),
        (barriers(old) >= barriers(new)) & ((old ^ new) & 0xFF != 0),
        old != 0,
    )


def _merge(old, new):
    """Make a read tag for two readers: several waves of one workgroup, or several workgroups."""
    several = np.maximum(barriers(old), barriers(new)) << BARRIER | _readers(old) | _readers(new)
    return np.where(_same_group(old, new), several | SEVERAL, np.int64(EVERYONE))


def _readers(tag):
    """Return the waves of a read tag, as bits in the place of its releases."""
    one = np.int64(1) << (RELEASE + (tag & READERS))
    return np.where(tag & 0xFF == SEVERAL, tag & _RELEASES, one)


def _who(tag: int) -> str:
    if tag >= EVERYONE:
        return "several workgroups"
    wave = "several waves" if tag & 0xFF == SEVERAL else f"wave {tag & 0xFF}"
    return f"{wave} of workgroup {(tag >> WORKGROUP) - 1}"

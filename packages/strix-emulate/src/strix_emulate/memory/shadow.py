# SPDX-License-Identifier: BSD-3-Clause
"""Memory with a shadow, which records the waves that wrote and read each cell.

A cell has the size of the kernel's smallest access, 1 to 4 bytes. Its shadow has the tags
(:mod:`strix_emulate.memory.tags`) of its last write and its last read.

Two accesses of different waves, at least one of which is a write, are a race if no barrier lies
between them. For waves of different workgroups, it must be a barrier of the grid, which clears all
tags of global memory. A barrier of a workgroup does not order an access that is still outstanding
when its wave arrives at the barrier. Such an access gets a tag as if it came after the barrier
(:meth:`Memory.postpone`). Accesses that look like a race are not a race if atomics order them
(:mod:`strix_emulate.memory.happens_before`), or if both are stores of the same value.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from strix_emulate.code.decode import Instruction
from strix_emulate.memory import pages
from strix_emulate.memory.findings import Findings, describe_place
from strix_emulate.memory.happens_before import Order
from strix_emulate.memory.tags import (
    BARRIER,
    EVERYONE,
    RELEASE,
    SEVERAL,
    are_unordered,
    atomic_tags,
    barriers_of,
    describe,
    in_same_workgroup,
    merge_readers,
    reader_bits,
    store_tags,
    tags_that_stores_release,
    wave_bit,
    wave_of,
)


@dataclass
class Touch:
    """The accesses of a memory instruction that is outstanding.

    Attributes:
        memory: The memory.
        at: Offsets, one for each lane that accesses the memory.
        tags: Tags that the accesses left in the shadow.
        size: Bytes of each access.
        write: Whether the instruction is a store or an atomic.
        atomic: Whether it is an atomic.
        returns: Whether it is an atomic that returns the old value.
    """

    memory: "Memory"
    at: np.ndarray
    tags: np.ndarray
    size: int
    write: bool
    atomic: bool = False
    returns: bool = False


class Storage:
    """Bytes with offsets from 0 on.

    Attributes:
        name: Name of the memory in messages.
        size: Number of bytes.
        bytes: The bytes, followed by spare bytes, so that an access of several bytes may start at
            the last byte.
        views: The same bytes as unsigned words, by bytes of a word. Words of 16 bytes are
            complex128.
    """

    def __init__(self, name: str, size: int, shared: bool = False):
        self.name = name
        self.size = size
        room = (size + 31) // 16 * 16
        # The zeros of numpy take no memory until they are touched.
        self.bytes = pages.shared_zeros(room) if shared else np.zeros(room, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes.view("c16")

    def load(self, at, size: int):
        """Load `size` bytes at each offset.

        Returns:
            (words, len(at)) uint32. Loads of 1 and 2 bytes are zero-extended.
        """
        is_aligned = size != 12 and not (at & (min(size, 16) - 1)).any()
        if is_aligned:
            values = np.take(self.views[size], at // size, mode="clip")
            if size < 4:
                return values.astype(np.uint32)[None]
            return values.view(np.uint32).reshape(len(at), size // 4).T
        if size >= 4 and not (at & 3).any():
            words = (at >> 2) + np.arange(size // 4)[:, None]
            return np.take(self.views[4], words, mode="clip")
        places = at + np.arange(size)[:, None]
        raw = np.take(self.bytes, places, mode="clip").astype(np.uint32)
        if size < 4:
            return sum(raw[i] << np.uint32(8 * i) for i in range(size))[None]
        return sum(raw[i::4] << np.uint32(8 * i) for i in range(4))

    def store(self, at, data, size: int) -> None:
        """Store the low `size` bytes of data, (words, len(at)) uint32, at each offset."""
        if size == 2 and not (at & 1).any():
            self.views[2][at >> 1] = data[0].astype(np.uint16)
        elif size >= 4 and not (at & 3).any():
            for i in range(size // 4):
                self.views[4][(at >> 2) + i] = data[i]
        else:
            for i in range(size):
                shifted = data[i // 4] >> np.uint32(8 * (i % 4))
                self.bytes[at + i] = shifted.astype(np.uint8)

    def differs(self, at, data, size: int) -> bool:
        """Return whether a store of the data would change a byte."""
        if size < 4:
            data = data & np.uint32((1 << 8 * size) - 1)
        return not np.array_equal(self.load(at, size), data)


class Memory(Storage):
    """Bytes with offsets from 0 on, and their shadow.

    Attributes:
        cell: Bytes of a shadow cell.
        checked: Whether there is a shadow, and races are reported.
        strict: Whether a load of bytes that no store wrote is reported.
        findings: Receives the findings of the checks.
        order: The order that atomics establish between waves, or None if nothing is checked.
        doubts: Postpones races of loads that may be unused, or None if races are reported at once.
        co_writers: Waves that wrote the same value to a cell, by cell, if they are of several
            workgroups.
        stores: The kernel's instructions, by address. Empty if no cache can hide a store.
        store_addresses: Address of the instruction that wrote each cell last. Empty if `stores` is.
        one_workgroup: Whether each cell belongs to one workgroup, as in LDS and scratch. LDS and
            scratch have no cache.
        written: Tag of the last write of each cell.
        read: Tag of the last read of each cell.
        swapped: Tag of the last atomic on each cell. It equals `written` if the atomic was the last
            write. It is `written` with the other sign if the last write was a plain store whose
            value an acquire has read.
        released: Tag up to which the last atomic on each cell released the accesses of its wave.
        writers: Bit masks of the waves that wrote the value of each cell. The waves are those of
            the last writer's workgroup.
    """

    #: Whether each cell belongs to one lane (:mod:`strix_emulate.memory.scratch`).
    of_lanes = False

    def __init__(
        self,
        name: str,
        size: int,
        cell: int = 4,
        checked: bool = True,
        strict: bool = True,
        shared: bool = False,
    ):
        super().__init__(name, size, shared)
        self.cell = cell
        self.checked = checked
        self.strict = strict
        self.findings = Findings()
        self.order: Order | None = None
        self.doubts: Any = None
        self.co_writers: dict[int, set[int]] = {}
        self.stores: dict[int, Instruction] = {}
        self.store_addresses = np.zeros(0, np.int32)
        self.one_workgroup = True
        self._pages: list[np.ndarray] = []
        self.clear_tags()

    def clear_tags(self) -> None:
        """Clear the tags, so that no wave counts as having accessed a cell."""
        cells = self.size // self.cell + 1 if self.checked else 0
        self.written = self._zeros(cells, np.int64)
        self.read = self._zeros(cells, np.int64)
        self.swapped = self._zeros(cells, np.int64)
        self.released = self._zeros(cells, np.int64)
        self.writers = self._zeros(cells, np.uint32)
        self._has_swaps = False
        self.co_writers.clear()

    def clear_tags_in_place(self) -> None:
        """Clear the tags in the same pages. New pages are slower if most cells were touched."""
        self.co_writers.clear()
        self.written.fill(0)
        if not self.of_lanes:
            self.read.fill(0)
            self.writers.fill(0)
        if self._has_swaps:
            self.swapped.fill(0)
            self.released.fill(0)

    def release_tags(self) -> None:
        """Release the shadow's pages to later launches, at the end of this one."""
        self.written = np.zeros(0, np.int64)
        self.read = self.written
        self.swapped = self.written
        self.released = self.written
        self.writers = np.zeros(0, np.uint32)
        self.store_addresses = np.zeros(0, np.int32)
        for mapped in self._pages:
            pages.release(mapped)
        self._pages = []

    def _zeros(self, count: int, dtype) -> np.ndarray:
        zeros, mapped = pages.lazy_zeros(count, dtype)
        if mapped is not None:
            self._pages.append(mapped)
        return zeros

    def record_stores(self, instructions: list[Instruction]) -> None:
        """From now on, also record which of these instructions last stored to each cell."""
        if not self.stores:
            self.store_addresses = self._zeros(len(self.written), np.int32)
        self.stores |= {ins.address: ins for ins in instructions}

    def _record_store(self, cells) -> None:
        if self.stores and self.findings.instruction:
            self.store_addresses[cells] = self.findings.instruction.address

    def track(
        self,
        at,
        size: int,
        tags,
        swap_words: int = 0,
    ) -> Touch | None:
        """Check a load against earlier stores, and record it.

        Args:
            at: Offsets, flat.
            size: Bytes of each access.
            tags: Tag of each access.
            swap_words: Bit mask of the words of each access that a later compare-and-swap compares
                with memory. For these words, an earlier atomic is not a race, and a stale value is
                harmless.

        Raises:
            Trap: A race, a read before any write, or a load that may get an old value from a cache,
                if such a finding ends the launch.
        """
        if not self.checked:
            return None
        touch = Touch(self, at, tags, size, False)
        cells, tags = self._cells(at, size, tags)
        before = np.take(self.written, cells)
        if self.strict and self.one_workgroup and not before.all():
            self.report_unwritten()
        if self._may_conflict(before, tags):
            conflict = self._unordered(before, tags)
            if conflict.any():
                conflict &= ~self._wrote_same_value(
                    cells,
                    before,
                    tags,
                    conflict,
                )
            compared = self._cells_in_words(swap_words, size, len(at))
            conflict &= ~compared | (before != self.swapped[cells])
            self._report_race(conflict, before, tags, "a write", cells, tags)
            self._check_caches(
                cells[~compared],
                before[~compared],
                tags[~compared],
            )
        self._record_reads(cells, tags)
        return touch

    def report_unwritten(self) -> None:
        """Report a load of bytes that nothing wrote."""
        self.findings.report("uninitialised", f"{self.name} is read before it is written")

    def _record_reads(self, cells, tags) -> None:
        readers = np.take(self.read, cells)
        if self._may_conflict(readers, tags):
            unordered = self._unordered(readers, tags)
            self.read[cells] = np.where(
                unordered,
                merge_readers(readers, tags),
                tags,
            )
        else:
            self.read[cells] = tags
        now = np.take(self.read, cells)
        overwritten = np.flatnonzero(now != tags)
        if len(overwritten):
            unordered = self._unordered(now[overwritten], tags[overwritten])
            overwritten = overwritten[unordered]
            self._add_readers(cells[overwritten], tags[overwritten])

    def _add_readers(self, cells, tags) -> None:
        """Record the readers of cells that several waves read by the same instruction."""
        order = np.argsort(cells, kind="stable")
        cells = cells[order]
        tags = tags[order]
        first = np.flatnonzero(np.diff(cells, prepend=-1))
        if not len(first):
            return
        cells = cells[first]
        now = self.read[cells]
        lowest = np.minimum.reduceat(tags, first)
        highest = np.maximum.reduceat(tags, first)
        bits = np.bitwise_or.reduceat(reader_bits(tags), first)
        bits = bits | reader_bits(now) | SEVERAL
        barriers = np.maximum(barriers_of(highest), barriers_of(now)) << BARRIER
        near = in_same_workgroup(lowest, highest) & in_same_workgroup(highest, now)
        self.read[cells] = np.where(near, barriers | bits, np.int64(EVERYONE))

    def track_acquire(self, at, size: int, tags) -> None:
        """Record a load that bypasses the caches. It orders accesses, and is never a race."""
        if self.order is not None:
            cells, tags = self._cells(at, size, tags)
            released = self._released_tags(cells, tags)
            self.order.acquire(self.name, cells, tags, released)
            # If an acquire reads the value of a store or an atomic, the value has reached memory.
            # So the store or atomic gets the tag of the epoch in which it was executed. Stores of
            # its wave that are still outstanding keep their later tags.
            is_read = released != np.take(self.written, cells)
            if is_read.any():
                cells = cells[is_read]
                released = released[is_read]
                is_atomic = self.written[cells] == self.swapped[cells]
                self._has_swaps = True
                self.written[cells] = released
                self.swapped[cells] = np.where(is_atomic, released, -released)

    def track_atomic(
        self,
        at,
        size: int,
        tags,
        may_take_lock: bool = False,
        returns: bool = False,
    ) -> Touch | None:
        """Record an atomic. If it may take a lock, it must already have been executed.

        Args:
            at: Offsets, flat.
            size: Bytes of each access.
            tags: Tag of each access.
            may_take_lock: Whether the atomic may take a lock: a swap, or a compare-and-swap, that
                returns the old value.
            returns: Whether the atomic returns the old value.
        """
        self._has_swaps = True
        later = tags if returns or self.one_workgroup else atomic_tags(tags)
        touch = Touch(self, at, later, size, True, True, returns)
        _, later = self._cells(at, size, later)
        cells, tags = self._cells(at, size, tags)
        if self.order is not None:
            before = np.take(self.written, cells)
            swaps = None
            if may_take_lock:
                values = np.take(self.views[size], at // size)
                values = np.tile(values, len(cells) // max(1, len(at)))
                swaps = (values, before == np.take(self.swapped, cells))
            released = self._released_tags(cells, tags)
            self.order.atomic(self.name, cells, tags, released, swaps)
        self.written[cells] = later
        self.swapped[cells] = later
        self.released[cells] = tags
        self.writers[cells] = wave_bit(tags)
        self._record_store(cells)
        return touch

    def _released_tags(self, cells, tags):
        """Return by cell the tag up to which the last write released the accesses of its wave.

        A plain store of global memory releases only stores and atomics that were awaited before it.
        In CU mode, the waves of a workgroup use one cache, which keeps their stores in order. LLVM
        before 22 places no wait between them.
        """
        written = np.take(self.written, cells)
        swapped = np.take(self.swapped, cells)
        is_store = (written != swapped) & (written != -swapped)
        written = np.where(written == swapped, np.take(self.released, cells), written)
        if self.one_workgroup:
            return written
        if self.order is not None and self.order.one_cache:
            is_store &= ~in_same_workgroup(written, tags)
        return np.where(is_store, tags_that_stores_release(written), written)

    def _unordered(self, old, new):
        """Return by element whether two accesses are of different waves, and nothing orders them.

        Barriers and atomics order accesses.
        """
        conflict = are_unordered(old, new)
        if self.order is not None and conflict.any():
            at = np.flatnonzero(conflict)
            conflict[at] = ~self.order.ordered(old[at], new[at])
        return conflict

    def _wrote_same_value(self, cells, before, tags, conflict):
        """Return by cell whether the reading wave also wrote the value that another wave wrote."""
        own_bit = self.writers[cells] & wave_bit(tags) != 0
        result = in_same_workgroup(before, tags) & own_bit
        if not self.co_writers:
            return result
        for i in np.flatnonzero(conflict & ~result).tolist():
            waves = self.co_writers.get(int(cells[i]), ())
            result[i] = wave_of(int(tags[i])) in waves
        return result

    def _releases_lock(self, cells, before, tags, conflict):
        """Return by cell whether a store releases a lock that its wave took by an atomic.

        The instruction is a plain store, but the store counts as atomic, because other waves access
        the lock only by atomics.
        """
        result = conflict & (before == self.swapped[cells])
        for i in np.flatnonzero(result).tolist():
            result[i] = self.order is not None and self.order.holds(
                self.name, int(cells[i]), int(tags[i])
            )
        return result

    def _check_caches(self, cells, before, tags) -> None:
        """Report loads that are ordered after a store but may read an older value from a cache."""
        if self.one_workgroup or self.order is None or self.order.idle:
            return
        at = np.flatnonzero(are_unordered(before, tags))
        old = before[at]
        new = tags[at]
        is_hidden = self.order.ordered(old, new) & ~self.order.visible(old, new)
        hidden = np.flatnonzero(is_hidden)
        if not len(hidden):
            return
        first = hidden[0]
        writer = int(old[first])
        reader = int(new[first])
        store = self.stores.get(int(self.store_addresses[cells[at[first]]]))
        caches = "buffer_gl0_inv"
        if not in_same_workgroup(writer, reader):
            caches = "buffer_gl1_inv and buffer_gl0_inv"
        self.findings.report(
            "stale",
            f"{describe(reader)} reads what {describe(writer)} wrote at {describe_place(store)}. "
            f"The load is ordered after the store, but without {caches} between them a cache may "
            "still have the older value",
        )

    def _may_conflict(self, before, tags) -> bool:
        """Return whether any access may be unordered with an earlier one, by a quick test.

        In LDS and scratch, all tags of a cell are of one workgroup. So the last barrier orders all
        accesses that came before it.
        """
        if not self.one_workgroup:
            return bool(before.any())
        return bool((before >= tags >> BARRIER << BARRIER).any())

    def track_store(self, at, data, size: int, tags) -> Touch | None:
        """Check a store against earlier accesses, execute it, and record it.

        Several waves may write the same value to the same cell, because compilers let all threads
        that have a copy of a value store it.

        Args:
            at: Offsets, flat.
            data: (words, len(at)) uint32.
            size: Bytes of each access.
            tags: Tag of each access.

        Raises:
            Trap: A race, if such a finding ends the launch.
        """
        if not self.checked:
            self.store(at, data, size)
            return None
        if not self.one_workgroup:
            tags = store_tags(tags)
        touch = Touch(self, at, tags, size, True)
        cells, tags = self._cells(at, size, tags)
        self._check_readers(cells, at, data, size, tags)
        before = np.take(self.written, cells)
        conflict = self._check_writers(cells, before, at, data, size, tags)
        if self.co_writers:
            for cell in cells[~conflict].tolist():
                self.co_writers.pop(cell, None)
        writers = wave_bit(tags)
        if conflict.any():
            near = conflict & in_same_workgroup(before, tags)
            writers = np.where(near, self.writers[cells] | writers, writers)
            far = conflict & ~near
            self._add_co_writers(cells[far], before[far], tags[far])
        self.store(at, data, size)
        self.written[cells] = tags
        self.writers[cells] = writers
        self._record_store(cells)
        self._check_lanes(cells, at, data, size, tags, writers)
        return touch

    def _check_readers(self, cells, at, data, size: int, tags) -> None:
        """Report a store to a cell that another wave read."""
        readers = np.take(self.read, cells)
        if self._may_conflict(readers, tags):
            conflict = self._unordered(readers, tags)
            conflict &= ~self._repeats_value(
                cells,
                at,
                data,
                size,
                readers,
                conflict,
            )
            self._report_race(conflict, readers, tags, "a read", cells, readers)

    def _check_writers(self, cells, before, at, data, size: int, tags):
        """Report a store of a different value than another wave stored.

        Return by cell whether the store and another wave's store are unordered, even if their
        values are the same. A store that releases a lock counts as ordered.
        """
        if not self._may_conflict(before, tags):
            return np.zeros(len(cells), bool)
        conflict = self._unordered(before, tags)
        if conflict.any():
            conflict &= ~self._releases_lock(cells, before, tags, conflict)
            lanes = _lanes_of_cells(conflict, len(at))
            if self.differs(at[lanes], data[:, lanes], size):
                self._report_race(
                    conflict,
                    before,
                    tags,
                    "a write of a different value",
                )
        return conflict

    def _check_lanes(
        self,
        cells,
        at,
        data,
        size: int,
        tags,
        writers,
    ) -> None:
        """Report different values that waves stored to one cell by the same instruction.

        The cell has the value of the last lane.
        """
        overwritten = self.written[cells] != tags
        if not overwritten.any():
            return
        lanes = _lanes_of_cells(overwritten, len(at))
        if self.differs(at[lanes], data[:, lanes], size):
            self.findings.report(
                "race",
                f"two waves write different values to one {self.name} cell at once",
            )
        here = np.isin(cells, cells[overwritten])
        np.bitwise_or.at(self.writers, cells[here], writers[here])
        here &= ~in_same_workgroup(self.written[cells], tags)
        self._add_co_writers(cells[here], self.written[cells[here]], tags[here])

    def _repeats_value(
        self,
        cells,
        at,
        data,
        size: int,
        readers,
        conflict,
    ):
        """Return by cell whether a store repeats a value that the reading wave had written before.

        Attention kernels do so: workgroups that share a key head append the same keys to the KV
        cache and read the keys back. Such a store needs no check for other readers, because a read
        of the cell by any other wave was already reported as a race.
        """
        if self.one_workgroup or not conflict.any():
            return np.zeros(len(cells), bool)
        repeated = conflict & (wave_of(readers) == wave_of(self.written[cells]))
        if self.co_writers:
            for i in np.flatnonzero(conflict & ~repeated).tolist():
                repeated[i] = int(cells[i]) in self.co_writers
        lanes = _lanes_of_cells(repeated, len(at))
        if self.differs(at[lanes], data[:, lanes], size):
            repeated[:] = False
        return repeated

    def _add_co_writers(self, cells, first, second) -> None:
        """Record that waves with these tags wrote the same value to these cells."""
        tags = zip(cells.tolist(), first.tolist(), second.tolist(), strict=True)
        for cell, a, b in tags:
            waves = self.co_writers.setdefault(cell, set())
            waves.update((wave_of(a), wave_of(b)))

    def _cells(self, at, size: int, tags):
        """Return the cells of the accesses, and a tag for each cell.

        The first cells of all accesses come first, then the second ones, and so on.
        """
        count = max(1, size // self.cell)
        cells = at >> (self.cell.bit_length() - 1)
        if count > 1:
            cells = (cells + np.arange(count)[:, None]).ravel()
            tags = np.broadcast_to(tags, (count, len(at))).ravel()
        return cells, tags

    def _cells_in_words(
        self,
        words: int,
        size: int,
        lanes: int,
    ) -> np.ndarray:
        """Return flags of the cells from `_cells`: whether they lie in the words of a bit mask."""
        count = max(1, size // self.cell)
        word = np.arange(count) * self.cell // 4
        return np.repeat((words >> word & 1).astype(bool), lanes)

    def _report_race(
        self,
        conflict,
        before,
        tags,
        event: str,
        cells=None,
        readers=None,
    ) -> None:
        """Report a race, or postpone it until it is known whether a store uses the loaded value.

        Args:
            conflict: By cell of the access that is executed: whether it races.
            before: By cell, tag of the earlier access.
            tags: By cell, tag of the access that is executed.
            event: Kind of the earlier access, for the message.
            cells: The cells. None unless the race is between a load and a store.
            readers: For such a race, the tags of the load: `before` or `tags`.
        """
        if not conflict.any():
            return
        first = int(np.flatnonzero(conflict)[0])
        old = describe(int(before[first]))
        new = describe(int(tags[first]))
        message = (
            f"{self.name} cell is touched by {new} after {event} by {old}, and nothing orders the "
            "two accesses"
        )
        if self.doubts is not None and readers is not None:
            is_load = readers is tags
            writers = before if is_load else tags
            is_postponed = self.doubts.postpone(
                message,
                cells[conflict] * self.cell,
                readers[conflict],
                writers[conflict],
                is_load,
            )
            if is_postponed:
                return
        self.findings.report("race", message)

    def postpone(self, touch: Touch, waves, at_barrier: bool) -> None:
        """Change the tags of an outstanding access as if it came after a barrier or a release.

        Args:
            touch: The access.
            waves: The waves whose accesses change, as tags without clocks.
            at_barrier: Whether the waves are at a barrier. Otherwise, they are at a release.
        """
        shadow = self.written if touch.write else self.read
        selected = np.isin(wave_of(touch.tags), waves)
        postponed = store_tags(touch.tags)
        if at_barrier:
            postponed = (touch.tags >> BARRIER) + 1 << BARRIER | touch.tags & 0xFF
            # The barrier does not wait for the access. So the access gets the tag of the epoch that
            # begins when it has been awaited (tags.store_tags).
            if touch.write and not touch.returns and not self.one_workgroup:
                postponed = store_tags(postponed)
        at = touch.at[selected]
        cells, tags = self._cells(at, touch.size, touch.tags[selected])
        _, later = self._cells(at, touch.size, postponed[selected])
        now = shadow[cells]
        is_same = now >> RELEASE == tags >> RELEASE
        if at_barrier:
            # The tag of a cell with several readers has no releases, so only barriers are compared.
            has_readers = (now & 0xFF == SEVERAL) & (barriers_of(now) == barriers_of(tags))
            shadow[cells[has_readers]] += 1 << BARRIER
            is_same &= ~has_readers
        later = later & ~0xFF | now & 0xFF
        if touch.atomic:
            is_atomic = is_same & (now == self.swapped[cells])
            self.swapped[cells[is_atomic]] = later[is_atomic]
        shadow[cells[is_same]] = later[is_same]
        touch.tags = np.where(selected, postponed, touch.tags)


def _lanes_of_cells(flags, lanes: int):
    """Return the lanes with at least one flagged cell."""
    return np.flatnonzero(flags.reshape(-1, lanes).any(axis=0))

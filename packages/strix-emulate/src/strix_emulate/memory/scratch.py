# SPDX-License-Identifier: BSD-3-Clause
"""Scratch memory. Each cell belongs to one lane, so there are no races, and order is irrelevant."""

from strix_emulate.memory.shadow import Memory, Touch


class Scratch(Memory):
    """Private memory of lanes. Its shadow has a byte per cell: whether the cell was written."""

    of_lanes = True

    def clear_tags(self) -> None:
        """Forget which cells were written."""
        super().clear_tags()
        self.written = self.written.view("u1")[: len(self.written)]

    def track(
        self,
        at,
        size: int,
        tags,
        swap_words: int = 0,
    ) -> Touch | None:
        """Report a load of bytes that nothing wrote."""
        if self.checked and self.strict:
            cells, _ = self._cells(at, size, tags)
            if not self.written[cells].all():
                self.report_unwritten()
        return None

    def track_acquire(self, at, size: int, tags) -> None:
        """Report a load of bytes that nothing wrote."""
        self.track(at, size, tags)

    def track_atomic(
        self,
        at,
        size: int,
        tags,
        may_take_lock: bool = False,
        returns: bool = False,
    ) -> Touch | None:
        """Record an atomic as a store."""
        self._record(at, size, tags)
        return None

    def track_store(self, at, data, size: int, tags) -> Touch | None:
        """Store the data, and record that the cells were written."""
        self.store(at, data, size)
        if self.checked:
            self._record(at, size, tags)
        return None

    def _record(self, at, size: int, tags) -> None:
        cells, _ = self._cells(at, size, tags)
        self.written[cells] = 1

    def postpone(self, touch: Touch, waves, at_barrier: bool) -> None:
        """Do nothing: no other wave sees an outstanding access."""

# SPDX-License-Identifier: BSD-3-Clause
"""Scratch: each cell is a lane's own, so no wave races there, and nothing orders others."""

from strix_emulate.memory.shadow import Memory, Touch


class Scratch(Memory):
    """Memory of lanes, whose shadow says which cells were written, a byte for each."""

    of_lanes = True

    def clear_tags(self) -> None:
        """Forget what was written."""
        super().clear_tags()
        self.written = self.written.view("u1")[: len(self.written)]

    def track(self, at, size: int, marks, swap_words: int = 0) -> Touch | None:
        """Find a load of what nothing wrote."""
        if self.checked and self.strict and not self.written[self._cells(at, size, marks)[0]].all():
            self.findings.found("uninitialised", f"{self.name} is read before it is written")
        return None

    def track_acquire(self, at, size: int, marks) -> None:
        """Find what any other load is found for."""
        self.track(at, size, marks)

    def track_atomic(self, at, size: int, marks, takes: bool = False) -> None:
        """Note an atomic as a store."""
        self.written[self._cells(at, size, marks)[0]] = 1

    def track_store(self, at, data, size: int, marks) -> Touch | None:
        """Store, and note it."""
        self.store(at, data, size)
        if self.checked:
            self.written[self._cells(at, size, marks)[0]] = 1
        return None

    def postpone(self, touch: Touch, waves, unit: int) -> None:
        """Do nothing: no other wave sees what is outstanding."""

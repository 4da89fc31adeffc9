# SPDX-License-Identifier: BSD-3-Clause
"""Races of loads whose values may be unused. If nothing uses a loaded value, its race is harmless.

Compilers generate code with such races. If a tensor is smaller than a workgroup, each wave loads a
copy of it, and one wave stores the tensor in place. The loads of the other waves race with that
store, but nothing uses their values.

So a race between a plain load and a store of global memory is judged only when the waves have
ended. The race is a fault if a wave that executed the load also executed a store that the loaded
value can reach, and a lane was active in that store. A race is reported at once if the kernel calls
functions or selects vector registers by M0, or if the loaded value decides whether code with an
effect is executed.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import Trap
from strix_emulate.instructions.uses import DECIDES, Uses
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.tags import (
    EVERYONE,
    READERS,
    RELEASE,
    RELEASES,
    SEVERAL,
    WORKGROUP,
    wave_of,
)
from strix_emulate.memory.waves import Waves


@dataclass
class _Doubt:
    message: str
    instruction: Instruction
    count: int = 0


@dataclass(frozen=True)
class _Race:
    """A race that is not judged yet.

    Attributes:
        address: Address of the instruction at which the race was found.
        reader: Tag of the load without its clock. If several waves load, the tag has their bits.
        writer: Tag of the store without its clock.
        reached: Bit mask of the numbers of the stores that the loaded value can reach.
    """

    address: int
    reader: int
    writer: int
    reached: int


class Doubts:
    """Races of one launch that are not judged yet.

    Attributes:
        stored: Bit masks of the numbers of the stores that each wave executed, by wave of the grid.
        touched: Bit masks of the arrays that each load touched, by number of the load.
        refused: Whether races are reported at once, without judging them.
    """

    def __init__(
        self,
        uses: Uses,
        findings: Findings,
        ranges: np.ndarray,
        waves: int,
        total: int,
    ):
        """Begin without races.

        Args:
            uses: The stores that each loaded value can reach.
            findings: Receives the races that are harmless.
            ranges: Address ranges of the arrays, as `Arena.ranges` returns them.
            waves: Number of waves of a workgroup.
            total: Number of workgroups.
        """
        self._uses = uses
        self._findings = findings
        self._waves = waves
        self._ranges = ranges
        self._open: dict[_Race, _Doubt] = {}
        self.stored = np.zeros(total * waves, np.int64)
        self.touched = np.zeros(len(uses.loads) + 1, np.int64)
        self.refused = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def number(self, address: int) -> int:
        """Return the number of the load or store at an address, or 0 if it has none."""
        return self._uses.numbers.get(address, 0)

    def note_load(self, at: np.ndarray) -> None:
        """Record the arrays that the current load touches. `at` has its offsets."""
        load = self._findings.instruction
        if load is not None and len(at):
            self.touched[self.number(load.address)] |= self._array_bits(at)

    def note_store(self, g: Waves, inside: np.ndarray | None = None) -> None:
        """Record which waves execute the current store with an active lane.

        `inside` has a flag for each active lane: whether it stores. None means that all do.
        """
        store = self._findings.instruction
        if store is None:
            return
        lanes = np.arange(g.n * g.width)[g.lanes]
        if inside is not None:
            lanes = lanes[inside]
        g.stored[lanes // g.width] |= np.int64(1) << self.number(store.address)

    def note_end(self, g: Waves) -> None:
        """Record the stores of waves that have ended."""
        self.stored[g.workgroup * self._waves + g.wave] = g.stored

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """First offsets of the arrays, sorted, and the bit mask of each array.

        A view of an array is a range with the same offset. The array's mask has the bits of all its
        ranges.
        """
        starts, array = np.unique(self._ranges[:, 2], return_inverse=True)
        bits = np.zeros(len(starts), np.int64)
        range_bits = np.int64(1) << np.arange(len(self._ranges)) % 64
        np.bitwise_or.at(bits, array.ravel(), range_bits)
        return starts, bits

    def _array_bits(self, at: np.ndarray) -> np.int64:
        starts, bits = self._arrays
        array = np.unique(np.searchsorted(starts, at, "right") - 1)
        return np.bitwise_or.reduce(bits[array])

    def postpone(
        self,
        message: str,
        at,
        readers,
        writers,
        is_load: bool,
    ) -> bool:
        """Postpone a race if possible. Return whether it is judged later.

        Args:
            message: The finding.
            at: Offsets of the cells that race.
            readers: Tags of the loads.
            writers: Tags of the stores.
            is_load: Whether the current instruction is the load. Otherwise it is the store.
        """
        here = self._findings.instruction
        if self.refused or here is None or not self._findings.ends_launch("race"):
            return False
        loads = [here] if is_load else self._loads_of(self._array_bits(at))
        reached = 0
        for load in loads:
            uses = self._uses.reached_stores(load)
            if uses == DECIDES:
                return False
            reached |= uses
        pairs = np.unique(np.stack([readers, writers]), axis=1)
        for reader, writer in pairs.T.tolist():
            if reader < EVERYONE:
                is_several = reader & 0xFF == SEVERAL
                bits = reader & RELEASES if is_several else 0
                reader = wave_of(reader) | bits
            race = _Race(here.address, reader, wave_of(writer), reached)
            doubt = self._open.setdefault(race, _Doubt(message, here))
            doubt.count += 1
        return True

    def _loads_of(self, bits: np.int64) -> list[Instruction]:
        """Return the loads that touched any of these arrays."""
        return [load for i, load in enumerate(self._uses.loads) if self.touched[i] & bits]

    def judge(self) -> None:
        """Judge the races of waves that have ended.

        Raises:
            Trap: A wave executed a store that its racing load can reach.
        """
        for race, doubt in self._open.items():
            executed = self._stores_of(race.reader, race.writer).view(np.uint64)
            if (executed & np.uint64(race.reached)).any():
                trap = Trap("race", doubt.message)
                trap.instruction = doubt.instruction
                raise trap

    def _stores_of(self, reader: int, writer: int) -> np.ndarray:
        """Return the bit masks of the stores that the reading waves executed, by wave.

        The wave that wrote is left out, even if it is one of the reading waves.
        """
        if reader >= EVERYONE:
            selected = np.ones(len(self.stored), bool)
        else:
            selected = np.zeros(len(self.stored), bool)
            wave = np.arange(self._waves)
            has_read = wave == reader & 0xFF
            if reader & 0xFF == SEVERAL:
                has_read = reader >> (RELEASE + (wave & READERS)) & 1 == 1
            selected[self._first_wave(reader) + wave[has_read]] = True
        selected[self._first_wave(writer) + (writer & 0xFF)] = False
        return self.stored[selected]

    def _first_wave(self, tag: int) -> int:
        """Return the number in the grid of the first wave of the tag's workgroup."""
        return ((tag >> WORKGROUP) - 1) * self._waves

    def note_unused(self) -> None:
        """Add a note for each remaining race. The loaded values of these races reached no store."""
        for doubt in self._open.values():
            message = f"{doubt.message}; the loaded value reaches no store"
            self._findings.note("race", doubt.instruction, message, doubt.count)
        self._open.clear()

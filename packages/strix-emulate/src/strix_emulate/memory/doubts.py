# SPDX-License-Identifier: BSD-3-Clause
"""Races of loads that may be of no use: whether what they gave reaches a store.

Of a tensor smaller than its workgroup each wave loads a copy, and one of them stores the tensor in
place. The loads of the others race with that store, and nothing uses them. So a race between a
plain load and a store of global memory is judged when its waves have ended: by the stores that they
executed with an active lane, and by those that the code of the load can reach.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import Trap
from strix_emulate.instructions.uses import DECIDES, Uses
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.happens_before import (
    BARRIER,
    EVERYONE,
    READERS,
    RELEASE,
    SEVERAL,
    WORKGROUP,
    who,
)
from strix_emulate.memory.waves import Waves

_RELEASES = (1 << BARRIER) - (1 << RELEASE)


@dataclass
class _Doubt:
    message: str
    instruction: Instruction
    count: int = 0


class Doubts:
    """Races of one launch that are not judged yet.

    Attributes:
        stored: By wave of the grid, the numbers of the stores that it executed, as bits.
        touched: By number of a load, the arrays that it touched, as bits.
        refused: Whether such a race is found at once.
    """

    def __init__(self, uses: Uses, findings: Findings, ranges: np.ndarray, waves: int, total: int):
        self._uses, self._findings, self._waves = uses, findings, waves
        self.stored = np.zeros(total * waves, np.int64)
        self.touched = np.zeros(len(uses.loads) + 1, np.int64)
        self.refused = False
        self._ranges = ranges
        self._open: dict[tuple[int, int, int, int], _Doubt] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def number(self, address: int) -> int:
        """Return the number of the load or store at an address."""
        return self._uses.numbers.get(address, 0)

    def note_load(self, at: np.ndarray) -> None:
        """Note the offsets that a load touches."""
        if self._findings.at is not None and len(at):
            self.touched[self.number(self._findings.at.address)] |= self._bits(at)

    def note_store(self, g: Waves, inside: np.ndarray | None = None) -> None:
        """Note that waves store; inside: which of their active lanes do, None for all."""
        if self._findings.at is None:
            return
        lanes = np.arange(g.n * g.width)[g.lanes]
        rows = (lanes if inside is None else lanes[inside]) // g.width
        g.stored[rows] |= np.int64(1) << self.number(self._findings.at.address)

    def ended(self, g: Waves) -> None:
        """Note the stores of waves that have ended."""
        self.stored[g.workgroup * self._waves + g.wave] = g.stored

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Where arrays begin, in order, and the bits of each: a view has those of its array."""
        starts, array = np.unique(self._ranges[:, 2], return_inverse=True)
        bits = np.zeros(len(starts), np.int64)
        np.bitwise_or.at(bits, array.ravel(), np.int64(1) << np.arange(len(self._ranges)) % 64)
        return starts, bits

    def _bits(self, at: np.ndarray) -> np.int64:
        starts, bits = self._arrays
        array = np.unique(np.searchsorted(starts, at, "right") - 1)
        return np.bitwise_or.reduce(bits[array])

    def postpone(self, message: str, at, readers, writers, reads: bool) -> bool:
        """Return whether a race is to be judged later.

        Args:
            message: The finding.
            at: Offsets.
            readers: The tags of the loads.
            writers: The tags of the stores.
            reads: Whether the load is executed now, and not the store.
        """
        here = self._findings.at
        if self.refused or here is None or not self._findings.ends("race"):
            return False
        loads = [here]
        if not reads:
            bits = self._bits(at)
            loads = [load for i, load in enumerate(self._uses.loads) if self.touched[i] & bits]
        reached = 0
        for load in loads:
            uses = self._uses.of(load)
            if uses == DECIDES:
                return False
            reached |= uses
        for reader, writer in np.unique(np.stack([readers, writers]), axis=1).T.tolist():
            if reader < EVERYONE:
                several = reader & 0xFF == SEVERAL
                reader = who(reader) | (reader & _RELEASES if several else 0)
            key = (here.address, reader, who(writer), reached)
            self._open.setdefault(key, _Doubt(message, here)).count += 1
        return True

    def judge(self) -> None:
        """Find races of waves that have ended and stored what they loaded. Raise Trap."""
        for (_, reader, writer, reached), doubt in self._open.items():
            if (self._stored_by(reader, writer).view(np.uint64) & np.uint64(reached)).any():
                trap = Trap("race", doubt.message)
                trap.instruction = doubt.instruction
                raise trap

    def _stored_by(self, reader: int, writer: int) -> np.ndarray:
        """Return what the waves with that tag stored, without the writer."""
        if reader >= EVERYONE:
            chosen = np.ones(len(self.stored), bool)
        else:
            chosen = np.zeros(len(self.stored), bool)
            wave = np.arange(self._waves)
            read = wave == reader & 0xFF
            if reader & 0xFF == SEVERAL:
                read = reader >> (RELEASE + (wave & READERS)) & 1 == 1
            chosen[((reader >> WORKGROUP) - 1) * self._waves + wave[read]] = True
        chosen[((writer >> WORKGROUP) - 1) * self._waves + (writer & 0xFF)] = False
        return self.stored[chosen]

    def note(self) -> None:
        """Note what is left: races of loads that nothing used."""
        for doubt in self._open.values():
            text = f"{doubt.message}; what is loaded reaches no store"
            self._findings.note("race", doubt.instruction, text, doubt.count)
        self._open.clear()

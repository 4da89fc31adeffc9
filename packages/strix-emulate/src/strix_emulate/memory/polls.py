# SPDX-License-Identifier: BSD-3-Clause
"""Polls: accesses to memory that other waves change, in a loop that waits for the change.

A wave that reads the same values as in an earlier iteration of a loop waits for another wave. The
values of an iteration are recorded as a hash. The polled cells are recorded too, because a change
of one of them can wake the wave.
"""

from dataclasses import dataclass

import numpy as np

from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import Waves

#: Maximum number of polls that are recorded in an iteration.
_LIMIT = 64
#: Odd 64-bit factors of the hash function.
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True)
class Poll:
    """The cells and values that waves polled by one instruction.

    Attributes:
        memory: The memory.
        wave: Row of the wave of each lane that polled.
        at: Offsets by lane.
        size: Bytes of each access.
        words: Values in the cells after the instruction, (words, lanes).
        compares: Whether the instruction is a compare-and-swap.
    """

    memory: Memory
    wave: np.ndarray
    at: np.ndarray
    size: int
    words: np.ndarray
    compares: bool

    def of_waves(self, rows: np.ndarray) -> "Poll":
        """Return the poll of some waves. `rows` has the new row of each wave, or -1 to omit it."""
        wave = rows[self.wave]
        selected = wave >= 0
        return Poll(
            self.memory,
            wave[selected],
            self.at[selected],
            self.size,
            self.words[:, selected],
            self.compares,
        )

    @property
    def has_changed(self) -> bool:
        """Whether the cells have other values now."""
        return not np.array_equal(self.memory.load(self.at, self.size), self.words)


def note(
    g: Waves,
    memory: Memory,
    at: np.ndarray,
    size: int,
    lanes: np.ndarray,
    target: range,
    compares: bool,
) -> None:
    """Record a poll after its execution.

    Args:
        g: The waves.
        memory: The memory.
        at: Offsets by lane.
        size: Bytes of each access.
        lanes: Flat numbers of the lanes that polled.
        target: Vector registers that the instruction wrote. They are hashed too, because a swap may
            succeed and leave the same value in memory.
        compares: Whether the instruction is a compare-and-swap.
    """
    if not len(at) or len(g.polled) >= _LIMIT:
        return
    words = memory.load(at, size)
    number = (at.astype(np.uint64) + np.uint64(len(memory.name))) * _FACTORS[0]
    for word in (*words, *g.VF[target.start : target.stop, lanes]):
        number = (number ^ word) * _FACTORS[1]
    number = (number ^ number >> np.uint64(29)) * _FACTORS[2]
    wave = lanes // g.width
    np.add.at(g.poll_hash, wave, number.view(np.int64))
    poll = Poll(memory, wave, at, size, words, compares)
    g.polled.append(poll)
    if g.slept_with is not None:
        g.slept_with.note_poll(poll)


def record_active(
    g: Waves,
    memory: Memory,
    at: np.ndarray,
    size: int,
    inside,
    target: range,
    compares: bool = False,
) -> None:
    """Record a poll of the active lanes, if polls are recorded in this iteration.

    `inside` has a flag for each active lane: whether it accesses memory. None means that all do.
    """
    if not g.records_polls:
        return
    lanes = np.arange(g.n * g.width)[g.lanes]
    if inside is not None:
        lanes = lanes[inside]
    note(g, memory, at, size, lanes, target, compares)


def select(polled: list[Poll], index: np.ndarray, n: int) -> list[Poll]:
    """Return the polls of some of n waves. `index` has the rows of the selected waves."""
    rows = np.full(n, -1)
    rows[index] = np.arange(len(index))
    selected = [poll.of_waves(rows) for poll in polled]
    return [poll for poll in selected if len(poll.at)]

# SPDX-License-Identifier: BSD-3-Clause
"""What waves see when they ask for memory that others change: which cells, and what stands there.

A wave that goes round a loop and sees the same as in an earlier turn waits for another wave. What
it saw in a turn is kept as a number, and the cells by which it can be woken.
"""

from dataclasses import dataclass

import numpy as np

from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.waves import Waves

#: Cells that are kept of one turn.
_MOST = 64
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True)
class Seen:
    """What waves saw at one instruction.

    Attributes:
        memory: Where.
        wave: By lane that asked, the row of its wave.
        at: The offsets.
        size: Bytes.
        words: What stood there afterwards, (words, lanes).
        compares: Whether it is a compare-and-swap.
    """

    memory: Memory
    wave: np.ndarray
    at: np.ndarray
    size: int
    words: np.ndarray
    compares: bool

    def chosen(self, rows: np.ndarray) -> "Seen":
        """Return what some waves saw; rows: by wave its new row, or -1."""
        wave = rows[self.wave]
        kept = wave >= 0
        at, words = self.at[kept], self.words[:, kept]
        return Seen(self.memory, wave[kept], at, self.size, words, self.compares)

    @property
    def changed(self) -> bool:
        """Whether something else stands there now."""
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
    """Note what waves see at these offsets, by lane, after the instruction.

    target: the registers that it wrote: a swap may leave what stood there, and have succeeded.
    compares: whether it is a compare-and-swap.
    """
    if not len(at) or len(g.watch) >= _MOST:
        return
    words = memory.load(at, size)
    number = (at.astype(np.uint64) + np.uint64(len(memory.name))) * _FACTORS[0]
    for word in (*words, *g.VF[target.start : target.stop, lanes]):
        number = (number ^ word) * _FACTORS[1]
    number = (number ^ number >> np.uint64(29)) * _FACTORS[2]
    wave = lanes // g.width
    np.add.at(g.look, wave, number.view(np.int64))
    g.watch.append(Seen(memory, wave, at, size, words, compares))
    if g.woken is not None:
        g.woken.note(g.watch[-1])


def note_active(
    g: Waves,
    memory: Memory,
    at: np.ndarray,
    size: int,
    inside,
    target: range,
    compares: bool = False,
) -> None:
    """Note what active lanes see; inside: which of them ask at all, None for all."""
    if g.records:
        lanes = np.arange(g.n * g.width)[g.lanes]
        lanes = lanes if inside is None else lanes[inside]
        note(g, memory, at, size, lanes, target, compares)


def select(watch: list[Seen], index: np.ndarray, n: int) -> list[Seen]:
    """Return what the waves `index` of n saw."""
    rows = np.full(n, -1)
    rows[index] = np.arange(len(index))
    chosen = [seen.chosen(rows) for seen in watch]
    return [seen for seen in chosen if len(seen.at)]

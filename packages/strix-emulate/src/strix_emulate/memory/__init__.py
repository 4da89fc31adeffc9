# SPDX-License-Identifier: BSD-3-Clause
"""Registers and memory of waves, and the checks for races, missing waits and unwritten memory.

Modules:

* ``addressing``: computation of the offsets that memory instructions access.
* ``arena``: `Arena`: global memory with its arrays.
* ``findings``: the checks, and `Findings`, which ends the launch or adds a note.
* ``happens_before``: the order of accesses that atomics establish.
* ``pages``: zeroed arrays for large shadows.
* ``polls``: the memory cells that waves poll, and the values that they read there.
* ``scratch``: `Scratch`: memory of single lanes, in which no race is possible.
* ``shadow``: `Memory`: bytes with a shadow, which records the waves that read and wrote them.
* ``tags``: access tags, which say which wave accessed a cell, and when.
* ``waits``: the wait counters, and the registers that outstanding loads will write.
* ``waves``: `Waves`: registers of waves at the same instruction.
"""

__all__ = [
    "addressing",
    "arena",
    "findings",
    "happens_before",
    "pages",
    "polls",
    "scratch",
    "shadow",
    "tags",
    "waits",
    "waves",
]

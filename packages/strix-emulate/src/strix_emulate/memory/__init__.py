# SPDX-License-Identifier: BSD-3-Clause
"""Registers and memory of waves, and the checks for races, missing waits and unwritten memory.

Its modules, imported where they are needed:

* ``addressing``: offsets that memory instructions access.
* ``arena``: `Arena`: global memory with its arrays.
* ``doubts``: races of plain loads whose value may reach no store.
* ``findings``: the checks, and what becomes of their findings.
* ``happens_before``: how atomics order accesses.
* ``pages``: zeroed arrays for large shadows.
* ``polls``: cells that waves poll, and the values that they read there.
* ``scratch``: `Scratch`: memory of single lanes, in which nothing races.
* ``shadow``: `Memory`: bytes with a shadow of who read and wrote them.
* ``storage``: `Storage`: bytes without a shadow.
* ``tags``: access tags: which wave accessed a cell, and when.
* ``waits``: the wait counters, and the registers that are still to be written.
* ``waves``: `Waves`: registers of waves at the same instruction.
"""

__all__ = [
    "addressing",
    "arena",
    "doubts",
    "findings",
    "happens_before",
    "pages",
    "polls",
    "scratch",
    "shadow",
    "storage",
    "tags",
    "waits",
    "waves",
]

# SPDX-License-Identifier: BSD-3-Clause
"""What waves read and write: registers, memory with its shadow, and what may race.

Its modules, imported where they are needed:

* ``addressing``: where memory instructions go.
* ``arena``: `Arena`: global memory, where arrays lie.
* ``doubts``: races of plain loads, until their value reaches a store.
* ``findings``: what checks find, and which are off.
* ``happens_before``: what atomics order.
* ``polls``: which cells waves poll, and what they saw there.
* ``scratch``: scratch: each cell is one lane's, so nothing races.
* ``shadow``: `Memory`: bytes with a shadow of who read and wrote them.
* ``waits``: the wait counters: results that are outstanding.
* ``waves``: `Waves`: registers of waves at the same instruction.
"""

__all__ = [
    "addressing",
    "arena",
    "doubts",
    "findings",
    "happens_before",
    "polls",
    "scratch",
    "shadow",
    "waits",
    "waves",
]

# SPDX-License-Identifier: BSD-3-Clause
"""What waves read and write: registers, memory with its shadow, and what may race.

Its modules, imported where they are needed:

* ``addressing``: where memory instructions go.
* ``arena``: `Arena`: global memory, where arrays lie.
* ``findings``: what checks find, and which are off.
* ``happens_before``: what atomics order.
* ``shadow``: `Memory`: bytes with a shadow of who read and wrote them.
* ``waits``: the wait counters: results that are outstanding.
* ``waves``: `Waves`: registers of waves at the same instruction.
"""

__all__ = ["addressing", "arena", "findings", "happens_before", "shadow", "waits", "waves"]

# SPDX-License-Identifier: BSD-3-Clause
"""A kernel as basic blocks, and the grid of workgroups that executes them.

Its modules, imported where they are needed:

* ``machine``: `Machine`, which runs workgroups, and `Options`.
* ``meeting``: where waves part and meet.
* ``parallel``: workgroups on several cores, in forked processes over one memory.
* ``program``: `Program`, basic blocks of Python functions.
* ``sleep``: waves that sleep until a cell that they polled changes.
"""

__all__ = ["machine", "meeting", "parallel", "program", "sleep"]

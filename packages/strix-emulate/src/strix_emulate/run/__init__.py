# SPDX-License-Identifier: BSD-3-Clause
"""A kernel as basic blocks, and the execution of a grid of workgroups.

Its modules, imported where they are needed:

* ``initial``: registers of waves at the start of a kernel.
* ``machine``: `Machine`, which executes one launch.
* ``meeting``: where waves part and meet.
* ``options``: `Options` and `Outcome` of a launch.
* ``parallel``: workgroups on several cores, in forked processes over one memory.
* ``program``: `Program`: basic blocks of Python functions.
* ``scheduler``: `Scheduler`, which decides which waves proceed.
* ``sleep``: waves that sleep until a cell that they polled changes.
"""

__all__ = [
    "initial",
    "machine",
    "meeting",
    "options",
    "parallel",
    "program",
    "scheduler",
    "sleep",
]

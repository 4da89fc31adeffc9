# SPDX-License-Identifier: BSD-3-Clause
"""A kernel as basic blocks, and the execution of a grid of workgroups.

Modules:

* ``doubts``: races of plain loads whose value may reach no store.
* ``initial``: registers of waves at the start of a kernel.
* ``machine``: `Machine`, which executes one launch.
* ``meeting``: barriers, and functions that split and join sets of waves.
* ``options``: `Options` and `Outcome` of a launch.
* ``parallel``: execution of workgroups on several cores, in forked processes that share memory.
* ``program``: `Program`: a kernel as basic blocks of Python functions.
* ``scheduler``: `Scheduler`, which selects the waves that proceed.
* ``sleep``: waves that sleep until a polled memory cell changes.
"""

__all__ = [
    "doubts",
    "initial",
    "machine",
    "meeting",
    "options",
    "parallel",
    "program",
    "scheduler",
    "sleep",
]

# SPDX-License-Identifier: BSD-3-Clause
"""Runs of instructions in C: its sources, how they are compiled, and when they run.

Its modules, imported where they are needed:

* ``generate``: `build`, which compiles it: `python -m strix_emulate.native.generate FOLDER`.
* ``library``: `loaded`, the library for this processor, if one is installed.
* ``plans``: what a run or a trace does to the wait counters.
* ``runs``: parts of basic blocks: steps of numpy, and runs of steps in C.
* ``traces``: blocks in a row that C executes at once, as waves went through them before.
"""

__all__ = ["generate", "library", "plans", "runs", "traces"]

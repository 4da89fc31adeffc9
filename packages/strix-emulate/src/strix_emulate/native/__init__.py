# SPDX-License-Identifier: BSD-3-Clause
"""Execution of instructions in C: the sources, their compilation, and what runs in C.

Its modules, imported where they are needed:

* ``generate``: `build`, which compiles the library:
  `python -m strix_emulate.native.generate FOLDER`.
* ``library``: `load_library`, the library for this processor, if one is installed.
* ``plans``: what a run or a trace does to the wait counters.
* ``runs``: `Run`: consecutive steps of a basic block that C executes.
* ``traces``: consecutive basic blocks that C executes at once.
"""

__all__ = ["generate", "library", "plans", "runs", "traces"]

# SPDX-License-Identifier: BSD-3-Clause
"""Execution of instructions in C: the C sources, their compilation, and calls of the C library.

Modules:

* ``generate``: `build`, which compiles the libraries
  (`python -m strix_emulate.native.generate FOLDER`).
* ``library``: `load_library`, which loads the library for this processor if it is installed.
* ``plans``: the effect of a run or a trace on the wait counters.
* ``runs``: `Run`: consecutive steps of a basic block that C executes in one call.
* ``traces``: `Trace`: consecutive basic blocks that C executes in one call.
"""

__all__ = ["generate", "library", "plans", "runs", "traces"]

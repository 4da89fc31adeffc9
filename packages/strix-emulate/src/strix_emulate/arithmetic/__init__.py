# SPDX-License-Identifier: BSD-3-Clause
"""Arithmetic of instructions: functions on arrays, in tables by mnemonic.

Its modules, imported where they are needed:

* ``doubles``: float64: division steps, reduction of angles, classes.
* ``floats``: floating-point operations that numpy lacks.
* ``mode_register``: the MODE register, and what CLAMP does.
* ``operations``: vector operations by mnemonic.
* ``scalars``: scalar operations by mnemonic.
* ``subdword``: vector operations on parts of 32 bits.
* ``translate``: numpy functions as C, for one element.
"""

__all__ = ["doubles", "floats", "mode_register", "operations", "scalars", "subdword", "translate"]

# SPDX-License-Identifier: BSD-3-Clause
"""Arithmetic of instructions: functions on arrays, in tables by mnemonic.

Modules:

* ``doubles``: float64 operations: division steps, reduction of angles, sine, power of two.
* ``floats``: floating-point operations that numpy lacks.
* ``mode_register``: the MODE register, and output modifiers such as CLAMP.
* ``operations``: vector operations by mnemonic.
* ``scalars``: scalar operations by mnemonic.
* ``subdword``: vector operations on parts of 32 bits.
* ``translate``: translation of numpy functions to C functions of one element.
"""

__all__ = ["doubles", "floats", "mode_register", "operations", "scalars", "subdword", "translate"]

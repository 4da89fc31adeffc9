# SPDX-License-Identifier: BSD-3-Clause
"""What instructions compute: functions on arrays, in tables by mnemonic.

Its modules, imported where they are needed:

* ``doubles``: float64: division steps, reduction of angles, classes.
* ``floats``: floating-point operations that numpy lacks.
* ``mode_register``: the MODE register, and what CLAMP does.
* ``operations``: vector operations by mnemonic.
* ``scalars``: scalar operations by mnemonic.
* ``subdword``: vector operations on parts of 32 bits.
* ``translate``: what a numpy function computes for one element, as C.
"""

__all__ = ["doubles", "floats", "mode_register", "operations", "scalars", "subdword", "translate"]

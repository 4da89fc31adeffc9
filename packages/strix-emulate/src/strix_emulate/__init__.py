# SPDX-License-Identifier: BSD-3-Clause
"""A functional emulator of gfx1151 (RDNA3.5): executes code objects on a CPU, without timing.

Programs use `strix_emulate.api`. It is not imported here: the library in C is compiled where
nothing is installed but numpy.
"""

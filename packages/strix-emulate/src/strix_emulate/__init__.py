# SPDX-License-Identifier: BSD-3-Clause
"""A functional emulator of gfx1151 (RDNA3.5): executes code objects on a CPU, without timing."""

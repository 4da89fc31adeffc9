# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton kernels: interpreted, compiled only, under emulation, or on a GPU."""

__all__ = ["call", "cases", "emulation", "interpreter", "launches", "modes", "stand_in"]

# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton kernels on a machine without a GPU."""

__all__ = ["call", "cases", "emulation", "interpreter", "launches", "modes", "stand_in"]

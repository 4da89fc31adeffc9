# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels on a machine without a GPU."""

__all__ = ["call", "cases", "emulation", "interpreter", "modes", "stand_in"]

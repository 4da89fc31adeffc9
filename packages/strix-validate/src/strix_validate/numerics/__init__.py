# SPDX-License-Identifier: BSD-3-Clause
"""Correct results: the reference in float64, and how far a kernel may be from it."""

__all__ = ["comparison", "reference"]

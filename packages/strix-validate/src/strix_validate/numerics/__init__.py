# SPDX-License-Identifier: BSD-3-Clause
"""What correct numbers are: the reference in float64, and how far a kernel may be from it."""

__all__ = ["comparison", "reference"]

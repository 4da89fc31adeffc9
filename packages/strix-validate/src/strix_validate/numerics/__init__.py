# SPDX-License-Identifier: BSD-3-Clause
"""The reference results in float64, and the allowed error of a kernel."""

__all__ = ["comparison", "reference"]

# SPDX-License-Identifier: BSD-3-Clause
"""What real layers look like: the one table that all tiers read, warm and the sets of kernels."""

__all__ = ["table"]

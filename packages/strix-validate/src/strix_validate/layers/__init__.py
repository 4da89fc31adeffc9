# SPDX-License-Identifier: BSD-3-Clause
"""What real layers look like: the one table that all tiers read, and config.json."""

__all__ = ["config", "pairs", "table"]

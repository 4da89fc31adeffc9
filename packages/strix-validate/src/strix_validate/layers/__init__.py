# SPDX-License-Identifier: BSD-3-Clause
"""The layers of real models: the one table that all tiers read, and what config.json describes."""

__all__ = ["config", "kinds", "pairs", "table"]

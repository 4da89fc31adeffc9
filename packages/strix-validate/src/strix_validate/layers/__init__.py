# SPDX-License-Identifier: BSD-3-Clause
"""The layers of real models, read from a config.json or from the table models.toml."""

__all__ = ["config", "defaults", "kinds", "pairs", "parts", "quantization", "table"]

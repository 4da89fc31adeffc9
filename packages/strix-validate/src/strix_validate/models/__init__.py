# SPDX-License-Identifier: BSD-3-Clause
"""Which models run: what vLLM chooses for a config.json on gfx1151, how far that is proven."""

__all__ = ["choose", "command", "diffusion", "model_memory", "table"]

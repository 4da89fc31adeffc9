# SPDX-License-Identifier: BSD-3-Clause
"""Which models run: what vLLM chooses for a config.json on gfx1151, how far that is proven."""

__all__ = [
    "answer",
    "choose",
    "command",
    "defaults",
    "diffusion",
    "formats",
    "gguf_file",
    "lora",
    "mistral",
    "model_memory",
    "parts",
    "reading",
    "serving",
    "table",
]

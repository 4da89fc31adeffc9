# SPDX-License-Identifier: BSD-3-Clause
"""Report which models run on gfx1151: vLLM's choices for a config.json, and their proofs."""

__all__ = [
    "answer",
    "choose",
    "command",
    "diffusion",
    "formats",
    "gguf_file",
    "lora",
    "mistral",
    "model_memory",
    "reading",
    "serving",
    "table",
]

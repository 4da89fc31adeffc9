# SPDX-License-Identifier: BSD-3-Clause
"""Launch vLLM's Triton kernels, and compute their expected results."""

__all__ = [
    "attention",
    "attention_modes",
    "drafts",
    "experts",
    "kernels",
    "linear_attention",
    "lora",
    "mla",
    "model",
    "model_cases",
    "mxfp4",
    "quantized",
    "sampling",
    "source",
    "vllm_checks",
]

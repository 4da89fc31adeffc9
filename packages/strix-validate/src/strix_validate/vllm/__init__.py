# SPDX-License-Identifier: BSD-3-Clause
"""Launch vLLM's Triton kernels, and compute what they must return."""

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

# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's Triton kernels: how they are launched, and what they must return."""

__all__ = [
    "attention", "experts", "kernels", "linear_attention", "lora", "mla", "model",
    "mxfp4", "quantized", "sampling", "source", "vllm_checks",
]  # fmt: skip

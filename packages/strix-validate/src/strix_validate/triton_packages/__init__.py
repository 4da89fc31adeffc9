# SPDX-License-Identifier: BSD-3-Clause
"""Checks of Triton kernels of other packages than flash-attn and vLLM: one module per package."""

__all__ = ["conch", "fla", "gguf", "liger", "package_checks", "sage"]

# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels of packages beside flash-attn and vLLM: a module for each, tables of its calls."""

__all__ = ["conch", "fla", "gguf", "liger", "package_checks", "sage"]

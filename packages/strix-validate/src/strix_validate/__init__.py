# SPDX-License-Identifier: BSD-3-Clause
"""Validates the attention of PyTorch, flash-attn and vLLM, and the host, for AMD gfx1151."""

#: The GPU architecture that all of this is about, as LLVM and ROCm name it.
TARGET = "gfx1151"

# SPDX-License-Identifier: BSD-3-Clause
"""Checks of Triton kernels of other packages than flash-attn and vLLM: one module per package.

The module package_checks lists and runs the checks of all packages, also of flash-attn and vLLM.
"""

__all__ = ["conch", "fla", "gguf", "liger", "package_checks", "sage"]

# SPDX-License-Identifier: BSD-3-Clause
"""Checks of Triton kernels in packages other than flash-attn and vLLM, one module per package.

The module package_checks lists and runs the checks of all packages, including flash-attn and vLLM.
"""

__all__ = ["conch", "fla", "gguf", "liger", "package_checks", "sage"]

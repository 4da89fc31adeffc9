# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels of packages beside flash-attn and vLLM: a module for each, tables of its calls.

Its modules, imported where they are needed:

* ``conch``: conch-triton-kernels: vLLM's 8-bit weights.
* ``fla``: fla-core: linear attention.
* ``gguf``: vllm-gguf-plugin: weights in GGUF's types.
* ``liger``: liger-kernel: fine-tuning.
* ``package_call``: `PackageCall`, a call of an installed package.
* ``package_checks``: the checks of these packages in the tiers kernels, attention and emulated.
* ``sage``: sageattention: 8-bit attention.
"""

__all__ = ["conch", "fla", "gguf", "liger", "package_call", "package_checks", "sage"]

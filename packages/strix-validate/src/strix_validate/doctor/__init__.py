# SPDX-License-Identifier: BSD-3-Clause
"""Is this machine ready for the GPU: its hardware, kernel, packages and memory. Needs no torch."""

__all__ = [
    "cluster_machine", "environment", "hardware", "host", "kernel_lists", "tree",
    "virtual_packages", "vllm_memory",
]  # fmt: skip

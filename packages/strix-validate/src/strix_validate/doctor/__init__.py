# SPDX-License-Identifier: BSD-3-Clause
"""Check whether this machine can use its GPU: hardware, kernel, packages and memory.

This subpackage needs no torch.
"""

__all__ = [
    "access",
    "cluster_machine",
    "containers",
    "copies",
    "copy_rate",
    "environment",
    "findings",
    "hardware",
    "host",
    "interpreter",
    "kernel_lists",
    "kernel_release",
    "memory",
    "packages",
    "parameters",
    "settings",
    "tree",
    "virtual_packages",
    "vllm_memory",
    "workspace",
]

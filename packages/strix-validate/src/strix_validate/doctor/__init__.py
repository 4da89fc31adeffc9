# SPDX-License-Identifier: BSD-3-Clause
"""Is this machine ready for the GPU: its hardware, kernel, packages and memory. Needs no torch."""

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

# SPDX-License-Identifier: BSD-3-Clause
"""Compile kernels before they are needed, for packages and for this machine."""

__all__ = ["costs", "flash_calls", "packages", "vllm_calls", "warm", "workload"]

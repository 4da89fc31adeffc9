# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's Triton kernels: how they are launched, and what they must return."""

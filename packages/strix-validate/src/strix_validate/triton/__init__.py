# SPDX-License-Identifier: BSD-3-Clause
"""Triton's kernels on a machine without a GPU."""

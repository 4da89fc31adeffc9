# SPDX-License-Identifier: BSD-3-Clause
"""Checks of an installed PyTorch and flash-attn: attention results and compiled GPU kernels."""

# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: cases, the reference in float64, the comparison."""

# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: the calls that are checked, and what they must return."""

__all__ = ["behaviour", "flash", "flash_cases", "sdpa", "sdpa_pairs", "sdpa_shapes"]

# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: the calls that are checked, and their expected results.

A case (SdpaCase, FlashCase) has the arguments of a call, and describes the bug that the case
catches. A problem is built from a case: tensors drawn from the case's seed, the call, and the
expected results.
"""

__all__ = [
    "behaviour",
    "flash",
    "flash_cases",
    "sdpa",
    "sdpa_cases",
    "sdpa_pairs",
    "sdpa_problem",
]

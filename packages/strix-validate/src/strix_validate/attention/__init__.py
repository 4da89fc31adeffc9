# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: the calls that are checked, and what they must return.

A case states a call's arguments and the bug that it catches (SdpaCase, FlashCase). A problem is
built from it: tensors drawn from the case's seed, the call, and the expected results.
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

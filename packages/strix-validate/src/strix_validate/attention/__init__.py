# SPDX-License-Identifier: BSD-3-Clause
"""Attention by torch and flash-attn: the calls that are checked, and their expected results.

A case (SdpaCase, FlashCase) describes a call, and the bug that the case catches. The tensors of the
call are drawn from the case's seed. sdpa_problem.Problem has the inputs and the expected results of
an SdpaCase. A FlashCase has its call and its expected results itself.
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

# SPDX-License-Identifier: BSD-3-Clause
"""Real recipes with what PyPI serves."""

import re

from support.project import forge


def test_our_patches_apply() -> None:
    """Those that PyPI serves must apply; the others are reported as not attempted."""
    said = forge("patches", "check")
    assert re.search(r"^flash-attn: \d+ patches: applies$", said, re.M)
    for line in said.splitlines():
        assert " patches: " not in line or re.search(r": (applies$|not attempted: )", line)

# SPDX-License-Identifier: BSD-3-Clause
"""Tests that kill one program after another: minutes each, so they run at night."""

import os

import pytest

needs_time = pytest.mark.skipif(
    not os.environ.get("FORGE_KILLS"),
    reason="takes minutes; FORGE_KILLS=all runs it, as a workflow does each night",
)

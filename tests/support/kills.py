# SPDX-License-Identifier: BSD-3-Clause
"""A marker for tests that take minutes. They run if FORGE_KILLS is set, as it is at night."""

import os

import pytest

needs_time = pytest.mark.skipif(
    not os.environ.get("FORGE_KILLS"),
    reason="takes minutes; FORGE_KILLS=all runs it, as a workflow does each night",
)

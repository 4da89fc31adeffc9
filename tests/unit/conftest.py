# SPDX-License-Identifier: BSD-3-Clause
"""A channel to publish, and a folder to publish it to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.static_channel import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "channel")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"

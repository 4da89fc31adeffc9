# SPDX-License-Identifier: BSD-3-Clause
"""Channels to publish and to install from, and a folder to publish to."""

from pathlib import Path

import pytest
from support import small_channel
from support.static_channel import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "channel")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    """Of alpha and beta, in a folder."""
    return small_channel.make(tmp_path / "channel", "alpha", "beta")

# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for unit tests: channels, and a folder to publish to."""

from pathlib import Path

import pytest
from support import small_channel
from support.static_channel import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """An empty channel to publish."""
    return Source(tmp_path / "channel")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder to publish to, which does not exist yet."""
    return tmp_path / "out"


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    """The folder of a channel with the packages alpha and beta."""
    return small_channel.make(tmp_path / "channel", "alpha", "beta")

# SPDX-License-Identifier: BSD-3-Clause
"""Channels to publish and to install from, and a folder to publish to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_channel import index, package
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
    folder = tmp_path / "channel"
    (folder / "noarch").mkdir(parents=True)
    package(folder, "alpha", "1.0")
    package(folder, "beta", "1.0")
    index(folder)
    return folder

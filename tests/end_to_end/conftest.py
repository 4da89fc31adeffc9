# SPDX-License-Identifier: BSD-3-Clause
"""What a user of a published channel meets: conda-forge, our channel on a server, a home folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import stand_in
from support.pixi import require
from support.release import Release
from support.servers import Revalidating, served


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("pixi"):
        require("pixi")


@pytest.fixture(scope="session")
def conda_forge(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a small conda-forge."""
    folder = stand_in.make(tmp_path_factory.mktemp("conda-forge") / "channel")
    with served(folder, Revalidating) as url:
        yield url


@pytest.fixture(scope="session")
def release(conda_forge: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Packages built on the conda-forge base, published, and served."""
    root = tmp_path_factory.mktemp("release")
    with served(root, Revalidating) as url:
        made = Release(root, conda_forge, url)
        # 5 GB of PyPI's torch, and what ours does not need; then what two builds at once unpacked
        # into the cold cache, where one has failed: "Failed to resolve dependencies", and no more
        for name in ("nvidia-*", "pytorch-*", "pip-*", "python-*", "setuptools-*", "*sysroot*"):
            made.hold(stand_in.PACKAGES.glob(f"{name}.conda"))
        made.build()
        made.publish()
        yield made

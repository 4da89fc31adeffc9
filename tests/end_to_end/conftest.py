# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures that give a user a small conda-forge, our published channel and a home folder."""

from collections.abc import Iterator

import pytest
from support import stand_in
from support.conda_forge import records_of_both
from support.pixi import Pixi, require
from support.release import Release
from support.servers import Revalidating, served
from support.stand_in import MAPPING, write_mapping

from forge.bases import CONDA_FORGE, PUBLISHED


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("pixi"):
        require("pixi")


@pytest.fixture(scope="module")
def pixi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pixi]:
    """A pixi user, whose channels have conda-forge's committed records and our own records."""
    folder = records_of_both(tmp_path_factory.mktemp("records"))
    write_mapping(folder / "mapping", pytorch="torch")
    with served(folder, Revalidating) as url:
        mirrors = {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}
        yield Pixi(folder / "home", mirrors | {MAPPING: f"{url}/mapping"})


@pytest.fixture(scope="session")
def conda_forge(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a small conda-forge on this machine."""
    folder = stand_in.make(tmp_path_factory.mktemp("conda-forge") / "channel")
    with served(folder, Revalidating) as url:
        yield url


@pytest.fixture(scope="session")
def release(conda_forge: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Packages that were built on the conda-forge base, published, and served at a URL."""
    root = tmp_path_factory.mktemp("release")
    with served(root, Revalidating) as url:
        new_release = Release(root, conda_forge, url)
        # Fill the cache before the builds. When two concurrent builds unpacked these packages into
        # an empty cache, one build failed and printed only "Failed to resolve dependencies".
        for name in ("pip-*", "python-*", "setuptools-*", "*sysroot*"):
            new_release.hold(stand_in.PACKAGES.glob(f"{name}.conda"))
        new_release.build()
        new_release.publish()
        yield new_release

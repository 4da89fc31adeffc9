# SPDX-License-Identifier: BSD-3-Clause
"""What a user of a published channel meets: conda-forge, our channel on a server, a home folder."""

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
    """A user with the committed records of conda-forge, and those of what our recipes make."""
    folder = records_of_both(tmp_path_factory.mktemp("records"))
    write_mapping(folder / "mapping", pytorch="torch")
    with served(folder, Revalidating) as url:
        mirrors = {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}
        yield Pixi(folder / "home", mirrors | {MAPPING: f"{url}/mapping"})


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
        # what two builds at once unpacked into the cold cache, where one has failed: "Failed to
        # resolve dependencies", and no more
        for name in ("pip-*", "python-*", "setuptools-*", "*sysroot*"):
            made.hold(stand_in.PACKAGES.glob(f"{name}.conda"))
        made.build()
        made.publish()
        yield made

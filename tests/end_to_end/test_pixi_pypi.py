# SPDX-License-Identifier: BSD-3-Clause
"""A PyPI package on top of ours: a real pixi takes our torch and triton for PyPI's, or does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conda_forge import records_of_both
from support.pixi import Pixi, fit
from support.project import CHECKOUT
from support.release import copy_stack
from support.servers import QuietHandler, Revalidating, served
from support.simple_index import needs_torch
from support.static_channel import Source

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.channel.publish import StaticChannel

pytestmark = pytest.mark.pixi

# the service that pixi asks for PyPI's names of conda packages: it knows conda-forge's, not ours
MAPPING = "https://conda-mapping.prefix.dev"
FROM_PYPI = re.compile(r"pypi: \S+/(torch|triton|needs_torch)-")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("index")
    needs_torch(folder)
    with served(folder, QuietHandler) as url:
        yield url


@pytest.fixture(scope="module")
def pixi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pixi]:
    folder = records_of_both(tmp_path_factory.mktemp("records"))
    service = folder / "mapping" / "compressed-v0" / "compressed_mapping.json"
    service.parent.mkdir(parents=True)
    service.write_text(json.dumps({"numpy": "numpy"}))
    with served(folder, Revalidating) as url:
        mirrors = {"theirs": CONDA_FORGE, "ours": PUBLISHED, "mapping": MAPPING}
        yield Pixi(folder / "home", {name: f"{url}/{path}" for path, name in mirrors.items()})


def from_pypi(pixi: Pixi, folder: Path, index: str) -> set[str]:
    """What pixi locks from the index when a package is added that requires torch and triton."""
    manifest = folder / "pixi.toml"
    added = f'\n[pypi-options]\nindex-url = "{index}"\n\n[pypi-dependencies]\nneeds-torch = "*"\n'
    manifest.write_text(manifest.read_text() + added)
    pixi("lock", cwd=folder)
    return set(FROM_PYPI.findall((folder / "pixi.lock").read_text()))


@pytest.mark.parametrize("table", [True, False], ids=["with our names", "without"])
def test_on_a_stack(pixi: Pixi, index: str, tmp_path: Path, table: bool) -> None:
    """Without the table of names PyPI's torch comes over ours: so this test can fail."""
    folder = copy_stack("attention", tmp_path)
    manifest = fit(folder / "pixi.toml")
    if not table:
        text, there = re.subn(
            r"(?ms)^\[workspace\.conda-pypi-map.*?(?=^\[)", "", manifest.read_text()
        )
        assert there == 1
        manifest.write_text(text)
    theirs = set() if table else {"torch", "triton"}
    assert from_pypi(pixi, folder, index) == {"needs_torch"} | theirs


@pytest.fixture
def packages(tmp_path: Path) -> Source:
    """A local channel with packages that are called as ours are."""
    source = Source(tmp_path / "local", CHECKOUT / "recipes" / "pypi-names.json")
    source.make("pytorch", version="2.13.0", subdir="linux-64", depends=["python >=3.12"])
    source.make("triton", version="3.7.1", subdir="linux-64", depends=["python >=3.12"])
    return source


def workspace(folder: Path, channel: str) -> Path:
    """A workspace of a user's own, with torch from `channel`."""
    folder.mkdir()
    (folder / "pixi.toml").write_text(
        f'[workspace]\nname = "w"\nchannels = ["{channel}", "conda-forge"]\n'
        'platforms = ["linux-64"]\n[dependencies]\npytorch = "*"\ntriton = "*"\n'
    )
    return folder


def test_on_a_local_channel(pixi: Pixi, index: str, tmp_path: Path, packages: Source) -> None:
    folder = workspace(tmp_path / "w", packages.folder.as_uri())
    assert from_pypi(pixi, folder, index) == {"needs_torch"}


def test_on_a_published_channel(pixi: Pixi, index: str, tmp_path: Path, packages: Source) -> None:
    StaticChannel(tmp_path / "published").publish(packages)
    with served(tmp_path / "published", Revalidating) as url:
        folder = workspace(tmp_path / "w", url)
        assert from_pypi(pixi, folder, index) == {"needs_torch"}


def test_without_purls(pixi: Pixi, index: str, tmp_path: Path, packages: Source) -> None:
    """The same channel as another tool indexes it: PyPI's torch and triton, over ours."""
    file = packages.folder / "linux-64" / "repodata.json"
    data = json.loads(file.read_bytes())
    for record in data["packages.conda"].values():
        record.pop("purls", None)
    file.write_text(json.dumps(data))
    folder = workspace(tmp_path / "w", packages.folder.as_uri())
    assert from_pypi(pixi, folder, index) == {"needs_torch", "torch", "triton"}

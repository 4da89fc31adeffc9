# SPDX-License-Identifier: BSD-3-Clause
"""PyPI packages on top of ours, in every order of commands: a real pixi takes PyPI's torch or not.

What may happen: ours stays, or the solve fails and names what it would have taken.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.conda_forge import records_of_both
from support.pixi import MAPPING, Pixi, fit, write_mapping
from support.project import CHECKOUT
from support.release import copy_stack
from support.servers import Revalidating, served
from support.simple_index import ADDED, NEW, SimpleIndex, popular
from support.static_channel import Source

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.channel.publish import StaticChannel

pytestmark = pytest.mark.pixi

NAMES = CHECKOUT / "recipes" / "pypi-names.json"
FROM_PYPI = re.compile(r"pypi: \S+?/(\w+)-([\d.]+)-py3")
# the commands before and after `pixi add --pypi NAME`, in the orders in which people type them
ORDERS = {
    "first": (["add python numpy pytorch triton"], []),
    "after a lock": (["add python numpy pytorch triton", "lock"], []),
    "after an install": (["add --no-install python numpy pytorch triton", "install"], []),
    "then update": (["add python numpy pytorch triton"], ["update"]),
    "then upgrade": (["add python numpy pytorch triton"], ["upgrade"]),
    "then a conda package": (["add python numpy pytorch triton"], ["add safetensors", "lock"]),
    "ours one by one": (["add pytorch", "add python", "add numpy", "add triton"], ["update"]),
    "removed and added": (["add python numpy pytorch triton"], ["remove triton", "add triton"]),
}
# these write the lock alone: PyPI's files need a real Python
LOCKS_ONLY = ("add", "remove", "update", "upgrade")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("index")
    popular(folder)
    with served(folder, SimpleIndex) as url:
        yield url


@dataclass
class User:
    """Somebody with a workspace, and what of PyPI it locks."""

    pixi: Pixi
    folder: Path

    def __call__(self, line: str, code: int | None = 0) -> str:
        word, *rest = line.split()
        words = [word, *(["--no-install"] if word in LOCKS_ONLY else []), *rest]
        return self.pixi(*dict.fromkeys(words), cwd=self.folder, code=code)

    def write(self, index: str, *tables: str, channels: Sequence[str] = (PUBLISHED,)) -> None:
        self.folder.mkdir()
        (self.folder / "pixi.toml").write_text(
            f'[workspace]\nname = "w"\nchannels = {json.dumps([*channels, "conda-forge"])}\n'
            f'platforms = ["linux-64"]\n[pypi-options]\nindex-url = "{index}"\n' + "".join(tables)
        )

    def from_pypi(self) -> set[str]:
        lock = self.folder / "pixi.lock"
        found = dict(FROM_PYPI.findall(lock.read_text())) if lock.exists() else {}
        assert all(found[name] == NEW for name in found.keys() & ADDED.keys()), found
        return set(found)


def table(name: str) -> str:
    """A table of docs/pypi.md, as people paste it."""
    (block,) = re.findall(r"(?ms)^```toml\n(.*?)^```", (CHECKOUT / "docs/pypi.md").read_text())
    (text,) = re.findall(rf"(?ms)^\[{re.escape(name)}.*?(?=^\[|\Z)", block)
    return text


def conda_packages(folder: Path, *names: str) -> Source:
    """Packages of one file that are called as ours and conda-forge's are."""
    versions = {"pytorch": "2.13.0", "triton": "3.7.1", "torchvision": "0.28.0", "python": "3.12.5"}
    source = Source(folder, NAMES)
    for name in names:
        needs = [] if name == "python" else ["python >=3.12"]
        source.make(name, versions.get(name, "2.0"), "linux-64", depends=needs)
    return source


def without_purls(channel: Path) -> None:
    """The index as another tool writes it."""
    for file in channel.glob("*/repodata.json"):
        data = json.loads(file.read_bytes())
        for record in data["packages.conda"].values():
            record.pop("purls", None)
        file.write_text(json.dumps(data))
        for other in {*file.parent.glob("repodata_*"), *file.parent.glob("*.zst")}:
            other.unlink()


# Who serves our channel: our own index says what our packages are called on PyPI, and of another
# one the workspace has to know.
SERVED = {"published": ["pypi-exclude-newer", "pypi-dependencies"]}
SERVED["hosted"] = ["workspace.conda-pypi-map", *SERVED["published"]]


@pytest.fixture(scope="module", params=SERVED)
def channels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, str], list[str]]]:
    """A folder, the mirrors of a user, and the tables that the workspace needs."""
    folder = tmp_path_factory.mktemp("channels")
    ours = conda_packages(folder / "local" / "ours", "pytorch", "triton", "torchvision")
    StaticChannel(folder / "ours").publish(ours)
    # some of its records say what they are on PyPI, as those of the committed records do: pixi asks
    # for no names where it finds one
    conda_packages(folder / "theirs", "python", "numpy", "safetensors")
    file = folder / "theirs/linux-64/repodata.json"
    data = json.loads(file.read_bytes())
    for record in data["packages.conda"].values():
        record["purls"] = ["pkg:pypi/numpy"] if record["name"] == "numpy" else []
    file.write_text(json.dumps(data))
    if request.param == "hosted":
        without_purls(folder / "ours")
    yield from served_to_a_user(folder, SERVED[request.param])


def served_to_a_user(
    folder: Path, tables: list[str]
) -> Iterator[tuple[Path, dict[str, str], list[str]]]:
    write_mapping(folder / "mapping", numpy="numpy")
    with served(folder, Revalidating) as url:
        mirrors = {"theirs": CONDA_FORGE, "ours": PUBLISHED, "mapping": MAPPING}
        yield folder, {name: f"{url}/{path}" for path, name in mirrors.items()}, tables


@pytest.mark.parametrize("order", ORDERS)
def test_ours_stays_or_nothing_is_locked(
    channels: tuple[Path, dict[str, str], list[str]], index: str, tmp_path: Path, order: str
) -> None:
    """For each of five packages, in the same workspace."""
    _, mirrors, tables = channels
    start = User(Pixi(tmp_path / "home", mirrors), tmp_path / "start")
    start.write(index, *map(table, tables))
    before, after = ORDERS[order]
    for line in before:
        start(line)
    for added in ADDED:
        user = User(start.pixi, shutil.copytree(start.folder, tmp_path / added, symlinks=True))
        said = user(f"add --pypi {added}", code=None)
        if user.from_pypi():
            assert user.from_pypi() == {added} and added not in ("timm", "xformers")
            for line in after:
                user(line)
                assert user.from_pypi() == {added}
        else:  # what is missing is named, and the workspace is as it was
            named = ("torch ", "torchvision ", "torch==", "xformers ")  # the last is hidden itself
            assert any(name in said for name in named), said
            manifests = [(who.folder / "pixi.toml").read_text() for who in (user, start)]
            assert manifests[0] == manifests[1]
            user("lock --check")


def test_without_the_tables(tmp_path: Path, index: str) -> None:
    """The tests above can fail: PyPI's torch comes over ours, and a lock before changes nothing."""
    for number, first in enumerate((None, "lock")):
        folder = tmp_path / str(number)
        conda_packages(folder / "ours", "pytorch", "triton")
        without_purls(folder / "ours")
        conda_packages(folder / "theirs", "python", "numpy")
        for _, mirrors, _ in served_to_a_user(folder, []):
            user = User(Pixi(folder / "home", mirrors), folder / "w")
            user.write(index)
            user("add python numpy pytorch triton")
            if first:
                user(first)
            user("add --pypi accelerate")
            assert user.from_pypi() >= {"accelerate", "torch", "triton", "nvidia_cublas"}


def test_ours_where_there_is_one(
    channels: tuple[Path, dict[str, str], list[str]], index: str, tmp_path: Path
) -> None:
    """timm wants torchvision: the failure names that or torch, and with ours it locks."""
    _, mirrors, tables = channels
    user = User(Pixi(tmp_path / "home", mirrors), tmp_path / "w")
    user.write(index, *map(table, tables))
    user("add python numpy pytorch triton")
    assert "torch" in user("add --pypi timm", code=1)
    user("add torchvision")
    (user.folder / "pixi.lock").unlink()  # as docs/pypi.md says
    user("add --pypi timm")
    assert user.from_pypi() == {"timm"}


@pytest.fixture(scope="module")
def pixi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pixi]:
    """With the committed records of conda-forge, and our recipes in an index without purls."""
    folder = records_of_both(tmp_path_factory.mktemp("records"))
    without_purls(folder / "ours")
    for _, mirrors, _ in served_to_a_user(folder, []):
        yield Pixi(folder / "home", mirrors)


@pytest.mark.parametrize("locked_by", ["nobody", "pixi"])
def test_on_a_stack(pixi: Pixi, index: str, tmp_path: Path, locked_by: str) -> None:
    """The copied folder, from a hosted channel."""
    user = User(pixi, copy_stack("attention", tmp_path / "stacks"))
    manifest = fit(user.folder / "pixi.toml")
    if locked_by == "pixi":
        user("lock")
    # as its comment says
    text = manifest.read_text().replace("# [pypi-dep", "[pypi-dep").replace("# torch =", "torch =")
    manifest.write_text(f'{text}\n[pypi-options]\nindex-url = "{index}"\n')
    said = user("add --pypi accelerate", code=None)
    assert user.from_pypi() == {"accelerate"} or (locked_by == "pixi" and "torch" in said), said
    assert "torch" in user("add --pypi timm", code=1)
    assert user.from_pypi() <= {"accelerate"}


def test_on_a_local_channel(pixi: Pixi, index: str, tmp_path: Path) -> None:
    """channel/, a folder: its index says what our packages are on PyPI."""
    source = conda_packages(tmp_path / "local", "pytorch", "triton")
    user = User(pixi, tmp_path / "w")
    user.write(index, channels=[source.folder.as_uri()])
    user("add python numpy pytorch triton")
    user("add --pypi accelerate")
    assert user.from_pypi() == {"accelerate"}


def test_the_start_of_the_readme(pixi: Pixi, index: str, tmp_path: Path) -> None:
    """A pixi.toml without this repository: PyPI's torch cannot be locked, whatever came before."""
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```", (CHECKOUT / "README.md").read_text())
    for name, first in (("added", None), ("locked", "lock")):
        user = User(pixi, tmp_path / name)
        user.folder.mkdir()
        manifest = user.folder / "pixi.toml"
        manifest.write_text(f'{text}\n[pypi-options]\nindex-url = "{index}"\n')
        if first:
            user(first)
        for package in ADDED:
            user(f"add --pypi {package}", code=None)
            assert user.from_pypi() - {"numpy"} <= set(ADDED) - {"timm", "xformers"}
        assert "torchao" in user.from_pypi()

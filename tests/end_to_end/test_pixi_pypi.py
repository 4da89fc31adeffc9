# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi adds PyPI packages to a workspace with our pytorch, in several orders of commands.

Our pytorch stays. If a package cannot use it, the solve fails, and the message names what the
package requires.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.conda_forge import LACKS, records_of_both
from support.pixi import Pixi, fit
from support.project import CHECKOUT, STACKS
from support.release import copy_stack
from support.servers import Revalidating, served
from support.simple_index import ADDED, NEW, REFUSED, SimpleIndex, popular
from support.stand_in import MAPPING, write_mapping, write_repodata
from support.static_channel import Source, without_purls

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.channel.publish import PublishedChannel
from forge.conda import pypi
from forge.generated import FOR_CUDA

pytestmark = pytest.mark.pixi

# Packages of PyPI that the tables of docs/pypi.md hide: packages with the names of ours, and
# packages that require CUDA.
HIDDEN = {*filter(None, pypi.read_names(CHECKOUT / "recipes").values()), *FOR_CUDA}
LOCKED_WHEEL = re.compile(r"pypi: \S+?/(\w+)-([\d.]+)-py3")
# Orders of commands: the commands before `pixi add --pypi NAME`, and the commands after it.
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
# Commands that are run with --no-install, so that they only lock. To install files from PyPI, pixi
# would need a real Python.
WITHOUT_INSTALL = ("add", "remove", "update", "upgrade")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index that replaces PyPI."""
    folder = tmp_path_factory.mktemp("index")
    popular(folder, *HIDDEN)
    with served(folder, SimpleIndex) as url:
        yield url


OTHER_PLATFORMS = ("win-64", "osx-arm64", "linux-aarch64")


@dataclass
class User:
    """A user with a workspace.

    Attributes:
        pixi: pixi in the user's home folder.
        folder: The folder of the workspace.
    """

    pixi: Pixi
    folder: Path

    def __call__(self, line: str, code: int | None = 0) -> str:
        """Run `pixi LINE`, require this exit code, if any, and return what pixi printed."""
        command, *arguments = line.split()
        if command in WITHOUT_INSTALL and "--no-install" not in arguments:
            arguments.insert(0, "--no-install")
        return self.pixi(command, *arguments, cwd=self.folder, code=code)

    def write(self, index: str, *tables: str, channels: Sequence[str] = (PUBLISHED,)) -> None:
        """Write the workspace's manifest.

        Args:
            index: The URL of the index that replaces PyPI.
            tables: Text to append.
            channels: The channels before conda-forge.
        """
        self.folder.mkdir()
        (self.folder / "pixi.toml").write_text(
            f'[workspace]\nname = "w"\nchannels = {json.dumps([*channels, "conda-forge"])}\n'
            f'platforms = ["linux-64"]\n[pypi-options]\nindex-url = "{index}"\n' + "".join(tables)
        )

    def list_pypi_packages(self) -> set[str]:
        """Return the names of the locked packages that are from PyPI.

        If these include packages in ADDED or REFUSED, they must have the version NEW.
        """
        lock = self.folder / "pixi.lock"
        if not lock.exists():
            return set()
        versions = {}
        for name, version in LOCKED_WHEEL.findall(lock.read_text()):
            versions[name.replace("_", "-")] = version
        for name in versions.keys() & (ADDED | REFUSED).keys():
            assert versions[name] == NEW, versions
        return set(versions)

    def try_to_add(self, *names: str) -> set[str]:
        """Run `pixi add --pypi NAMES`, and return the locked packages that are from PyPI.

        If no package from PyPI is locked, pixi must have named an unsatisfied requirement, and must
        not have changed the manifest.
        """
        manifest = self.folder / "pixi.toml"
        before = manifest.read_text()
        printed = self(f"add --pypi {' '.join(names)}", code=None)
        locked = self.list_pypi_packages()
        if not locked:
            assert re.search(r"(torch|torchvision|xformers|unsloth)( |==)", printed), printed
            assert manifest.read_text() == before
        return locked


def read_table(name: str) -> str:
    """Return a table of docs/pypi.md, as users paste it."""
    # The first TOML block of docs/pypi.md has the tables for our packages. A later block is for
    # users of AMD's own wheels.
    block = re.findall(r"(?ms)^```toml\n(.*?)^```", (CHECKOUT / "docs/pypi.md").read_text())[0]
    (text,) = re.findall(rf"(?ms)^\[{re.escape(name)}.*?(?=^\[|\Z)", block)
    return text


def make_packages(folder: Path, *names: str) -> Source:
    """Make a channel with one package for each name. Each package has one file."""
    versions = {"pytorch": "2.13.0", "triton": "3.7.1", "torchvision": "0.28.0", "python": "3.12.5"}
    source = Source(folder, CHECKOUT / "recipes")
    for name in names:
        needs = [] if name == "python" else ["python >=3.12"]
        source.make(name, versions.get(name, "2.0"), "linux-64", depends=needs)
    return source


# The tables of docs/pypi.md that a workspace needs. "published": we write the index of our channel,
# and it has our packages' names on PyPI. "hosted": a service such as prefix.dev writes the index
# without these names, so the workspace needs a table of them.
TABLES = {"published": ["pypi-exclude-newer", "pypi-dependencies"]}
TABLES["hosted"] = ["workspace.conda-pypi-map", *TABLES["published"]]


@pytest.fixture(scope="module", params=TABLES)
def channels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The mirrors of a user, and the tables that the workspace needs."""
    folder = tmp_path_factory.mktemp("channels")
    ours = make_packages(folder / "local" / "ours", "pytorch", "triton", "torchvision")
    PublishedChannel(folder / "ours").publish(ours)
    # As in the committed records, some records of conda-forge have the package's name on PyPI. pixi
    # then does not look for names in its mapping.
    make_packages(folder / "theirs", "python", "numpy", "safetensors")
    file = folder / "theirs/linux-64/repodata.json"
    data = json.loads(file.read_bytes())
    for record in data["packages.conda"].values():
        record["purls"] = ["pkg:pypi/numpy"] if record["name"] == "numpy" else []
    file.write_text(json.dumps(data))
    if request.param == "hosted":
        without_purls(folder / "ours")
    with serve_channels(folder) as mirrors:
        yield mirrors, TABLES[request.param]


@contextmanager
def serve_channels(folder: Path) -> Iterator[dict[str, str]]:
    """Serve folder/theirs, folder/ours and a mapping; yield their URLs by public URL."""
    write_mapping(
        folder / "mapping",
        numpy="numpy",
        accelerate="accelerate",
        diffusers="diffusers",
        peft="peft",
    )
    with served(folder, Revalidating) as url:
        yield {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours", MAPPING: f"{url}/mapping"}


@pytest.mark.parametrize("order", ORDERS)
def test_ours_stays(
    channels: tuple[dict[str, str], list[str]], index: str, tmp_path: Path, order: str
) -> None:
    """pixi adds three packages that can use our pytorch, and refuses three that cannot."""
    mirrors, tables = channels
    user = User(Pixi(tmp_path / "home", mirrors), tmp_path / "start")
    user.write(index, *map(read_table, tables))
    lines_before, lines_after = ORDERS[order]
    for line in lines_before:
        user(line)
    for refused in ("timm", "xformers", "unsloth"):
        assert user.try_to_add(refused) == set()
        user("lock --check")
    names = {"accelerate", "torchao", "torchmetrics"}
    assert user.try_to_add(*names) == names
    for line in lines_after:
        user(line)
        assert user.list_pypi_packages() == names


def test_without_the_tables(tmp_path: Path, index: str) -> None:
    """Without the tables of docs/pypi.md, pixi locks PyPI's torch over ours.

    This shows that the tests above can fail.
    """
    make_packages(tmp_path / "ours", "pytorch", "triton")
    without_purls(tmp_path / "ours")
    make_packages(tmp_path / "theirs", "python", "numpy")
    with serve_channels(tmp_path) as mirrors:
        user = User(Pixi(tmp_path / "home", mirrors), tmp_path / "w")
        user.write(index)
        user("add python numpy pytorch triton")
        assert user.try_to_add("accelerate") >= {"accelerate", "torch", "triton", "nvidia-cublas"}


@pytest.fixture(scope="module", params=["own", "hosted"])
def pixi(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pixi]:
    """A pixi user with the committed records of conda-forge and those of our recipes' packages.

    The index of our channel is our own, or one that a service has written.
    """
    folder = records_of_both(tmp_path_factory.mktemp("records"))
    for subdir in OTHER_PLATFORMS:
        packages = {}
        for name, needs in {
            "python": [],
            "pytorch": ["python >=3.12,<3.13"],
            "numpy": ["python"],
        }.items():
            packages[f"{name}-3.12.5-0.conda"] = {
                "name": name,
                "version": "3.12.5",
                "build": "0",
                "build_number": 0,
                "subdir": subdir,
                "depends": needs,
                "sha256": "0" * 64,
                "size": 1,
            }
        write_repodata(folder / "theirs", subdir, packages)
    if request.param == "hosted":
        without_purls(folder / "ours")
    with serve_channels(folder) as mirrors:
        yield Pixi(folder / "home", mirrors)


def copy_workspace(workspace: str, folder: Path, index: str) -> Path:
    """Copy a stack or README's pixi.toml to a folder, and return the folder of its manifest."""
    if workspace == "README":
        folder.mkdir()
        (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```", (CHECKOUT / "README.md").read_text())
        (folder / "pixi.toml").write_text(text)
    else:
        folder = copy_stack(workspace, folder)
        fit(folder / "pixi.toml")
    manifest = folder / "pixi.toml"
    text = manifest.read_text()
    for name in LACKS.get(f"stacks/{workspace}", []):
        text = re.sub(rf"(?m)^{name} = .*\n", "", text)
    manifest.write_text(f'{text}\n[pypi-options]\nindex-url = "{index}"\n')
    return folder


@pytest.mark.parametrize("workspace", ["README", *STACKS])
@pytest.mark.parametrize("locked", ["before", "after"])
def test_twelve_packages(
    pixi: Pixi, index: str, tmp_path: Path, workspace: str, locked: str
) -> None:
    """Our pytorch stays. Of each package from PyPI, pixi takes the new release."""
    user = User(pixi, copy_workspace(workspace, tmp_path / "w", index))
    if locked == "after":
        user("lock")
    # Refusals are tested in only two workspaces, because all workspaces have the same tables, as
    # test_generated.py checks.
    if workspace in ("README", "attention"):
        for refused in REFUSED:
            assert user.try_to_add(refused) == set()
    from_pypi = user.try_to_add(*ADDED)
    lock = (user.folder / "pixi.lock").read_text()
    from_conda = {name for name in ADDED if re.search(rf"conda: \S+/{name}-\d", lock)}
    assert (from_pypi | from_conda) - {"numpy"} == ADDED.keys()
    assert re.search(rf"conda: {PUBLISHED}/linux-64/pytorch-2.13.0-rocm", lock)
    if workspace == "attention":
        # docs/pypi.md says that timm can be added after our torchvision.
        user("add torchvision")
        assert "timm" in user.try_to_add("timm")


def test_on_a_local_channel(pixi: Pixi, index: str, tmp_path: Path) -> None:
    """A workspace with a local channel needs no table of names.

    The index of the channel has our packages' names on PyPI.
    """
    source = make_packages(tmp_path / "local", "pytorch", "triton")
    user = User(pixi, tmp_path / "w")
    user.write(index, channels=[source.folder.as_uri()])
    user("add python numpy pytorch triton")
    assert user.try_to_add("accelerate") == {"accelerate"}


@pytest.mark.parametrize("locked", ["before", "after"])
def test_each_name_of_ours_on_pypi(pixi: Pixi, index: str, tmp_path: Path, locked: str) -> None:
    """pixi takes no package from PyPI that has the name of one of ours or requires CUDA.

    The workspace has README's tables. test_generated.py checks that all pages and stacks have the
    same tables.
    """
    user = User(pixi, copy_workspace("README", tmp_path / "w", index))
    if locked == "after":
        user("lock")
    manifest = user.folder / "pixi.toml"
    lock = user.folder / "pixi.lock"
    before = manifest.read_text()
    for name in sorted(HIDDEN):
        user(f"add --pypi {name}", code=None)
        replaced = user.list_pypi_packages() & HIDDEN
        assert not replaced, f"`pixi add --pypi {name}` must not lock from PyPI: {replaced}"
        manifest.write_text(before)
        if locked == "before":
            lock.unlink(missing_ok=True)


@pytest.mark.parametrize("platforms", [*([name] for name in OTHER_PLATFORMS), OTHER_PLATFORMS])
def test_the_readmes_workspace_on_other_platforms(
    pixi: Pixi, index: str, tmp_path: Path, platforms: Sequence[str]
) -> None:
    """README's workspace also locks on platforms for which we have no packages.

    These platforms get conda-forge's pytorch if the manifest requires pytorch for all platforms,
    and no pytorch otherwise.
    """
    user = User(pixi, copy_workspace("README", tmp_path / "w", index))
    manifest = user.folder / "pixi.toml"
    text = manifest.read_text()
    all_platforms = json.dumps(["linux-64", *platforms])
    text = text.replace('platforms = ["linux-64"]', f"platforms = {all_platforms}")
    for requirement in ("", 'pytorch = "*"\n'):
        manifest.write_text(text.replace("[dependencies]\n", f"[dependencies]\n{requirement}"))
        user("lock")
        lock = yaml.safe_load((user.folder / "pixi.lock").read_text())
        packages_by_platform = lock["environments"]["default"]["packages"]
        assert packages_by_platform.keys() == {"linux-64", *platforms}
        for platform, packages in packages_by_platform.items():
            urls = [package.get("conda", "") for package in packages]
            torch_urls = [url for url in urls if "/pytorch-" in url]
            if platform == "linux-64":
                (url,) = torch_urls
                assert url.startswith(f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm")
            elif requirement:
                (url,) = torch_urls
                assert url.startswith(f"{CONDA_FORGE}/{platform}/pytorch-3.12.5")
            else:
                assert torch_urls == []
    assert user.try_to_add("accelerate") - {"numpy"} == {"accelerate"}

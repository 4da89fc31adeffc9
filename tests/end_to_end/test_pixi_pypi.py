# SPDX-License-Identifier: BSD-3-Clause
"""PyPI packages on top of ours, in every order of commands: a real pixi takes PyPI's torch or not.

Ours stays, and where it is not enough the solve fails and names what it would have taken.
"""

import json
import re
from collections.abc import Iterator, Sequence
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

# what of PyPI never comes over ours: the names of ours there, and what requires CUDA
HIDDEN = {*filter(None, pypi.read_names(CHECKOUT / "recipes").values()), *FOR_CUDA}
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
    popular(folder, *HIDDEN)
    with served(folder, SimpleIndex) as url:
        yield url


OTHER_PLATFORMS = ("win-64", "osx-arm64", "linux-aarch64")


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
        lines = FROM_PYPI.findall(lock.read_text()) if lock.exists() else []
        found = {name.replace("_", "-"): version for name, version in lines}
        assert all(found[name] == NEW for name in found.keys() & (ADDED | REFUSED).keys()), found
        return set(found)

    def added(self, *names: str) -> set[str]:
        """What of PyPI is locked after `pixi add --pypi NAMES`, which may fail."""
        before = (self.folder / "pixi.toml").read_text()
        said = self(f"add --pypi {' '.join(names)}", code=None)
        if not (found := self.from_pypi()):  # what is missing is named, and nothing was changed
            assert re.search(r"(torch|torchvision|xformers|unsloth)( |==)", said), said
            assert (self.folder / "pixi.toml").read_text() == before
        return found


def table(name: str) -> str:
    """A table of docs/pypi.md, as people paste it."""
    # the first block: the other takes AMD's own wheels instead
    block = re.findall(r"(?ms)^```toml\n(.*?)^```", (CHECKOUT / "docs/pypi.md").read_text())[0]
    (text,) = re.findall(rf"(?ms)^\[{re.escape(name)}.*?(?=^\[|\Z)", block)
    return text


def conda_packages(folder: Path, *names: str) -> Source:
    """Packages of one file that are called as ours and conda-forge's are."""
    versions = {"pytorch": "2.13.0", "triton": "3.7.1", "torchvision": "0.28.0", "python": "3.12.5"}
    source = Source(folder, CHECKOUT / "recipes")
    for name in names:
        needs = [] if name == "python" else ["python >=3.12"]
        source.make(name, versions.get(name, "2.0"), "linux-64", depends=needs)
    return source


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
    PublishedChannel(folder / "ours").publish(ours)
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
    write_mapping(
        folder / "mapping",
        numpy="numpy",
        accelerate="accelerate",
        diffusers="diffusers",
        peft="peft",
    )
    with served(folder, Revalidating) as url:
        mirrors = {"theirs": CONDA_FORGE, "ours": PUBLISHED, "mapping": MAPPING}
        yield folder, {name: f"{url}/{path}" for path, name in mirrors.items()}, tables


@pytest.mark.parametrize("order", ORDERS)
def test_ours_stays(
    channels: tuple[Path, dict[str, str], list[str]], index: str, tmp_path: Path, order: str
) -> None:
    """Three packages that ours is enough for, and three for which it is not."""
    _, mirrors, tables = channels
    user = User(Pixi(tmp_path / "home", mirrors), tmp_path / "start")
    user.write(index, *map(table, tables))
    before, after = ORDERS[order]
    for line in before:
        user(line)
    for refused in ("timm", "xformers", "unsloth"):
        assert user.added(refused) == set()
        user("lock --check")
    three = {"accelerate", "torchao", "torchmetrics"}
    assert user.added(*three) == three
    for line in after:
        user(line)
        assert user.from_pypi() == three


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
            assert user.added("accelerate") >= {"accelerate", "torch", "triton", "nvidia-cublas"}


@pytest.fixture(scope="module", params=["own", "hosted"])
def pixi(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pixi]:
    """With the committed records of conda-forge, and our recipes in an index of either kind."""
    folder = records_of_both(tmp_path_factory.mktemp("records"))
    for subdir in OTHER_PLATFORMS:
        names = {"python": [], "pytorch": ["python >=3.12,<3.13"], "numpy": ["python"]}
        packages = {
            f"{name}-3.12.5-0.conda": {
                "name": name,
                "version": "3.12.5",
                "build": "0",
                "build_number": 0,
                "subdir": subdir,
                "depends": needs,
                "sha256": "0" * 64,
                "size": 1,
            }
            for name, needs in names.items()
        }
        write_repodata(folder / "theirs", subdir, packages)
    if request.param == "hosted":
        without_purls(folder / "ours")
    for _, mirrors, _ in served_to_a_user(folder, []):
        yield Pixi(folder / "home", mirrors)


def copied(workspace: str, folder: Path, index: str) -> Path:
    """A stack, or README's pixi.toml, as people copy it."""
    if workspace == "README":
        folder.mkdir()
        (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```", (CHECKOUT / "README.md").read_text())
        (folder / "pixi.toml").write_text(text)
    else:
        fit(copy_stack(workspace, folder) / "pixi.toml")
        folder /= workspace
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
    """Ours stays, and of what can be had no old release is taken, before and after a lock."""
    user = User(pixi, copied(workspace, tmp_path / "w", index))
    if locked == "after":
        user("lock")
    # what is the same for all of them is tried with one; test_locks.py compares their tables
    for refused in REFUSED if workspace in ("README", "attention") else ():
        assert user.added(refused) == set()
    found = user.added(*ADDED)
    lock = (user.folder / "pixi.lock").read_text()
    ours = {name for name in ADDED if re.search(rf"conda: \S+/{name}-\d", lock)}
    assert (found | ours) - {"numpy"} == ADDED.keys()
    assert re.search(rf"conda: {PUBLISHED}/linux-64/pytorch-2.13.0-rocm", lock)
    if workspace == "attention":  # as docs/pypi.md says
        user("add torchvision")
        assert "timm" in user.added("timm")


def test_on_a_local_channel(pixi: Pixi, index: str, tmp_path: Path) -> None:
    """channel/, a folder: its index says what our packages are on PyPI."""
    source = conda_packages(tmp_path / "local", "pytorch", "triton")
    user = User(pixi, tmp_path / "w")
    user.write(index, channels=[source.folder.as_uri()])
    user("add python numpy pytorch triton")
    assert user.added("accelerate") == {"accelerate"}


@pytest.mark.parametrize("locked", ["before", "after"])
def test_each_name_of_ours_on_pypi(pixi: Pixi, index: str, tmp_path: Path, locked: str) -> None:
    """pixi takes ours for it, or refuses it; before a first lock and after it.

    README's tables are those of every page and stack: test_generated.py compares them.
    """
    user = User(pixi, copied("README", tmp_path / "w", index))
    if locked == "after":
        user("lock")
    manifest, lock = user.folder / "pixi.toml", user.folder / "pixi.lock"
    before = manifest.read_text()
    for name in sorted(HIDDEN):
        user(f"add --pypi {name}", code=None)
        taken = user.from_pypi() & HIDDEN
        assert not taken, f"after pixi add --pypi {name}: {taken}"
        manifest.write_text(before)
        if locked == "before":
            lock.unlink(missing_ok=True)


@pytest.mark.parametrize("others", [*([one] for one in OTHER_PLATFORMS), OTHER_PLATFORMS])
def test_the_readmes_workspace_on_other_platforms(
    pixi: Pixi, index: str, tmp_path: Path, others: Sequence[str]
) -> None:
    """Ours are for linux-64 alone; with `pytorch = "*"` the others get conda-forge's."""
    user = User(pixi, copied("README", tmp_path / "w", index))
    manifest = user.folder / "pixi.toml"
    text = manifest.read_text()
    platforms = json.dumps(["linux-64", *others])
    text = text.replace('platforms = ["linux-64"]', f"platforms = {platforms}")
    for line, torch in (("", None), ('pytorch = "*"\n', f"{CONDA_FORGE}/{{}}/pytorch-3.12.5")):
        manifest.write_text(text.replace("[dependencies]\n", f"[dependencies]\n{line}"))
        user("lock")
        lock = yaml.safe_load((user.folder / "pixi.lock").read_text())
        by_platform = lock["environments"]["default"]["packages"]
        assert by_platform.keys() == {"linux-64", *others}
        for platform, packages in by_platform.items():
            ours = f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm"
            expected = ours if platform == "linux-64" else torch and torch.format(platform)
            builds = [p["conda"] for p in packages if "/pytorch-" in p.get("conda", "")]
            assert len(builds) == bool(expected) and all(b.startswith(expected) for b in builds)
    assert user.added("accelerate") - {"numpy"} == {"accelerate"}

# SPDX-License-Identifier: BSD-3-Clause
"""docs/move.md: its commands with a real pixi, from each start, up to the torch that is imported.

The packages are stand-ins: each torch is a module that says whose it is. Python is real.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.pixi import Pixi
from support.project import CHECKOUT
from support.servers import Revalidating, served
from support.simple_index import SimpleIndex, popular
from support.stand_in import HOST_BASE, MAPPING, PYTHON, write_mapping
from support.static_channel import Source, without_purls
from support.wheels import write_wheel

from forge.bases import CONDA_FORGE, PUBLISHED

pytestmark = pytest.mark.pixi

PAGE = (CHECKOUT / "docs/move.md").read_text()
SECTIONS = dict(re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", PAGE))
TABLES = "[the\ntables](#the-tables)"
OURS, CUDA, CPU, WHEEL, AMD, USERS = (
    "2.13.0 7.15.2",
    "2.12.0 None",
    "2.11.0 None",
    "2.99.0 None",
    "2.13.0+rocm10.0.0 7.15.2",
    "2.1.0 None",
)
SITE = f"lib/python{PYTHON}/site-packages"
WITH_CUDA = {"CONDA_OVERRIDE_CUDA": "12.9"}


def module(printed: str) -> str:
    """The source of a torch whose version and HIP are `printed`."""
    version, hip = printed.split()
    hip = hip if hip == "None" else repr(hip)
    return f"__version__ = {version!r}\nclass version:\n    hip = {hip}\n"


def blocks(section: str) -> list[tuple[str, str]]:
    """The fenced blocks of a section, by their language; "tables" where it says to append them."""
    text = re.sub(r"\[the\s+tables\]\(#the-tables\)", "[the tables](#the-tables)", section)
    steps = r"(?ms)^```(\w+)\n(.*?)^```|(Append \[the tables\])"
    return [
        ("tables", "") if append else (kind, text) for kind, text, append in re.findall(steps, text)
    ]


def block(section: str, kind: str) -> str:
    """The first block of a kind."""
    return next(text for language, text in blocks(SECTIONS[section]) if language == kind)


@pytest.fixture(scope="module")
def world(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A conda-forge, our channel, and a PyPI; yields the addresses of each."""
    folder = tmp_path_factory.mktemp("world")
    torch, python = f"{SITE}/torch/__init__.py", [f"python {PYTHON}.*"]
    ours = Source(folder / "ours", CHECKOUT / "recipes")
    ours.make("libtorch", "2.13.0", "linux-64")
    needs = [*python, "libtorch 2.13.0"]
    ours.make("pytorch", "2.13.0", "linux-64", file=torch, text=module(OURS), depends=needs)
    for name in ("triton", "flash-attn", "amd-aiter", "flash-attn-kernels-gfx1151"):
        ours.make(name, "3.7.1", "linux-64", depends=python)
    without_purls(ours.folder)  # prefix.dev's index has none
    theirs = Source(folder / "theirs")
    for version, build, text, needs in (
        ("2.12.0", "cuda129_0", CUDA, ["__cuda"]),
        ("2.11.0", "cpu_0", CPU, []),
    ):
        needs += [*python, f"libtorch {version}"]
        theirs.make("libtorch", version, "linux-64")
        theirs.make(
            "pytorch",
            version,
            "linux-64",
            build=build,
            file=torch,
            text=module(text),
            depends=needs,
        )
    theirs.make("pytorch-gpu", "2.12.0", "linux-64", depends=["pytorch 2.12.0 cuda*"])
    theirs.make("pytorch-cpu", "2.11.0", "linux-64", depends=["pytorch 2.11.0 cpu*"])
    for name, version in (("cuda-version", "12.9"), ("numpy", "2.0")):
        theirs.make(name, version, "linux-64")
    take_python(folder / "theirs")
    index = folder / "index"
    popular(index)
    (wheel,) = index.glob("torch/torch-2.99.0-*")
    wheel.unlink()
    files = {"torch/__init__.py": module(WHEEL)}
    write_wheel(index / "torch", "torch", "2.99.0", files, ("triton==3.99.0",))
    write_mapping(folder / "mapping", numpy="numpy", accelerate="accelerate")
    with served(folder, Revalidating) as url, served(index, SimpleIndex) as pypi:
        places = {"theirs": CONDA_FORGE, "ours": PUBLISHED, "mapping": MAPPING}
        yield {name: f"{url}/{place}" for place, name in places.items()} | {"pypi": pypi}


def take_python(channel: Path) -> None:
    """Put the host base's Python into a channel; nothing of our names is known there."""
    records = json.loads((HOST_BASE / "repodata.json").read_bytes())["packages.conda"]
    index = channel / "linux-64/repodata.json"
    data = json.loads(index.read_bytes())
    for file, record in records.items():
        if record["name"] == "python":
            data["packages.conda"][file] = record
            (channel / "linux-64" / file).symlink_to(HOST_BASE / file)
    for record in data["packages.conda"].values():
        record["purls"] = ["pkg:pypi/numpy"] if record["name"] == "numpy" else []
    index.write_text(json.dumps(data))
    for other in {*index.parent.glob("repodata_*"), *index.parent.glob("*.zst")}:
        other.unlink()


@dataclass
class User:
    """Somebody who follows the page."""

    pixi: Pixi
    folder: Path
    index: str

    def manifest(self) -> Path:
        return self.folder / "pixi.toml"

    def write(self, text: str) -> None:
        """Write a manifest of the page, which takes PyPI's packages from the test's own index."""
        options = f'[pypi-options]\nindex-url = "{self.index}"\n'
        self.manifest().write_text(f"{text.replace('3.12', PYTHON)}\n\n{options}")

    def append(self, text: str) -> None:
        old = self.manifest().read_text()
        self.manifest().write_text(f"{old}\n{text}")

    def run(self, line: str, code: int | None = 0, **environment: str) -> str:
        """Run a line of the page, and require its exit code."""
        words = shlex.split(line.replace("3.12", PYTHON), comments=True)
        if words[0] != "pixi":
            subprocess.run(words, cwd=self.folder, check=True)
            return ""
        printed = self.pixi(*words[1:], cwd=self.folder, code=code, **environment)
        if words[1] == "init":
            self.write(self.manifest().read_text())
        return printed

    def from_pypi(self) -> set[str]:
        """The packages of PyPI in the lock."""
        lock = (self.folder / "pixi.lock").read_text()
        files = re.findall(r"pypi: (\S+)", lock)
        assert all(file.startswith(self.index) for file in files), "of this machine alone"
        return {file.split("/")[-1].split("-")[0] for file in files}

    def imports(self, **environment: str) -> str:
        """The version of torch, HIP's, and the torch's place: what the page's check prints."""
        line = block("See whose torch is imported", "sh").strip()
        words = shlex.split(line)
        pixi = self.pixi.environment | environment
        done = subprocess.run(words, cwd=self.folder, env=pixi, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def follow(self, section: str) -> str:
        """Do what a section says, up to its check; returns all that was printed."""
        printed = ""
        for kind, text in blocks(SECTIONS[section].split("Then [check it]")[0]):
            if kind == "sh":
                printed += "".join(map(self.run, text.splitlines()))
            elif kind == "tables":
                self.append(block("The tables", "toml"))
            elif kind == "text":
                lines = [" ".join(line.split()) for line in printed.splitlines()]
                for line in text.splitlines():
                    assert any(line in other for other in lines), f"{line}: not in {printed}"
        return printed

    def require_ours(self) -> None:
        """What the page's check prints is as its table says, and so is the list of packages."""
        version, hip, place = self.imports().split()
        assert f"{version} {hip}" == OURS
        assert Path(place).is_relative_to(self.folder / ".pixi/envs")
        lock = (self.folder / "pixi.lock").read_text()
        assert re.search(rf"conda: {PUBLISHED}/linux-64/pytorch-2.13", lock)
        assert not self.from_pypi() & {"torch", "triton"}


@pytest.fixture
def user(world: dict[str, str], tmp_path: Path) -> User:
    mirrors = {name: url for name, url in world.items() if name != "pypi"}
    (tmp_path / "mine").mkdir()
    return User(Pixi(tmp_path / "home", mirrors), tmp_path / "mine", world["pypi"])


def start(user: User, section: str) -> None:
    """The workspace that a section begins with."""
    user.write(block(section, "toml"))


FORGE, PYPI = "From conda-forge's PyTorch", "From PyPI's PyTorch in a pixi workspace"
VENV, CONDA = "From a virtual environment with AMD's wheels", "From a conda environment"


@pytest.mark.parametrize("installed", [False, True])
def test_from_conda_forge(user: User, installed: bool) -> None:
    start(user, FORGE)
    if installed:
        user.run("pixi install", **WITH_CUDA)
        assert user.imports(**WITH_CUDA).startswith(CUDA)
    user.follow(FORGE)
    user.require_ours()
    user.append(block("The tables", "toml"))
    update, add = re.findall(r"(?m)^pixi (?:update|add --pypi).*", SECTIONS[FORGE])
    assert "there are no versions of torch" in user.run(add, code=1)
    user.run(update)
    user.run(add)
    user.require_ours()
    assert "accelerate" in user.from_pypi()


@pytest.mark.parametrize(
    ("requirement", "imported", "refused"),
    [
        ('pytorch = "*"', CPU, False),
        ('pytorch-cpu = "*"', CPU, True),
        ('pytorch = ">=2.11,<2.12"', CPU, True),
        ('pytorch = { version = "*", build = "cpu*" }', CPU, True),
        ('pytorch = "*"\npytorch-cpu = "*"', CPU, True),
    ],
)
def test_a_channel_before_and_after_another(
    user: User, requirement: str, imported: str, refused: bool
) -> None:
    """Appended it changes nothing, in silence; before, what asks for another build is named."""
    text = block(FORGE, "toml").split("[dependencies]")[0]
    user.write(f'{text}[dependencies]\npython = "{PYTHON}.*"\n{requirement}\n')
    user.run("pixi lock")
    assert "Added" in user.run(f"pixi workspace channel add {PUBLISHED}")
    user.run("pixi update")
    assert user.imports().startswith(imported)
    prepend = f"pixi workspace channel add --no-install --prepend {PUBLISHED}"
    assert "Added" in user.run(prepend)
    assert user.imports().startswith(imported), "pixi moves it: docs/move.md says too much"
    remove, prepend = blocks(SECTIONS[FORGE])[-1][1].splitlines()
    user.run(remove)
    printed = user.run(prepend, code=int(refused))
    if refused:
        assert "failed to solve requirements" in printed
        names = re.findall(r"(?m)^(pytorch[\w-]*) = ", requirement)
        user.run(f"pixi remove --no-install {' '.join(names)}")
        user.run(prepend)
        user.run("pixi add pytorch")
    user.require_ours()


@pytest.mark.parametrize("installed", [False, True])
def test_from_pypi(user: User, installed: bool) -> None:
    start(user, PYPI)
    user.run("pixi install" if installed else "pixi lock")
    if installed:
        assert user.imports().startswith(WHEEL)
    user.follow(PYPI)
    user.require_ours()


def test_from_pypi_without_an_update(user: User) -> None:
    """A lock from before the tables stays, and with it PyPI's torch over ours."""
    start(user, PYPI)
    user.run("pixi lock")
    first, *_ = (text for kind, text in blocks(SECTIONS[PYPI]) if kind == "sh")
    for line in first.splitlines():
        user.run(line)
    user.append(block("The tables", "toml"))
    user.run("pixi lock")
    assert {"torch", "triton"} <= user.from_pypi()
    assert user.imports().startswith(WHEEL)


def virtual_environment(folder: Path) -> dict[str, str]:
    """Make one with AMD's torch; returns the variables of its activation."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(module(AMD))
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def test_from_a_virtual_environment(user: User, tmp_path: Path) -> None:
    """While it is active, `python` is its own, and `pixi run python` the workspace's."""
    active = virtual_environment(tmp_path / "venv")
    user.follow(VENV)
    user.require_ours()
    script = "import torch; print(torch.__version__, torch.version.hip)"
    own = subprocess.run(
        ["python", "-c", script], env=user.pixi.environment | active, capture_output=True, text=True
    )
    assert own.stdout.strip() == AMD
    assert user.imports(**active).startswith(OURS)


def test_beside_a_torch_of_the_user(user: User) -> None:
    """It is imported by pixi's Python too, until the workspace says not to look there."""
    site = user.pixi.home / ".local" / SITE / "torch"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text(module(USERS))
    user.follow(VENV)
    version, hip, place = user.imports().split()
    assert f"{version} {hip}" == USERS and Path(place).is_relative_to(user.pixi.home)
    user.append(blocks(SECTIONS[VENV])[-1][1])
    user.require_ours()


@pytest.mark.parametrize("with_pip", [True, False])
def test_from_a_conda_environment(user: User, with_pip: bool) -> None:
    text = block(CONDA, "yaml").replace("3.12", PYTHON)
    if not with_pip:
        text = text.split("  - pip:")[0]
    (user.folder / "environment.yml").write_text(text)
    user.follow(CONDA)
    user.require_ours()


def test_every_way_is_walked() -> None:
    ways = {name for name in SECTIONS if name.startswith("From ")}
    assert ways == {FORGE, PYPI, VENV, CONDA}
    for way in ways:
        assert "[check it](#see-whose-torch-is-imported)" in SECTIONS[way]
    assert shutil.which("sed")

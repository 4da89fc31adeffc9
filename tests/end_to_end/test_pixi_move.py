# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi runs the commands of docs/move.md, and Python then imports our torch.

There is a test for each workspace and environment from which a user moves. Python is real. The
other packages are stand-ins: each torch is a module that has only its version and HIP's version.
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
# The output of the page's check for each torch: the versions of torch and of HIP.
OURS = "2.13.0 7.15.2"
CUDA = "2.12.0 None"
CPU = "2.11.0 None"
WHEEL = "2.99.0 None"
AMD = "2.13.0+rocm10.0.0 7.15.2"
USERS = "2.1.0 None"
SITE = f"lib/python{PYTHON}/site-packages"
WITH_CUDA = {"CONDA_OVERRIDE_CUDA": "12.9"}


def make_torch(versions: str) -> str:
    """Return the source of a torch module with these versions of torch and HIP."""
    version, hip = versions.split()
    hip = "None" if hip == "None" else repr(hip)
    return f"__version__ = {version!r}\nclass version:\n    hip = {hip}\n"


def list_steps(section: str) -> list[tuple[str, str]]:
    """Return the steps of a section in order, each as a kind and a text.

    A fenced block is a step whose kind is its language. An instruction to append the tables is a
    step of the kind "tables", without a text.
    """
    section = re.sub(r"\[the\s+tables\]\(#the-tables\)", "[the tables](#the-tables)", section)
    steps = []
    for match in re.finditer(r"(?ms)^```(\w+)\n(.*?)^```|Append \[the tables\]", section):
        language, text = match.groups()
        steps.append((language, text) if language else ("tables", ""))
    return steps


def find_block(section: str, language: str) -> str:
    """Return a section's first block in the given language."""
    return next(text for kind, text in list_steps(SECTIONS[section]) if kind == language)


def make_our_channel(folder: Path) -> None:
    python = f"python {PYTHON}.*"
    channel = Source(folder, CHECKOUT / "recipes")
    channel.make("libtorch", "2.13.0", "linux-64")
    channel.make(
        "pytorch",
        "2.13.0",
        "linux-64",
        file=f"{SITE}/torch/__init__.py",
        text=make_torch(OURS),
        depends=[python, "libtorch 2.13.0"],
    )
    for name in ("triton", "flash-attn", "amd-aiter", "flash-attn-kernels-gfx1151"):
        channel.make(name, "3.7.1", "linux-64", depends=[python])
    without_purls(channel.folder)  # The index of prefix.dev has no purls.


def make_conda_forge(folder: Path) -> None:
    channel = Source(folder)
    for version, build, versions, needs in (
        ("2.12.0", "cuda129_0", CUDA, ["__cuda"]),
        ("2.11.0", "cpu_0", CPU, []),
    ):
        channel.make("libtorch", version, "linux-64")
        channel.make(
            "pytorch",
            version,
            "linux-64",
            build=build,
            file=f"{SITE}/torch/__init__.py",
            text=make_torch(versions),
            depends=[*needs, f"python {PYTHON}.*", f"libtorch {version}"],
        )
    channel.make("pytorch-gpu", "2.12.0", "linux-64", depends=["pytorch 2.12.0 cuda*"])
    channel.make("pytorch-cpu", "2.11.0", "linux-64", depends=["pytorch 2.11.0 cpu*"])
    channel.make("cuda-version", "12.9", "linux-64")
    channel.make("numpy", "2.0", "linux-64")
    add_python(folder)


@pytest.fixture(scope="module")
def addresses(
    host_base: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Local addresses of conda-forge, of our channel and of pixi's mapping, by public address.

    "pypi" is the address of an index like PyPI.
    """
    folder = tmp_path_factory.mktemp("world")
    make_our_channel(folder / "ours")
    make_conda_forge(folder / "theirs")
    index = folder / "index"
    popular(index)
    (wheel,) = index.glob("torch/torch-2.99.0-*")
    wheel.unlink()
    files = {"torch/__init__.py": make_torch(WHEEL)}
    write_wheel(index / "torch", "torch", "2.99.0", files, ("triton==3.99.0",))
    write_mapping(folder / "mapping", numpy="numpy", accelerate="accelerate")
    with served(folder, Revalidating) as url, served(index, SimpleIndex) as pypi:
        yield {
            CONDA_FORGE: f"{url}/theirs",
            PUBLISHED: f"{url}/ours",
            MAPPING: f"{url}/mapping",
            "pypi": pypi,
        }


def add_python(channel: Path) -> None:
    """Add the host base's Python to a channel, and add the field `purls` to all records.

    Only numpy gets a name on PyPI.
    """
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
    # Remove the other forms of the index, because they do not have these changes.
    for file in {*index.parent.glob("repodata_*"), *index.parent.glob("*.zst")}:
        file.unlink()


@dataclass
class User:
    """A user who follows docs/move.md.

    Attributes:
        pixi: pixi in the user's home folder.
        folder: The folder of the workspace.
        index: The URL of the index that replaces PyPI.
    """

    pixi: Pixi
    folder: Path
    index: str

    @property
    def manifest(self) -> Path:
        return self.folder / "pixi.toml"

    def write(self, text: str) -> None:
        """Write a manifest of docs/move.md, changed so that PyPI's packages come from `index`."""
        options = f'[pypi-options]\nindex-url = "{self.index}"\n'
        self.manifest.write_text(f"{text.replace('3.12', PYTHON)}\n\n{options}")

    def append(self, text: str) -> None:
        old = self.manifest.read_text()
        self.manifest.write_text(f"{old}\n{text}")

    def run(self, line: str, code: int | None = 0, **environment: str) -> str:
        """Run a line of docs/move.md, require this exit code, and return what pixi printed."""
        words = shlex.split(line.replace("3.12", PYTHON), comments=True)
        if words[0] != "pixi":
            subprocess.run(words, cwd=self.folder, check=True)
            return ""
        printed = self.pixi(*words[1:], cwd=self.folder, code=code, **environment)
        if words[1] == "init":
            self.write(self.manifest.read_text())
        return printed

    def list_pypi_packages(self) -> set[str]:
        """Return the names of the packages in the lock that are from PyPI."""
        lock = (self.folder / "pixi.lock").read_text()
        files = re.findall(r"pypi: (\S+)", lock)
        assert all(file.startswith(self.index) for file in files), (
            "every file must be from the index that replaces PyPI"
        )
        return {file.split("/")[-1].split("-")[0] for file in files}

    def check_torch(self, **environment: str) -> str:
        """Run docs/move.md's check; return the versions of torch and HIP, and torch's path."""
        line = find_block("See whose torch is imported", "sh").strip()
        done = subprocess.run(
            shlex.split(line),
            cwd=self.folder,
            env=self.pixi.environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def follow(self, section: str) -> None:
        """Follow a section of docs/move.md up to its check; require the output that it shows."""
        printed = ""
        for kind, text in list_steps(SECTIONS[section].split("Then [check it]")[0]):
            if kind == "sh":
                for line in text.splitlines():
                    printed += self.run(line)
            elif kind == "tables":
                self.append(find_block("The tables", "toml"))
            elif kind == "text":
                printed_lines = [" ".join(line.split()) for line in printed.splitlines()]
                for line in text.splitlines():
                    is_printed = any(line in printed_line for printed_line in printed_lines)
                    assert is_printed, f"{line}: not in {printed}"

    def require_ours(self) -> None:
        """Require that the check of docs/move.md and the lock both show our torch."""
        version, hip, file = self.check_torch().split()
        assert f"{version} {hip}" == OURS
        assert Path(file).is_relative_to(self.folder / ".pixi/envs")
        lock = (self.folder / "pixi.lock").read_text()
        assert re.search(rf"conda: {PUBLISHED}/linux-64/pytorch-2.13", lock)
        assert not self.list_pypi_packages() & {"torch", "triton"}


@pytest.fixture
def user(addresses: dict[str, str], tmp_path: Path) -> User:
    mirrors = {name: url for name, url in addresses.items() if name != "pypi"}
    (tmp_path / "mine").mkdir()
    return User(Pixi(tmp_path / "home", mirrors), tmp_path / "mine", addresses["pypi"])


def write_first_manifest(user: User, section: str) -> None:
    """Write the manifest with which a section of docs/move.md begins."""
    user.write(find_block(section, "toml"))


FORGE = "From conda-forge's PyTorch"
PYPI = "From PyPI's PyTorch in a pixi workspace"
VENV = "From a virtual environment with AMD's wheels"
CONDA = "From a conda environment"


@pytest.mark.parametrize("installed", [False, True])
def test_from_conda_forge(user: User, installed: bool) -> None:
    write_first_manifest(user, FORGE)
    if installed:
        user.run("pixi install", **WITH_CUDA)
        assert user.check_torch(**WITH_CUDA).startswith(CUDA)
    user.follow(FORGE)
    user.require_ours()
    user.append(find_block("The tables", "toml"))
    update, add = re.findall(r"(?m)^pixi (?:update|add --pypi).*", SECTIONS[FORGE])
    assert "there are no versions of torch" in user.run(add, code=1)
    user.run(update)
    user.run(add)
    user.require_ours()
    assert "accelerate" in user.list_pypi_packages()


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
    """If our channel is after conda-forge, it has no effect, and pixi prints no warning.

    If our channel is before conda-forge, pytorch comes from our channel. A requirement that only
    another pytorch meets then fails.
    """
    text = find_block(FORGE, "toml").split("[dependencies]")[0]
    user.write(f'{text}[dependencies]\npython = "{PYTHON}.*"\n{requirement}\n')
    user.run("pixi lock")
    assert "Added" in user.run(f"pixi workspace channel add {PUBLISHED}")
    user.run("pixi update")
    assert user.check_torch().startswith(imported)
    prepend = f"pixi workspace channel add --no-install --prepend {PUBLISHED}"
    assert "Added" in user.run(prepend)
    message = "pixi must not move the channel to the front: docs/move.md says that it does not"
    assert user.check_torch().startswith(imported), message
    remove, prepend = list_steps(SECTIONS[FORGE])[-1][1].splitlines()
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
    write_first_manifest(user, PYPI)
    if installed:
        user.run("pixi install")
        assert user.check_torch().startswith(WHEEL)
    else:
        user.run("pixi lock")
    user.follow(PYPI)
    user.require_ours()


def test_from_pypi_without_an_update(user: User) -> None:
    """Without `pixi update`, the lock keeps PyPI's torch, which overwrites ours.

    For pixi, a lock is up to date even if it was made before the workspace had the tables of names.
    """
    write_first_manifest(user, PYPI)
    user.run("pixi lock")
    commands = find_block(PYPI, "sh")
    for line in commands.splitlines():
        user.run(line)
    user.append(find_block("The tables", "toml"))
    user.run("pixi lock")
    assert {"torch", "triton"} <= user.list_pypi_packages()
    assert user.check_torch().startswith(WHEEL)


def make_virtual_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment with AMD's torch, and return the variables that activate it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(make_torch(AMD))
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def test_from_a_virtual_environment(user: User, tmp_path: Path) -> None:
    """In an active virtual environment, `python` imports AMD's torch.

    Even there, `pixi run python` imports the workspace's torch.
    """
    activation = make_virtual_environment(tmp_path / "venv")
    user.follow(VENV)
    user.require_ours()
    script = "import torch; print(torch.__version__, torch.version.hip)"
    done = subprocess.run(
        ["python", "-c", script],
        env=user.pixi.environment | activation,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == AMD
    assert user.check_torch(**activation).startswith(OURS)


def test_beside_a_torch_of_the_user(user: User) -> None:
    """pixi's Python imports a torch in ~/.local unless the workspace sets PYTHONNOUSERSITE."""
    site = user.pixi.home / ".local" / SITE / "torch"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text(make_torch(USERS))
    user.follow(VENV)
    version, hip, file = user.check_torch().split()
    assert f"{version} {hip}" == USERS and Path(file).is_relative_to(user.pixi.home)
    user.append(list_steps(SECTIONS[VENV])[-1][1])
    user.require_ours()


@pytest.mark.parametrize("with_pip", [True, False])
def test_from_a_conda_environment(user: User, with_pip: bool) -> None:
    text = find_block(CONDA, "yaml").replace("3.12", PYTHON)
    if not with_pip:
        text = text.split("  - pip:")[0]
    (user.folder / "environment.yml").write_text(text)
    user.follow(CONDA)
    user.require_ours()


def test_every_way_is_walked() -> None:
    """Each section "From ..." of docs/move.md has a test, and links to the check of torch."""
    names = {name for name in SECTIONS if name.startswith("From ")}
    assert names == {FORGE, PYPI, VENV, CONDA}
    for name in names:
        assert "[check it](#see-whose-torch-is-imported)" in SECTIONS[name]
    assert shutil.which("sed"), "the page's commands need sed"

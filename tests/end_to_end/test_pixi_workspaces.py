# SPDX-License-Identifier: BSD-3-Clause
"""The examples of docs/workspaces.md: one lock for several machines, and a stack as a container."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import rattler
import yaml
from support.conda_forge import LACKS, records_of_both
from support.pixi import Pixi, fit, require
from support.project import CHECKOUT, STACKS
from support.release import Release, copy_stack, run
from support.servers import Revalidating, served
from support.stand_in import MAPPING, write_mapping

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.generated import COMBINED_MANIFEST, compose

PAGE = (CHECKOUT / "docs" / "workspaces.md").read_text()
DOCKERFILE = CHECKOUT / "stacks" / "attention" / "Dockerfile"
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "ENV", "RUN", "ENTRYPOINT", "CMD"}


def read_instructions() -> list[list[str]]:
    """Return the instructions of the Dockerfile, each as a name and its arguments."""
    lines = DOCKERFILE.read_text().splitlines()
    return [line.split(" ", 1) for line in lines if line and not line.startswith("#")]


def list_images() -> list[str]:
    """Return the base images of the Dockerfile."""
    return [rest.split()[0] for name, rest in read_instructions() if name == "FROM"]


EXAMPLE, *_ = re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE)


@pytest.mark.pixi
def test_one_lock_for_every_machine(pixi: Pixi, tmp_path: Path) -> None:
    """The environment for Strix Halo has our pytorch, and the others have conda-forge's pytorch.

    No environment has torch or triton from PyPI.
    """
    manifest = tmp_path / "pyproject.toml"
    manifest.write_text(EXAMPLE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    fit(manifest)
    pixi("lock", cwd=tmp_path)
    lock = yaml.safe_load((tmp_path / "pixi.lock").read_text())
    torch_urls = {}
    for name, environment in lock["environments"].items():
        (packages,) = environment["packages"].values()
        for package in packages:
            assert not re.search("torch|triton", package.get("pypi", ""))
        urls = [package["conda"] for package in packages if "conda" in package]
        (torch_urls[name],) = (url for url in urls if "/pytorch-2" in url)
    assert torch_urls["strix-halo"].startswith(f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm")
    for name, build in (("default", "cpu"), ("nvidia", "cuda")):
        assert torch_urls[name].startswith(f"{CONDA_FORGE}/linux-64/")
        assert build in torch_urls[name]


@pytest.fixture(scope="module")
def both_pythons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pixi]:
    """A pixi user, whose channels have conda-forge's committed records and ours for two Pythons."""
    folder = records_of_both(tmp_path_factory.mktemp("records"), "3.12", "3.13")
    write_mapping(folder / "mapping", pytorch="torch")
    with served(folder, Revalidating) as url:
        mirrors = {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}
        yield Pixi(folder / "home", mirrors | {MAPPING: f"{url}/mapping"})


def require_our_torch(folder: Path) -> dict[str, list[str]]:
    """Require that every environment of a lock has our torch and no other one.

    Returns:
        The URLs of the packages by environment.
    """
    lock = yaml.safe_load((folder / "pixi.lock").read_text())
    urls_by_environment = {}
    for name, environment in lock["environments"].items():
        (packages,) = environment["packages"].values()
        urls = [next(iter(package.values())) for package in packages]
        (torch,) = [url for url in urls if re.search(r"/(pytorch|torch)-\d", url)]
        assert torch.startswith(f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm")
        urls_by_environment[name] = urls
    return urls_by_environment


def write_manifest(folder: Path, text: str, python: str) -> None:
    """Write a manifest of several stacks for a version of Python.

    Requirements that the committed records lack are left out.
    """
    missing = [name for stack in STACKS for name in LACKS.get(f"stacks/{stack}", [])]
    manifest = folder / "pixi.toml"
    manifest.write_text(re.sub(rf"(?m)^({'|'.join(missing)}) = .*\n", "", text))
    fit(manifest)
    text = re.sub(r"(?m)^python = .*", f'python = "{python}.*"', manifest.read_text())
    manifest.write_text(text)


@pytest.mark.pixi
@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("pair", [*combinations(STACKS, 2)], ids="-".join)
def test_two_stacks_in_one_workspace(
    both_pythons: Pixi, tmp_path: Path, pair: tuple[str, str], python: str
) -> None:
    """A workspace of two stacks locks an environment for each stack and one for both."""
    texts = {name: (CHECKOUT / f"stacks/{name}/pixi.toml").read_text() for name in pair}
    write_manifest(tmp_path, f"{compose(texts)}both = {json.dumps(pair)}\n", python)
    both_pythons("lock", cwd=tmp_path)
    urls_by_environment = require_our_torch(tmp_path)
    assert urls_by_environment.keys() == {"default", pair[1], "both"}
    for urls in urls_by_environment.values():
        assert any(f"/python-{python}." in url for url in urls)


@pytest.mark.pixi
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_the_example_of_several_stacks(both_pythons: Pixi, tmp_path: Path, python: str) -> None:
    write_manifest(tmp_path, (CHECKOUT / COMBINED_MANIFEST).read_text(), python)
    both_pythons("lock", cwd=tmp_path)
    urls_by_environment = require_our_torch(tmp_path)
    assert urls_by_environment.keys() == {"default", "vllm", "finetune"}
    assert any("/vllm-0.33" in url for url in urls_by_environment["vllm"])


@pytest.mark.pixi
def test_a_torch_for_every_environment_does_not_lock(both_pythons: Pixi, tmp_path: Path) -> None:
    """A workspace does not lock if one environment lacks our pytorch and requires PyPI's torch."""
    text = (CHECKOUT / COMBINED_MANIFEST).read_text()
    text = text.replace('default = ["attention"]', 'attention = ["attention"]')
    write_manifest(tmp_path, f'{text}\n[pypi-dependencies]\ntorch = "*"\n', "3.12")
    both_pythons("lock", cwd=tmp_path, code=1)


def test_the_dockerfile_is_well_formed() -> None:
    """Every image has a tag, and files that are copied from the first image keep their paths."""
    instructions = read_instructions()
    assert {name for name, _ in instructions} <= INSTRUCTIONS
    for image in list_images():
        assert re.fullmatch(r"[\w./-]+:[\d.]+", image)
    copies = [rest.split() for name, rest in instructions if name == "COPY"]
    copies_from_build = [words for words in copies if words[0] == "--from=build"]
    assert copies_from_build
    for _, source, target in copies_from_build:
        assert source == target and source.startswith("/stack/")
    assert any("pixi.toml" in words for words in copies)
    for option in ("--device /dev/kfd", "--device /dev/dri", "--group-add"):
        assert option in PAGE


@pytest.mark.pixi
def test_hadolint_has_no_finding(tmp_path: Path) -> None:
    hadolint = require("hadolint")
    run([hadolint, DOCKERFILE], dict(os.environ))
    untagged = tmp_path / "Dockerfile"
    untagged.write_text(DOCKERFILE.read_text().replace(":24.04", ""))
    assert "DL3006" in run([hadolint, untagged], dict(os.environ), code=1).stdout


def find_builder() -> str:
    """Return a program that builds images on this machine, or skip the test."""
    for name in ("docker", "podman", "buildah"):
        words = [name, "info"]
        if shutil.which(name) and not subprocess.run(words, capture_output=True).returncode:
            return name
    pytest.skip("no docker, podman or buildah that runs")


def write_base_image(folder: Path, home: Path, *programs: str) -> None:
    """Write the Dockerfile and the files of a base image.

    The files are programs of this machine, the shared libraries that they and Python load, and a
    user's configuration of pixi.

    Args:
        folder: The folder to write to.
        home: The home folder with the configuration.
        programs: The names of the programs, beside the shells.
    """
    executables = {Path(require(name)) for name in ("bash", "sh", *programs)}
    python = [sys._base_executable, *Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")]
    # The libraries of py-rattler represent those of all wheels with code in Rust.
    python += Path(rattler.__file__).parent.glob("*.so")
    ldd = subprocess.run(["ldd", *executables, *python], capture_output=True, text=True).stdout
    libraries = {Path(path) for path in re.findall(r"\s(/\S+) \(0x", ldd)}
    # pixi does not start without certificates.
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    for name in ("bin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    for file in executables | libraries | {certificates}:
        target = folder / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copytree(home / ".pixi", folder / "root" / ".pixi")
    (folder / "tmp").mkdir()
    path = f"/bin:/usr/bin:{Path(require('pixi')).parent}"
    (folder / "Dockerfile").write_text(f"FROM scratch\nCOPY . /\nENV HOME=/root PATH={path}\n")


@pytest.mark.pixi
def test_the_image_is_built(release: Release, tmp_path: Path) -> None:
    """The Dockerfile builds an image that runs the validator and does not contain pixi.

    Its base images are replaced by images with programs of this machine.
    """
    builder = find_builder()
    folder = copy_stack("attention", tmp_path)
    fit(folder / "pixi.toml")
    Pixi(tmp_path / "home", release.mirrors)  # writes pixi's configuration into the home folder
    tags = []

    def build_image(name: str, context: Path) -> str:
        """Build an image and return its tag."""
        tag = f"localhost/strix-forge-test-{name}"
        tags.append(tag)
        command = [builder, "build", "--network", "host", "--pull=false", "-t", tag, context]
        # With this isolation, buildah needs no access to control groups.
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        run(command, environment, cwd=tmp_path)
        return tag

    try:
        text = (folder / "Dockerfile").read_text()
        for image in list_images():
            name = re.sub(r"\W", "-", image)
            programs = ["pixi", "cat", "uname"] if "pixi" in name else ["cat", "uname"]
            write_base_image(tmp_path / name, tmp_path / "home", *programs)
            text = text.replace(image, build_image(name, tmp_path / name))
        (folder / "Dockerfile").write_text(text)
        stack = build_image("stack", folder)
        # The builds of the following images run programs in the stack's image.
        context = tmp_path / "done"
        context.mkdir()
        entry_point = json.loads(dict(read_instructions())["ENTRYPOINT"])
        command = [*entry_point, "strix-validate", "--version"]
        (context / "Dockerfile").write_text(
            f'FROM {stack}\nRUN {json.dumps(command)}\nRUN ["bash", "-c", "! type pixi"]\n'
        )
        build_image("done", context)
        command.append("--wrong")
        (context / "Dockerfile").write_text(f"FROM {stack}\nRUN {json.dumps(command)}\n")
        with pytest.raises(AssertionError):
            build_image("wrong", context)
    finally:
        subprocess.run([builder, "rmi", "--force", *tags], capture_output=True, check=False)

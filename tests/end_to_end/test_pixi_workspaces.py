# SPDX-License-Identifier: BSD-3-Clause
"""docs/workspaces.md: a project for several machines, and a stack as a container."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain, combinations
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


def instructions() -> list[list[str]]:
    """The Dockerfile's lines, each split at its first space."""
    lines = DOCKERFILE.read_text().splitlines()
    return [line.split(" ", 1) for line in lines if line and not line.startswith("#")]


EXAMPLE, *_ = re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE)


@pytest.mark.pixi
def test_one_lock_for_every_machine(pixi: Pixi, tmp_path: Path) -> None:
    """Ours for a Strix Halo alone, conda-forge's builds for the others, nothing of PyPI's torch."""
    manifest = tmp_path / "pyproject.toml"
    manifest.write_text(EXAMPLE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    fit(manifest)
    pixi("lock", cwd=tmp_path)
    lock = yaml.safe_load((tmp_path / "pixi.lock").read_text())
    torch = {}
    for name, environment in lock["environments"].items():
        (packages,) = environment["packages"].values()
        assert not [p["pypi"] for p in packages if re.search("torch|triton", p.get("pypi", ""))]
        conda = [package["conda"] for package in packages if "conda" in package]
        (torch[name],) = (url for url in conda if "/pytorch-2" in url)
    assert torch["strix-halo"].startswith(f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm")
    assert torch["default"].startswith(f"{CONDA_FORGE}/linux-64/") and "cpu" in torch["default"]
    assert torch["nvidia"].startswith(f"{CONDA_FORGE}/linux-64/") and "cuda" in torch["nvidia"]


@pytest.fixture(scope="module")
def both_pythons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pixi]:
    """A user of the committed records of conda-forge, and of ours for two Pythons."""
    folder = records_of_both(tmp_path_factory.mktemp("records"), "3.12", "3.13")
    write_mapping(folder / "mapping", pytorch="torch")
    with served(folder, Revalidating) as url:
        mirrors = {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}
        yield Pixi(folder / "home", mirrors | {MAPPING: f"{url}/mapping"})


def require_our_torch(folder: Path) -> dict[str, list[str]]:
    """Every environment of a lock has our torch, and none PyPI's; returns their packages."""
    lock = yaml.safe_load((folder / "pixi.lock").read_text())
    environments = {}
    for name, environment in lock["environments"].items():
        (packages,) = environment["packages"].values()
        urls = [next(iter(package.values())) for package in packages]
        (torch,) = [url for url in urls if re.search(r"/(pytorch|torch)-\d", url)]
        assert torch.startswith(f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm")
        environments[name] = urls
    return environments


def write_several(folder: Path, text: str, python: str) -> None:
    """Several stacks as a pixi.toml, for a Python, without what the records lack."""
    names = "|".join(chain(*(LACKS.get(f"stacks/{stack}", []) for stack in STACKS)))
    manifest = folder / "pixi.toml"
    manifest.write_text(re.sub(rf"(?m)^({names}) = .*\n", "", text))
    fit(manifest)
    text = re.sub(r"(?m)^python = .*", f'python = "{python}.*"', manifest.read_text())
    manifest.write_text(text)


@pytest.mark.pixi
@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("pair", [*combinations(STACKS, 2)], ids="-".join)
def test_two_stacks_in_one_workspace(
    both_pythons: Pixi, tmp_path: Path, pair: tuple[str, str], python: str
) -> None:
    """An environment for each, and one of both."""
    texts = {name: (CHECKOUT / f"stacks/{name}/pixi.toml").read_text() for name in pair}
    write_several(tmp_path, f"{compose(texts)}both = {json.dumps(pair)}\n", python)
    both_pythons("lock", cwd=tmp_path)
    environments = require_our_torch(tmp_path)
    assert environments.keys() == {"default", pair[1], "both"}
    for urls in environments.values():
        assert [url for url in urls if f"/python-{python}." in url]


@pytest.mark.pixi
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_the_example_of_several_stacks(both_pythons: Pixi, tmp_path: Path, python: str) -> None:
    write_several(tmp_path, (CHECKOUT / COMBINED_MANIFEST).read_text(), python)
    both_pythons("lock", cwd=tmp_path)
    assert require_our_torch(tmp_path).keys() == {"default", "vllm", "finetune"}
    assert "/vllm-0.33" in " ".join(require_our_torch(tmp_path)["vllm"])


@pytest.mark.pixi
def test_a_torch_for_every_environment_does_not_lock(both_pythons: Pixi, tmp_path: Path) -> None:
    """The tests above can fail: without a torch of conda's, an environment cannot have PyPI's."""
    text = (CHECKOUT / COMBINED_MANIFEST).read_text()
    text = text.replace('default = ["attention"]', 'attention = ["attention"]')
    write_several(tmp_path, f'{text}\n[pypi-dependencies]\ntorch = "*"\n', "3.12")
    both_pythons("lock", cwd=tmp_path, code=1)


def test_the_dockerfile_is_well_formed() -> None:
    """Every image has a tag, and what is copied from one comes out at the same path."""
    words = instructions()
    assert {instruction for instruction, _ in words} <= INSTRUCTIONS
    images = [rest.split()[0] for instruction, rest in words if instruction == "FROM"]
    assert all(re.fullmatch(r"[\w./-]+:[\d.]+", image) for image in images)
    copied = [rest.split() for instruction, rest in words if instruction == "COPY"]
    for _, source, target in (parts for parts in copied if parts[0] == "--from=build"):
        assert source == target and source.startswith("/stack/")
    assert {"pixi.toml", "--from=build"} <= {part for parts in copied for part in parts}
    for option in ("--device /dev/kfd", "--device /dev/dri", "--group-add"):
        assert option in PAGE


@pytest.mark.pixi
def test_hadolint_has_no_finding(tmp_path: Path) -> None:
    hadolint = require("hadolint")
    run([hadolint, DOCKERFILE], dict(os.environ))
    untagged = tmp_path / "Dockerfile"
    untagged.write_text(DOCKERFILE.read_text().replace(":24.04", ""))
    assert "DL3006" in run([hadolint, untagged], dict(os.environ), code=1).stdout


def builder() -> str:
    """A program that builds images here; without one the test is skipped."""
    for name in ("docker", "podman", "buildah"):
        words = [name, "info"]
        if shutil.which(name) and not subprocess.run(words, capture_output=True).returncode:
            return name
    pytest.skip("no docker, podman or buildah that runs")


def base_image(folder: Path, home: Path, *programs: str) -> None:
    """Files for an image: programs of this machine, what they load, and somebody's home folder."""
    python = [sys._base_executable, *Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")]
    python += Path(rattler.__file__).parent.glob("*.so")  # as what PyPI has in Rust
    files = {Path(require(name)) for name in ("bash", "sh", *programs)}
    listed = subprocess.run(["ldd", *files, *python], capture_output=True, text=True).stdout
    for name in ("bin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    certificates = {Path("/etc/ssl/certs/ca-certificates.crt")}  # without any, pixi does not start
    for file in {*files, *map(Path, re.findall(r"\s(/\S+) \(0x", listed)), *certificates}:
        target = folder / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copytree(home / ".pixi", folder / "root" / ".pixi")
    (folder / "tmp").mkdir()
    path = f"/bin:/usr/bin:{Path(require('pixi')).parent}"
    (folder / "Dockerfile").write_text(f"FROM scratch\nCOPY . /\nENV HOME=/root PATH={path}\n")


@pytest.mark.pixi
def test_the_image_is_built(release: Release, tmp_path: Path) -> None:
    """Where a builder runs: all of the Dockerfile but the images that it begins with.

    These have the programs of this machine, and nothing else. The last image has no pixi.
    """
    build = [builder(), "build", "--network", "host", "--pull=false"]
    folder, made = copy_stack("attention", tmp_path), list[str]()
    fit(folder / "pixi.toml")
    Pixi(tmp_path / "home", release.mirrors)
    text = (folder / "Dockerfile").read_text()

    def image(name: str, context: Path) -> str:
        made.append(f"localhost/strix-forge-test-{name}")
        own = {"BUILDAH_ISOLATION": "chroot"}  # which needs no rights on control groups
        run([*build, "-t", made[-1], context], os.environ | own, cwd=tmp_path)
        return made[-1]

    try:
        for _, rest in (words for words in instructions() if words[0] == "FROM"):
            name = re.sub(r"\W", "-", rest.split()[0])
            programs = ["pixi", "cat", "uname"] if "pixi" in name else ["cat", "uname"]
            base_image(tmp_path / name, tmp_path / "home", *programs)
            text = text.replace(rest.split()[0], image(name, tmp_path / name))
        (folder / "Dockerfile").write_text(text)
        done = tmp_path / "done"
        done.mkdir()
        entry = json.loads(dict(instructions())["ENTRYPOINT"])
        says = [*entry, "strix-validate", "--version"]
        (done / "Dockerfile").write_text(
            f"FROM {image('stack', folder)}\nRUN {json.dumps(says)}\n"
            'RUN ["bash", "-c", "! type pixi"]\n'
        )
        image("done", done)
        (done / "Dockerfile").write_text(f"FROM {made[-2]}\nRUN {json.dumps([*says, '--wrong'])}\n")
        with pytest.raises(AssertionError):
            image("wrong", done)
    finally:
        subprocess.run([build[0], "rmi", "--force", *made], capture_output=True, check=False)

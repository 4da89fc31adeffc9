# SPDX-License-Identifier: BSD-3-Clause
"""docs/workspaces.md: a project for several machines, and a stack as a container."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.conda_forge import records_of_both
from support.pixi import MAPPING, Pixi, fit, write_mapping
from support.project import CHECKOUT
from support.release import Release, copy_stack, run
from support.servers import Revalidating, served

from forge.bases import CONDA_FORGE, PUBLISHED

PAGE = (CHECKOUT / "docs" / "workspaces.md").read_text()
DOCKERFILE = CHECKOUT / "stacks" / "attention" / "Dockerfile"
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "ENV", "RUN", "ENTRYPOINT", "CMD"}


def instructions() -> list[list[str]]:
    """The Dockerfile's lines, each split at its first space."""
    lines = DOCKERFILE.read_text().splitlines()
    return [line.split(" ", 1) for line in lines if line and not line.startswith("#")]


@pytest.mark.pixi
def test_one_lock_for_every_machine(tmp_path: Path) -> None:
    """Ours for a Strix Halo alone, conda-forge's builds for the others, nothing of PyPI's torch."""
    folder = records_of_both(tmp_path / "records")
    write_mapping(folder / "mapping", pytorch="torch")
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE)
    manifest = tmp_path / "pyproject.toml"
    manifest.write_text(text)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    fit(manifest)
    with served(folder, Revalidating) as url:
        mirrors = {CONDA_FORGE: f"{url}/theirs", PUBLISHED: f"{url}/ours"}
        mirrors |= {MAPPING: f"{url}/mapping"}
        Pixi(tmp_path / "home", mirrors)("lock", cwd=tmp_path)
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
def test_its_commands_make_an_environment_that_needs_no_pixi(
    release: Release, tmp_path: Path
) -> None:
    """What its first stage runs, in a copy of the stack; then its entry point, without pixi."""
    folder = copy_stack("attention", tmp_path)
    manifest = fit(folder / "pixi.toml")
    # gigabytes, and no other case
    large = r"(?m)^(pytorch|triton|flash-attn|flash-attn-kernels-gfx1151|amd-aiter) = .*\n"
    manifest.write_text(re.sub(large, "", manifest.read_text()))
    pixi = Pixi(tmp_path / "home", release.mirrors)
    for instruction, rest in instructions():
        if instruction == "RUN":
            run(["bash", "-ec", rest], pixi.environment, cwd=folder)
    alone = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = run(["bash", folder / "entrypoint.sh", "strix-validate", "--version"], alone)
    assert done.stdout.startswith("strix-validate 0.")


def test_the_image_is_built(tmp_path: Path) -> None:
    """Where a builder runs, its base images can be had, and our channel is published."""
    builder = next(filter(shutil.which, ("docker", "podman", "buildah")), None)
    if not builder:
        pytest.skip("no docker, podman or buildah on PATH")
    if subprocess.run([builder, "info"], capture_output=True, check=False).returncode:
        pytest.skip(f"{builder} does not run here")
    folder = copy_stack("attention", tmp_path)
    done = subprocess.run([builder, "build", folder], capture_output=True, text=True, check=False)
    for needed in ("ghcr.io", "ubuntu:24.04", PUBLISHED):
        if done.returncode and re.search(rf"(?m)^.*(rror|ailed).*{needed}", done.stderr):
            pytest.skip(f"{needed} cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr

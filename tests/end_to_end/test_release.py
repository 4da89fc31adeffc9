# SPDX-License-Identifier: BSD-3-Clause
"""The user's whole way: built on the conda-forge base, published, served, locked, installed, run.

conda-forge is a stand-in on loopback (support/stand_in.py), pytorch comes from it. Without pixi
the driver locks and installs; test_pixi_release.py goes the same last steps with pixi.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support import stand_in
from support.project import CHECKOUT
from support.release import RECIPES, Release, copy_stack, host_bound, published_in, run
from support.servers import QuietHandler, Revalidating, served
from support.simple_index import needs_torch

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.conda.local import HOST_BOUND
from forge.conda.package import Package

HOST_BASE = CHECKOUT / "build" / "host-base"


class User:
    """Somebody with an empty home folder and a copy of a stack, without pixi."""

    def __init__(self, release: Release, folder: Path, stack: str = "attention") -> None:
        self.home = folder / "home"
        stand_in.write_mirrors(self.home, release.mirrors)
        copy_stack(stack, self.home / "stacks")
        self.copy = self.home / "build" / "stacks" / stack
        for name in ("bases", "variants.yaml"):
            (self.home / name).symlink_to(CHECKOUT / name)
        # the packages that the build has unpacked already
        cache = {"RATTLER_CACHE_DIR": str(release.cache)}
        mine = {"HOME": str(self.home), "FORGE_ROOT": str(self.home), "FORGE_CHANNEL": PUBLISHED}
        self.environment = release.environment | cache | mine
        self.driver = release.driver

    def forge(self, *words: str, code: int = 0) -> str:
        done = run([*self.driver, *words], self.environment, code)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def user(release: Release, tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User(release, tmp_path_factory.mktemp("user"))
    user.forge("lock", "attention")
    user.forge("install", "attention")
    return user


def test_what_was_published(release: Release) -> None:
    """All of it is whole, tested, and bound to no host: by name, index and what is inside."""
    packages = release.packages()
    assert packages.keys() == {*RECIPES}
    release.forge("verify", *map(str, packages.values()))
    release.forge("channel", "verify", release.url)
    assert host_bound(release.published) == []
    for file in packages.values():
        index = Package(file).index
        assert not index["build"].startswith(HOST_BOUND) and index["name"] in file.name
    assert "built  " not in release.build(), "the second run built something"


def assert_locked(user: User, release: Release, name: str) -> None:
    """The lock names the public addresses, and exactly the packages that were published."""
    lock = (user.copy / "pixi.lock").read_text()
    assert host_bound(user.copy / "pixi.lock") == []
    assert "127.0.0.1" not in lock and "file:" not in lock and str(user.home) not in lock
    packages = release.packages()
    for file in map(packages.get, published_in(name)):
        assert f"- conda: {PUBLISHED}/{file.parent.name}/{file.name}\n" in lock
    assert f"- conda: {CONDA_FORGE}/linux-64/pytorch-2.13.0-rocm_" in lock


def test_stack_from_what_was_published(release: Release, user: User) -> None:
    assert_locked(user, release, "attention")
    prefix = user.copy / ".pixi" / "envs" / "default"
    assert host_bound(prefix) == [] and len(list(prefix.glob("conda-meta/*.json"))) > 30


@pytest.mark.parametrize(
    ("stack", "packages"),
    [
        ("diffusion", {"diffusers", "flash-attn"}),
        ("finetune", {"datasets", "flash-attn", "liger-kernel", "peft", "trl"}),
    ],
)
def test_another_stack(release: Release, tmp_path: Path, stack: str, packages: set[str]) -> None:
    """Locked alone: test_stack_checks.py installs them, of the same packages on the host base."""
    user = User(release, tmp_path, stack)
    user.forge("lock", stack)
    assert_locked(user, release, stack)
    lock = (user.copy / "pixi.lock").read_text()
    assert packages <= {*re.findall(r"(?m)^- conda: .*/(\S+)-[^-\s]+-[^-\s]+\.conda$", lock)}


def test_check_passes(user: User) -> None:
    """The stack's task `check`, of torch and of flash-attn's entry points: the rest of flash-attn's
    cases run in its package's test, and torch's other backends with pixi."""
    words = ["strix-validate", "attention", "--json", "--only", "sdpa/math/causal-*"]
    for name in ("varlen", "cache"):
        words += ["--only", f"flash-attn/interpreter/{name}-float32"]
    report = json.loads(
        run([*user.driver, "run", "attention", "--", *words], user.environment).stdout
    )
    assert report["summary"]["failed"] == 0 and report["summary"]["passed"] >= 5


def test_pip_keeps_our_torch(user: User, tmp_path: Path) -> None:
    """pip puts a package on top that requires torch and triton: neither is replaced."""
    needs_torch(tmp_path / "index")
    prefix = user.copy / ".pixi" / "envs" / "default"
    before = {path.name for path in prefix.glob("lib/python*/site-packages/t*.dist-info")}
    with served(tmp_path / "index", QuietHandler) as index:
        pip = [sys.executable, "-m", "pip", "--python", prefix / "bin" / "python", "install"]
        alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        run([*pip, "--index-url", index, "needs-torch"], user.environment | alone)
    assert list(prefix.glob("lib/python*/site-packages/needs_torch-1.0.dist-info"))
    assert {path.name for path in prefix.glob("lib/python*/site-packages/t*.dist-info")} == before
    assert {"torch-2.13.0.dist-info", "triton-3.7.1.dist-info"} <= {
        re.sub(r"\+\w+", "", name) for name in before
    }


def test_a_host_bound_package_is_found(release: Release, tmp_path: Path) -> None:
    """In conda-forge's place one newer einops that names the host base: these tests see it."""
    records = json.loads((HOST_BASE / "linux-64/repodata.json").read_bytes())["packages.conda"]
    ((name, record),) = ((n, r) for n, r in records.items() if r["name"] == "einops")
    conda_forge, bad = tmp_path / "conda-forge", name.replace(record["version"], "99.0")
    stand_in.make(conda_forge)
    index = json.loads((conda_forge / "linux-64/repodata.json").read_bytes())["packages.conda"]
    stand_in.write_repodata(conda_forge, "linux-64", index | {bad: record | {"version": "99.0"}})
    assert host_bound(conda_forge) == [bad]
    with served(conda_forge, Revalidating) as url:
        user = User(release, tmp_path)
        stand_in.write_mirrors(user.home, release.mirrors | {CONDA_FORGE: url})
        user.forge("lock", "attention")
    assert any(bad in line for line in host_bound(user.copy / "pixi.lock"))

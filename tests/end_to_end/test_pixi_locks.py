# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi locks the root workspace and the stacks from conda-forge's committed records.

The records are in tests/data/conda-forge.
"""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
import yaml
from support.conda_forge import LACKS
from support.pixi import Pixi, fit
from support.project import CHECKOUT, STACKS
from support.release import copy_stack

from forge.bases import PUBLISHED

pytestmark = pytest.mark.pixi


def read_lock(lock: Path) -> str:
    """Return the text of a lock file without its lines `indexed_timestamp`.

    Versions of pixi after 0.77 write these lines.
    """
    lines = lock.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("  indexed_timestamp:"))


def test_the_committed_lock(pixi: Pixi, tmp_path: Path) -> None:
    """If the lock is deleted, pixi writes the same lock again. `--check` detects a stale lock.

    read_lock() leaves out the lines that only newer versions of pixi write.
    """
    for name in ("pixi.toml", "pixi.lock"):
        shutil.copy(CHECKOUT / name, tmp_path)
    pixi("lock", "--check", cwd=tmp_path)
    manifest = tmp_path / "pixi.toml"
    lock = tmp_path / "pixi.lock"
    committed = read_lock(lock)
    lock.unlink()
    pixi("lock", cwd=tmp_path)
    assert read_lock(lock) == committed
    manifest.write_text(manifest.read_text().replace('git = "*"', 'git = "<2"'))
    pixi("lock", "--check", cwd=tmp_path, code=1)


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_is_locked(pixi: Pixi, tmp_path: Path, stack: str) -> None:
    """Every environment of a stack's lock has pytorch from our channel.

    The packages that lacks.yaml lists for the stack are removed from the manifest, because the
    committed records do not have them.
    """
    folder = copy_stack(stack, tmp_path / "stacks")
    manifest = fit(folder / "pixi.toml")
    for name in LACKS.get(f"stacks/{stack}", []):
        manifest.write_text(re.sub(rf"(?m)^{name} = .*\n", "", manifest.read_text()))
    pixi("lock", cwd=folder)
    for environment in yaml.safe_load((folder / "pixi.lock").read_text())["environments"].values():
        (packages,) = environment["packages"].values()
        (torch,) = (p["conda"] for p in packages if "/pytorch-2" in p["conda"])
        assert torch.startswith(f"{PUBLISHED}/linux-64/pytorch-2.13.0-rocm")
    pixi("lock", "--check", cwd=folder)
    manifest.write_text(manifest.read_text().replace('validate = "*"', 'validate = "<0.1"'))
    pixi("lock", "--check", cwd=folder, code=1)


@pytest.mark.parametrize("stack", STACKS)
def test_a_machine_without_the_gpu_installs_a_stack(tmp_path: Path, stack: str) -> None:
    """On a machine without a GPU, `pixi install --all` installs only the emulated environment."""
    folder = copy_stack(stack, tmp_path / "stacks")
    manifest = fit(folder / "pixi.toml")
    data = tomllib.loads(manifest.read_text())
    data["workspace"] |= {"channels": [], "conda-pypi-map": {}}
    for table in (data, *data["feature"].values()):
        for name in ("dependencies", "pypi-dependencies", "pypi-exclude-newer"):
            table.pop(name, None)
    manifest.write_text(tomli_w.dumps(data))
    without_gpu = {"CONDA_OVERRIDE_AMDGPU": "", "CONDA_OVERRIDE_AMDGPU_ARCH": ""}
    printed = Pixi(tmp_path / "home", {})("install", "--all", cwd=folder, **without_gpu)
    gpu_environments = sorted(data["environments"].keys() - {"emulated"})
    (skipped,) = re.findall("that do not support the current platform: (.*)", printed)
    assert sorted(skipped.split(", ")) == gpu_environments
    assert "The emulated environment has been installed" in printed
    assert [path.name for path in (folder / ".pixi/envs").iterdir()] == ["emulated"]

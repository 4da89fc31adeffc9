# SPDX-License-Identifier: BSD-3-Clause
"""pixi.lock's bindings, which are older than requirements.txt's: the unit tests and a build.

pyproject.toml says why there are two versions. All other tests run with requirements.txt's.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import bindings
from support.project import CHECKOUT, MiniProject

# Unit tests that no bindings have a part in, or that reach them where others here do as well.
OTHERS = (
    "*_mutants.py", "test_archives.py", "test_bases.py", "test_channel_page.py", "test_checks.py",
    "test_cli.py", "test_documented.py", "test_evidence.py", "test_gpu_checks.py",
    "test_host_base.py", "test_launcher.py", "test_night.py", "test_optimized.py",
    "test_package_checks.py", "test_patches.py", "test_preflight.py", "test_processes.py",
    "test_publish_killed.py", "test_pytorch_build.py", "test_rocm_*.py", "test_security_table.py",
    "test_sources.py", "test_subpackages.py", "test_upstream*.py", "test_validate_without_torch.py",
    "test_versions.py", "test_workflows.py",
)  # fmt: skip
# Every recipe and stack is solved for the Python and the ROCm that users get.
SOLVED_ALIKE = "python-3.13 or rollback"


@pytest.fixture(scope="module")
def folder() -> Path:
    if {name: metadata.version(name) for name in bindings.BINDINGS} == bindings.locked():
        pytest.skip("all tests of this run have the bindings of pixi.lock")
    return bindings.install()


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    return bindings.in_front(folder)


def test_versions(environment: dict[str, str]) -> None:
    """What the other tests here run with is what pixi.lock names."""
    code = (
        "from importlib.metadata import version as v; print(v('py-rattler'), v('py-rattler-build'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, text=True, capture_output=True
    )
    assert done.stdout.split() == list(bindings.locked().values())


def test_unit_tests(environment: dict[str, str]) -> None:
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-m", "unit"]
    options += ["-k", f"not ({SOLVED_ALIKE})"]
    options += [f"--ignore-glob=*/{name}" for name in OTHERS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/unit"], cwd=CHECKOUT, env=environment,
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_a_build(environment: dict[str, str], tmp_path: Path) -> None:
    """On a base of few wheels: rendered, built, tested, indexed, planned again: nothing is left."""
    project = MiniProject(tmp_path)
    (project.root / "build" / "host-base").unlink()  # that of other bindings
    (project.root / "bases" / "host" / "requirements.in").write_text("typer\n")
    project.recipe("alpha")
    test = "test -f $PREFIX/share/alpha/text && python -c 'import typer'"
    project.recipe("beta", run=["alpha", "typer"], test=test)
    path = {"PYTHONPATH": environment["PYTHONPATH"]}
    project.forge("build-all", **path)
    assert len(project.packages()) == 2
    assert "up to date" in project.forge("build-all", **path).stdout

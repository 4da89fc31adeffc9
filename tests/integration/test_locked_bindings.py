# SPDX-License-Identifier: BSD-3-Clause
"""pixi.lock's bindings, which are older than requirements.txt's: some unit tests and a build.

pyproject.toml says why there are two versions. All other tests run with requirements.txt's.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import bindings
from support.project import CHECKOUT, MiniProject

from forge.hostbase.base import LOCK
from forge.hostbase.lock import read_pins

# Typer, and what it requires of PyPI.
TYPER = [
    "typer",
    "annotated-doc",
    "annotated-types",
    "markdown-it-py",
    "mdurl",
    "pydantic",
    "pydantic-core",
    "pygments",
    "rich",
    "shellingham",
    "typing-extensions",
    "typing-inspection",
]
# Unit tests in which the driver calls, in this process, what it takes of the bindings: to render
# and plan, to index, publish and verify, to read packages, locks and servers, to solve, to offer to
# the cache. The others reach the bindings through the same functions.
REACHED = (
    "test_publish.py",
    "test_local_channel.py",
    "test_locks.py",
    "test_network.py",
    "test_package.py",
    "test_package_cache.py",
    "test_plan.py",
    "test_recipes.py",
)
# of every recipe alone: does it render on both bases, and in which order are they built
OF_RECIPES = "not test_recipes or test_renders or test_order"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of a process that has the bindings of pixi.lock."""
    if {name: metadata.version(name) for name in bindings.BINDINGS} == bindings.locked():
        pytest.skip("all tests of this run have the bindings of pixi.lock")
    return bindings.in_front(bindings.install())


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
    options += ["-k", OF_RECIPES, *(f"tests/unit/{name}" for name in REACHED)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=CHECKOUT,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_a_build(environment: dict[str, str], tmp_path: Path) -> None:
    """On a base of few wheels: rendered, built, tested, indexed, planned again: nothing is left.
    Then a stack of it, locked, installed and activated."""
    project = MiniProject(tmp_path)
    (project.root / "build" / "host-base").unlink()  # that of other bindings
    host = project.root / "recipes/bases/host"
    (host / "requirements.in").write_text("typer\n")
    pins = read_pins(host / LOCK)
    (host / LOCK).write_text("".join(f"{pins[name].line}\n" for name in TYPER))
    project.recipe("alpha")
    test = "test -f $PREFIX/share/alpha/text && python -c 'import typer'"
    project.recipe("beta", run=["alpha", "typer"], test=test)
    path = {"PYTHONPATH": environment["PYTHONPATH"]}
    project.forge("build-all", **path)
    assert len(project.packages()) == 2
    assert "up to date" in project.forge("build-all", **path).stdout
    project.stack("app", "beta")
    project.forge("lock", "app", **path)
    project.forge("install", "app", **path)
    words = ("run", "app", "--", "sh", "-c", 'cat "$CONDA_PREFIX/share/beta/text"')
    assert project.forge(*words, **path).stdout == "beta\n"

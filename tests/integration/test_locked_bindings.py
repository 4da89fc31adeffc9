# SPDX-License-Identifier: BSD-3-Clause
"""Some unit tests and a build work with the versions of the bindings and typer in pixi.lock.

The versions in pixi.lock are older than the versions in requirements.txt, with which the other
tests run, unless pixi runs them. pyproject.toml explains why both are supported.
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

# The wheels of Typer and of its requirements.
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
# Unit tests that call the bindings in their own process: they render recipes, plan, solve, publish,
# verify, write indexes, fill the cache, and read packages, locks and servers. Other tests call the
# bindings only through the same functions of the driver. The first test parses all documented
# command lines with typer.
UNIT_TESTS = (
    "test_documented.py",
    "test_publish.py",
    "test_local_channel.py",
    "test_locks.py",
    "test_network.py",
    "test_package.py",
    "test_package_cache.py",
    "test_plan.py",
    "test_recipes.py",
)
# An expression for pytest's option -k. In test_recipes.py, the expression selects only the tests
# that render each recipe on both bases.
SELECTED = "not test_recipes or test_renders"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment variables of a process that imports the versions of pixi.lock."""
    if {name: metadata.version(name) for name in bindings.PACKAGES} == bindings.locked():
        pytest.skip("all tests of this run have the versions of pixi.lock")
    return bindings.in_front(bindings.install())


def test_versions(environment: dict[str, str]) -> None:
    """The environment has the versions that pixi.lock names."""
    code = "from importlib.metadata import version as v; "
    code += "print(v('py-rattler'), v('py-rattler-build'), v('typer'))"
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert output.split() == list(bindings.locked().values())


def test_unit_tests(environment: dict[str, str]) -> None:
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-m", "unit"]
    options += ["-k", SELECTED, *(f"tests/unit/{name}" for name in UNIT_TESTS)]
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
    """Two recipes are built and are then up to date, and a stack of them installs and runs.

    With the bindings of pixi.lock, the test also makes a host base of few wheels.
    """
    project = MiniProject(tmp_path)
    # The host base of the checkout was made with the newer versions of the bindings.
    (project.root / "build" / "host-base").unlink()
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

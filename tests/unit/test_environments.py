# SPDX-License-Identifier: BSD-3-Clause
"""Before a build, each environment of the plan is solved.

If an environment cannot be solved, its recipe is not built, and neither are the recipes that need
it. All other recipes are built. In these tests, conda-forge is a folder with a few records, which
is served on loopback, and nothing is built.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard
from support import stand_in
from support.project import MiniProject
from support.servers import served

from forge import bases
from forge.building.environments import find_unsolvable
from forge.conda.local import LocalChannel
from forge.project import SUBDIRS, Project
from forge.recipes.plan import BUILD, UP_TO_DATE, RecipeSet

PYTHONS = [
    ("python", "3.12.0", "0_cpython", ["python_abi 3.12.* *_cp312"]),
    ("python", "3.13.0", "0_cp313", ["python_abi 3.13.* *_cp313"]),
    ("python_abi", "3.12", "0_cp312", []),
    ("python_abi", "3.13", "0_cp313", []),
    ("pip", "26.0", "0", ["python"]),
]
# Name, version, build string, dependencies.
Package = tuple[str, str, str, list[str]]
Solve = Callable[..., dict[str, str]]


def make_records(packages: list[Package]) -> dict[str, dict[str, Any]]:
    """Return records by file name. The files themselves do not exist."""
    result = {}
    for name, version, build, depends in packages:
        result[f"{name}-{version}-{build}.conda"] = {
            "name": name,
            "version": version,
            "build": build,
            "build_number": 0,
            "subdir": "noarch" if build.startswith("py_") else "linux-64",
            "depends": depends,
            "sha256": "0" * 64,
        }
    return result


@pytest.fixture
def mini(tmp_path: Path) -> MiniProject:
    return MiniProject(tmp_path / "project")


@pytest.fixture
def solve(mini: MiniProject, tmp_path: Path) -> Solve:
    """A function that plans the project's recipes, and solves them with these packages.

    It returns the reason for each recipe that cannot be built, by its name.

    Args:
        packages: The packages of conda-forge, beside PYTHONS.
        exports: The run_exports of packages, by file name.
        show: Called with a line for each environment.
    """

    def find_reasons(
        *packages: Package,
        exports: dict[str, Any] | None = None,
        show: Callable[[str], None] = lambda _: None,
    ) -> dict[str, str]:
        project = Project.at(mini.root)
        recipes = RecipeSet(project, bases.load(project, "conda-forge"))
        channel = LocalChannel(project.output_folder)
        folder = tmp_path / "conda-forge"
        folder.mkdir()
        records = make_records([*PYTHONS, *packages])
        for subdir in SUBDIRS:
            selected = {file: r for file, r in records.items() if r["subdir"] == subdir}
            stand_in.write_repodata(folder, subdir, selected)
        entries = {name: {"run_exports": value} for name, value in (exports or {}).items()}
        text = json.dumps({"packages": {}, "packages.conda": entries})
        (folder / "linux-64/run_exports.json.zst").write_bytes(zstandard.compress(text.encode()))
        with served(folder) as url:
            return find_unsolvable(recipes, recipes.plan(channel), channel, show, url)

    return find_reasons


def recipe(
    mini: MiniProject, name: str, tests: list[Any] | None = None, **requirements: Any
) -> None:
    """Write a recipe of one compiled package."""
    mini.recipe(name)
    text = {
        "schema_version": 1,
        "package": {"name": name, "version": "1.0"},
        "build": {"number": 0, "variant": {"use_keys": ["content_digest"]}},
        "requirements": requirements,
        "tests": tests or [],
        "about": {"license": "BSD-3-Clause", "summary": "a test package"},
    }
    (mini.root / "recipes" / name / "recipe.yaml").write_text(yaml.safe_dump(text))


GAMMA: Package = ("gamma", "2.1", "0", [])


def test_what_solves_is_not_named(mini: MiniProject, solve: Solve) -> None:
    """Each environment is shown and then solved once.

    The build environment of beta is equal to that of alpha, so it is not solved again.
    """
    test = {"script": ["true"], "requirements": {"run": ["gamma"], "build": ["cmake"]}}
    recipe(mini, "alpha", [test], build=["cmake"], host=["python"], run=["python", "gamma >=2"])
    recipe(mini, "beta", build=["cmake"], run=["alpha"])
    shown: list[str] = []
    cmake = ("cmake", "4.0", "0", [])
    assert solve(GAMMA, cmake, show=shown.append) == {}
    assert shown == [
        "[1/2] alpha: build, Python 3.12",
        "[1/2] alpha: host, Python 3.12",
        "[1/2] alpha: host, Python 3.13",
        "[1/2] alpha: run, Python 3.12",
        "[1/2] alpha: run, Python 3.13",
        "[1/2] alpha: test, Python 3.12",
        "[1/2] alpha: test, Python 3.13",
        "[2/2] beta: run, Python 3.12",
        "[2/2] beta: run, Python 3.13",
    ]


@pytest.mark.parametrize("kind", ["build", "host", "run"])
def test_a_missing_package(mini: MiniProject, solve: Solve, kind: str) -> None:
    """A recipe that requires a missing package is not built, and neither are its dependents.

    The missing package may be in any environment of the recipe. A dependent may need the recipe to
    run, or only for a test.
    """
    recipe(mini, "alpha", **{kind: ["delta >=1", "gamma"]})
    recipe(mini, "beta", run=["alpha"])
    recipe(mini, "omega", [{"script": ["true"], "requirements": {"run": ["beta"]}}])
    recipe(mini, "other", run=["gamma"])
    python = ", Python 3.12 and 3.13" if kind == "run" else ""
    assert solve(GAMMA) == {
        "alpha": f"conda-forge has no delta >=1 ({kind} environment{python})",
        "beta": "needs alpha",
        "omega": "needs beta",
    }


def test_a_package_that_is_too_old(mini: MiniProject, solve: Solve) -> None:
    """The reason states conda-forge's newest version of the package, in whichever subdir it is."""
    recipe(mini, "alpha", run=["gamma >=2.2,<3", "delta >=2"])
    recipe(mini, "beta", run=["gamma"])
    older = ("gamma", "2.0", "py_0", [])
    delta = [("delta", "1.0", "0", []), ("delta", "2.0", "py_0", [])]
    reason = "conda-forge has no gamma >=2.2,<3 (the newest is 2.1)"
    assert solve(older, GAMMA, *delta) == {
        "alpha": f"{reason} (run environment, Python 3.12 and 3.13)"
    }


def test_a_conflict_in_a_test_alone(mini: MiniProject, solve: Solve) -> None:
    """The reason names the first of the test's requirements that conflicts with those before it."""
    test = {"script": ["true"], "requirements": {"run": ["epsilon", "delta", "zeta"]}}
    recipe(mini, "alpha", [test], run=["gamma >=2"])
    recipe(mini, "beta", run=["gamma"])
    reasons = solve(
        GAMMA,
        ("gamma", "1.0", "0", []),
        ("delta", "1.0", "0", ["gamma <2"]),
        ("epsilon", "1.0", "0", []),
        ("zeta", "1.0", "0", []),
    )
    assert list(reasons) == ["alpha"]
    assert reasons["alpha"].startswith("delta cannot be installed with the other requirements: ")
    assert reasons["alpha"].endswith(" (test environment)")


def test_a_test_for_a_python_that_is_missing(mini: MiniProject, solve: Solve) -> None:
    test = {"python": {"imports": ["alpha"], "python_version": ["3.12.*", "3.11.*"]}}
    recipe(mini, "alpha", [test], run=["python"])
    reason = "conda-forge has no python 3.11.* (the newest is 3.13.0)"
    assert solve() == {"alpha": f"{reason} (test environment, Python 3.11)"}


def test_a_conflict_of_one_python_alone(mini: MiniProject, solve: Solve) -> None:
    """For Python 3.13, gamma is available only in a version that alpha does not accept."""
    recipe(mini, "alpha", host=["python"], run=["python", "gamma >=2"])
    recipe(mini, "beta", host=["python"], run=["python", "gamma"])
    reasons = solve(
        ("gamma", "2.0", "py312_0", ["python_abi 3.12.* *_cp312"]),
        ("gamma", "1.0", "py313_0", ["python_abi 3.13.* *_cp313"]),
    )
    assert list(reasons) == ["alpha"]
    assert reasons["alpha"].startswith("gamma >=2 cannot be installed with the other requirements")
    assert reasons["alpha"].endswith(" (run environment, Python 3.13)")


ABI = {
    "python-3.12.0-0_cpython.conda": {"weak": ["python_abi 3.12.* *_cp312"]},
    "python-3.13.0-0_cp313.conda": {"weak": ["python_abi 3.13.* *_cp313"]},
}
ZETA: list[Package] = [
    ("zeta", "1.0", "py312_0", ["python_abi 3.12.* *_cp312"]),
    ("zeta", "1.0", "py313_0", ["python_abi 3.13.* *_cp313", "gamma <2"]),
]


def test_a_conflict_in_the_second_test_with_one_python(mini: MiniProject, solve: Solve) -> None:
    """Only the environment of alpha's second test cannot be solved, and only with Python 3.13."""
    tests = [{"script": ["true"], "requirements": {"run": specs}} for specs in ([], ["zeta"])]
    recipe(mini, "alpha", tests, host=["python"], run=["python", "gamma >=2"])
    recipe(mini, "beta", host=["python"], run=["python", "zeta"])
    reasons = solve(GAMMA, ("gamma", "1.0", "0", []), *ZETA, exports=ABI)
    assert list(reasons) == ["alpha"]
    assert reasons["alpha"].startswith("zeta cannot be installed with the other requirements: ")
    assert reasons["alpha"].endswith(" (test environment, Python 3.13)")


@pytest.mark.parametrize("kind", ["build", "run"])
def test_what_only_a_test_lacks(mini: MiniProject, solve: Solve, kind: str) -> None:
    tests = [{"script": ["true"], "requirements": {kind: ["gamma", "delta >=3"]}}]
    recipe(mini, "alpha", tests, run=["gamma"])
    recipe(mini, "beta", run=["gamma"])
    assert solve(GAMMA, ("delta", "2.9", "0", [])) == {
        "alpha": "conda-forge has no delta >=3 (the newest is 2.9) (test environment)"
    }


def test_each_python_has_its_own_reason(mini: MiniProject, solve: Solve) -> None:
    recipe(mini, "alpha", host=["python", "gamma", "delta"], run=["python"])
    reasons = solve(
        ("gamma", "1.0", "py313_0", ["python_abi 3.13.* *_cp313"]),
        ("delta", "1.0", "py312_0", ["python_abi 3.12.* *_cp312"]),
    )
    first, second = reasons["alpha"].split(" (host environment, Python 3.12); ")
    assert first.startswith("gamma cannot be") and second.startswith("delta cannot be")
    assert second.endswith(" (host environment, Python 3.13)")


def test_a_package_for_every_python_is_installed_with_each(mini: MiniProject, solve: Solve) -> None:
    mini.recipe("alpha", run=["gamma"])
    reasons = solve(("gamma", "2.0", "py312_0", ["python_abi 3.12.* *_cp312"]))
    assert reasons["alpha"].startswith("gamma cannot be installed with the other requirements: ")
    assert reasons["alpha"].endswith(" (run environment, Python 3.13)")


def test_what_a_compiler_exports_is_required_of_host_and_run(
    mini: MiniProject, solve: Solve
) -> None:
    recipe(mini, "alpha", build=["compiler"], host=["gamma"])
    recipe(mini, "beta", build=["compiler"], run=["epsilon"])
    recipe(mini, "other", build=["compiler"], run=["gamma"])
    recipe(mini, "quiet", build=["compiler"], run=["epsilon"])
    path = mini.root / "recipes/quiet/recipe.yaml"
    data = yaml.safe_load(path.read_text())
    data["requirements"]["ignore_run_exports"] = {"from_package": ["compiler"]}
    path.write_text(yaml.safe_dump(data))
    reasons = solve(
        ("compiler", "14.0", "0", []),
        ("library", "14.0", "0", []),
        ("library", "13.0", "0", []),
        ("gamma", "2.0", "0", []),
        ("epsilon", "1.0", "0", ["library <14"]),
        exports={"compiler-14.0-0.conda": {"strong": ["library >=14"]}},
    )
    assert list(reasons) == ["beta"]
    assert "library >=14 cannot be installed" in reasons["beta"]


def test_what_a_host_package_exports_is_required_to_run(mini: MiniProject, solve: Solve) -> None:
    """The run_exports of conda-forge's packages and of ours are required.

    Because of run_exports, beta requires alpha, and alpha requires library >=3. gamma, which beta
    requires too, conflicts with library >=3.
    """
    recipe(mini, "alpha", host=["library"], run_exports=["alpha <2"])
    recipe(mini, "beta", host=["alpha"], run=["gamma"])
    reasons = solve(
        ("library", "3.0", "0", []),
        ("library", "2.0", "0", []),
        ("gamma", "2.0", "0", ["library <3"]),
        exports={"library-3.0-0.conda": {"weak": ["library >=3,<4"]}},
    )
    assert list(reasons) == ["beta"]
    assert "alpha <2 cannot be installed with the other requirements" in reasons["beta"]


def test_what_is_built_is_taken_as_it_is(
    mini: MiniProject, solve: Solve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environments of a package that is built already are not solved again.

    The environments of its dependents use the requirements of the built package, and not those of
    the recipe.
    """
    recipe(mini, "alpha", run=["nowhere"])
    recipe(mini, "beta", run=["alpha", "gamma"])
    original_plan = RecipeSet.plan

    def plan(self: RecipeSet, channel: LocalChannel) -> Any:
        steps = original_plan(self, channel)
        output = steps[0].outputs[0]
        package = (output.name, output.version, output.build, ["gamma <2"])
        stand_in.write_repodata(channel.folder, "linux-64", make_records([package]))
        steps[0].action = UP_TO_DATE
        assert steps[1].action == BUILD
        return steps

    mini.channel.mkdir()
    monkeypatch.setattr(RecipeSet, "plan", plan)
    reasons = solve(GAMMA)
    assert list(reasons) == ["beta"]
    assert reasons["beta"].startswith("alpha cannot be installed with the other requirements: ")

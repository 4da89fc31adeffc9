# SPDX-License-Identifier: BSD-3-Clause
"""The requirements of all recipes can be solved with real conda-forge records and ours.

Our records are the rendered outputs, without files. data/conda-forge/lacks.yaml lists requirements
that no conda-forge record satisfies. The tests leave these out, so nothing shows that they solve.
"""

import contextlib
import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest
from rattler.exceptions import SolverError
from support.conda_forge import LACKS, MACHINE, OTHER_ROCM, STRIX_HALO, Rendered, Solver, to_spec
from support.project import CHECKOUT, RECIPES, STACKS

from forge.bases import PUBLISHED, BaseName
from forge.cli.context import Context
from forge.cli.stacks import Stack
from forge.envs.manifest import Manifest
from forge.errors import ForgeError
from forge.generated import compose
from forge.recipes.recipe import parse_package_name

CORE = {"python": ["3.13"], "aotriton_kernels": ["core"]}
NEXT = {"python": ["3.14.* *_cp314"]}
# Configurations: the overrides of the base's variants, and the version of Python.
CONFIGURATIONS = [({}, "3.12"), (CORE, "3.13"), (NEXT, "3.14")]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=["default", "core-3.13", "3.14"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(*request.param)


@pytest.fixture(scope="module")
def solver(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Solver:
    return Solver(tmp_path_factory.mktemp("records"), rendered)


@pytest.fixture(scope="module")
def solver_of_both(tmp_path_factory: pytest.TempPathFactory) -> Solver:
    """A solver over the channel as it is published: with packages for Python 3.12 and for 3.13."""
    return Solver(tmp_path_factory.mktemp("both"), Rendered({}), Rendered({}, "3.13"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_requirements_solve(rendered: Rendered, solver: Solver, recipe: str) -> None:
    lacking: set[str] = set()
    conflicting = rendered.conflicting(recipe)
    excluded = {*LACKS.get(recipe, []), *conflicting}
    for environment in rendered.environments(recipe):
        specs = [spec for spec in environment.specs if parse_package_name(spec) not in excluded]
        try:
            solver.solve(specs)
        except SolverError as error:
            pytest.fail(f"{environment.label} does not solve: {error}"[:2000])
        lacking |= solver.lacking(specs)
        for spec in set(environment.specs) - set(specs):
            if parse_package_name(spec) in conflicting:
                with pytest.raises(SolverError):
                    solver.solve([*specs, spec])
                continue
            with contextlib.suppress(SolverError):
                solver.solve([rendered.python, spec])
                # For Python 3.14, the records satisfy one requirement of lacks.yaml: cbor2.
                is_lacking = solver.lacking([spec]) or "3.14" in rendered.python
                assert is_lacking, f"lacks.yaml must not list {spec}, which solves"
    assert not lacking, "add these to lacks.yaml"


@pytest.mark.parametrize("stack", STACKS)
def test_stacks_solve(rendered: Rendered, solver: Solver, stack: str) -> None:
    """Each stack solves on gfx1151, and does not solve on gfx1100.

    The names in lacks.yaml are left out. The stack's own pin of Python is replaced by the Python of
    the configuration. This shows that the stack would also solve with a wider pin.
    """
    manifest = Manifest.load(CHECKOUT / "stacks" / stack / "pixi.toml")
    for specs in manifest.environments.values():
        others = [spec for spec in specs if parse_package_name(spec) != "python"]
        assert len(others) < len(specs), "the environment must require python"
        specs = [rendered.python, *others]
        lacking = solver.lacking(specs)
        names = {parse_package_name(spec) for spec in specs}
        assert lacking == names & {*LACKS.get(f"stacks/{stack}", [])}
        assert names - lacking <= solver.solve(specs, STRIX_HALO)
        with pytest.raises(SolverError):
            solver.solve(specs, STRIX_HALO | {"__amdgpu_arch": "11.0.0"})


def test_a_wrong_pin_does_not_solve(solver: Solver) -> None:
    lacking = solver.lacking(["triton 9.9.*", "no-such-name", "python 3.12.*"])
    assert lacking == {"triton", "no-such-name"}
    with pytest.raises(SolverError):
        solver.solve(["pytorch", "setuptools <70"])


@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_is_of_the_python_that_is_asked_for(
    solver_of_both: Solver, stack: str, python: str
) -> None:
    """Each package of ours that is built per Python is the build for the requested Python."""
    manifest = Manifest.load(CHECKOUT / "stacks" / stack / "pixi.toml")
    for specs in manifest.environments.values():
        lacking = LACKS.get(f"stacks/{stack}", [])
        specs = [spec for spec in specs if parse_package_name(spec) not in lacking]
        records = solver_of_both.records([*specs, f"python {python}.*"], STRIX_HALO)
        our_records = [record for record in records if "/ours/" in record.url]
        tags: set[str] = set()
        for record in our_records:
            tags.update(re.findall(r"py3\d+(?=h)", str(record.build)))
        assert tags == {f"py{python.replace('.', '')}"}
        names = {record.name.normalized for record in our_records}
        assert {"pytorch", "libtorch", "triton", "flash-attn"} <= names


@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("pair", [*combinations(STACKS, 2)], ids="-".join)
def test_two_stacks_solve_in_one_workspace(
    solver_of_both: Solver, tmp_path: Path, pair: tuple[str, str], python: str
) -> None:
    """Each of two stacks solves in an environment of its own, and both solve in a third one."""
    texts = {name: (CHECKOUT / f"stacks/{name}/pixi.toml").read_text() for name in pair}
    file = tmp_path / "pixi.toml"
    file.write_text(f"{compose(texts)}both = {list(pair)}\n")
    lacking: set[str] = set()
    for stack in pair:
        lacking.update(LACKS.get(f"stacks/{stack}", []))
    environments = Manifest.load(file).environments
    assert environments.keys() == {"default", pair[1], "both"}
    for specs in environments.values():
        specs = [spec for spec in specs if parse_package_name(spec) not in lacking]
        names = solver_of_both.solve([*specs, f"python {python}.*"], STRIX_HALO)
        assert {parse_package_name(spec) for spec in specs} <= names


@pytest.mark.parametrize("number", ["3.11", "3.12", "3.13", "3.14"])
def test_a_stack_is_locked_for_a_python_by_its_number(tmp_path: Path, number: str) -> None:
    """A number such as 3.12 selects the newest release of that Python, not the first one."""
    root = tmp_path / "project"
    shutil.copytree(CHECKOUT / "stacks", root / "stacks")
    shutil.copytree(CHECKOUT / "recipes/bases", root / "recipes/bases")
    shutil.copy(CHECKOUT / "variants.yaml", root)
    solver = Solver(tmp_path / "records", Rendered({"python": [number]}, number))
    for name in STACKS:
        ctx = Context(BaseName.CONDA_FORGE, None, [f"python={number}"], root=root)
        stack = Stack(ctx, name)
        stack.write(PUBLISHED)
        specs = stack.copy.manifest.environments["default"]
        (python_spec,) = [spec for spec in specs if parse_package_name(spec) == "python"]
        assert python_spec.startswith(f"python {number}.*")
        if number == "3.11":
            # torch requires optree, of which the records have no build for Python 3.11.
            specs = [python_spec]
        records = solver.records(specs, STRIX_HALO)
        (python,) = [record for record in records if record.name.normalized == "python"]
        assert str(python.version).startswith(f"{number}.")
        assert str(python.version) > f"{number}.0"


def test_a_skipped_recipe_that_another_needs_is_named() -> None:
    with pytest.raises(ForgeError, match="triton/recipe.yaml yields no package.* needs triton"):
        Rendered({"python": ["3.10.* *_cpython"]}, "3.10")


def test_torch_gets_no_eigen_5(rendered: Rendered, solver: Solver) -> None:
    """torch 2.13 does not recognise Eigen 5, so its build would clone another Eigen."""
    assert solver.solve(["eigen >=5"]) >= {"eigen"}
    environments = rendered.environments("pytorch")
    (host,) = [each for each in environments if each.label == "host of torch-build"]
    assert "eigen" in solver.solve(host.specs)
    with pytest.raises(SolverError):
        solver.solve([*host.specs, "eigen >=5"])


def test_triton_finds_a_compiler_without_activation(rendered: Rendered, solver: Solver) -> None:
    """If CC is not set, triton looks for `gcc`. The package gcc_linux-64 alone does not have it."""
    environments = rendered.environments("triton")
    (run,) = [each for each in environments if each.label == "run of triton"]
    assert {"gcc", "gcc_linux-64"} <= solver.solve(run.specs)


# Names that build and host environments require without a version, and that conda-forge-pinning
# does not pin. These names were looked up by hand, because no file of ours has this fact.
UNPINNED = {
    "ccache",
    "einops",
    "jemalloc",
    "jinja2",
    "llvm-openmp",
    "make",
    "msgpack-python",
    "ninja",
    "packaging",
    "pandas",
    "patch",
    "pip",
    "pkg-config",
    "psutil",
    "pybind11",
    "pyelftools",
    "pyyaml",
    "regex",
    "requests",
    "rich",
    "scikit-build-core",
    "setuptools",
    "setuptools-scm",
    "six",
    "typer",
    "typing_extensions",
    "wheel",
}


def test_conda_forges_pins_are_ours(rendered: Rendered) -> None:
    """Each name without a version is either pinned here or listed as one that nobody pins."""
    unpinned: set[str] = set()
    for recipe in rendered.by_recipe:
        for environment in rendered.environments(recipe):
            if not environment.label.startswith("run of"):
                unpinned.update(spec for spec in environment.specs if " " not in spec)
    unpinned -= rendered.outputs.keys()
    assert unpinned <= UNPINNED, (
        "look these up in conda-forge-pinning: a pin goes into recipes/bases/"
    )
    assert rendered.pinned("pybind11-abi") == "pybind11-abi =11"
    assert rendered.pinned("libblas") == "libblas 3.9.* *netlib"


@pytest.mark.parametrize("other", ["hip-runtime-amd", "rocblas"])
def test_our_rocm_keeps_others_out(solver: Solver, other: str) -> None:
    """Another ROCm cannot be installed together with ours.

    conda-forge's HIP, for example, would install a second libamdhip64.
    """
    assert "rocm-sdk-core" in solver.solve(["rocm-sdk-core"])
    assert solver.solve([other]) == {other}
    with pytest.raises(SolverError):
        solver.solve(["rocm-sdk-core", other])


def unknown_constraints(constraints: dict[str, list[str]], names: set[str]) -> set[str]:
    """Return the constraints on packages that do not exist. Such a constraint excludes nothing.

    Args:
        constraints: Constraints by output.
        names: The names of all packages.
    """
    result = set()
    for output, specs in constraints.items():
        for spec in specs:
            is_virtual = spec.startswith("__")
            if not is_virtual and parse_package_name(spec) not in names:
                result.add(f"{output}: {spec}")
    return result


def test_each_constraint_is_on_a_package_that_exists(rendered: Rendered, solver: Solver) -> None:
    """Each constraint names a package that exists. Any other constraint would exclude nothing.

    rocm-sdk-core once constrained the feedstock `hip`, which did not exclude hip-runtime-amd.
    """
    constraints: dict[str, list[str]] = {}
    for name, output in rendered.outputs.items():
        requirements = output.get("requirements", {}).get("run_constraints", [])
        if requirements:
            constraints[name] = [to_spec(each, rendered.outputs) for each in requirements]
    assert {"rocm-sdk-core", "pytorch", "flash-attn"} <= constraints.keys()
    names = {*rendered.outputs, *solver.names}
    # Our recipe has to exclude each ROCm package of another channel that other-rocm.yaml lists. A
    # name that only the recipe has could be that of a feedstock, as `hip` was, and would exclude
    # nothing.
    assert {*OTHER_ROCM} <= {parse_package_name(spec) for spec in constraints["rocm-sdk-core"]}
    assert unknown_constraints(constraints, names) == set()
    assert unknown_constraints({"a": ["hip <0.0.0a0", "__cuda"]}, names) == {"a: hip <0.0.0a0"}


@pytest.mark.parametrize("package", ["rocm-sdk-libraries", "aotriton"])
def test_another_gpu_is_refused(solver: Solver, package: str) -> None:
    """The solver refuses the package if the virtual packages describe another GPU, or an old glibc.

    Without a virtual package for the GPU, the packages can be installed.
    """
    assert package in solver.solve([package], MACHINE | {"__amdgpu_arch": "11.5.1"})
    with pytest.raises(SolverError):
        solver.solve([package], MACHINE | {"__amdgpu_arch": "11.0.0"})
    with pytest.raises(SolverError):
        solver.solve([package], MACHINE | {"__glibc": "2.17"})

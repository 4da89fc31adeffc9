# SPDX-License-Identifier: BSD-3-Clause
"""Every recipe's build, host and run requirements solve against real conda-forge records and ours.

Ours are the rendered outputs, as records without files. What the conda-forge records lack is
listed in data/conda-forge/lacks.yaml, and is not counted as solved.
"""

import contextlib
import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest
from rattler.exceptions import SolverError
from support.conda_forge import LACKS, MACHINE, OTHER_ROCM, STRIX_HALO, Rendered, Solver, spec_of
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
LANES = [({}, "3.12"), (CORE, "3.13"), (NEXT, "3.14")]


@pytest.fixture(scope="module", params=LANES, ids=["default", "core-3.13", "3.14"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(*request.param)


@pytest.fixture(scope="module")
def solver(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Solver:
    return Solver(tmp_path_factory.mktemp("records"), rendered)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Solver:
    """The channel as it is published: with the packages of both Pythons."""
    return Solver(tmp_path_factory.mktemp("both"), Rendered({}), Rendered({}, "3.13"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_requirements_solve(rendered: Rendered, solver: Solver, recipe: str) -> None:
    lacking, listed = set(), set(LACKS.get(recipe, []))
    apart = rendered.apart(recipe)
    for wanted in rendered.environments(recipe):
        there = [s for s in wanted.specs if parse_package_name(s) not in listed | apart]
        try:
            solver.solve(there)
        except SolverError as error:
            pytest.fail(f"{wanted.what} does not solve: {error}"[:2000])
        lacking |= solver.lacking(there)
        for spec in set(wanted.specs) - set(there):
            if parse_package_name(spec) in apart:
                with pytest.raises(SolverError):
                    solver.solve([*there, spec])
                continue
            with contextlib.suppress(SolverError):
                solver.solve([rendered.python, spec])
                held = solver.lacking([spec]) or "3.14" in rendered.python  # cbor2's alone
                assert held, f"lacks.yaml lists {spec}, which solves"
    assert not lacking, "add these to lacks.yaml"


@pytest.mark.parametrize("stack", STACKS)
def test_stacks_solve(rendered: Rendered, solver: Solver, stack: str) -> None:
    """On the platform that it states, and on no other GPU; without what lacks.yaml lists.

    With the Python of the lane, so that a wider pin in the stack is known to solve.
    """
    manifest = Manifest.load(CHECKOUT / "stacks" / stack / "pixi.toml")
    for specs in manifest.environments.values():
        specs = [rendered.python if parse_package_name(s) == "python" else s for s in specs]
        lacking, names = solver.lacking(specs), {parse_package_name(spec) for spec in specs}
        assert lacking == names & {*LACKS.get(f"stacks/{stack}", [])}
        assert names - lacking <= solver.solve(specs, STRIX_HALO)
        with pytest.raises(SolverError):
            solver.solve(specs, STRIX_HALO | {"__amdgpu_arch": "11.0.0"})


def test_a_wrong_pin_does_not_solve(solver: Solver) -> None:
    assert solver.lacking(["triton 9.9.*", "no-such-name", "python 3.12.*"]) == {
        "triton", "no-such-name"
    }  # fmt: skip
    with pytest.raises(SolverError):
        solver.solve(["pytorch", "setuptools <70"])


@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_is_of_the_python_that_is_asked_for(both: Solver, stack: str, python: str) -> None:
    """Of all our packages that are made for one; those that are for any serve both."""
    manifest = Manifest.load(CHECKOUT / "stacks" / stack / "pixi.toml")
    for specs in manifest.environments.values():
        lacking = LACKS.get(f"stacks/{stack}", [])
        there = [spec for spec in specs if parse_package_name(spec) not in lacking]
        records = both.records([*there, f"python {python}.*"], STRIX_HALO)
        ours = [record for record in records if "/ours/" in record.url]
        tags = {found[0] for r in ours if (found := re.search(r"py3\d+(?=h)", str(r.build)))}
        assert tags == {f"py{python.replace('.', '')}"}
        assert {"pytorch", "libtorch", "triton", "flash-attn"} <= {r.name.normalized for r in ours}


@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("pair", [*combinations(STACKS, 2)], ids="-".join)
def test_two_stacks_solve_in_one_workspace(
    both: Solver, tmp_path: Path, pair: tuple[str, str], python: str
) -> None:
    """Each in an environment of its own, and both in one."""
    texts = {name: (CHECKOUT / f"stacks/{name}/pixi.toml").read_text() for name in pair}
    file = tmp_path / "pixi.toml"
    file.write_text(f"{compose(texts)}both = {list(pair)}\n")
    lacking = {name for stack in pair for name in LACKS.get(f"stacks/{stack}", [])}
    environments = Manifest.load(file).environments
    assert environments.keys() == {"default", pair[1], "both"}
    for specs in environments.values():
        there = [spec for spec in specs if parse_package_name(spec) not in lacking]
        names = both.solve([*there, f"python {python}.*"], STRIX_HALO)
        assert {parse_package_name(spec) for spec in there} <= names


@pytest.mark.parametrize("number", ["3.11", "3.12", "3.13", "3.14"])
def test_a_stack_is_locked_for_a_python_by_its_number(tmp_path: Path, number: str) -> None:
    """The newest release of that Python, and not the first."""
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
        (asked,) = [spec for spec in specs if parse_package_name(spec) == "python"]
        assert asked.startswith(f"python {number}.*")
        # the records have no optree for 3.11, which torch needs
        records = solver.records([asked] if number == "3.11" else specs, STRIX_HALO)
        (python,) = [record for record in records if record.name.normalized == "python"]
        assert str(python.version).startswith(f"{number}.") and str(python.version) > f"{number}.0"


def test_a_skipped_recipe_that_another_needs_is_named() -> None:
    with pytest.raises(ForgeError, match="triton/recipe.yaml yields no package.* needs triton"):
        Rendered({"python": ["3.10.* *_cpython"]}, "3.10")


def test_torch_gets_no_eigen_5(rendered: Rendered, solver: Solver) -> None:
    """torch 2.13 does not recognise it, and would clone its own."""
    assert solver.solve(["eigen >=5"]) >= {"eigen"}
    (host,) = [w for w in rendered.environments("pytorch") if w.what == "host of torch-build"]
    assert "eigen" in solver.solve(host.specs)
    with pytest.raises(SolverError):
        solver.solve([*host.specs, "eigen >=5"])


def test_triton_finds_a_compiler_without_activation(rendered: Rendered, solver: Solver) -> None:
    """Without CC it looks for `gcc`, which conda-forge's compiler package does not hold."""
    (run,) = [w for w in rendered.environments("triton") if w.what == "run of triton"]
    assert {"gcc", "gcc_linux-64"} <= solver.solve(run.specs)


# Names that build and host environments ask for bare, and that conda-forge-pinning does not hold.
UNPINNED = {
    "ccache", "einops", "jemalloc", "jinja2", "llvm-openmp", "make", "msgpack-python", "ninja",
    "packaging", "pandas", "patch", "pip", "pkg-config", "psutil", "pybind11", "pyelftools",
    "pyyaml", "regex", "requests", "scikit-build-core", "setuptools", "setuptools-scm", "six",
    "typing_extensions", "wheel",
}  # fmt: skip


def test_conda_forges_pins_are_ours(rendered: Rendered) -> None:
    """Of each bare name one knows that it is pinned, or that conda-forge pins it no more."""
    bare = {
        spec
        for recipe in rendered.by_recipe
        for wanted in rendered.environments(recipe)
        if not wanted.what.startswith("run of")
        for spec in wanted.specs
        if " " not in spec and spec not in rendered.outputs
    }
    assert bare <= UNPINNED, "look these up in conda-forge-pinning: a pin goes into recipes/bases/"
    assert rendered.pinned("pybind11-abi") == "pybind11-abi =11"
    assert rendered.pinned("libblas") == "libblas 3.9.* *netlib"


@pytest.mark.parametrize("other", ["hip-runtime-amd", "rocblas"])
def test_our_rocm_keeps_others_out(solver: Solver, other: str) -> None:
    """conda-forge's HIP would put a second libamdhip64 beside ours."""
    assert "rocm-sdk-core" in solver.solve(["rocm-sdk-core"])
    assert solver.solve([other]) == {other}
    with pytest.raises(SolverError):
        solver.solve(["rocm-sdk-core", other])


def unknown_constraints(constraints: dict[str, list[str]], known: set[str]) -> set[str]:
    """Constraints of outputs on names that nothing has, and that thus constrain nothing."""
    return {
        f"{output}: {spec}"
        for output, specs in constraints.items()
        for spec in specs
        if not spec.startswith("__") and parse_package_name(spec) not in known
    }


def test_each_constraint_is_on_a_package_that_exists(rendered: Rendered, solver: Solver) -> None:
    """rocm-sdk-core constrained `hip`, which is a feedstock, and let hip-runtime-amd in."""
    constraints = {
        name: [spec_of(c, rendered.outputs) for c in o["requirements"]["run_constraints"]]
        for name, o in rendered.outputs.items()
        if o.get("requirements", {}).get("run_constraints")
    }
    assert {"rocm-sdk-core", "pytorch", "flash-attn"} <= constraints.keys()
    known = {*rendered.outputs, *solver.names}
    assert {*OTHER_ROCM} <= {parse_package_name(spec) for spec in constraints["rocm-sdk-core"]}
    assert unknown_constraints(constraints, known) == set()
    assert unknown_constraints({"a": ["hip <0.0.0a0", "__cuda"]}, known) == {"a: hip <0.0.0a0"}


@pytest.mark.parametrize("package", ["rocm-sdk-libraries", "aotriton"])
def test_another_gpu_is_refused(solver: Solver, package: str) -> None:
    """Where the solver knows the GPU. Where it does not, nothing is asked for."""
    assert package in solver.solve([package], MACHINE | {"__amdgpu_arch": "11.5.1"})
    with pytest.raises(SolverError):
        solver.solve([package], MACHINE | {"__amdgpu_arch": "11.0.0"})
    with pytest.raises(SolverError):
        solver.solve([package], MACHINE | {"__glibc": "2.17"})

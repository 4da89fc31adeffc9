# SPDX-License-Identifier: BSD-3-Clause
"""Every recipe of this repository on both bases."""

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.conda_forge import Rendered, Solver
from support.plain_rendering import plain
from support.project import CHECKOUT, RECIPES, MiniProject, tracked_files
from typer.testing import CliRunner

from forge import bases
from forge.cli.main import app
from forge.conda import pypi
from forge.conda.local import CONTENT_HASH
from forge.project import Project
from forge.recipes.cost import read_costs
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import list_patches, list_sources, parse_package_name, parse_purls
from forge.recipes.render import render
from forge.sources.cache import PYPI_URL
from forge.sources.patching import touched

PROJECT = Project.at(CHECKOUT)


@pytest.fixture(scope="module", params=["conda-forge", "host"])
def either(request: pytest.FixtureRequest) -> RecipeSet:
    """The recipes on one base and on the other; `recipes` are those on conda-forge's."""
    return RecipeSet(PROJECT, bases.load(PROJECT, request.param))


@pytest.mark.parametrize("name", RECIPES)
def test_renders(either: RecipeSet, name: str) -> None:
    """Build strings follow conda-forge's grammar, sources are pinned, a licence file is named."""
    recipe = either.recipes[name]
    rendered = render(recipe.path, either.base, "x")
    assert rendered
    for data in (output["recipe"] for output in rendered):
        assert data["about"]["license"] and data["about"]["license_file"]
        assert data["tests"], "a package without a test"
        assert CONTENT_HASH.search(data["build"]["string"])
        assert data["build"]["string"].startswith(either.base.base_tag)
    for source in list_sources(recipe):
        assert re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", source.digest)


@pytest.mark.parametrize("name", RECIPES)
def test_what_inherits_nothing_is_not_called_as_the_recipe(name: str) -> None:
    """It would be built in the folder of those that inherit, and hold what they left there."""
    data = yaml.safe_load((CHECKOUT / "recipes" / name / "recipe.yaml").read_text())
    outputs = [output for output in data.get("outputs", ()) if "package" in output]
    if any("inherit" in output for output in outputs):
        others = {o["package"]["name"] for o in outputs if "inherit" not in o}
        assert data["recipe"]["name"] not in others


TOOLS = 0.2  # CPU hours of what only tests need: the emulator, the validator, Triton
# its tests on a CPU need some torch; where ours is not built conda-forge's or PyPI's does
ANY_TORCH = {"strix-validate"}


def test_a_package_is_not_tested_with_what_costs_more(either: RecipeSet) -> None:
    """It enters no channel before what its tests require is built: amdsmi waited for PyTorch."""
    costs = read_costs(either.recipes.values(), either.base)
    hours = {name: cost.cpu_hours for name, cost in costs.items()}
    for name, recipe in either.recipes.items():
        needs = {either.owner[n] for n in recipe.needs if n in either.owner}
        built = either.dependencies(needs) | {name}
        tested = either.dependencies({name}) - built
        if name not in ANY_TORCH:
            wrong = {n for n in tested if hours[n] > max(TOOLS, sum(map(hours.get, built)))}
            assert not wrong, f"{name} is tested with {wrong}"


@pytest.mark.parametrize("changed", ["triton", "flash-attn", "amd-aiter", "strix-validate"])
def test_kernels_follow_what_they_are_compiled_from(recipes: RecipeSet, changed: str) -> None:
    """Kernels of another source or compiler are installed and never found."""
    assert "flash-attn-kernels-gfx1151" in recipes.dependents({changed})


def test_kernels_have_the_patches_of_their_source(recipes: RecipeSet) -> None:
    kernels = ("vllm/v1/attention/ops/", "vllm/model_executor/layers/fused_moe/")
    patches = {
        name: {
            path.name
            for source in recipes.recipes[name].sources
            for path in list_patches(recipes.recipes[name], source)
            if any(file.startswith(kernels) for file in touched(path.read_text()))
        }
        for name in ("vllm", "vllm-kernels-gfx1151")
    }
    assert patches["vllm"] == patches["vllm-kernels-gfx1151"] != set()


@pytest.mark.parametrize(
    ("output", "licence", "text"),
    [
        # triton's wheel has LLVM linked in, torch Eigen, libhipsolver needs CHOLMOD
        ("triton", "Apache-2.0 WITH LLVM-exception", "LICENSE-LLVM.txt"),
        ("libtorch", "MPL-2.0", "MPL-2.0.txt"),
        ("rocm-sdk-libraries", "GPL-2.0-or-later", "GPL-2.0.txt"),
    ],
)
def test_licences_of_what_is_linked_in(
    recipes: RecipeSet, output: str, licence: str, text: str
) -> None:
    path = recipes.recipes[recipes.owner[output]].path
    outputs = [o["recipe"] for o in render(path, recipes.base, "x")]
    found = [o["about"] for o in outputs if o["package"]["name"] == output]
    assert found and all(licence in about["license"].split(" AND ") for about in found)
    assert all(text in about["license_file"] for about in found)
    assert (path.parent / text).stat().st_size > 10_000


def test_kernels_are_bound_to_what_they_were_compiled_from(recipes: RecipeSet) -> None:
    """Beside another build none of them is found, and nothing would say so."""

    def constraints(name: str) -> list[Any]:
        outputs = render(recipes.recipes[name].path, recipes.base, "x")
        return next(o["recipe"]["requirements"]["run_constraints"] for o in outputs)

    def exact(name: str) -> set[str]:
        pins = [c["pin_compatible"] for c in constraints(name) if "pin" in str(c)]
        return {pin["name"] for pin in pins if pin["exact"]}

    assert exact("flash-attn-kernels-gfx1151") == {"flash-attn", "amd-aiter"}
    assert exact("triton-packages-kernels-gfx1151") == {"fla-core", "liger-kernel", "sageattention"}
    assert f"vllm =={recipes.recipes['vllm'].version}" in constraints("vllm-kernels-gfx1151")


def test_one_late_package_of_conda_forge_does_not_stop_vllm(recipes: RecipeSet) -> None:
    """vLLM requires nothing of conda-forge in one exact version."""
    from_conda_forge = [
        spec
        for spec in recipes.recipes["vllm"].requirements["run"]
        if parse_package_name(spec) not in recipes.owner
    ]
    assert len(from_conda_forge) > 50
    assert [spec for spec in from_conda_forge if "==" in spec] == []


def test_what_a_test_is_pinned_to_is_read(tmp_path: Path) -> None:
    """A pin among a test's requirements is a mapping, as it is among the recipe's own."""
    mini = MiniProject(tmp_path)
    mini.recipe("beta")
    path = mini.recipe("alpha") / "recipe.yaml"
    test = """requirements: {run: ["${{ pin_compatible('beta') }}"]}"""
    path.write_text(path.read_text().replace("  - script:", f"  - {test}\n    script:"))
    recipes = RecipeSet(Project.at(mini.root), bases.load(PROJECT, "conda-forge"))
    assert recipes.direct_needs("alpha") == {"beta"}


def without_hashes(outputs: list[dict[str, Any]]) -> set[str]:
    """Rendered outputs, each once, the hashes in their build strings blanked."""
    return {re.sub("h[0-9a-f]{7}_", "h_", json.dumps(output)) for output in outputs}


@pytest.mark.parametrize("name", RECIPES)
def test_driver_adds_only_the_hash(name: str) -> None:
    """Plain rattler-build and the driver build the same package on conda-forge."""
    path = CHECKOUT / "recipes" / name / "recipe.yaml"
    recipes = RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge"), set(RECIPES) - {name})
    ours = [output["recipe"] for output in render(path, recipes.base, "x")]
    theirs = plain(path)
    assert ours != theirs and without_hashes(ours) == without_hashes(theirs)


def test_no_recipe_knows_its_base() -> None:
    for path in tracked_files():
        if path.parent.parent == CHECKOUT / "recipes":
            words = "host base|hostgcc|hostgxx|hostbound|recipes/bases/host"
            assert not re.search(words, path.read_text()), path


def test_amds_own_kernels_of_aotriton() -> None:
    """The fast lane adds one source, the archive that torch pins, and its packages say so."""
    name = "aotriton"
    ours, fast = (
        RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge", {"aotriton_kernels": [kernels]}))
        for kernels in ("full", "upstream")
    )
    path = CHECKOUT / "recipes" / name / "recipe.yaml"
    assert all(
        output["recipe"]["build"]["string"].startswith("gfx1151_upstream_h")
        for output in render(path, fast.base, "x")
    )
    (added,) = {s.url for s in list_sources(fast.recipes[name])} - {
        s.url for s in list_sources(ours.recipes[name])
    }
    assert added.endswith("/0.12b/aotriton-0.12b-images-amd-gfx115x.tar.gz")


def test_variants_have_reasons() -> None:
    """One key per pin, a comment above each."""
    lines = (CHECKOUT / "variants.yaml").read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if re.match(r"\w+:", line)]
    assert keys
    for index in keys:
        assert lines[index - 1].startswith("# "), f"{lines[index]} has no reason above it"


def test_packages_name_sources_that_others_can_fetch(recipes: RecipeSet) -> None:
    """Those of the base whose packages are published; where not, the recipe says why."""
    why = "no hash of upstream's archive|from upstream's own wheel"
    without_reason = {
        name
        for name, recipe in recipes.recipes.items()
        if any(str(source.get("url")).startswith(PYPI_URL) for source in recipe.sources)
        and not re.search(why, recipe.path.read_text())
    }
    assert not without_reason
    (archive,) = recipes.recipes["model-hosting-container-standards"].sources
    assert archive["url"].startswith("https://github.com/aws/")


def for_gpu(arch: str) -> RecipeSet:
    """The recipes with another value of gpu_arch, and no other edit."""
    return RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge", {"gpu_arch": [arch]}))


def names_of_gpu(recipes: RecipeSet) -> dict[str, set[str]]:
    """The GPUs that the rendered outputs of each recipe name, comments and patches' files aside."""
    found: dict[str, set[str]] = {}
    for name, recipe in recipes.recipes.items():
        for data in (output["recipe"] for output in render(recipe.path, recipes.base, "x")):
            said = [data["package"]["name"], data["build"]["string"], data["about"]["summary"]]
            said += data["requirements"].get("run", []) + data["requirements"].get(
                "run_constraints", []
            )
            found.setdefault(name, set()).update(
                re.findall(r"gfx\d+|__amdgpu_arch ==[\d.]+", str(said))
            )
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_conda_smithys_linter_has_nothing_to_say(name: str) -> None:
    """What recipes of ours broke (lint_about_contents, lint_noarch_selectors of 3.62; it has no
    variants and cannot slice one): no package index that CI reaches has the program itself, which
    is `pixi run lint-recipes`."""
    text = (CHECKOUT / "recipes" / name / "recipe.yaml").read_text()
    data = yaml.safe_load(text)
    variants = yaml.safe_load((CHECKOUT / "variants.yaml").read_text())
    sliced = [word for word in re.findall(r"([\w.]+)\[", text) if word in variants]
    assert not sliced, f'write (NAME ~ "")[...] for {sliced}'
    assert all(data["about"].get(key) for key in ("homepage", "license", "summary"))
    skip = yaml.safe_load((CHECKOUT / "recipes/conda-forge.yml").read_text())["linter"]["skip"]
    if "noarch" in data.get("build", {}) and "lint_noarch_selectors" not in skip:
        specs = itertools.chain(*data.get("requirements", {}).values())
        assert "skip" not in data["build"] and not any(isinstance(s, dict) for s in specs)


def test_another_gpu_is_one_value_away() -> None:
    ours, other = names_of_gpu(for_gpu("gfx1151")), names_of_gpu(for_gpu("gfx1150"))
    assert ours.keys() == other.keys()
    products = {"strix-emulate", "strix-validate"}  # about gfx1151, whatever the channel is for
    assert {n: v for n, v in other.items() if v and n not in products} == {
        name: {word.replace("gfx1151", "gfx1150").replace("11.5.1", "11.5.0") for word in words}
        for name, words in ours.items()
        if words and name not in products
    }
    for name in ("rocm-sdk", "vllm-kernels-gfx1151"):
        assert other[name] == {"gfx1150", "__amdgpu_arch ==11.5.0"}


def test_plan_says_what_upstream_lacks_for_another_gpu(tmp_path: Path) -> None:
    def plan(arch: str) -> str:
        arguments = ["plan", "--base", "conda-forge", "--variant", f"gpu_arch={arch}"]
        return CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)]).output

    other = plan("gfx1150")
    assert "   rocm-sdk: lacks RCCL's kernels (ROCm/TheRock#150), MIOpen's tuned" in other
    assert "   rocm-sdk: lacks an archive of known hash" in plan("gfx1152")
    assert "lacks" not in plan("gfx1151").split("GiB")[0]


def test_tests_of_packages_know_their_gpu() -> None:
    """recipes/checks reads the variant key, which only outputs that have it get."""
    recipes = for_gpu("gfx1150")
    for recipe in recipes.recipes.values():
        for output in render(recipe.path, recipes.base, "x"):
            if "gfx1150" in (build := output["recipe"]["build"])["string"]:
                assert output["build_configuration"]["variant"]["gpu_arch"] == "gfx1150", build


def test_no_archive_of_another_gpu_is_taken_for_ours() -> None:
    (source,) = [
        s for s in list_sources(for_gpu("gfx1150").recipes["rocm-sdk"]) if "therock" in s.origin
    ]
    assert "gfx1150" in source.origin and set(source.digest) == {"0"}


def test_versions_agree(either: RecipeSet) -> None:
    """What a stack asks for is what the recipes and variants.yaml say."""
    pins = {key: either.base.variants[key][0] for key in ("pytorch", "triton", "amd_aiter_min")}
    assert either.recipes["triton"].version == pins["triton"]
    manifest = tomllib.loads((CHECKOUT / "stacks/attention/pixi.toml").read_text())
    stack = manifest["feature"]["attention"]["dependencies"]
    assert pins["pytorch"].startswith(stack["pytorch"].removesuffix("*"))
    assert stack["triton"] == f"{pins['triton']}.*"
    assert stack["amd-aiter"] == f">={pins['amd_aiter_min']}"
    assert stack["flash-attn"] == f"{either.recipes['flash-attn'].version}.*"


def test_what_pypi_has_is_named(either: RecipeSet) -> None:
    """Without a name there, pixi would install PyPI's package over ours."""
    names = pypi.read_names(PROJECT.recipes)
    assert names["pytorch"] == "torch" and "libtorch" not in names
    assert names.keys() <= {*either.owner, *either.absent}
    for recipe in either.recipes.values():
        on_pypi = {purl.name for purl in parse_purls(recipe) if purl.type == "pypi"}
        assert on_pypi <= {*names.values()}, f"{recipe.name}: extra.pypi lacks a name"


def test_vllm_runs_the_checks_of_its_kernels(either: RecipeSet) -> None:
    """In its package test, with what they need; a skip, status 3, passes only without a libLLVM."""
    recipe = either.recipes["vllm"]
    output, *_ = (rendered["recipe"] for rendered in render(recipe.path, either.base, "x"))
    (test,) = (test for test in output["tests"] if "script" in test)
    lines = [line for line in test["script"] if line.startswith("strix-validate")]
    assert lines == [
        "strix-validate kernels --only 'kernels/vllm-*'",
        "strix-validate attention --device cpu --only 'attention/vllm-*'",
        "strix-validate emulated --only 'emulated/vllm-*' || test $? -eq 3",
        "strix-validate serve || test $? -eq 3",
    ]
    assert "strix-validate" in test["requirements"]["run"]
    assert {"pytorch", "triton"} <= {
        parse_package_name(spec) for spec in recipe.requirements["run"]
    }


def test_doctor_comes_with_few_packages(tmp_path: Path) -> None:
    """It is the first that a user of the channel runs: `pixi exec --spec strix-validate`."""
    rendered = Rendered({})
    solver, python = Solver(tmp_path, rendered), rendered.pinned("python")
    wanted = [python, *rendered.run(rendered.outputs["strix-validate"])]
    brought = solver.solve(wanted) - solver.solve([python])
    assert len(brought | solver.lacking(wanted)) < 25, brought
    assert not brought & {"numpy", "pytorch", "libllvm22", "strix-emulate"}

# SPDX-License-Identifier: BSD-3-Clause
"""All recipes of this repository, on both bases."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.conda_forge import Rendered, Solver
from support.plain_rendering import render_plain
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
    """The recipes, rendered with each of the two bases. `recipes` has conda-forge's base only."""
    return RecipeSet(PROJECT, bases.load(PROJECT, request.param))


@pytest.mark.parametrize("name", RECIPES)
def test_renders(either: RecipeSet, name: str) -> None:
    """Each output has tests, a licence file and conda-forge's form of build strings.

    The recipe's sources are pinned.
    """
    recipe = either.recipes[name]
    rendered = render(recipe.path, either.base, "x")
    assert rendered
    for output in rendered:
        data = output["recipe"]
        assert data["about"]["license"]
        assert data["about"]["license_file"]
        assert data["tests"], "the package must have a test"
        assert CONTENT_HASH.search(data["build"]["string"])
        assert data["build"]["string"].startswith(either.base.base_tag)
    for source in list_sources(recipe):
        assert re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", source.digest)


@pytest.mark.parametrize("name", RECIPES)
def test_what_inherits_nothing_is_not_called_as_the_recipe(name: str) -> None:
    """An output that does not inherit from a staging has another name than the recipe.

    With the same name, the output would be built in the staging's folder and have its files.
    """
    data = yaml.safe_load((CHECKOUT / "recipes" / name / "recipe.yaml").read_text())
    outputs = [output for output in data.get("outputs", ()) if "package" in output]
    if any("inherit" in output for output in outputs):
        others = {output["package"]["name"] for output in outputs if "inherit" not in output}
        assert data["recipe"]["name"] not in others


# CPU hours of the packages that only tests need: the emulator, the validator, Triton.
TOOLS = 0.2
# Packages whose tests need a torch on a CPU. This may be our torch, conda-forge's or PyPI's.
ANY_TORCH = {"strix-validate"}


def test_a_package_is_not_tested_with_what_costs_more(either: RecipeSet) -> None:
    """A package's tests require no package that is more work to build than the tested one.

    The work of the tested package includes all packages that it needs. Packages that take up to
    TOOLS hours, and the tests of the packages in ANY_TORCH, are excepted. A package enters the
    channel only after everything that its tests require.
    """
    costs = read_costs(either.recipes.values(), either.base)
    hours = {name: cost.cpu_hours for name, cost in costs.items()}
    for name, recipe in either.recipes.items():
        if name in ANY_TORCH:
            continue
        needs = {either.owner[need] for need in recipe.needs if need in either.owner}
        built = either.dependencies(needs) | {name}
        limit = max(TOOLS, sum(hours[each] for each in built))
        only_tested = either.dependencies({name}) - built
        expensive = {each for each in only_tested if hours[each] > limit}
        assert not expensive, f"{name} must not be tested with {expensive}"


@pytest.mark.parametrize("changed", ["triton", "flash-attn", "amd-aiter", "strix-validate"])
def test_kernels_follow_what_they_are_compiled_from(recipes: RecipeSet, changed: str) -> None:
    """Compiled kernels are rebuilt if their source or their compiler changes.

    Kernels from another source or compiler would be installed, but never used.
    """
    assert "flash-attn-kernels-gfx1151" in recipes.dependents({changed})


def test_kernels_have_the_patches_of_their_source(recipes: RecipeSet) -> None:
    kernels = ("vllm/v1/attention/ops/", "vllm/model_executor/layers/fused_moe/")

    def list_kernel_patches(name: str) -> set[str]:
        recipe = recipes.recipes[name]
        result = set()
        for source in recipe.sources:
            for path in list_patches(recipe, source):
                if any(file.startswith(kernels) for file in touched(path.read_text())):
                    result.add(path.name)
        return result

    patches = list_kernel_patches("vllm")
    assert patches
    assert list_kernel_patches("vllm-kernels-gfx1151") == patches


@pytest.mark.parametrize(
    ("output", "license_name", "text"),
    [
        # triton's wheel contains LLVM, torch contains Eigen, and libhipsolver needs CHOLMOD.
        ("triton", "Apache-2.0 WITH LLVM-exception", "LICENSE-LLVM.txt"),
        ("libtorch", "MPL-2.0", "MPL-2.0.txt"),
        ("rocm-sdk-libraries", "GPL-2.0-or-later", "GPL-2.0.txt"),
    ],
)
def test_licences_of_what_is_linked_in(
    recipes: RecipeSet, output: str, license_name: str, text: str
) -> None:
    path = recipes.recipes[recipes.owner[output]].path
    rendered = [each["recipe"] for each in render(path, recipes.base, "x")]
    abouts = [each["about"] for each in rendered if each["package"]["name"] == output]
    assert abouts
    for about in abouts:
        assert license_name in about["license"].split(" AND ")
        assert text in about["license_file"]
    assert (path.parent / text).stat().st_size > 10_000


def test_kernels_are_bound_to_what_they_were_compiled_from(recipes: RecipeSet) -> None:
    """Packages of kernels have constraints on the builds from which they were compiled.

    With another build no kernel would be used, and there would be no message.
    """

    def constraints(name: str) -> list[Any]:
        outputs = render(recipes.recipes[name].path, recipes.base, "x")
        return outputs[0]["recipe"]["requirements"]["run_constraints"]

    def exact(name: str) -> set[str]:
        pins = [each["pin_compatible"] for each in constraints(name) if "pin" in str(each)]
        return {pin["name"] for pin in pins if pin["exact"]}

    assert exact("flash-attn-kernels-gfx1151") == {"flash-attn", "amd-aiter"}
    assert exact("triton-packages-kernels-gfx1151") == {"fla-core", "liger-kernel", "sageattention"}
    assert f"vllm =={recipes.recipes['vllm'].version}" in constraints("vllm-kernels-gfx1151")


def test_one_late_package_of_conda_forge_does_not_stop_vllm(recipes: RecipeSet) -> None:
    """vLLM requires no package of conda-forge in one exact version."""
    specs = recipes.recipes["vllm"].requirements["run"]
    from_conda_forge = [spec for spec in specs if parse_package_name(spec) not in recipes.owner]
    assert len(from_conda_forge) > 50
    assert [spec for spec in from_conda_forge if "==" in spec] == []


def test_what_a_test_is_pinned_to_is_read(tmp_path: Path) -> None:
    """A pin in the requirements of a test counts as a dependency. In YAML, it is a mapping."""
    mini = MiniProject(tmp_path)
    mini.recipe("beta")
    path = mini.recipe("alpha") / "recipe.yaml"
    test = """requirements: {run: ["${{ pin_compatible('beta') }}"]}"""
    path.write_text(path.read_text().replace("  - script:", f"  - {test}\n    script:"))
    recipes = RecipeSet(Project.at(mini.root), bases.load(PROJECT, "conda-forge"))
    assert recipes.direct_needs("alpha") == {"beta"}


def remove_hashes(outputs: list[dict[str, Any]]) -> set[str]:
    """Return rendered outputs as JSON without the hashes in their build strings, each once."""
    return {re.sub("h[0-9a-f]{7}_", "h_", json.dumps(output)) for output in outputs}


@pytest.mark.parametrize("name", RECIPES)
def test_driver_adds_only_the_hash(name: str) -> None:
    """rattler-build alone and the driver build the same package on conda-forge."""
    path = CHECKOUT / "recipes" / name / "recipe.yaml"
    recipes = RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge"), set(RECIPES) - {name})
    with_driver = [output["recipe"] for output in render(path, recipes.base, "x")]
    without_driver = render_plain(path)
    assert with_driver != without_driver
    assert remove_hashes(with_driver) == remove_hashes(without_driver)


def test_no_recipe_knows_its_base() -> None:
    for path in tracked_files():
        if path.parent.parent == CHECKOUT / "recipes":
            words = "host base|hostgcc|hostgxx|hostbound|recipes/bases/host"
            assert not re.search(words, path.read_text()), path


def test_amds_own_kernels_of_aotriton() -> None:
    """The variant `upstream` adds the archive that torch pins, and is named in build strings."""

    def load(kernels: str) -> RecipeSet:
        variants = {"aotriton_kernels": [kernels]}
        return RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge", variants))

    def list_urls(recipes: RecipeSet) -> set[str]:
        return {source.url for source in list_sources(recipes.recipes["aotriton"])}

    full = load("full")
    upstream = load("upstream")
    path = CHECKOUT / "recipes/aotriton/recipe.yaml"
    for output in render(path, upstream.base, "x"):
        assert output["recipe"]["build"]["string"].startswith("gfx1151_upstream_h")
    (added,) = list_urls(upstream) - list_urls(full)
    assert added.endswith("/0.12b/aotriton-0.12b-images-amd-gfx115x.tar.gz")


def test_variants_have_reasons() -> None:
    """Each pin has a key of its own, with a comment above it."""
    lines = (CHECKOUT / "variants.yaml").read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if re.match(r"\w+:", line)]
    assert keys
    for index in keys:
        assert lines[index - 1].startswith("# "), f"{lines[index]} must have a reason above it"


def test_packages_name_sources_that_others_can_fetch(recipes: RecipeSet) -> None:
    """On conda-forge's base, a recipe has no source from PyPI, or states the reason."""
    reasons = "no hash of upstream's archive|from upstream's own wheel"
    without_reason = []
    for name, recipe in recipes.recipes.items():
        urls = [str(source.get("url")) for source in recipe.sources]
        if not any(url.startswith(PYPI_URL) for url in urls):
            continue
        if not re.search(reasons, recipe.path.read_text()):
            without_reason.append(name)
    assert not without_reason
    (archive,) = recipes.recipes["model-hosting-container-standards"].sources
    assert archive["url"].startswith("https://github.com/aws/")


def load_for_gpu(arch: str) -> RecipeSet:
    """Return the recipes with this value of gpu_arch."""
    return RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge", {"gpu_arch": [arch]}))


def find_gpu_names(recipes: RecipeSet) -> dict[str, set[str]]:
    """Return the GPUs that the outputs of each recipe name, in fields that users see."""
    result: dict[str, set[str]] = {}
    for name, recipe in recipes.recipes.items():
        gpus = result.setdefault(name, set())
        for output in render(recipe.path, recipes.base, "x"):
            data = output["recipe"]
            texts = [data["package"]["name"], data["build"]["string"], data["about"]["summary"]]
            texts += data["requirements"].get("run", [])
            texts += data["requirements"].get("run_constraints", [])
            gpus.update(re.findall(r"gfx\d+|__amdgpu_arch ==[\d.]+", str(texts)))
    return result


@pytest.mark.parametrize("name", RECIPES)
def test_conda_smithys_linter_has_nothing_to_say(name: str) -> None:
    """Recipes follow the rules of conda-smithy's linter 3.62 that some of them once broke.

    These are lint_about_contents and lint_noarch_selectors. Besides, the linter has no variants, so
    an expression must not slice one. `pixi run lint-recipes` runs the linter itself. .ci/run
    cannot, because no package index that it reaches has the linter.
    """
    text = (CHECKOUT / "recipes" / name / "recipe.yaml").read_text()
    data = yaml.safe_load(text)
    variants = yaml.safe_load((CHECKOUT / "variants.yaml").read_text())
    sliced_variants = [word for word in re.findall(r"([\w.]+)\[", text) if word in variants]
    assert not sliced_variants, f'write (NAME ~ "")[...] for {sliced_variants}'
    for key in ("homepage", "license", "summary"):
        assert data["about"].get(key)
    skip = yaml.safe_load((CHECKOUT / "recipes/conda-forge.yml").read_text())["linter"]["skip"]
    if "noarch" in data.get("build", {}) and "lint_noarch_selectors" not in skip:
        specs = itertools.chain(*data.get("requirements", {}).values())
        assert "skip" not in data["build"]
        assert not any(isinstance(spec, dict) for spec in specs)


def test_another_gpu_is_one_value_away() -> None:
    ours = find_gpu_names(load_for_gpu("gfx1151"))
    other = find_gpu_names(load_for_gpu("gfx1150"))
    assert ours.keys() == other.keys()
    # The summaries of the two products name gfx1151, even in a channel for another GPU.
    for name in ours.keys() - {"strix-emulate", "strix-validate"}:
        expected = set()
        for gpu in ours[name]:
            expected.add(gpu.replace("gfx1151", "gfx1150").replace("11.5.1", "11.5.0"))
        assert other[name] == expected, name
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
    """An output with a GPU in its build string uses the variant gpu_arch, which its tests read."""
    recipes = load_for_gpu("gfx1150")
    for recipe in recipes.recipes.values():
        for output in render(recipe.path, recipes.base, "x"):
            build = output["recipe"]["build"]
            if "gfx1150" in build["string"]:
                assert output["build_configuration"]["variant"]["gpu_arch"] == "gfx1150", build


def test_no_archive_of_another_gpu_is_taken_for_ours() -> None:
    sources = list_sources(load_for_gpu("gfx1150").recipes["rocm-sdk"])
    (source,) = [source for source in sources if "therock" in source.origin]
    assert "gfx1150" in source.origin
    assert set(source.digest) == {"0"}


def test_what_pypi_has_is_named(either: RecipeSet) -> None:
    """Each package of ours that PyPI has is named in extra.pypi.

    Without the name, pixi would install PyPI's package over ours.
    """
    names = pypi.read_names(PROJECT.recipes)
    assert names["pytorch"] == "torch"
    assert "libtorch" not in names
    assert names.keys() <= {*either.owner, *either.absent}
    for recipe in either.recipes.values():
        on_pypi = {purl.name for purl in parse_purls(recipe) if purl.type == "pypi"}
        assert on_pypi <= {*names.values()}, f"{recipe.name}: extra.pypi must have each name"


def test_doctor_comes_with_few_packages(tmp_path: Path) -> None:
    """strix-validate, which has the doctor, requires few packages.

    Users of the channel run it first, with `pixi exec --spec strix-validate`.
    """
    rendered = Rendered({})
    solver = Solver(tmp_path, rendered)
    python = rendered.pinned("python")
    specs = [python, *rendered.run(rendered.outputs["strix-validate"])]
    added = solver.solve(specs) - solver.solve([python])
    assert len(added | solver.lacking(specs)) < 25, added
    assert not added & {"numpy", "pytorch", "libllvm22", "strix-emulate"}

# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's real sources with our patches detect the GPU and count its memory correctly.

The tests also compare the recipe's requirements and pins with those of the sources. vLLM is not
installed.
"""

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from support.project import CHECKOUT, FILTER, MiniProject

from forge import versions
from forge.errors import NotAttempted
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import parse_source
from forge.recipes.render import render
from forge.sources.cache import SourceCache

CHECKS = CHECKOUT / "recipes" / "vllm"
VALIDATOR = CHECKOUT / "packages" / "strix-validate" / "src"
# Versions with which AMD builds vLLM and which differ from our versions.
KNOWN_DIFFERENCES = [
    "AITER_BRANCH=0.1.26, but our amd-aiter is 0.1.20.post1",
    "TRITON_VERSION=3.8.0, but our triton is 3.7.1",
]
# Names of packages on conda-forge, by their names on PyPI, where the two names differ.
CONDA_NAMES = {
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "typing-extensions": "typing_extensions",
}


@pytest.fixture(scope="module")
def trees(recipes: RecipeSet, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two trees of vLLM's sdist: upstream's, and the patched one. Some parts are left out."""
    recipe = recipes.recipes["vllm"]
    source = parse_source(recipe, next(data for data in recipe.sources if "patches" in data))
    try:
        archive = SourceCache(recipes.project).fetch(source, lambda *_: None)
    except NotAttempted as error:
        pytest.skip(f"not attempted: {error}")
    folder = tmp_path_factory.mktemp("vllm")
    parts = ("vllm/", "requirements/", "setup.py", "docker/Dockerfile.rocm_base", "cmake/")
    prefixes = tuple(f"vllm-{recipe.version}/{part}" for part in parts)
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.startswith(prefixes)]
        tar.extractall(folder, members, **FILTER)
    upstream = folder / f"vllm-{recipe.version}"
    patched = folder / "patched"
    # The copy may consist of hard links, because git replaces each file that it changes.
    shutil.copytree(upstream, patched, copy_function=os.link)
    for patch in sorted((CHECKOUT / "patches/vllm").glob("*.patch")):
        subprocess.run(["git", "apply", "-p1", patch], cwd=patched, check=True)
    return upstream, patched


@pytest.fixture(scope="module")
def python(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python interpreter with the host base's torch."""
    project = MiniProject(tmp_path_factory.mktemp("env"))
    project.recipe("probe")
    project.stack("detect", "python", "pytorch", "packaging", "psutil", "numpy", "pydantic")
    project.forge("lock", "detect")
    project.forge("install", "detect")
    done = project.forge("run", "detect", "--", "python", "-c", "import sys; print(sys.executable)")
    return Path(done.stdout.strip())


def check(python: Path, name: str, tree: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    """Run a check of the recipe on a tree of vLLM, by default with all of its cases."""
    return subprocess.run(
        [python, CHECKS / f"{name}.py", "--source", tree, *cases],
        env=os.environ | {"PYTHONPATH": str(VALIDATOR)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("name", "number"), [("check_detection", 12), ("check_memory", 5)])
def test_patched(trees: tuple[Path, Path], python: Path, name: str, number: int) -> None:
    done = check(python, name, trees[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(": ok$", done.stdout, re.M)) == number


def test_upstream_does_not_find_the_gpu(trees: tuple[Path, Path], python: Path) -> None:
    """Without our patches, the check fails in the cases that the patches are for."""
    cases = ("no driver", "no amdsmi", "amdsmi lists it")
    done = check(python, "check_detection", trees[0], *cases)
    assert done.returncode == 1
    assert "no driver: ok" in done.stdout
    assert "no amdsmi: wrong choices {'platform': 'UnspecifiedPlatform'" in done.stdout
    assert (
        "amdsmi lists it: wrong choices {'first': 'ROCM_ATTN', 'tables': {'': False, "
        "',dtype=int4_w4a16': False}, 'as default': None, 'fp8 depth': 128}"
    ) in done.stdout


def test_other_counts_of_memory_are_wrong(
    trees: tuple[Path, Path], python: Path, tmp_path: Path
) -> None:
    """The check fails if vLLM counts memory in one of two wrong ways.

    These are upstream's count for an integrated GPU, which is meant for CUDA, and the count for a
    discrete GPU.
    """
    upstream, patched = trees
    tree = tmp_path / "vllm"
    shutil.copytree(patched, tree)
    memory = tree / "vllm/utils/mem_utils.py"
    shutil.copy(upstream / "vllm/utils/mem_utils.py", memory)
    done = check(python, "check_memory", tree, "64 GiB carved out", "512 MiB and 96 GiB of GTT")
    assert done.returncode == 1 and "64 GiB carved out: ok" in done.stdout
    assert f"free: {118 * 2**30}, not {96 * 2**30}" in done.stdout
    shutil.copy(patched / "vllm/utils/mem_utils.py", memory)
    platform = tree / "vllm/platforms/rocm.py"
    text = platform.read_text()
    assert "return memory is None or memory[1]" in text
    platform.write_text(text.replace("return memory is None or memory[1]", "return False"))
    done = check(python, "check_memory", tree, "the system uses most")
    assert done.returncode == 1 and "default fits: True, not False" in done.stdout


def read_requirements(tree: Path, name: str = "rocm.txt") -> dict[str, SpecifierSet]:
    """Return what upstream requires of a ROCm build, by conda name (Python 3.12, x86-64 Linux)."""
    result: dict[str, SpecifierSet] = {}
    for line in (tree / "requirements" / name).read_text().splitlines():
        line = line.partition(" #")[0].strip()
        if line.startswith("-r "):
            result |= read_requirements(tree, line.split()[1])
        elif line and not line.startswith("#"):
            requirement = Requirement(line)
            platform = {"python_version": "3.12", "platform_machine": "x86_64"}
            if requirement.marker is None or requirement.marker.evaluate(platform):
                pypi_name = canonicalize_name(requirement.name)
                result[CONDA_NAMES.get(pypi_name, pypi_name)] = requirement.specifier
    return result


def find_differences(
    upstream: dict[str, SpecifierSet], run_requirements: list[str], not_required: Iterable[str]
) -> list[str]:
    """Return how a recipe's requirements differ from upstream's.

    Where upstream pins a version, the recipe may have a range that contains the version. The recipe
    may lack the names in `not_required`, but upstream must require each of them.
    """
    versions = dict((*spec.split(" "), "")[:2] for spec in run_requirements)
    result = []
    for name, specifier in upstream.items():
        if name in not_required:
            continue
        pins = [s.version for s in specifier if s.operator == "=="]
        recipe = SpecifierSet(versions[name]) if name in versions else None
        is_in_range = recipe is not None and pins != [] and recipe.contains(pins[0])
        if recipe is None or (recipe != specifier and not is_in_range):
            result.append(f"{name} {specifier}: the recipe has {versions.get(name)}")
    result += [
        f"{name}: upstream does not require it" for name in not_required if name not in upstream
    ]
    return result


def test_recipe_requires_what_upstream_does(recipes: RecipeSet, trees: tuple[Path, Path]) -> None:
    vllm = recipes.recipes["vllm"]
    rendered = render(vllm.path, recipes.base, "x")[0]["recipe"]
    run = rendered["requirements"]["run"]
    not_required = vllm.extra["not_required"]
    upstream = read_requirements(trees[0])
    # The bound of setuptools in rocm.txt is for builds. The bound in common.txt is for run time.
    upstream["setuptools"] = read_requirements(trees[0], "common.txt")["setuptools"]
    assert len(upstream) > 60
    assert find_differences(upstream, run, not_required) == []
    additions = {spec.split(" ")[0] for spec in run} - set(upstream)
    assert additions == {
        "python",
        "pytorch",
        "torchvision",
        "torchaudio",
        "triton",
        "amdsmi",
        "flash-attn",
        "amd-aiter",
        "openai-harmony",
    }


def test_differences_from_upstream_are_reported() -> None:
    upstream = {"lark": SpecifierSet("==1.2.2"), "peft": SpecifierSet("")}
    assert find_differences(upstream, ["lark >=1.2.2,<2"], {"peft"}) == []
    assert find_differences(upstream, ["lark >=1.2.3,<2"], {"peft"}) == [
        "lark ==1.2.2: the recipe has >=1.2.3,<2"
    ]
    assert find_differences(upstream, ["lark ==1.2.2"], set()) == ["peft : the recipe has None"]
    assert find_differences(upstream, ["lark ==1.2.2", "peft"], {"timm"}) == [
        "timm: upstream does not require it"
    ]


def test_pins_are_those_that_amd_builds_with(recipes: RecipeSet, trees: tuple[Path, Path]) -> None:
    """AMD builds vLLM with the same versions of packages as we do, with two differences.

    AMD's versions are in upstream's Dockerfile, because upstream's metadata has the versions of the
    CUDA build. docs/next-set.md explains the differences.
    """
    vllm = recipes.recipes["vllm"]
    (stated,) = vllm.extra["built_with"].values()
    assert {"pytorch", "torchvision", "torchaudio", "triton"} < set(stated.values())
    lines = versions.pairings(recipes, vllm, vllm.version, trees[0])
    pairings = [line.partition(" has ")[2] for line in lines]
    differences = [pairing for pairing in pairings if ", but our " in pairing]
    assert differences == KNOWN_DIFFERENCES and len(pairings) > len(differences)


def test_triton_kernels_are_the_other_ones_that_upstream_names(trees: tuple[Path, Path]) -> None:
    """The recipe does not use the Triton kernels that upstream names for ROCm.

    The kernels for ROCm are for Triton 3.8 (see docs/vllm.md).
    """
    text = (trees[0] / "cmake/external_projects/triton_kernels.cmake").read_text()
    tags = re.findall(r'set\(TRITON_KERNELS_TAG "(.+)"\)', text)
    assert tags == ["669b31acc1dd1b3fd93286afd5db67f65d9f7557", "v3.5.1"]
    recipe = (CHECKOUT / "recipes/vllm/recipe.yaml").read_text()
    assert "git: https://github.com/triton-lang/triton.git" in recipe and tags[0] not in recipe

# SPDX-License-Identifier: BSD-3-Clause
"""rattler-build puts each file of aotriton and pytorch into the package that the recipe states.

No test can compile these packages, so their build scripts are replaced by scripts that make empty
files. The outputs keep their names and order, and the keys `inherit`, `files`, `dynamic_linking`.
`MiniProject.forge` compares each package with its recipe.
"""

import json
from typing import Any

import pytest
import yaml
from rattler_build import Package
from support.project import MiniProject
from support.recipe_checks import RECIPES

# The files of each package.
AOTRITON = {
    "aotriton-images-gfx1151": ["lib/aotriton.images/amd-gfx115x/flash/attn_fwd/x.aks2"],
    "aotriton": ["lib/libaotriton_v2.so.0.12.0"],
    "aotriton-devel": [
        "lib/libaotriton_v2.so",
        "include/aotriton/flash.h",
        "lib/cmake/aotriton/aotriton-config.cmake",
        "opt/aotriton/lib/libaotriton_v2.so.0.12.0",
        "opt/aotriton/include/aotriton/flash.h",
    ],
}
PYTORCH = {
    "libtorch": [
        "bin/torch_shm_manager",
        "lib/libtorch.so",
        "lib/libtorch_hip.so",
        "include/ATen/Tensor.h",
        "include/torch/script.h",
        "share/cmake/Torch/TorchConfig.cmake",
    ],
    "pytorch": [
        "bin/torchrun",
        "lib/libtorch_python.so",
        "lib/python3.99/site-packages/torch/__init__.py",
        "lib/python3.99/site-packages/torch/lib/libtorch_x.so",
    ],
    "pytorch-gpu": [],
}


VARIANT = {"use_keys": ["content_digest"]}


def write_touch_script(files: list[str]) -> list[str]:
    """Return commands that make empty files in the prefix."""
    return [f'mkdir -p "$(dirname "$PREFIX/{f}")" && touch "$PREFIX/{f}"' for f in files]


def simplify(recipe: str, files_by_package: dict[str, list[str]]) -> dict[str, Any]:
    """Return a recipe without sources, requirements and tests, whose scripts make empty files."""
    data = yaml.safe_load((RECIPES / recipe / "recipe.yaml").read_text())
    inherited_files: list[str] = []
    outputs = []
    for output in data["outputs"]:
        if "staging" in output:
            staging = {"staging": output["staging"], "build": {}}
            outputs.append(staging)
            continue
        name = str(output["package"]["name"]).replace("${{ gpu_arch }}", "gfx1151")
        files = files_by_package[name]
        old_build = output.get("build", {})
        build = {key: old_build[key] for key in ("files", "dynamic_linking") if key in old_build}
        build["variant"] = VARIANT
        if "inherit" in output:
            inherited_files += files
        elif files:
            build["script"] = write_touch_script(files)
        output["build"] = build
        output["about"] = {"license": "MIT"}
        for key in ("source", "requirements", "tests"):
            output.pop(key, None)
        outputs.append(output)
    staging["build"] = {"script": write_touch_script(inherited_files)}
    top_level = {key: data[key] for key in ("schema_version", "context", "recipe")}
    return top_level | {"build": {"number": 0, "variant": VARIANT}, "outputs": outputs}


@pytest.mark.parametrize(
    ("recipe", "files_by_package"),
    [("aotriton", AOTRITON), ("pytorch", PYTORCH)],
    ids=["aotriton", "pytorch"],
)
def test_each_file_is_in_its_package(
    project: MiniProject, recipe: str, files_by_package: dict[str, list[str]]
) -> None:
    folder = project.root / "recipes" / f"{recipe}-emptied"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(json.dumps(simplify(recipe, files_by_package)))
    project.forge("build-all")
    built_files = {}
    for file in project.channel.glob("*/*.conda"):
        package = Package.from_file(str(file))
        built_files[package.name] = sorted(map(str, package.files))
    assert built_files == {name: sorted(files) for name, files in files_by_package.items()}

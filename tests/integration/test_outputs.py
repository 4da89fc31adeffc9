# SPDX-License-Identifier: BSD-3-Clause
"""The outputs of recipes that no test can compile, divided by rattler-build as the recipe says.

What is staged is a list of empty files; the rest is the recipe's own: names, order, `inherit` and
`files`. `MiniProject.forge` holds what comes out against it.
"""

import json
from typing import Any

import pytest
import yaml
from rattler_build import Package
from support.project import MiniProject
from support.recipe_checks import RECIPES

IMAGES = "lib/aotriton.images/amd-gfx115x/flash/attn_fwd/x.aks2"
AOTRITON = {
    "aotriton-images-gfx1151": [IMAGES],
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


def touch(files: list[str]) -> list[str]:
    """Commands that make empty files in the prefix."""
    return [f'mkdir -p "$(dirname "$PREFIX/{f}")" && touch "$PREFIX/{f}"' for f in files]


def emptied(recipe: str, held: dict[str, list[str]]) -> dict[str, Any]:
    """The recipe without sources, requirements and tests; its scripts make the files of `held`."""
    data = yaml.safe_load((RECIPES / recipe / "recipe.yaml").read_text())
    inherited, digest = list[str](), {"use_keys": ["content_digest"]}
    outputs = [output for output in data["outputs"] if "package" in output]
    for output in outputs:
        files = held[str(output["package"]["name"]).replace("${{ gpu_arch }}", "gfx1151")]
        build = output.get("build", {})
        kept = {key: build[key] for key in ("files", "dynamic_linking") if key in build}
        if "inherit" in output:
            inherited += files
        elif files:
            kept["script"] = touch(files)
        output["build"] = kept | {"variant": digest}
        output["about"] = {"license": "MIT"}
        for key in ("source", "requirements", "tests"):
            output.pop(key, None)
    (staging,) = (output for output in data["outputs"] if "staging" in output)
    staged = {"staging": staging["staging"], "build": {"script": touch(inherited)}}
    rest = [staged if output is staging else output for output in data["outputs"]]
    build = {"number": 0, "variant": digest}
    kept = {key: data[key] for key in ("schema_version", "context", "recipe")}
    return kept | {"build": build, "outputs": rest}


@pytest.mark.parametrize(
    ("recipe", "held"), [("aotriton", AOTRITON), ("pytorch", PYTORCH)], ids=["aotriton", "pytorch"]
)
def test_each_file_is_in_its_package(
    project: MiniProject, recipe: str, held: dict[str, list[str]]
) -> None:
    folder = project.root / "recipes" / f"{recipe}-emptied"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(json.dumps(emptied(recipe, held)))
    project.forge("build-all")
    found = {}
    for file in project.channel.glob("*/*.conda"):
        package = Package.from_file(str(file))
        found[package.name] = sorted(map(str, package.files))
    assert found == {name: sorted(files) for name, files in held.items()}

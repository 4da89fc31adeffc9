# SPDX-License-Identifier: BSD-3-Clause
"""The outputs of recipes that no test can compile, divided by rattler-build as the recipe says.

What is staged is a list of empty files, or AMD's wheels of a small tree; the rest is the recipe's
own: names, order, `inherit` and `files`. `MiniProject.forge` holds what comes out against it.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from rattler.package_streaming import extract
from rattler_build import Package
from support.project import MiniProject
from support.pytorch_tree import RECIPE, amd_wheels
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


def emptied(
    recipe: str, held: dict[str, list[str]], staged: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The recipe without sources, requirements and tests; its scripts make the files of `held`.

    What outputs inherit is made as `staged` says, if that is given.
    """
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
    staged = staged or {"build": {"script": touch(inherited)}}
    staged = {"staging": staging["staging"], **staged}
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


def files_of(packages: dict[str, Path]) -> tuple[set[str], set[str], str]:
    """Those of libtorch and of pytorch, and the folder of Python's modules."""
    held = {
        name: {str(entry) for entry in Package.from_file(str(path)).files}
        for name, path in packages.items()
    }
    assert not held["libtorch"] & held["pytorch"]
    end = "torch/__init__.py"
    (site,) = {n.removesuffix(end) for n in held["pytorch"] if n.endswith(f"/{end}")}
    return held["libtorch"], held["pytorch"], site


LOAD = """\
import ctypes, importlib.util, sys
sys.prefix = sys.argv[1]
spec = importlib.util.spec_from_file_location("init", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if sys.argv[3:]:
    module.initialize()
ctypes.CDLL(sys.argv[1] + "/lib/libtorch_hip.so")
"""


def test_amds_wheels_give_the_same_outputs(project: MiniProject, tmp_path: Path) -> None:
    """Its libraries as they are, with the device code where they look for it, on ROCm of ours.

    By the recipe's own globs each file is in one package, and none in two.
    """
    rocm, wheels = tmp_path / "rocm", project.root / "fake"
    shutil.copytree(RECIPES / "checks", wheels / "checks")
    amd_wheels(wheels, rocm)
    shutil.copytree(rocm, wheels / "rocm")
    folder = project.root / "recipes/pytorch-emptied"
    folder.mkdir()
    for name in ("lay_out.py", "from_wheels.py"):
        shutil.copy(RECIPE / name, folder)
    sdk = 'mkdir -p "$PREFIX/opt" && mv rocm "$PREFIX/opt/"\n'
    (folder / "staged.sh").write_text(sdk + (RECIPE / "from_wheels.sh").read_text())
    versions = {"TORCH_VERSION": "2.13.0", "TRITON_VERSION": "3.7.1"}
    staged = {
        "source": {"path": "../../fake"},
        "build": {"script": {"file": "staged.sh", "env": versions}},
        "requirements": {"host": ["python", "pip", "pyelftools"]},
    }
    recipe = emptied("pytorch", {name: [] for name in PYTORCH}, staged)
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    project.forge("build-all", "--variant", "pytorch_from=amd-wheel")
    packages = {
        name: next(project.channel.glob(f"linux-64/{name}-2*.conda"))
        for name in ("libtorch", "pytorch")
    }
    library, python, site = files_of(packages)
    assert {
        ".kpack/torch_gfx1151.kpack", "lib/aotriton.images/amd-gfx115x/flash/attn_fwd.aks2",
        "lib/libaotriton_v2.so.0.13.0", "lib/libtorch_hip.so", "lib/libc10.so",
        "include/ATen/header.h", "share/cmake/Torch/TorchConfig.cmake", "bin/torch_shm_manager",
    } <= library  # fmt: skip
    assert {
        "bin/torchrun", "lib/libtorch_python.so", f"{site}torch/lib", f"{site}torch/_rocm_init.py",
        f"{site}torch/include/ATen", f"{site}torch/_C{sysconfig.get_config_var('EXT_SUFFIX')}",
    } <= python  # fmt: skip
    assert not {name for name in python if "pybind11/" in name}

    prefix = tmp_path / "env"
    for package in packages.values():
        extract(package, tmp_path / package.stem)
        shutil.copytree(tmp_path / package.stem, prefix, symlinks=True, dirs_exist_ok=True)
    shutil.copytree(rocm, prefix / "opt/rocm")
    metadata = next(prefix.glob(f"{site}torch-*.dist-info/METADATA")).read_text()
    assert "rocm[" not in metadata and "Requires-Dist: triton==3.7.1; platform" in metadata
    with zipfile.ZipFile(next(wheels.glob("torch-*.whl"))) as archive:
        original = archive.read("torch/lib/libtorch_hip.so")
    assert (prefix / "lib/libtorch_hip.so").read_bytes() == original, "patchelf has been here"
    command = [sys.executable, "-c", LOAD, prefix, prefix / site / "torch/_rocm_init.py"]
    done = subprocess.run([*command, "yes"], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert "libamdhip64.so.7: cannot open shared object file" in done.stderr


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("rm amd_torch_device_gfx1151-*.whl", "has no .kpack/*gfx1151*.kpack: a wheel of device"),
        ("rm amd_torch_device_gfx115x-*.whl", "has no lib/aotriton.images/amd-gfx115x"),
        ("TORCH_VERSION=2.14.0", "+rocm10.0.0.dist-info, and the recipe is for torch 2.14.0"),
        ("rm rocm/lib/libamdhip64.so.7", "needs libamdhip64.so.7"),
    ],
)
def test_other_wheels_are_refused(tmp_path: Path, spoil: str, message: str) -> None:
    """By from_wheels.py alone, on what pip installs into a folder."""
    amd_wheels(tmp_path, tmp_path / "rocm")
    script = f"""\
        TORCH_VERSION=2.13.0
        {spoil}
        "$PYTHON" -m pip install -q --no-deps --no-index --no-compile --target site *.whl
        mkdir -p env/opt env/lib env/bin env/include && mv rocm env/opt/
        "$PYTHON" "$RECIPE/from_wheels.py" site env . "$TORCH_VERSION" 3.7.1
        """
    environment = {"PYTHON": sys.executable, "RECIPE": str(RECIPE), "PYTHONPATH": str(RECIPES)}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=os.environ | environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and message in done.stderr, done.stdout + done.stderr

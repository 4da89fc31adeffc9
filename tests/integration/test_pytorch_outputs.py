# SPDX-License-Identifier: BSD-3-Clause
"""The pytorch recipe's outputs divide what its build installs, in a real build of a small tree."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from rattler.package_streaming import extract
from rattler_build import Package
from support.project import MiniProject
from support.pytorch_tree import RECIPE, amd_wheels
from support.recipe_checks import RECIPES


def divide(project: MiniProject, install: str, *options: str) -> dict[str, Path]:
    """The packages libtorch and pytorch of a small recipe with the real one's files, by name.

    `install` is its build script, which finds beside it what is in `project.root / "fake"`.
    """
    outputs = yaml.safe_load((RECIPE / "recipe.yaml").read_text())["outputs"]
    built = {o["package"]["name"]: o["build"] for o in outputs[1:3]}
    folder = project.root / "recipes/mini"
    folder.mkdir()
    for name in ("lay_out.py", "from_wheels.py"):
        shutil.copy(RECIPE / name, folder)
    shutil.copytree(RECIPES / "checks", project.root / "fake/checks")
    (folder / "build.sh").write_text(install)
    digest = {"use_keys": ["content_digest", "pytorch_from"]}
    variables = {"TORCH_VERSION": "2.13.0", "TRITON_VERSION": "3.7.1"}
    staging = {
        "staging": {"name": "made"},
        "source": {"path": "../../fake"},
        "build": {"script": {"file": "build.sh", "env": variables}},
        "requirements": {"host": ["python", "pip", "pyelftools"]},
    }
    packages = [
        {
            "package": {"name": f"mini-{name}"},
            "inherit": "made",
            "build": {
                "files": build["files"],
                "dynamic_linking": build["dynamic_linking"],
                "variant": digest,
            },
            "about": {"license": "MIT"},
        }
        for name, build in built.items()
    ]
    recipe = {
        "schema_version": 1,
        "recipe": {"name": "mini", "version": "1.0"},
        "build": {"number": 0, "variant": digest},
        "outputs": [staging, *packages],
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    project.forge("build-all", *options)
    return {name: next(project.channel.glob(f"linux-64/mini-{name}-*.conda")) for name in built}


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
    wheels.mkdir()
    amd_wheels(wheels, rocm)
    shutil.copytree(rocm, wheels / "rocm")
    sdk = 'mkdir -p "$PREFIX/opt" && mv rocm "$PREFIX/opt/"\n'
    script = sdk + (RECIPE / "from_wheels.sh").read_text()
    packages = divide(project, script, "--variant", "pytorch_from=amd-wheel")
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

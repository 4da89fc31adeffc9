# SPDX-License-Identifier: BSD-3-Clause
"""How the pytorch recipe builds: its script and its layout of the packages.

The build itself takes hours and an SDK; here the script runs on a source tree and tools made up for
the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from rattler_build import Package
from support.project import MiniProject
from support.pytorch_tree import LOG, RECIPE, Build, layout

# --- the layout of the packages


@pytest.fixture
def installed(tmp_path: Path) -> tuple[Path, Path]:
    """site-packages/torch as torch's own build leaves it, and the prefix."""
    prefix = tmp_path / "env"
    torch = prefix / "lib/python3.12/site-packages/torch"
    for name in [
        "__init__.py", "bin/torch_shm_manager", "bin/protoc", "lib/libtorch.so", "lib/libdnnl.a",
        "lib/libtorch_python.so", "lib/libaotriton_v2.so", "lib/aotriton.images/image",
        "include/google/any.h", "share/cmake/dnnl/dnnl-config.cmake",
        *(f"include/{name}/header.h" for name in layout.PARTS["include"]),
        *(f"share/cmake/{name}/{name}Config.cmake" for name in layout.PARTS["share/cmake"]),
    ]:  # fmt: skip
        path = torch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    # as CMake copies it from aotriton-devel: a relative link that leads nowhere here
    (torch / "include/aotriton").symlink_to("../../../include/aotriton")
    (prefix / "include").mkdir()
    return torch, prefix


def test_layout(installed: tuple[Path, Path]) -> None:
    torch, prefix = installed
    layout.lay_out(torch, prefix, Path("/source"))
    assert (prefix / "lib/libtorch.so").read_text() == "lib/libtorch.so"
    assert (torch / "lib/libtorch.so").samefile(prefix / "lib/libtorch.so")
    assert (torch / "include/ATen/header.h").samefile(prefix / "include/ATen/header.h")
    assert (torch / "share/cmake/Torch").is_dir() and (torch / "include/google/any.h").exists()
    # what $ORIGIN/.. is for a library found through torch/lib
    assert (torch / "lib").is_symlink() and Path(f"{torch}/lib/..").resolve() == prefix
    assert not os.path.isabs(os.readlink(torch / "lib"))
    left = {path.name for path in prefix.rglob("*")}
    assert not {"libdnnl.a", "protoc", "aotriton", "aotriton.images", "dnnl"} & left
    assert not any("aotriton" in name for name in left)


def test_layout_refusals(installed: tuple[Path, Path]) -> None:
    torch, prefix = installed
    (prefix / "include/ATen").mkdir()
    with pytest.raises(SystemExit, match="is there already"):
        layout.lay_out(torch, prefix, Path("/source"))


def test_layout_sees_a_missing_part(installed: tuple[Path, Path]) -> None:
    (installed[0] / "bin/torch_shm_manager").unlink()
    with pytest.raises(SystemExit, match="no torch_shm_manager"):
        layout.lay_out(*installed, Path("/source"))


def test_layout_sees_a_path_of_the_build(installed: tuple[Path, Path]) -> None:
    (installed[0] / "share/cmake/ATen/ATenConfig.cmake").write_text("set(A /source/torch/include)")
    with pytest.raises(SystemExit, match="folder of this build"):
        layout.lay_out(*installed, Path("/source"))


FAKE_INSTALL = """\
set -e
cp -r fake "$SP_DIR/torch"
touch "$SP_DIR/torch/_C.cpython.so"
mkdir -p "$PREFIX/bin"
touch "$PREFIX/bin/torchrun" "$PREFIX/bin/torchfrtrace"
python "$RECIPE_DIR/lay_out.py" "$SP_DIR/torch" "$PREFIX" "$SRC_DIR"
"""


def test_outputs_divide_what_is_installed(
    installed: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The recipe's own globs, in a real build: each file is in one package, none in two."""
    outputs = yaml.safe_load((RECIPE / "recipe.yaml").read_text())["outputs"]
    files = {o["package"]["name"]: o["build"]["files"] for o in outputs[1:3]}
    project = MiniProject(tmp_path_factory.mktemp("outputs"))
    folder = project.root / "recipes/mini"
    folder.mkdir()
    shutil.copy(RECIPE / "lay_out.py", folder)
    (folder / "build.sh").write_text(FAKE_INSTALL)
    shutil.copytree(installed[0], project.root / "fake/fake", symlinks=True)
    digest = {"use_keys": ["content_digest"]}
    staging = {
        "staging": {"name": "made"},
        "source": {"path": "../../fake"},
        "build": {"script": {"file": "build.sh"}},
        "requirements": {"host": ["python"]},
    }
    packages = [
        {
            "package": {"name": f"mini-{name}"},
            "inherit": "made",
            "build": {"files": globs, "variant": digest},
            "about": {"license": "MIT"},
        }
        for name, globs in files.items()
    ]
    recipe = {
        "schema_version": 1,
        "recipe": {"name": "mini", "version": "1.0"},
        "build": {"number": 0, "variant": digest},
        "outputs": [staging, *packages],
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    project.forge("build-all")

    held = {}
    for path in project.channel.glob("linux-64/*.conda"):
        (name,) = [name for name in files if path.name.startswith(f"mini-{name}-")]
        held[name] = {str(entry) for entry in Package.from_file(str(path)).files}
    torch = next(name.split("torch/")[0] for name in held["pytorch"] if name.endswith("_init__.py"))
    assert not held["libtorch"] & held["pytorch"]
    assert {name for name in held["libtorch"] if name.startswith("lib/")} == {"lib/libtorch.so"}
    assert {"include/ATen/header.h", "bin/torch_shm_manager"} <= held["libtorch"]
    assert {
        "bin/torchrun", "bin/torchfrtrace", "lib/libtorch_python.so", f"{torch}torch/lib",
        f"{torch}torch/_C.cpython.so", f"{torch}torch/include/ATen",
    } <= held["pytorch"]  # fmt: skip


# --- the build script


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def test_build(build: Build) -> None:
    _, calls = build.run()
    hipify, configure, compile_, pip, byte_compile = calls
    assert hipify == "python tools/amd_build/build_amd.py"
    given = set(re.findall(r"\[(.*?)\]", configure))
    assert {
        "-DUSE_ROCM=ON", "-DUSE_CUDA=OFF", "-DUSE_FLASH_ATTENTION=ON", "-DUSE_MSLK=OFF",
        "-DCMAKE_HIP_COMPILER_LAUNCHER=ccache", "-DA=1",
        f"-DCMAKE_FIND_ROOT_PATH=SRC;{build.prefix};/sysroot",
        "-DCMAKE_HIP_FLAGS=--gcc-install-dir=SRC/gcc/lib/gcc/x86_64-conda-linux-gnu/14.3.0 "
        "--sysroot=/sysroot",
    } <= given  # fmt: skip
    assert compile_ == "cmake [--build] [build] [--target] [install] [--parallel] [2]"
    assert "--no-index" in pip and "compileall" in byte_compile
    # GCC as clang looks for it
    view, target = build.source / "gcc", "x86_64-conda-linux-gnu"
    assert (view / "lib/gcc" / target / "14.3.0/libgcc.a").exists()
    links = {"include/c++/14.3.0": "c++", "bin": "tools", "lib": "lib"}
    for link, folder in links.items():
        assert os.readlink(view / target / link) == f"{build.environment['BUILD_PREFIX']}/{folder}"
    assert not (build.source / ".gitmodules").exists()
    assert (build.source / "third_party/NNPACK/cmake/DownloadSix.cmake").read_text() == ""
    assert (build.prefix / "lib/libtorch.so").exists()


def test_compiler_without_headers(build: Build) -> None:
    tool = Path(build.environment["PATH"].split(":")[0]) / "g++"
    tool.write_text(tool.read_text().replace("/c++/vector", "/c++/nothing"))
    output, calls = build.run(code=1)
    assert "does not find <vector>" in output and calls == []


def test_resumes_where_it_failed(build: Build) -> None:
    """A killed compile of hours goes on; hipify, which rewrites the tree, never runs twice."""
    marker = build.write("fail-compile", "")
    _, calls = build.run(code=1)
    assert [call.split()[0] for call in calls] == ["python", "cmake", "cmake"]
    marker.unlink()
    output, calls = build.run()
    assert "== compile" in output and "== prepare" not in output
    assert [call.split()[0] for call in calls] == ["cmake", "python", "python"]
    assert build.run()[1] == []


def test_hipify_that_failed_runs_again(build: Build) -> None:
    marker = build.write("fail-hipify", "")
    build.run(code=1)
    marker.unlink()
    assert build.run()[1][0] == "python tools/amd_build/build_amd.py"


def test_wrong_source_stops_before_hipify(build: Build) -> None:
    build.environment["AOTRITON_COMMIT"] = "f" * 40
    output, calls = build.run(code=1)
    assert "variants.yaml" in output and calls == []


def test_wrong_configuration_stops_before_the_compile(build: Build) -> None:
    build.write("log", LOG.replace("USE_ROCM : ON", "USE_ROCM : OFF"))
    output, calls = build.run(code=1)
    assert "USE_ROCM is OFF" in output and not any("--build" in call for call in calls)


def test_options_reach_setup_py_too(build: Build) -> None:
    """CMake's forwarding of the environment is not relied on, setup.py's reading of it is."""
    (Path(build.environment["PATH"].split(":")[0]) / "cmake").write_text(
        "#!/bin/bash\nenv > environment; exit 1\n"
    )
    build.run(code=1)
    environment = (build.source / "environment").read_text()
    for line in ("USE_CUDA=OFF", "USE_SYSTEM_EIGEN_INSTALL=ON", "PYTORCH_ROCM_ARCH=gfx1151"):
        assert f"\n{line}\n" in environment
    assert f"CCACHE_BASEDIR={build.source.parent}\n" in environment
    assert f"CCACHE_DIR={build.environment['FORGE_CACHE']}/ccache\n" in environment
    for flag in ("-std=c++", "-fvisibility-inlines-hidden", "--as-needed"):
        assert flag not in environment

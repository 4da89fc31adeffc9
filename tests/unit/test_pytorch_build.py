# SPDX-License-Identifier: BSD-3-Clause
"""The build script of the pytorch recipe, its checks, and its layout of the packages.

A real build needs hours and an SDK. Here the script runs on a mock source tree with mock tools.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pytorch_tree import (
    COMMIT,
    LOG,
    NINJA,
    PINNED,
    READ_BY_SETUP,
    RECIPE,
    Build,
    configuration,
    installed_torch,
    layout,
    pin,
)

# --- the layout of the packages


@pytest.fixture
def installed(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of an installed torch, and its prefix."""
    return installed_torch(tmp_path / "env")


def test_layout(installed: tuple[Path, Path]) -> None:
    torch, prefix = installed
    layout.lay_out(torch, prefix, Path("/source"))
    assert (prefix / "lib/libtorch.so").read_text() == "lib/libtorch.so"
    assert (torch / "lib/libtorch.so").samefile(prefix / "lib/libtorch.so")
    assert (torch / "include/ATen/header.h").samefile(prefix / "include/ATen/header.h")
    assert (torch / "share/cmake/Torch").is_dir()
    assert (torch / "include/google/any.h").exists()
    assert (torch / "lib").is_symlink()
    # torch/lib is a link. For a library that is loaded through it, $ORIGIN/.. is the prefix, too.
    assert Path(f"{torch}/lib/..").resolve() == prefix
    assert not (torch / "lib").readlink().is_absolute()
    names = {path.name for path in prefix.rglob("*")}
    assert not {"libdnnl.a", "protoc", "aotriton", "aotriton.images", "dnnl"} & names
    assert not any("aotriton" in name for name in names)


def test_layout_refusals(installed: tuple[Path, Path]) -> None:
    torch, prefix = installed
    (prefix / "include/ATen").mkdir()
    with pytest.raises(SystemExit, match="already exists"):
        layout.lay_out(torch, prefix, Path("/source"))


def test_layout_sees_a_missing_part(installed: tuple[Path, Path]) -> None:
    (installed[0] / "bin/torch_shm_manager").unlink()
    with pytest.raises(SystemExit, match="no torch_shm_manager"):
        layout.lay_out(*installed, Path("/source"))


def test_layout_sees_a_path_of_the_build(installed: tuple[Path, Path]) -> None:
    (installed[0] / "share/cmake/ATen/ATenConfig.cmake").write_text("set(A /source/torch/include)")
    with pytest.raises(SystemExit, match="folder of this build"):
        layout.lay_out(*installed, Path("/source"))


# --- the commit of AOTriton


def test_right_pin() -> None:
    assert pin.find_fault(PINNED, COMMIT) == ""
    assert pin.find_fault(f"set(__AOTRITON_CI_COMMIT {COMMIT})\n", COMMIT) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PINNED.replace("0123", "ffff", 1), "builds"),
        (PINNED.replace(COMMIT, "0.12b"), "not a full commit"),
        (PINNED + PINNED, "2 lines"),
        ("set(__AOTRITON_VER 0.12b)\n", "0 lines"),
        (f"# set(__AOTRITON_CI_COMMIT {COMMIT})\n", "0 lines"),
    ],
)
def test_wrong_pin(text: str, reason: str) -> None:
    assert reason in pin.find_fault(text, COMMIT)


def test_pin_without_its_file(tmp_path: Path) -> None:
    command = [sys.executable, RECIPE / "check_aotriton_pin.py", tmp_path / "aotriton.cmake"]
    done = subprocess.run([*command, COMMIT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "does not exist" in done.stderr


# --- the configuration


def test_right_configuration() -> None:
    assert configuration.find_faults(NINJA, LOG, "/env", "gfx1151") == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("--   USE_ROCM : ON", "--   USE_ROCM : OFF", "USE_ROCM is OFF"),
        ("--   USE_ROCM : ON", "", "USE_ROCM is not in the summary"),
        ("USE_FLASH_ATTENTION : ON", "USE_FLASH_ATTENTION : ", "USE_FLASH_ATTENTION is "),
        ("USE_CUDA : OFF", "USE_CUDA : 1", "USE_CUDA is 1"),
        ("Using Preinstalled AOTriton at", "Using AOTriton Runtime from", "does not come from our"),
        ("Using Kineto with Roctracer", "Using CPU-only version of", "not built for the GPU"),
        (" -DHAS_ROCTRACER", "", "not built for the GPU"),
        ("--   USE_LAPACK : ON", "--   USE_LAPACK : 0", "USE_LAPACK is 0"),
        ("--   USE_TENSORPIPE : ON", "--   USE_TENSORPIPE : OFF", "USE_TENSORPIPE is OFF"),
        ("Found system Eigen", "Did not find system Eigen", "would be cloned"),
        ("gfx1151 ", "gfx1151 --offload-arch=gfx1100 ", "device code for"),
        ("--offload-arch=gfx1151", "", "device code for nothing"),
        ("-DUSE_FLASH_ATTENTION ", "", "-DUSE_FLASH_ATTENTION"),
        ("libaotriton_v2.so", "libother.so", "linked with libaotriton"),
        ("--gcc-install-dir=/source/gcc", "", "conda's GCC"),
        ("LINK torch_hip.dir", "LINK fbgemm.a libfbgemm_genai.a torch_hip.dir", "fbgemm_genai"),
        ("LINK torch_hip.dir", "LINK a/mslk.dir/x.o torch_hip.dir", "mslk is built"),
        (
            "build libtorch",
            "build a/aotriton_runtime-stamp/aotriton_runtime-download: X\nbuild libtorch",
            "aotriton_runtime would be downloaded",
        ),
        ("-I/env/opt/rocm/include", "-I/opt/rocm/include", "outside the environment"),
        ("/env/opt/rocm/lib/llvm/bin/clang++", "/usr/bin/clang++", "the HIP compiler"),
    ],
)
def test_wrong_configuration(old: str, new: str, reason: str) -> None:
    ninja = NINJA.replace(old, new)
    log = LOG.replace(old, new)
    assert (ninja, log) != (NINJA, LOG)
    (fault,) = configuration.find_faults(ninja, log, "/env", "gfx1151")
    assert reason in fault


# --- the build script


NO_ERRORS = ("maybe-uninitialized", "uninitialized", "restrict")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def test_build(build: Build) -> None:
    _, calls = build.run()
    hipify, configure, compile_, again, pip, byte_compile = calls
    assert hipify == "python tools/amd_build/build_amd.py"
    expected = {
        "-DUSE_ROCM=ON",
        "-DUSE_CUDA=OFF",
        "-DUSE_FLASH_ATTENTION=ON",
        "-DUSE_MSLK=OFF",
        "-DCMAKE_HIP_COMPILER_LAUNCHER=ccache",
        "-DUSE_RELATIVE_PATHS=ON",
        "-DA=1",
        "-DEIGEN3_FOUND=ON",
        f"-DEIGEN3_INCLUDE_DIR={build.prefix}/include/eigen3",
        f"-DPython_EXECUTABLE={build.environment['PYTHON']}",
        f"-DCMAKE_FIND_ROOT_PATH=SRC;{build.prefix};/sysroot",
        "-DCMAKE_HIP_FLAGS=--gcc-install-dir=SRC/gcc/lib/gcc/x86_64-conda-linux-gnu/14.3.0 "
        "--sysroot=/sysroot",
    }
    assert expected <= set(re.findall(r"\[(.*?)\]", configure))
    assert compile_ == again == "cmake [--build] [build] [--target] [install] [--parallel] [2]"
    assert pip.startswith("host-python -m pip")
    assert pip.endswith("2 jobs")
    assert "--no-index" in pip
    assert "compileall" in byte_compile
    assert (build.prefix / "lib/libtorch.so").exists()


def test_prepared_tree(build: Build) -> None:
    build.write("fail-compile", "")
    build.run(code=1)
    # The folder gcc has the layout that clang expects of a GCC installation.
    view = build.source / "gcc"
    target = "x86_64-conda-linux-gnu"
    assert (view / "lib/gcc" / target / "14.3.0/libgcc.a").exists()
    links = {"include/c++/14.3.0": "c++", "bin": "tools", "lib": "lib"}
    for link, folder in links.items():
        expected = Path(build.environment["BUILD_PREFIX"], folder)
        assert (view / target / link).readlink() == expected
    assert not (build.source / ".gitmodules").exists()
    assert (build.source / "third_party/NNPACK/cmake/DownloadSix.cmake").read_text() == ""


def test_what_is_left_for_the_outputs_to_copy(build: Build) -> None:
    """After a build, only licence texts, checks and files at the top of the tree remain.

    rattler-build copies the tree for each output. Links do not remain.
    """
    expected = {
        "LICENSE",
        "third_party/a/LICENSE.txt",
        "third_party/b/LICENSES/MIT",
        "checks/elf.py",
    }
    for name in expected:
        build.write(name, "text")
    (build.source / "third_party/a/LICENSES").symlink_to("../b/LICENSES")
    for name in ("build/a.o", "torch/lib/libtorch.so", "third_party/a/a.cpp", "aten/b.cpp"):
        build.write(name, "x" * 1_000_000)
    build.run()
    files = [path for path in build.source.rglob("*") if path.is_file()]
    names = {path.relative_to(build.source).as_posix() for path in files}
    assert expected <= names
    for name in names - expected:
        assert "/" not in name or name.startswith("checks/")
    assert sum(path.stat().st_size for path in files) < 100_000
    assert [path.name for path in build.source.glob("third_party/a/*")] == ["LICENSE.txt"]
    assert not (build.source / "aten").exists()


def test_what_lies_there_beside_the_copies_of_the_package(build: Build) -> None:
    """Before setup.py installs torch, objects, libraries and sources of submodules are removed.

    setup.py does not need these files, and needs disk space, because it writes another 4 GB.
    """
    written = ["compile_commands.json", "caffe2/proto/caffe2_pb2.py"]
    for name in [*written, "lib/libtorch_cpu.so", "a/a.cpp.o", "lib/libdnnl.a", ".ninja_deps"]:
        build.write(f"build/{name}", "x")
    for name in [*READ_BY_SETUP, "a/a.cpp", "a/include/a.h", "a/tests/data.bin"]:
        build.write(f"third_party/{name}", "x")
    build.run()
    lines = (build.prefix / "source-files").read_text().splitlines()
    names = [line.removeprefix("./") for line in lines]
    names = [name for name in names if name.startswith(("build/", "third_party/"))]
    expected = {f"build/{name}" for name in ["build.ninja", "CMakeCache.txt", *written]}
    expected |= {f"third_party/{name}" for name in READ_BY_SETUP}
    assert set(names) == expected


def test_the_pruned_build_has_nothing_to_do(build: Build) -> None:
    """After the objects are removed, the command of setup.py still has nothing to do.

    With the build.ninja that CMake writes, it would compile everything again.
    """
    if not all(map(shutil.which, ("cmake", "ninja"))):
        pytest.skip("no cmake or ninja")
    source = build.source / "project"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p NONE)\n"
        "add_custom_command(OUTPUT o COMMAND ${CMAKE_COMMAND} -E touch o)\n"
        "add_custom_target(t ALL DEPENDS o)\ninstall(FILES ${CMAKE_BINARY_DIR}/o DESTINATION .)\n"
    )
    folder = build.source / "build"
    options = {"check": True, "capture_output": True, "text": True}
    install = ["cmake", "--build", ".", "--target", "install", "--config", "Release", "--", "-j2"]
    configure = ["cmake", "-S", source, "-B", folder, "-GNinja", "--install-prefix", folder / "i"]
    subprocess.run(configure, **options)
    for _ in range(2):
        done = subprocess.run(install, cwd=folder, **options)
        _, _, text = (RECIPE / "build.sh").read_text().partition("prune() {")
        prune, _, _ = text.partition("\n}")
        subprocess.run(["bash", "-ec", prune], cwd=build.source, **options)
        assert not (folder / "o").exists()
    assert "no work to do" in done.stdout


def test_compiler_without_headers(build: Build) -> None:
    tool = Path(build.environment["PATH"].split(":")[0]) / "g++"
    tool.write_text(tool.read_text().replace("/c++/vector", "/c++/nothing"))
    output, calls = build.run(code=1)
    assert "does not find <vector>" in output
    assert calls == []


def test_resumes_where_it_failed(build: Build) -> None:
    """A build whose compilation failed goes on with the compilation.

    The compilation takes hours. hipify rewrites the tree, so it must not run again.
    """
    marker = build.write("fail-compile", "")
    _, calls = build.run(code=1)
    assert [call.split()[0] for call in calls] == ["python", "cmake", "cmake"]
    marker.unlink()
    output, calls = build.run()
    assert "== compile" in output
    assert "== prepare" not in output
    assert [call.split()[0] for call in calls] == ["cmake", "cmake", "host-python", "python"]


def test_goes_on_in_the_tree_of_a_stopped_run(build: Build, tmp_path: Path) -> None:
    """The next run goes on in the old tree, although the driver has unpacked the source again."""
    shutil.copytree(build.source, tmp_path / "unpacked", symlinks=True)
    marker = build.write("fail-compile", "")
    build.run(code=1)
    for path in (marker, build.source / "calls"):
        path.unlink()
    build.source.rename(tmp_path / "stopped")
    (tmp_path / "unpacked").rename(build.source)
    output, calls = build.run()
    assert "== continuing where the last run was stopped\n== compile\n" in output
    assert [call.split()[0] for call in calls] == ["cmake", "cmake", "host-python", "python"]
    assert (build.prefix / "lib/libtorch.so").exists()
    assert not (tmp_path / "stopped").exists()


# For each stage, the arguments of the tool's call after which the build is stopped.
STOPS = {
    "configure": "-S .",
    "compile": "--build build",
    "prune": "find build -type f",
    "half pruned": "third_party -type f",
    "install": "-m pip install",
    "laid out": "lay_out",
    "byte code": "compileall",
    "clean": "-mindepth 2",
}


def list_files(*folders: Path) -> set[str]:
    """Return the names of all files and links, except the notes of the mock tools."""
    names: set[str] = set()
    for folder in folders:
        paths = [path for path in folder.rglob("*") if not path.is_dir()]
        names.update(str(path.relative_to(folder)) for path in paths)
    return names - {"calls", "source-files"}


@pytest.mark.parametrize("stage", STOPS)
def test_a_stop_in_each_stage(stage: str, build: Build, tmp_path: Path) -> None:
    """After a stop in any stage, the next run yields the same files as an uninterrupted one.

    As with the driver, the next run has new environments and a new source tree.
    """
    for name in ("build/a.o", "third_party/a/a.cpp", "third_party/a/LICENSE", "aten/b.cpp"):
        build.write(name, "x")
    first_copies = {path: tmp_path / f"first-{path.name}" for path in (build.source, build.prefix)}
    for path, copy in first_copies.items():
        shutil.copytree(path, copy, symlinks=True)
    build.run()
    expected = list_files(build.source, build.prefix)
    second_copies = {path: tmp_path / f"second-{path.name}" for path in first_copies}
    for path, copy in second_copies.items():
        shutil.copytree(first_copies[path], copy, symlinks=True)
        shutil.rmtree(path)
        first_copies[path].rename(path)
    stop = build.source.parent / "stop"
    stop.write_text(STOPS[stage].removeprefix("find "))
    build.run(code=1)
    stop.unlink()
    # The driver keeps the source tree only if it has a marker of a finished stage.
    if any(build.source.glob(".done-*")):
        build.source.rename(tmp_path / "stopped")
    else:
        shutil.rmtree(build.source)
    shutil.rmtree(build.prefix)
    for path, copy in second_copies.items():
        copy.rename(path)
    output, _ = build.run()
    # Only a build that was stopped in `clean` starts anew, because the markers are removed before
    # `clean`.
    assert ("== prepare" in output) == (stage == "clean")
    assert list_files(build.source, build.prefix) == expected


def test_hipify_that_failed_runs_again(build: Build) -> None:
    marker = build.write("fail-hipify", "")
    build.run(code=1)
    marker.unlink()
    _, calls = build.run()
    assert calls[0] == "python tools/amd_build/build_amd.py"


def test_wrong_source_stops_before_hipify(build: Build) -> None:
    build.environment["AOTRITON_COMMIT"] = "f" * 40
    output, calls = build.run(code=1)
    assert "variants.yaml" in output
    assert COMMIT in output
    assert "Traceback" not in output
    assert calls == []


def test_wrong_configuration_stops_before_the_compile(build: Build) -> None:
    build.write("log", LOG.replace("USE_ROCM : ON", "USE_ROCM : OFF"))
    output, calls = build.run(code=1)
    assert "USE_ROCM is OFF" in output
    assert not any("--build" in call for call in calls)


def test_options_reach_setup_py_too(build: Build) -> None:
    """The build's options are also environment variables, because setup.py reads them there."""
    tools = Path(build.environment["PATH"].split(":")[0])
    (tools / "cmake").write_text("#!/bin/bash\nenv > environment; exit 1\n")
    build.run(code=1)
    environment = (build.source / "environment").read_text()
    for line in ("USE_CUDA=OFF", "USE_SYSTEM_EIGEN_INSTALL=ON", "PYTORCH_ROCM_ARCH=gfx1151"):
        assert f"\n{line}\n" in environment
    assert f"CCACHE_BASEDIR={build.source.parent}\n" in environment
    assert f"CCACHE_DIR={build.environment['FORGE_CACHE']}/ccache\n" in environment
    assert "CCACHE_NAMESPACE=AMD clang version 23.0.0git (roc-10.0)\n" in environment
    assert f"HIPCC_LINK_FLAGS_APPEND=--gcc-install-dir={build.source}/gcc/lib/" in environment
    for flag in ("-std=c++", "--as-needed", "-z,now"):
        assert flag not in environment
    no_errors = {f"-Wno-error={kind}" for kind in NO_ERRORS}
    for name, flag in (("CFLAGS", "-pipe"), ("CXXFLAGS", "-O2")):
        (flags,) = re.findall(f"^{name}=(.*)", environment, re.M)
        assert {flag} | no_errors <= set(flags.split())
    assert "-Wl,-O2 -Wl,-z,lazy -Wl,-z,noexecstack\n" in environment


@pytest.mark.parametrize(("gib", "jobs"), [(1, 1), (9, 4), (30, 8)])
def test_memory_bounds_the_jobs(build: Build, gib: int, jobs: int) -> None:
    """There is one compiler for each 2 GiB of memory, and at most one for each CPU.

    setup.py gets the same number.
    """
    awk = Path(build.environment["PATH"].split(":")[0]) / "awk"
    awk.write_text(f"#!/bin/sh\necho {gib}\n")
    awk.chmod(0o755)
    build.environment["CPU_COUNT"] = "8"
    _, calls = build.run()
    assert f"[--parallel] [{jobs}]" in calls[2]
    assert calls[4].endswith(f" {jobs} jobs")


@pytest.mark.parametrize("recipe", ["torchvision", "torchaudio", "vllm"])
@pytest.mark.parametrize(("gib", "jobs"), [(1, 1), (9, 4), (30, 8)])
def test_memory_bounds_the_jobs_of_what_builds_on_torch(
    tmp_path: Path, recipe: str, gib: int, jobs: int
) -> None:
    folder = RECIPE.parent / recipe
    for name, script in {"awk": f"echo {gib}", "python": 'echo "$MAX_JOBS jobs"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    shutil.copytree(RECIPE.parent / "checks", tmp_path / "checks")
    kernels = tmp_path / "triton/python/triton_kernels/triton_kernels"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").touch()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CPU_COUNT": "8",
        "CXX": "g++",
        "PYTHON": str(tmp_path / "python"),
        "SRC_DIR": str(tmp_path),
        "PREFIX": str(tmp_path),
        "PKG_VERSION": "1",
        "PYTORCH_ROCM_ARCH": "gfx1151",
    }
    command = ["bash", folder / "build.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{jobs} jobs", done.stderr

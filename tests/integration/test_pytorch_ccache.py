# SPDX-License-Identifier: BSD-3-Clause
"""A second attempt at a build, in another folder, takes its objects from ccache.

torch's HIP objects: with clang and ccache of this machine and the recipe's own options.sh; the file
needs no ROCm. AOTriton's library: by its build_library.sh, with a CMake project of one file, which
like upstream's has pip install a list.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pytorch_tree import RECIPE, hip_clang
from support.recipe_checks import RECIPES
from support.servers import QuietHandler, served

SOURCE = """\
#include "scale.h"
__attribute__((device, used)) float scale(float x) { return x * SCALE; }
int host() { return 1; }
"""
COMPILE = """\
set -e
source "$RECIPE_DIR/options.sh"
make_gcc_view
ccache "$CLANG" -x hip -nogpuinc -nogpulib --offload-arch=gfx1151 -O2 \\
    --gcc-install-dir="$gcc_view" --rocm-device-lib-path="$HIP_DEVICE_LIB_PATH" \\
    -I"$SRC_DIR/include" -isystem "$PREFIX/include" \\
    -MD -MT scale.o -MF scale.o.d -o scale.o -c "$SRC_DIR/scale.hip"
"""
LIBRARY = """\
cmake_minimum_required(VERSION 3.16)
project(AOTriton CXX C)
set(hip_DIR "${CMAKE_INSTALL_PREFIX}/opt/rocm" CACHE PATH "")
add_library(aotriton_v2 SHARED dispatch.cc)
target_include_directories(aotriton_v2 PRIVATE "${CMAKE_INSTALL_PREFIX}/include")
set_target_properties(aotriton_v2 PROPERTIES VERSION 0.12.0)
install(TARGETS aotriton_v2)
file(WRITE requirements.txt "some-package\\n")
execute_process(COMMAND "$ENV{PYTHON}" -m pip install --target x -r requirements.txt
    OUTPUT_FILE pip.log ERROR_FILE pip.log)
"""
CLANGS = [*(f"clang++-{n}" for n in range(23, 16, -1)), "clang++"]


def clang() -> str:
    """The first clang++ on PATH, from 17 (--gcc-install-dir) on, that finds lld and its bundler."""
    for path in filter(None, map(shutil.which, CLANGS)):
        version = ask(path, "--version").partition("clang version ")[2].partition(".")[0]
        tools = (ask(path, f"-print-prog-name={tool}") for tool in ("lld", "clang-offload-bundler"))
        if int(version) >= 17 and all(map(shutil.which, tools)):
            return path
    return ""


def ask(program: str, question: str) -> str:
    done = subprocess.run([program, question], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def attempt(
    folder: Path, compiler: str, cache: Path, scale: int, version: str = "22.1"
) -> tuple[bytes, int]:
    """Compile in a new folder; returns the object and the number of hits so far."""
    work, prefix = folder / "work", folder / "host_env"
    for path in (work / "include", prefix / "include", prefix / "opt/rocm/lib/llvm/amdgcn/bitcode"):
        path.mkdir(parents=True)
    hip_clang(prefix, version)
    shutil.copytree(RECIPES / "checks", work / "checks")
    (work / "scale.hip").write_text(SOURCE)
    (work / "include/scale.h").write_text(f"#define SCALE {scale}\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CLANG": compiler,
        "CXX": "g++",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        "CONDA_BUILD_SYSROOT": "/",
        "RECIPE_DIR": str(RECIPE),
        "SRC_DIR": str(work),
        "PREFIX": str(prefix),
        "PYTHON": "python",
        "CPU_COUNT": "2",
        "TORCH_VERSION": "2.13.0",
        "CMAKE_ARGS": "",
        "CXXFLAGS": "",
        "LDFLAGS": "",
        "FORGE_CACHE": str(cache),
    }
    subprocess.run(["bash", "-c", COMPILE], cwd=work, env=environment, check=True)
    return (work / "scale.o").read_bytes(), hits_in(cache)


def hits_in(cache: Path) -> int:
    environment = os.environ | {"CCACHE_DIR": str(cache / "ccache")}
    printed = subprocess.run(
        ["ccache", "--print-stats"], env=environment, capture_output=True, text=True, check=True
    )
    counts = dict(line.split("\t") for line in printed.stdout.splitlines())
    return int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])


def test_second_attempt_hits(tmp_path: Path) -> None:
    """And a changed header is no hit, though depend mode runs no preprocessor; nor is another
    compiler whose clang++, a driver without its libraries, has the same bytes."""
    compiler = clang()
    if not compiler or not shutil.which("ccache"):
        pytest.skip("no ccache, or no clang++ (17 or newer) with lld and clang-offload-bundler")
    first, hits = attempt(tmp_path / "bld_1", compiler, tmp_path / "cache", 2)
    assert hits == 0
    again, hits = attempt(tmp_path / "bld_22", compiler, tmp_path / "cache", 2)
    assert hits == 1 and again == first
    other, hits = attempt(tmp_path / "bld_3", compiler, tmp_path / "cache", 3)
    assert hits == 1 and other != first
    _, hits = attempt(tmp_path / "bld_4", compiler, tmp_path / "cache", 2, "22.2")
    assert hits == 1


def aotriton_attempt(folder: Path, cache: Path, **more: str) -> None:
    """build_library.sh in a new folder, as far as its check of the real objects."""
    work, prefix = folder / "work", folder / "host_env"
    (prefix / "include").mkdir(parents=True)
    shutil.copytree(RECIPES / "checks", work / "checks")
    (work / "CMakeLists.txt").write_text(LIBRARY)
    (work / "dispatch.cc").write_text('#include "number.h"\nint number() { return NUMBER; }\n')
    (prefix / "include" / "number.h").write_text("#define NUMBER 7\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "SRC_DIR": str(work),
        "CPU_COUNT": "2",
        "PREFIX": str(prefix),
        "RECIPE_DIR": str(RECIPES / "aotriton"),
        "GPU_ARCH": "gfx1151",
        "AOTRITON_KERNELS": "sample",
        "AOTRITON_COMMIT": "a" * 40,
        "AOTRITON_TREE": "b" * 40,
        "FORGE_CACHE": str(cache),
        "LDFLAGS": "-Wl,--gc-sections",
        "PYTHON": sys.executable,
    }
    environment |= more
    done = subprocess.run(
        ["bash", RECIPES / "aotriton" / "build_library.sh"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Installing: " in done.stdout, done.stdout + done.stderr
    # the last word counts: newer linkers would take the version string for garbage
    linked = (work / "build" / "CMakeCache.txt").read_text()
    assert "LINKER_FLAGS:STRING=-Wl,--gc-sections -Wl,--no-gc-sections\n" in linked


def test_second_attempt_of_aotriton_hits(tmp_path: Path) -> None:
    if not all(map(shutil.which, ("ccache", "cmake", "ninja", "g++"))):
        pytest.skip("no ccache, cmake, ninja or g++")
    aotriton_attempt(tmp_path / "bld_1", tmp_path / "cache")
    assert hits_in(tmp_path / "cache") == 0
    aotriton_attempt(tmp_path / "bld_22", tmp_path / "cache")
    assert hits_in(tmp_path / "cache") == 1


def test_aotriton_installs_nothing_of_an_index(tmp_path: Path) -> None:
    """Whatever names one: rattler-build's own PIP_NO_INDEX is not what protects the build."""
    if not all(map(shutil.which, ("cmake", "ninja", "g++"))):
        pytest.skip("no cmake, ninja or g++")
    ccache = tmp_path / "bin/ccache"  # in the place of one that this machine may lack
    ccache.parent.mkdir()
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    requests = []

    class Noting(QuietHandler):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    folder, web = tmp_path / "bld", tmp_path / "web"
    web.mkdir()
    with served(web, Noting) as index:
        config = folder / ".config/pip/pip.conf"
        config.parent.mkdir(parents=True)
        config.write_text(f"[global]\nindex-url = {index}/config\nfind-links = {index}/links\n")
        names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
        more = {"PATH": f"{ccache.parent}:{os.environ['PATH']}"} | dict.fromkeys(names, index)
        aotriton_attempt(folder, tmp_path / "cache", **more)
    log = (folder / "work/pip.log").read_text()
    assert "No matching distribution found for some-package" in log
    assert not requests

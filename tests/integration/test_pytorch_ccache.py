# SPDX-License-Identifier: BSD-3-Clause
"""A second attempt at a build, in another folder, takes its objects from ccache.

For torch's HIP objects, this machine's clang compiles a file that needs no ROCm, with the options
of the recipe's options.sh. For AOTriton's library, the recipe's build_library.sh builds a CMake
project of one file. Like upstream's project, it lets pip install a list of requirements.
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


def find_clang() -> str:
    """Return the first clang++ on PATH that can compile HIP, or an empty string.

    It must have version 17 or newer, which has the option --gcc-install-dir, and must find lld and
    clang-offload-bundler.
    """
    for path in filter(None, map(shutil.which, CLANGS)):
        version = run_compiler(path, "--version").partition("clang version ")[2].partition(".")[0]
        lld = run_compiler(path, "-print-prog-name=lld")
        bundler = run_compiler(path, "-print-prog-name=clang-offload-bundler")
        if int(version) >= 17 and shutil.which(lld) and shutil.which(bundler):
            return path
    return ""


def run_compiler(program: str, option: str) -> str:
    done = subprocess.run([program, option], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def compile_torch(
    folder: Path, compiler: str, cache: Path, scale: int, version: str = "22.1"
) -> tuple[bytes, int]:
    """Compile a HIP file in a new folder.

    Args:
        folder: The folder.
        compiler: The path of clang++.
        cache: The folder of ccache's cache.
        scale: A number in a header, which changes the object.
        version: The version that the SDK's clang++ prints.

    Returns:
        The object, and the number of cache hits so far.
    """
    work = folder / "work"
    prefix = folder / "host_env"
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
    return (work / "scale.o").read_bytes(), count_hits(cache)


def count_hits(cache: Path) -> int:
    environment = os.environ | {"CCACHE_DIR": str(cache / "ccache")}
    output = subprocess.check_output(["ccache", "--print-stats"], env=environment, text=True)
    counts = dict(line.split("\t") for line in output.splitlines())
    return int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])


def test_second_attempt_hits(tmp_path: Path) -> None:
    """The same source in another folder is a cache hit.

    A changed header is a cache miss, although ccache runs no preprocessor in depend mode. Another
    version of the compiler is a cache miss too, although its program clang++ may have the same
    bytes. clang++ is only a driver, and does not contain the compiler's libraries.
    """
    compiler = find_clang()
    if not compiler or not shutil.which("ccache"):
        pytest.skip("no ccache, or no clang++ (17 or newer) with lld and clang-offload-bundler")
    cache = tmp_path / "cache"
    first, hits = compile_torch(tmp_path / "bld_1", compiler, cache, 2)
    assert hits == 0
    second, hits = compile_torch(tmp_path / "bld_22", compiler, cache, 2)
    assert hits == 1 and second == first
    changed, hits = compile_torch(tmp_path / "bld_3", compiler, cache, 3)
    assert hits == 1 and changed != first
    _, hits = compile_torch(tmp_path / "bld_4", compiler, cache, 2, "22.2")
    assert hits == 1


def build_aotriton(folder: Path, cache: Path, **variables: str) -> None:
    """Run build_library.sh in a new folder, with `variables` in its environment.

    The script compiles and installs. Its final check then fails, because it needs the real objects.
    """
    work = folder / "work"
    prefix = folder / "host_env"
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
    done = subprocess.run(
        ["bash", RECIPES / "aotriton" / "build_library.sh"],
        cwd=work,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Installing: " in done.stdout, done.stdout + done.stderr
    # Newer linkers would remove the version string, because nothing uses it. Of several flags, the
    # last one is in effect.
    cmake_cache = (work / "build" / "CMakeCache.txt").read_text()
    assert "LINKER_FLAGS:STRING=-Wl,--gc-sections -Wl,--no-gc-sections\n" in cmake_cache


def test_second_attempt_of_aotriton_hits(tmp_path: Path) -> None:
    if not all(map(shutil.which, ("ccache", "cmake", "ninja", "g++"))):
        pytest.skip("no ccache, cmake, ninja or g++")
    build_aotriton(tmp_path / "bld_1", tmp_path / "cache")
    assert count_hits(tmp_path / "cache") == 0
    build_aotriton(tmp_path / "bld_22", tmp_path / "cache")
    assert count_hits(tmp_path / "cache") == 1


def test_aotriton_installs_nothing_of_an_index(tmp_path: Path) -> None:
    """pip requests no package from an index, wherever the index is configured.

    The build does not rely on PIP_NO_INDEX, which rattler-build sets.
    """
    if not all(map(shutil.which, ("cmake", "ninja", "g++"))):
        pytest.skip("no cmake, ninja or g++")
    # The test works on a machine without ccache, too.
    ccache = tmp_path / "bin/ccache"
    ccache.parent.mkdir()
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    requests = []

    class RecordingHandler(QuietHandler):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    folder = tmp_path / "bld"
    web = tmp_path / "web"
    web.mkdir()
    with served(web, RecordingHandler) as index:
        config = folder / ".config/pip/pip.conf"
        config.parent.mkdir(parents=True)
        config.write_text(f"[global]\nindex-url = {index}/config\nfind-links = {index}/links\n")
        build_aotriton(
            folder,
            tmp_path / "cache",
            PATH=f"{ccache.parent}:{os.environ['PATH']}",
            PIP_INDEX_URL=index,
            PIP_EXTRA_INDEX_URL=index,
            PIP_FIND_LINKS=index,
        )
    log = (folder / "work/pip.log").read_text()
    assert "No matching distribution found for some-package" in log
    assert not requests

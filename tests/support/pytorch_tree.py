# SPDX-License-Identifier: BSD-3-Clause
"""The pytorch recipe's programs as modules, and a source tree and mock tools for its build.sh."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.recipe_checks import RECIPES, load

RECIPE = RECIPES / "pytorch"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


pin = load("pytorch", "check_aotriton_pin")
configuration = load("pytorch", "check_configuration")
layout = load("pytorch", "lay_out")

PINNED = f"""\
  if(DEFINED ENV{{PYTORCH_AOTRITON_COMMIT}})
    set(__AOTRITON_CI_COMMIT "$ENV{{PYTORCH_AOTRITON_COMMIT}}")
  else()
    set(__AOTRITON_CI_COMMIT "{COMMIT}")
  endif()
"""

NINJA = """\
rule HIP_COMPILER
  command = ccache /env/opt/rocm/lib/llvm/bin/clang++ $DEFINES $FLAGS -c $in
build torch_hip.dir/sdp_utils.hip.o: HIP_COMPILER
  DEFINES = -DUSE_FLASH_ATTENTION -DUSE_MEM_EFF_ATTENTION -DUSE_ROCM -DHAS_ROCTRACER
  FLAGS = --gcc-install-dir=/source/gcc -O3 --offload-arch=gfx1151 -I/env/opt/rocm/include
build libtorch_hip.so: LINK torch_hip.dir/sdp_utils.hip.o | /source/aotriton/lib/libaotriton_v2.so
"""
LOG = """\
-- Found system Eigen at /env/include/eigen3
-- Using Preinstalled AOTriton at /source/aotriton
-- Using Kineto with Roctracer support
""" + "".join(f"--   {name} : {value}\n" for name, value in configuration.SUMMARY.items())

# The last line of each mock tool. The tool fails if its arguments contain the text of the file
# `stop`.
STOPPED = """
[[ ! -e $SRC_DIR/../stop || "$*" != *"$(< "$SRC_DIR/../stop")"* ]]
"""
FAKE_TOOLS = {
    "find": f"""\
        {shutil.which("find")} "$@"
        """,
    # build.sh runs the recipe's checks, hipify and compileall with this program. Only programs of
    # the recipe are executed. Each other call appends a line to the file `calls`. hipify fails if
    # the file fail-hipify exists.
    "python": """\
        case "$*" in
            *check_*|*lay_out*) "$REAL_PYTHON" "$@" ;;
            *) echo "python ${*//$SRC_DIR/SRC}" >> "$SRC_DIR/calls" ;;
        esac
        [[ "$*" != *build_amd* ]] || [[ ! -e $SRC_DIR/fail-hipify ]]
        """,
    # build.sh runs pip, and so setup.py, with the host environment's Python.
    "host-python": """\
        echo "host-python ${*//$SRC_DIR/SRC}, $MAX_JOBS jobs" >> "$SRC_DIR/calls"
        cp -r "$SRC_DIR/installed" "$SP_DIR/torch"
        find . -type f -o -type l > "$SP_DIR/../../../source-files"
        """,
    "cmake": """\
        printf 'cmake' >> "$SRC_DIR/calls"; printf ' [%s]' "${@//$SRC_DIR/SRC}" >> "$SRC_DIR/calls"
        echo >> "$SRC_DIR/calls"
        if [[ $1 == -S ]]; then
            mkdir -p build && cp ninja build/build.ninja && touch build/CMakeCache.txt && cat log
        else
            [[ ! -e $SRC_DIR/fail-compile ]]
        fi
        """,
    "g++": """\
        case "$*" in
            -dumpmachine) echo x86_64-conda-linux-gnu ;;
            -dumpfullversion) echo 14.3.0 ;;
            -print-libgcc-file-name) echo "$BUILD_PREFIX/lib/gcc/libgcc.a" ;;
            -print-prog-name=ld) echo "$BUILD_PREFIX/tools/ld" ;;
            -print-file-name=libstdc++.so) echo "$BUILD_PREFIX/lib/libstdc++.so" ;;
            *) printf -- '-: x.h \\\\\\n %s/c++/vector other\\n' "$BUILD_PREFIX" ;;
        esac
        """,
}


# The files in submodules that setup.py reads. Compilers read all other files there.
READ_BY_SETUP = [
    "build_bundled.py",
    "a/CMakeLists.txt",
    "a/LICENSE",
    "a/b/LICENSES/MIT.txt",
    "a/COPYING.BSD",
    "a/NOTICE",
    "valgrind-headers/callgrind.h",
]


def installed_torch(prefix: Path) -> tuple[Path, Path]:
    """Make site-packages/torch as it is after torch's own build.

    Returns:
        The folder of torch, and the prefix.
    """
    torch = prefix / "lib/python3.12/site-packages/torch"
    names = [
        "__init__.py",
        "bin/torch_shm_manager",
        "bin/protoc",
        "lib/libtorch.so",
        "lib/libdnnl.a",
        "lib/libtorch_python.so",
        "lib/libaotriton_v2.so",
        "lib/aotriton.images/image",
        "include/google/any.h",
        "share/cmake/dnnl/dnnl-config.cmake",
    ]
    names += [f"include/{name}/header.h" for name in layout.PARTS["include"]]
    names += [f"share/cmake/{name}/{name}Config.cmake" for name in layout.PARTS["share/cmake"]]
    for name in names:
        path = torch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    # CMake copies this relative link from aotriton-devel. Its target does not exist here.
    (torch / "include/aotriton").symlink_to("../../../include/aotriton")
    (prefix / "include").mkdir()
    return torch, prefix


def hip_clang(prefix: Path, version: str) -> None:
    """Make a mock of the SDK's clang++, which prints its version for options.sh."""
    path = prefix / "opt/rocm/lib/llvm/bin/clang++"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\nInstalledDir: {path.parent}\\n' '{version}'\n")
    path.chmod(0o755)


class Build:
    """Run build.sh as rattler-build does, on a source tree with the few files that it uses.

    Attributes:
        source: The work folder, SRC_DIR.
        prefix: The host prefix, PREFIX.
        environment: The environment variables of the build.
    """

    def __init__(self, root: Path) -> None:
        self.source = root / "bld/work"
        self.prefix = root / "bld/host"
        tools = root / "tools"
        site = self.prefix / "lib/python3.12/site-packages"
        for folder in (site, self.prefix / "include", tools, root / "bld/build/lib/gcc"):
            folder.mkdir(parents=True)
        (root / "bld/build/lib/gcc/libgcc.a").touch()
        for prefix in ("bld/host", "bld/build"):
            (root / prefix / "conda-meta").mkdir()
            (root / prefix / "conda-meta/a-1.0-0.json").touch()
        hip_clang(self.prefix, "AMD clang version 23.0.0git (roc-10.0)")
        for name, script in FAKE_TOOLS.items():
            (tools / name).write_text(f"#!/bin/bash\nset -e\n{script}{STOPPED}")
            (tools / name).chmod(0o755)
        self.write("cmake/External/aotriton.cmake", PINNED)
        self.write("third_party/NNPACK/cmake/DownloadSix.cmake", "download")
        self.write(".gitmodules", "x")
        shutil.copytree(RECIPES / "checks", self.source / "checks")
        self.write("ninja", NINJA.replace("/env", str(self.prefix)))
        self.write("log", LOG)
        for part, names in layout.PARTS.items():
            for name in names:
                self.write(f"installed/{part}/{name.replace('*', 'libtorch')}", "x")
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SRC_DIR": str(self.source),
            "PREFIX": str(self.prefix),
            "BUILD_PREFIX": str(root / "bld/build"),
            "SP_DIR": str(site),
            "PYTHON": str(tools / "host-python"),
            "CPU_COUNT": "2",
            "RECIPE_DIR": str(RECIPE),
            "CXX": "g++",
            "CFLAGS": "-pipe",
            "CXXFLAGS": "-std=c++17 -O2",
            "LDFLAGS": "-Wl,--as-needed -Wl,-z,now -Wl,-O2",
            "CONDA_BUILD_SYSROOT": "/sysroot",
            "CMAKE_ARGS": f"-DCMAKE_FIND_ROOT_PATH={self.prefix};/sysroot -DA=1",
            "TORCH_VERSION": "2.13.0",
            "GPU_ARCH": "gfx1151",
            "AOTRITON_COMMIT": COMMIT,
            "REAL_PYTHON": sys.executable,
            "FORGE_CACHE": str(root / "cache"),
        }

    def write(self, name: str, text: str) -> Path:
        """Write a file of the work folder."""
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, code: int = 0) -> tuple[str, list[str]]:
        """Run the script. It has to fail if and only if `code` is not 0.

        Returns:
            The output of the script, and its calls of tools.
        """
        (self.source / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", RECIPE / "build.sh"],
            cwd=self.source,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert (done.returncode != 0) == (code != 0), done.stdout
        calls = self.source / "calls"
        if not calls.exists():
            return done.stdout, []
        return done.stdout, calls.read_text().splitlines()

# SPDX-License-Identifier: BSD-3-Clause
"""The pytorch recipe's own programs: each guard on good input, and failing on bad input.

The build itself takes hours and an SDK; here its script runs on a source tree and tools made up for
the test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
import zstandard
from conftest import CHECKOUT, MiniProject
from rattler_build import Package

RECIPE = CHECKOUT / "recipes" / "pytorch"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pin, configuration, layout, binaries = map(
    load, ("check_aotriton_pin", "check_configuration", "lay_out", "check_binaries")
)


# --- the commit of AOTriton

PINNED = f"""\
  if(DEFINED ENV{{PYTORCH_AOTRITON_COMMIT}})
    set(__AOTRITON_CI_COMMIT "$ENV{{PYTORCH_AOTRITON_COMMIT}}")
  else()
    set(__AOTRITON_CI_COMMIT "{COMMIT}")
  endif()
"""


def test_right_pin() -> None:
    assert pin.wrong(PINNED, COMMIT) == ""
    assert pin.wrong(f"set(__AOTRITON_CI_COMMIT {COMMIT})\n", COMMIT) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PINNED.replace("0123", "ffff", 1), "builds"),
        (PINNED.replace(COMMIT, "0.12b"), "no full commit"),
        (PINNED + PINNED, "2 lines"),
        ("set(__AOTRITON_VER 0.12b)\n", "0 lines"),
        (f"# set(__AOTRITON_CI_COMMIT {COMMIT})\n", "0 lines"),
    ],
)
def test_wrong_pin(text: str, why: str) -> None:
    assert why in pin.wrong(text, COMMIT)


def test_pin_from_the_command_line(tmp_path: Path) -> None:
    """What build.sh sees: the reason and a status, no traceback."""
    command = [sys.executable, RECIPE / "check_aotriton_pin.py", tmp_path / "aotriton.cmake"]
    done = subprocess.run([*command, COMMIT], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "does not exist" in done.stderr
    (tmp_path / "aotriton.cmake").write_text(PINNED)
    assert subprocess.run([*command, COMMIT], capture_output=True, check=False).returncode == 0
    done = subprocess.run([*command, "f" * 40], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and COMMIT in done.stderr and "Traceback" not in done.stderr


# --- the configuration

NINJA = """\
rule HIP_COMPILER
  command = ccache /env/opt/rocm/lib/llvm/bin/clang++ $DEFINES $FLAGS -c $in
build torch_hip.dir/sdp_utils.hip.o: HIP_COMPILER
  DEFINES = -DUSE_FLASH_ATTENTION -DUSE_MEM_EFF_ATTENTION -DUSE_ROCM
  FLAGS = --gcc-install-dir=/source/gcc -O3 --offload-arch=gfx1151 -I/env/opt/rocm/include
build libtorch_hip.so: LINK torch_hip.dir/sdp_utils.hip.o | /source/aotriton/lib/libaotriton_v2.so
"""
LOG = """\
-- Found system Eigen at /env/include/eigen3
-- Using Preinstalled AOTriton at /source/aotriton
""" + "".join(f"--   {name} : {value}\n" for name, value in configuration.SUMMARY.items())


def test_right_configuration() -> None:
    assert configuration.wrong(NINJA, LOG, "/env") == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("--   USE_ROCM : ON", "--   USE_ROCM : OFF", "USE_ROCM is OFF"),
        ("--   USE_ROCM : ON", "", "USE_ROCM is not in the summary"),
        ("USE_FLASH_ATTENTION : ON", "USE_FLASH_ATTENTION : ", "USE_FLASH_ATTENTION is "),
        ("USE_CUDA : OFF", "USE_CUDA : 1", "USE_CUDA is 1"),
        ("Using Preinstalled AOTriton at", "Using AOTriton Runtime from", "not taken from our"),
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
def test_wrong_configuration(old: str, new: str, why: str) -> None:
    ninja, log = NINJA.replace(old, new), LOG.replace(old, new)
    assert (ninja, log) != (NINJA, LOG)
    (reason,) = configuration.wrong(ninja, log, "/env")
    assert why in reason


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


# --- ELF files


def image(flags: int = 0x4A, machine: int = 224) -> bytes:
    """The 64-byte header of an AMDGPU code object."""
    header = struct.pack("<4sBBBB8xHHIQQQI", b"\x7fELF", 2, 1, 1, 64, 3, machine, 1, 0, 0, 0, flags)
    return header.ljust(64, b"\0")


def bundle(parts: dict[str, bytes]) -> bytes:
    """An offload bundle as clang-offload-bundler writes it."""
    heads, bodies = b"", b""
    start = 32 + sum(24 + len(target) for target in parts)
    for target, data in parts.items():
        heads += struct.pack("<QQQ", start + len(bodies), len(data), len(target)) + target.encode()
        bodies += data
    return binaries.MAGIC + struct.pack("<Q", len(parts)) + heads + bodies


GOOD = bundle({"host-x86_64-unknown-linux-gnu-": b"", "hipv4-amdgcn-amd-amdhsa--gfx1151": image()})


def compressed(data: bytes, version: int = 3) -> bytes:
    """A bundle as clang's --offload-compress writes it."""
    body = zstandard.compress(data)
    head = {2: "<4sHHIIQ", 3: "<4sHHQQQ"}[version]
    size = struct.calcsize(head) + len(body)
    return struct.pack(head, b"CCOB", version, 1, size, len(data), 7) + body


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "env/lib").mkdir(parents=True)
    return tmp_path / "env"


def library(prefix: Path, name: str, fatbin: bytes = b"", needs: tuple[str, ...] = (),
            rpath: str = "$ORIGIN", folder: str = "lib") -> Path:  # fmt: skip
    """Link a shared library with this .hip_fatbin, soname, RUNPATH and libraries needed."""
    (prefix / folder).mkdir(parents=True, exist_ok=True)
    path, source = prefix / folder / name, prefix / f"{name}.S"
    (prefix / "fatbin").write_bytes(fatbin)
    section = f'.section .hip_fatbin,"a"\n.incbin "{prefix}/fatbin"\n' if fatbin else ""
    source.write_text(f'.globl f\nf: ret\n{section}.section .note.GNU-stack,""\n')
    command = ["gcc", "-shared", "-nostdlib", "-Wl,--no-as-needed", f"-Wl,-soname,{name}"]
    found = [next(p for p in prefix.rglob(need) if p.is_file()) for need in needs]
    command += [f"-Wl,-rpath,{rpath}"] if rpath else []
    subprocess.run([*command, "-o", path, source, *found], check=True)
    source.unlink()
    return path


@pytest.mark.parametrize(
    ("fatbin", "count"),
    [
        (GOOD, 1),
        # the linker puts the objects' sections behind each other, aligned to pages
        (GOOD.ljust(4096, b"\0") + compressed(GOOD) + b"\0" * 77 + compressed(GOOD, 2), 3),
    ],
)
def test_right_images(prefix: Path, fatbin: bytes, count: int) -> None:
    path = library(prefix, "libtorch_hip.so", fatbin)
    assert binaries.check([path], prefix, count, False) == []
    (reason,) = binaries.check([path], prefix, count + 1, False)
    assert f"{count} device images in all" in reason


@pytest.mark.parametrize(
    ("fatbin", "why"),
    [
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1100": image()}), "image for hipv4"),
        (compressed(bundle({"hip-amdgcn-amd-amdhsa--gfx1150": image()})), "gfx1150"),
        (GOOD + bundle({"hipv4-amdgcn-amd-amdhsa--gfx1151": image(0x41)}), "is for 224, 0x41"),
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1151": image(machine=62)}), "is for 62"),
        (bundle({"hipv4-amdgcn-amd-amdhsa--gfx1151": b""}), "(0 bytes) is no 64-bit ELF"),
        (GOOD + b"HIPK", "no offload bundle"),
        (compressed(GOOD)[:-9], "does not unpack"),
        (b"CCOB" + struct.pack("<HH", 9, 1) + bytes(24), "version 9"),
    ],
)
def test_wrong_images(prefix: Path, fatbin: bytes, why: str) -> None:
    (reason,) = binaries.check([library(prefix, "libtorch_hip.so", fatbin)], prefix, 0, False)
    assert why in reason


def test_closure(prefix: Path) -> None:
    """libtorch_hip, AOTriton beside it, and a library of the SDK's tree."""
    library(prefix, "libamdhip64.so.7", folder="opt/rocm/lib")
    library(prefix, "libaotriton_v2.so.0.12.0", needs=("libamdhip64.so.7",),
            rpath="$ORIGIN/../opt/rocm/lib")  # fmt: skip
    hip = library(prefix, "libtorch_hip.so", needs=("libaotriton_v2.so.0.12.0",))
    assert binaries.check([hip], prefix, 0, True) == []
    other = library(prefix, "libc10.so")
    assert "no file needs libaotriton_v2" in binaries.check([other], prefix, 0, True)[0]
    # a library that only another one needs
    (prefix / "opt/rocm/lib/libamdhip64.so.7").unlink()
    (reason,) = binaries.check([hip], prefix, 0, True)
    assert reason.startswith(str(prefix / "lib/libaotriton")) and "needs libamdhip64" in reason


def test_aotriton_of_another_folder(prefix: Path) -> None:
    """The images lie beside the library of lib, so a copy elsewhere would find none."""
    library(prefix, "libaotriton_v2.so.0.12.0", folder="lib/torch")
    needs = ("libaotriton_v2.so.0.12.0",)
    hip = library(prefix, "libtorch_hip.so", needs=needs, rpath="$ORIGIN/torch")
    assert "no file needs libaotriton_v2" in binaries.check([hip], prefix, 0, True)[0]


@pytest.mark.parametrize(
    ("rpath", "why"),
    [
        ("$ORIGIN:/home/build/work/build/lib", "of the machine that built it"),
        ("/opt/rocm/lib", "of the machine that built it"),
        ("$ORIGIN/../../other", "out of the environment"),
        ("$ORIGIN/../opt/aotriton/lib", "only builds have"),
    ],
)
def test_wrong_rpath(prefix: Path, rpath: str, why: str) -> None:
    (reason,) = binaries.check([library(prefix, "libc10.so", rpath=rpath)], prefix, 0, False)
    assert why in reason


def test_no_elf_file(prefix: Path) -> None:
    (prefix / "lib/libc10.so").write_text("INPUT(libc10.so.1)")
    command = [sys.executable, RECIPE / "check_binaries.py", prefix, prefix / "lib/libc10.so"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Magic number" in done.stderr
    assert "Traceback" not in done.stderr


# --- the build script

FAKE_TOOLS = {
    # pip, setup.py and hipify are Python programs; each leaves a line and fails when told to
    "python": """\
        case "$*" in
            *check_*|*lay_out*) exec "$REAL_PYTHON" "$@" ;;
            *) echo "python ${*//$SRC_DIR/SRC}" >> "$SRC_DIR/calls" ;;
        esac
        [[ "$*" != *build_amd* ]] || [[ ! -e $SRC_DIR/fail-hipify ]]
        [[ "$*" != *"pip install"* ]] || cp -r "$SRC_DIR/installed" "$SP_DIR/torch"
        """,
    "cmake": """\
        printf 'cmake' >> "$SRC_DIR/calls"; printf ' [%s]' "${@//$SRC_DIR/SRC}" >> "$SRC_DIR/calls"
        echo >> "$SRC_DIR/calls"
        if [[ $1 == -S ]]; then
            mkdir -p build && cp ninja build/build.ninja && cat log
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


class Build:
    """build.sh in an environment like rattler-build's, on a tree of the few files it touches."""

    def __init__(self, root: Path) -> None:
        self.source, self.prefix, tools = root / "bld/work", root / "bld/host", root / "tools"
        site = self.prefix / "lib/python3.12/site-packages"
        for folder in (site, self.prefix / "include", tools, root / "bld/build/lib/gcc"):
            folder.mkdir(parents=True)
        (root / "bld/build/lib/gcc/libgcc.a").touch()
        for name, script in FAKE_TOOLS.items():
            (tools / name).write_text(f"#!/bin/bash\nset -e\n{script}")
            (tools / name).chmod(0o755)
        self.write("cmake/External/aotriton.cmake", PINNED)
        self.write("third_party/NNPACK/cmake/DownloadSix.cmake", "download")
        self.write(".gitmodules", "x")
        self.write("ninja", NINJA.replace("/env", str(self.prefix)))
        self.write("log", LOG)
        for part, names in layout.PARTS.items():
            for name in names:
                self.write(f"installed/{part}/{name.replace('*', 'libtorch')}", "x")
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}", "SRC_DIR": str(self.source),
            "PREFIX": str(self.prefix), "BUILD_PREFIX": str(root / "bld/build"),
            "SP_DIR": str(site), "PYTHON": "python", "RECIPE_DIR": str(RECIPE), "CPU_COUNT": "2",
            "CXX": "g++", "CXXFLAGS": "-std=c++17 -fvisibility-inlines-hidden -O2",
            "LDFLAGS": "-Wl,--as-needed -Wl,-O2", "CONDA_BUILD_SYSROOT": "/sysroot",
            "CMAKE_ARGS": f"-DCMAKE_FIND_ROOT_PATH={self.prefix};/sysroot -DA=1",
            "TORCH_VERSION": "2.13.0", "AOTRITON_COMMIT": COMMIT, "REAL_PYTHON": sys.executable,
            "FORGE_CACHE": str(root / "cache"),
        }  # fmt: skip

    def write(self, name: str, text: str) -> Path:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, code: int = 0) -> tuple[str, list[str]]:
        """What the script printed, and the calls of tools that it made in this run."""
        (self.source / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", RECIPE / "build.sh"], cwd=self.source, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == (code != 0), done.stdout
        calls = self.source / "calls"
        return done.stdout, calls.read_text().splitlines() if calls.exists() else []


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

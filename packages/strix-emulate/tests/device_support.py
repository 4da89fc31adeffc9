# SPDX-License-Identifier: BSD-3-Clause
"""Find or build the stand-in runtime for tests, and build and run programs that use it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from strix_emulate.device import launcher
from strix_emulate.errors import EmulatorError

HIP = Path(__file__).resolve().parents[1] / "hip"
HIP_PROGRAMS = Path(__file__).resolve().parent / "hip"


@cache
def find_compiler() -> list[str]:
    """Return the command of the C compiler, or skip the test."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(command[0]) is None:
        pytest.skip(f"no C compiler ({command[0]})")
    return command


@cache
def find_clang() -> str:
    """Return a clang that compiles for gfx1151 and has a linker, or skip the test."""
    for name in ("clang-22", "clang-23", "clang"):
        path = shutil.which(name)
        if path and shutil.which(name.replace("clang", "ld.lld")):
            # An older clang may know the target amdgcn, but not the processor gfx1151.
            probe = [path, "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx1151", "-nogpulib", "-x", "c"]
            done = subprocess.run([*probe, "-S", "-o", "-", os.devnull], capture_output=True)
            if done.returncode == 0:
                return path
    pytest.skip("no clang for gfx1151 with ld.lld")


@cache
def load_builder() -> ModuleType:
    """Import hip/build.py, or skip the test."""
    if not HIP.is_dir():
        pytest.skip("this test needs the stand-in runtime's sources, which only a checkout has")
    spec = importlib.util.spec_from_file_location("build_hip", HIP / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def find_library(folder: Path) -> Path:
    """Return the folder of the installed library, or build the library in the given folder."""
    try:
        return launcher.folder()
    except EmulatorError:
        find_compiler()
        return load_builder().build(folder).parent


HIP_MODE = ["-xhip", "-nogpuinc", "-nogpulib", "--offload-arch=gfx1151", "-O2"]


def run(*command) -> None:
    """Run a command. Raises CalledProcessError."""
    subprocess.run([str(x) for x in command], check=True)


def compile_device_code(source: Path, output: Path, *options: str) -> Path:
    """Compile the kernels of a HIP program to a code object."""
    run(
        find_clang(),
        *HIP_MODE,
        *options,
        "--cuda-device-only",
        "--no-gpu-bundle-output",
        source,
        "-o",
        output,
    )
    return output


def build_host_program(source: Path, image: Path, folder: Path, name: str, *options: str) -> Path:
    """Build a HIP program that embeds an image, or a library if the options request one."""
    compiled = folder / f"{name}.o"
    run(
        find_clang(),
        *HIP_MODE,
        "--cuda-host-only",
        "-Xclang",
        "-fcuda-include-gpubinary",
        "-Xclang",
        image,
        source,
        "-c",
        "-fPIC",
        "-o",
        compiled,
    )
    return link(folder, compiled, *options, name=name)


def link(folder: Path, *inputs, name: str) -> Path:
    """Link a program from C or object files, with the stand-in runtime."""
    library_folder = find_library(folder / "lib")
    run(
        *find_compiler(),
        *inputs,
        "-o",
        folder / name,
        f"-L{library_folder}",
        "-l:libamdhip64.so.7",
        "-lpthread",
    )
    return folder / name


def build_hip_program(name: str, folder: Path, *options: str) -> Path:
    """Build the program `name` from the folder hip."""
    source = HIP_PROGRAMS / f"{name}.hip"
    image = compile_device_code(source, folder / f"{name}.hsaco", *options)
    return build_host_program(source, image, folder, name)


_ASSEMBLY = """
.amdgcn_target "amdgcn-amd-amdhsa--gfx1151"
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
  {body}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr 8
  .amdhsa_next_free_sgpr 8
  {directives}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 0
    .wavefront_size: {wave}
    .sgpr_count: 8
    .vgpr_count: 8
    .max_flat_workgroup_size: 256
    .args:
      - {{ .offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global }}
...
.end_amdgpu_metadata
"""


def assemble(folder: Path, name: str, *kernels: tuple, directive: str = "") -> Path:
    """Assemble kernels, each with one pointer argument, into a code object.

    Args:
        folder: Receives the files.
        name: The name of the code object.
        kernels: The name, instructions and lanes per wave of each kernel.
        directive: A line that is added to each kernel's descriptor.
    """
    objects = []
    for kernel, body, wave in kernels:
        source = folder / f"{kernel}.s"
        directives = f"{directive}\n.amdhsa_wavefront_size32 {int(wave == 32)}"
        source.write_text(
            _ASSEMBLY.format(name=kernel, body=body, directives=directives, wave=wave)
        )
        objects.append(folder / f"{kernel}.o")
        run(
            find_clang(),
            "-target",
            "amdgcn-amd-amdhsa",
            "-mcpu=gfx1151",
            "-c",
            source,
            "-o",
            objects[-1],
        )
    linked = folder / f"{name}.hsaco"
    run(find_clang().replace("clang", "ld.lld"), "-shared", *objects, "-o", linked)
    return linked


def run_on_device(command: list, *options: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a command with `strix-emulate device`."""
    return subprocess.run(
        [sys.executable, "-m", "strix_emulate", "device", *options, "--", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | variables,
    )


def run_emulated(
    folder: Path, *command, options=(), **variables: str
) -> subprocess.CompletedProcess:
    """Run a command on the emulated device.

    The library is the installed one. If none is installed, it is built in the folder.
    """
    library_folder = str(find_library(folder / "lib"))
    return run_on_device([*command], *options, STRIX_EMULATE_HIP=library_folder, **variables)

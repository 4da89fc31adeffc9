# SPDX-License-Identifier: BSD-3-Clause
"""HIP programs, compiled by clang for gfx1151 without ROCm, on the emulated device."""

import struct
import subprocess
from pathlib import Path

import pytest
from device_support import HIP_PROGRAMS, clang, compiler, library, on_device

HIP_MODE = ["-xhip", "-nogpuinc", "-nogpulib", "--offload-arch=gfx1151", "-O2"]


def run(*command) -> None:
    subprocess.run([str(x) for x in command], check=True)


def bundle(code: bytes) -> bytes:
    """clang's offload bundle of a host and a gfx1151 entry, as clang-offload-bundler writes it."""
    names = [b"host-x86_64-unknown-linux-gnu-", b"hipv4-amdgcn-amd-amdhsa--gfx1151"]
    start = (32 + sum(24 + len(name) for name in names) + 4095) // 4096 * 4096
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(names))
    for name, size in zip(names, (0, len(code)), strict=True):
        head += struct.pack("<3Q", start, size, len(name)) + name
    return head.ljust(start, b"\0") + code


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds the library, and the device code of program.hip: program.hsaco."""
    path = tmp_path_factory.mktemp("programs")
    library(path / "lib")
    run(clang(), *HIP_MODE, "--cuda-device-only", "--no-gpu-bundle-output",
        HIP_PROGRAMS / "program.hip", "-o", path / "program.hsaco")  # fmt: skip
    return path


def link(folder: Path, *inputs, name: str, **_) -> Path:
    where = library(folder / "lib")
    run(*compiler(), *inputs, "-o", folder / name, f"-L{where}", "-l:libamdhip64.so.7")
    return folder / name


@pytest.fixture(scope="module", params=["code object", "bundle"])
def program(request, folder: Path) -> Path:
    """program.hip as an executable, whose device code is embedded in either form."""
    image = folder / "image"
    code = (folder / "program.hsaco").read_bytes()
    image.write_bytes(code if request.param == "code object" else bundle(code))
    run(clang(), *HIP_MODE, "--cuda-host-only", "-Xclang", "-fcuda-include-gpubinary", "-Xclang",
        image, HIP_PROGRAMS / "program.hip", "-c", "-o", folder / "program.o")  # fmt: skip
    return link(folder, folder / "program.o", name=f"program-{request.param.split()[0]}")


def on(folder: Path, *command, options=(), **variables):
    return on_device(
        list(command), *options, STRIX_EMULATE_HIP=str(library(folder / "lib")), **variables
    )


def test_a_hip_program_computes(folder: Path, program: Path) -> None:
    done = on(folder, program, options=["--log"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "table 1 10 7 1000 of 16 bytes, launches 1" in done.stdout
    assert done.stderr.count("wave-instructions") == 3


def test_a_store_too_far_is_an_illegal_address(folder: Path, program: Path) -> None:
    done = on(folder, program, "too far")
    assert "then: an illegal memory access was encountered" in done.stdout
    assert "and: an illegal memory access was encountered" in done.stdout
    # kernel, address and text of the instruction, and the lane: element 5000 is 136 of group 19
    assert "trap in _Z3addPKfS0_Pfi at 0x" in done.stderr
    assert "global_load_b32" in done.stderr
    assert "(lane 8 of wave 4 of workgroup 19)" in done.stderr


def test_modules_are_loaded_and_launched(folder: Path) -> None:
    program = link(folder, HIP_PROGRAMS / "module.c", name="module")
    done = on(folder, program, folder / "program.hsaco")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "c[299] 1196, launches 2\n"


def test_a_module_for_another_gpu_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.hsaco"
    code = bytearray((folder / "program.hsaco").read_bytes())
    code[48] = 0x41  # e_flags: gfx1100
    other.write_bytes(code)
    program = link(folder, HIP_PROGRAMS / "module.c", name="module")
    done = on(folder, program, other)
    assert done.returncode == 1
    assert "made for another GPU" in done.stderr
    assert "device kernel image is invalid" in done.stdout


def test_an_rpath_does_not_win(folder: Path, tmp_path: Path) -> None:
    """conda's linker writes RPATH, which goes before LD_LIBRARY_PATH."""
    source = tmp_path / "real.c"
    names = ["ModuleLoad", "ModuleGetFunction", "Malloc", "Memcpy", "ModuleLaunchKernel", "Free",
             "DeviceSynchronize", "ModuleGetGlobal", "ModuleUnload", "GetErrorString"]  # fmt: skip
    source.write_text("".join(f"int hip{name}(void) {{ return 100; }}\n" for name in names))
    run(*compiler(), "-shared", "-fPIC", "-Wl,-soname,libamdhip64.so.7", source,
        "-o", tmp_path / "libamdhip64.so.7")  # fmt: skip
    run(*compiler(), HIP_PROGRAMS / "module.c", "-o", tmp_path / "module", f"-L{tmp_path}",
        "-l:libamdhip64.so.7", f"-Wl,--disable-new-dtags,-rpath,{tmp_path}")  # fmt: skip
    alone = subprocess.run([tmp_path / "module", folder / "program.hsaco"], capture_output=True)
    assert alone.returncode != 0
    done = on(folder, tmp_path / "module", folder / "program.hsaco")
    assert done.returncode == 0, done.stdout + done.stderr

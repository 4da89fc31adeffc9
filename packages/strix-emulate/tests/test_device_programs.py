# SPDX-License-Identifier: BSD-3-Clause
"""HIP programs, compiled by clang for gfx1151 without ROCm, on the emulated device."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from device_support import (
    HIP,
    HIP_PROGRAMS,
    assemble,
    build_host_program,
    compile_device_code,
    find_compiler,
    find_library,
    link,
    run,
    run_emulated,
)
from strix_emulate import TARGETS, Buffer, launch
from strix_emulate.code import loader
from test_images import DEVICE, HOST, bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the library and program.hsaco, the device code of program.hip."""
    path = tmp_path_factory.mktemp("programs")
    find_library(path / "lib")
    compile_device_code(HIP_PROGRAMS / "program.hip", path / "program.hsaco")
    return path


@pytest.fixture(scope="module", params=["code object", "bundle"])
def program(request, folder: Path) -> Path:
    """Build program.hip, with the device code embedded as a code object or in a bundle."""
    image = folder / "image"
    code = (folder / "program.hsaco").read_bytes()
    image.write_bytes(
        code
        if request.param == "code object"
        else bundle((HOST, b""), (DEVICE, code), alignment=4096)
    )
    source = HIP_PROGRAMS / "program.hip"
    name = f"program-{request.param.split()[0]}"
    return build_host_program(source, image, folder, name)


def test_a_hip_program_computes(folder: Path, program: Path) -> None:
    done = run_emulated(folder, program, options=["--log"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "table 1 10 7 1000 of 16 bytes, launches 1" in done.stdout
    assert done.stderr.count("wave-instructions") == 3


def test_an_rpath_does_not_win(folder: Path, tmp_path: Path) -> None:
    """The stand-in runtime is loaded even if the program's RPATH names another folder.

    conda's linker writes RPATH, which has priority over LD_LIBRARY_PATH.
    """
    source = tmp_path / "real.c"
    names = [
        "ModuleLoad",
        "ModuleGetFunction",
        "Malloc",
        "Memcpy",
        "ModuleLaunchKernel",
        "Free",
        "DeviceSynchronize",
        "ModuleGetGlobal",
        "ModuleUnload",
        "GetErrorString",
    ]
    source.write_text("".join(f"int hip{name}(void) {{ return 100; }}\n" for name in names))
    run(
        *find_compiler(),
        "-shared",
        "-fPIC",
        "-Wl,-soname,libamdhip64.so.7",
        source,
        "-o",
        tmp_path / "libamdhip64.so.7",
    )
    run(
        *find_compiler(),
        HIP_PROGRAMS / "module.c",
        "-o",
        tmp_path / "module",
        f"-L{tmp_path}",
        "-l:libamdhip64.so.7",
        f"-Wl,--disable-new-dtags,-rpath,{tmp_path}",
    )
    alone = subprocess.run([tmp_path / "module", folder / "program.hsaco"], capture_output=True)
    assert alone.returncode != 0
    done = run_emulated(folder, tmp_path / "module", folder / "program.hsaco")
    assert done.returncode == 0, done.stdout + done.stderr


STORE = """s_load_b64 s[0:1], s[0:1], null
  v_mov_b32 v1, {value}
  v_lshlrev_b32 v0, 2, v0
  s_waitcnt lgkmcnt(0)
  global_store_b32 v0, v1, s[0:1]
  s_endpgm"""


def test_a_file_as_rocblas_has_them(tmp_path: Path) -> None:
    """The loader reads a file that is linked from assembly, as rocBLAS's files are.

    Such files have a metadata note for each object, but no sizes of functions, and no sizes of
    arguments in descriptors. A wave64 kernel may be in the same file as wave32 kernels.
    """
    kernels = (("one", 1, 32), ("two", 2, 32), ("wide", 3, 64))
    stores = [(name, STORE.format(value=value), wave) for name, value, wave in kernels]
    code_object = assemble(tmp_path, "linked", *stores)
    module = loader.parse_module(code_object.read_bytes(), "linked")
    assert {name: kernel.width for name, kernel in module.kernels.items()} == {
        "one": 32,
        "two": 32,
        "wide": 64,
    }
    assert {kernel.kernarg for kernel in module.kernels.values()} == {8}
    # The code of other kernels is not decoded.
    assert sum(size for _, size in module.kernels["one"].image.code) < 1024
    for name, value in (("two", 2), ("wide", 3)):
        out = np.zeros(64, np.int32)
        launch(module.kernels[name], (1,), [Buffer(out, "out")], threads=64)
        assert (out == value).all()


@pytest.mark.parametrize("gpu", ["gfx1151", "gfx1152", "gfx1100"])
def test_the_device_is_the_gpu_that_is_asked_for(gpu: str, folder: Path, tmp_path: Path) -> None:
    source = HIP_PROGRAMS / "program.hip"
    mode = f"--offload-arch={gpu}"
    image = compile_device_code(source, tmp_path / "image.hsaco", "--no-offload-arch=gfx1151", mode)
    program = link(folder, HIP_PROGRAMS / "module.c", name=f"module-{gpu}")
    done = run_emulated(folder, program, image, options=["--target", gpu])
    assert (done.returncode, done.stdout) == (0, "c[299] 1196, launches 2\n"), done.stderr
    other_gpu = "gfx1150" if gpu == "gfx1151" else "gfx1151"
    refused = run_emulated(folder, program, image, options=["--target", other_gpu])
    assert f"made for another GPU ({gpu}), the device is a {other_gpu}" in refused.stderr
    assert (refused.returncode, refused.stdout.count("device kernel image is invalid")) == (1, 1)
    source_of_query = tmp_path / "asks.c"
    source_of_query.write_text(
        '#include <stdio.h>\n#include "abi.h"\nint main(void) { hipDeviceProp_t p;'
        "hipGetDevicePropertiesR0600(&p, 0); "
        'printf("%s %d %d\\n", p.gcnArchName, p.multiProcessorCount, p.regsPerBlock); }\n'
    )
    program = link(folder, f"-I{HIP}", source_of_query, name=f"asks-{gpu}")
    done = run_emulated(folder, program, options=["--target", gpu])
    target = TARGETS[gpu]
    assert done.stdout == f"{gpu} {target.processors} {target.registers * 128}\n", done.stderr

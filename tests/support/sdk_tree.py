# SPDX-License-Identifier: BSD-3-Clause
"""A small tree with the layout of TheRock's distribution. The local gcc makes its ELF files."""

import json
import subprocess
import tarfile
from pathlib import Path

COMMIT = "16adc4d875fd4f65ea23c7c84e1c66706fde3047"
RUNNER = "/home/runner/_work/x/build/stage/lib/rocm_sysdeps/lib/pkgconfig/../../include"
TEXTS = {
    ".info/version": "10.0.0\n",
    ".kpack/blas_gfx1151.kpack": "kernels\n",
    "bin/hipcc": "#!/bin/sh\n",
    "bin/rocminfo": "#!/bin/sh\n",
    "bin/test_hip_api": "#!/bin/sh\n",
    "clients/run": "#!/bin/sh\n",
    "include/hip/hip_runtime.h": "#pragma once\n",
    "include/gdb/jit-reader.h": "/* GPL */\n",
    "lib/cmake/hip/hip-config.cmake": "set(hip_FOUND 1)\n",
    "lib/cmake/rocm_smi/rocm_smiTargets.cmake": f'set(DIRS "{RUNNER}/libdrm;{RUNNER}")\n',
    "lib/llvm/amdgcn/bitcode/ocml.bc": "bitcode\n",
    "lib/llvm/bin/clang-23": "compiler\n",
    "lib/rocblas/library/Kernels_gfx1151.co": "kernels\n",
    "libexec/rocgdb/x": "GPL\n",
    "share/doc/hip/LICENSE.txt": "MIT\n",
    "share/doc/rocgdb/COPYING3": "GPL\n",
    "share/miopen/db/gfx1151.db.txt": "db\n",
    "include/amd_smi/amdsmi.h": "#pragma once\n",
    "lib/cmake/amd_smi/amd_smi-config.cmake": "set(amd_smi_FOUND 1)\n",
    "lib/rdc/grpc/include/absl/base/config.h": "#pragma once\n",
    "lib/rdc/hsaco/gfx942/gpuReadWrite_kernels.hsaco": "another GPU's\n",
    "lib/rocm_sysdeps/share/terminfo/x/xterm": "terminal\n",
    "lib/rocm_sysdeps/share/libdrm/amdgpu.ids": "names\n",
    "lib/python3.10/site-packages/rocpd/__init__.py": "",
    "lib/host-math/include/suitesparse/cholmod.h": "#pragma once\n",
    "include/fftw3.h": "/* GPL */\n",
    "libhipcxx/include/cuda/std/array": "#pragma once\n",
    "src/rocprofiler/main.cpp": "int main() {}\n",
    "tests/run.sh": "#!/bin/sh\n",
    "share/rocgdb/syscalls.xml": "GPL\n",
    "share/therock/therock_manifest.json": json.dumps({"the_rock_commit": COMMIT}),
}
# Each library, and the libraries in its DT_NEEDED.
SHARED = {
    "lib/rocm_sysdeps/lib/librocm_sysdeps_elf.so.1": [],
    "lib/rocm_sysdeps/lib/librocm_sysdeps_z.so.1": [],
    "lib/rocm_sysdeps/lib/librocm_sysdeps_va.so.2": [],
    # The VA-API driver, which libva loads by name from its own folder. It needs the next library.
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gallium_drv_video.so": ["librocm_sysdeps_drm.so.2"],
    "lib/rocm_sysdeps/lib/librocm_sysdeps_drm.so.2": [],
    "lib/rocm_sysdeps/lib/librocm_sysdeps_numa.so.1": [],  # rocSHMEM loads this library.
    "lib/librocdecode.so.1": ["librocm_sysdeps_va.so.2"],
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gmp.so.10": [],
    "lib/rocm_sysdeps/lib/librocm_sysdeps_mpfr.so.6": ["librocm_sysdeps_gmp.so.10"],
    "lib/llvm/lib/libLLVM.so.23.0": ["librocm_sysdeps_z.so.1"],
    "lib/libamdhip64.so.7.15": ["librocm_sysdeps_elf.so.1", "libLLVM.so.23.0"],
    "lib/librocblas.so.5.0": ["libamdhip64.so.7"],
    "lib/libplugin.so": [],
    "lib/libMIOpen.so.1.0": ["libamdhip64.so.7"],
    "lib/libMIOpenCKGroupedConv_gfx1151.so.1.0": [],
    "lib/librocprofiler-sdk.so.1": ["libhsa-amd-aqlprofile64.so.1"],
    "lib/librocprofiler-sdk-attach.so.1": [],
    "lib/libhsa-amd-aqlprofile64.so.1": [],
    "lib/librocprof-sys.so.1": ["libdyninst.so.13"],  # The tree lacks libdyninst.
    "lib/host-math/lib/libcholmod.so.5": [],
    "lib/libhipsolver.so.1": ["libcholmod.so.5"],
    "lib/libfftw3.so.3": [],
    "lib/libamd_smi.so.26": [],
    "bin/rocgdb-py3.12": ["librocm_sysdeps_mpfr.so.6"],
}
LINKS = {
    "lib/libamdhip64.so.7": "libamdhip64.so.7.15",
    "lib/libamdhip64.so": "libamdhip64.so.7",
    "lib/librocblas.so.5": "librocblas.so.5.0",
    "lib/librocblas.so": "librocblas.so.5",
    "lib/rocm_sysdeps/lib/librocm_sysdeps_gmp.so": "librocm_sysdeps_gmp.so.10",
    "lib/rocm_sysdeps/lib/libgallium_drv_video.so": "librocm_sysdeps_gallium_drv_video.so",
    "lib/rocm_sysdeps/lib/radeonsi_drv_video.so": "libgallium_drv_video.so",
    "lib/rocm_sysdeps/lib/libnuma.so": "librocm_sysdeps_numa.so.1",
    "lib/libMIOpen.so": "libMIOpen.so.1.0",
    "lib/libMIOpenCKGroupedConv_gfx1151.so": "libMIOpenCKGroupedConv_gfx1151.so.1.0",
    "lib/librocprofiler-sdk.so": "librocprofiler-sdk.so.1",
    "lib/librocprofiler-sdk-attach.so": "librocprofiler-sdk-attach.so.1",
    "lib/libhsa-amd-aqlprofile64.so": "libhsa-amd-aqlprofile64.so.1",
    "lib/host-math/lib/libcholmod.so": "libcholmod.so.5",
    "lib/libfftw3.so": "libfftw3.so.3",
    "amdgcn": "lib/llvm/amdgcn",
    "llvm": "lib/llvm",
    "lib/libamd_smi.so": "libamd_smi.so.26",
    # The target is outside of the tree. This is no fault, because the recipe removes the folder.
    "tests/libc.so": "/lib/x86_64-linux-gnu/libc.so.6",
    "bin/rocgdb": "rocgdb-py3.12",
    "bin/clang": "../lib/llvm/bin/clang-23",
}


def make(root: Path) -> Path:
    """Write the tree and return its folder."""
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, needs in SHARED.items():
        library(root / name, needs)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    return root


def library(path: Path, needs: list[str]) -> None:
    """Link a shared library that needs libstdc++ and other libraries, which need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soname = path.name if path.suffix != ".15" else "libamdhip64.so.7"
    for name in needs:
        stub = path.parent / "stubs" / name
        stub.parent.mkdir(exist_ok=True)
        gcc(stub, name)
    stubs = [path.parent / "stubs" / name for name in needs]
    gcc(path, soname, "-Wl,--no-as-needed", *stubs, "-lstdc++")
    for stub in stubs:
        stub.unlink()
    if needs:
        (path.parent / "stubs").rmdir()


def gcc(out: Path, soname: str, *arguments: object) -> None:
    """Link an empty shared library."""
    command = ["gcc", "-shared", "-nostartfiles", "-x", "c", "/dev/null", "-x", "none", "-o", out]
    subprocess.run([*command, f"-Wl,-soname,{soname}", *arguments], check=True)


def pack(tree: Path, archive: Path) -> Path:
    """Write a tarball without a top folder, like AMD's, and return it."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(tree.iterdir()):
            tar.add(path, path.name)
    return archive

# SPDX-License-Identifier: BSD-3-Clause
"""Fail right after CMake, not hours later, if torch is not configured as intended.

usage: check_configuration.py BUILD_FOLDER CONFIGURE_LOG PREFIX GPU

torch's CMake turns off what it does not find and goes on. build.ninja says what will be compiled.
"""

import re
import sys
from pathlib import Path

# Names as in the summary that CMake prints at the end.
SUMMARY = {
    "USE_ROCM": "ON",
    "USE_CUDA": "OFF",
    "USE_FLASH_ATTENTION": "ON",
    "USE_MEM_EFF_ATTENTION": "ON",
    "USE_ROCM_CK_SDPA": "OFF",
    "USE_ROCM_CK_GEMM": "OFF",
    "USE_NUMPY": "ON",
    "USE_MKLDNN": "ON",
    "USE_NCCL": "ON",
    "USE_GLOO": "ON",
    "USE_KINETO": "ON",
    # torch turns these off by itself where it lacks something
    "USE_BLAS": "ON",
    "USE_LAPACK": "ON",
    "USE_OPENMP": "ON",
    "USE_DISTRIBUTED": "ON",
    "USE_TENSORPIPE": "ON",
    "USE_FBGEMM": "ON",
    "USE_NNPACK": "ON",
}
TRUE = {"ON", "1", "YES", "TRUE", "Y"}


def find_faults(ninja: str, log: str, prefix: str, gpu: str) -> list[str]:
    """Return what is wrong with torch's configuration, one line each.

    Args:
        ninja: The text of build.ninja and the files that it includes.
        log: The output of CMake.
        prefix: The host prefix.
        gpu: The architecture of the GPU.
    """
    faults = []
    summary = dict(re.findall(r"^--\s+(\w+)\s*: *(\S*)$", log, re.M))
    for name, expected in SUMMARY.items():
        value = summary.get(name, "not in the summary")
        is_on = value.upper() in TRUE
        if name not in summary or is_on != (expected == "ON"):
            faults.append(f"{name} is {value}, expected {expected}")
    if "Using Preinstalled AOTriton at" not in log:
        faults.append(
            "AOTriton does not come from our package (no line 'Using Preinstalled AOTriton')"
        )
    if "Using Kineto with Roctracer support" not in log or "-DHAS_ROCTRACER" not in ninja:
        faults.append("Kineto, the profiler's library, is built for the CPU alone")
    if "Found system Eigen at" not in log:
        faults.append("Eigen does not come from the environment, so it would be cloned")
    return [
        *faults,
        *find_rule_faults(ninja, gpu),
        *find_foreign_parts(ninja, prefix),
    ]


def find_rule_faults(ninja: str, gpu: str) -> list[str]:
    """Return what is wrong with what will be compiled, one line each."""
    faults = []
    architectures = set(re.findall(r"--offload-arch=(\w+)", ninja))
    if architectures != {gpu}:
        names = sorted(architectures) or "nothing"
        faults.append(f"device code for {names}, expected {gpu} only")
    for macro in ("USE_FLASH_ATTENTION", "USE_MEM_EFF_ATTENTION"):
        if f"-D{macro}" not in ninja:
            faults.append(f"nothing is compiled with -D{macro}")
    if "libaotriton_v2.so" not in ninja:
        faults.append("nothing is linked with libaotriton_v2.so")
    if "--gcc-install-dir=" not in ninja:
        faults.append("HIP files are not compiled against conda's GCC (no --gcc-install-dir)")
    for name in ("fbgemm_genai", "mslk"):
        if re.search(rf"\b(lib)?{name}\.(a|so)\b|/{name}\.dir/", ninja):
            faults.append(f"{name} is built, and has no kernel for {gpu}")
    return faults


def find_foreign_parts(ninja: str, prefix: str) -> list[str]:
    """Return what is not from the environment, one line each."""
    faults = []
    # ExternalProject marks each of its downloads with a stamp
    stamps = set(re.findall(r"\S*-stamp/([\w.+-]+)-download\b", ninja))
    for stamp in sorted(stamps):
        faults.append(f"{stamp} would be downloaded during the build")
    rocm = f"{prefix}/opt/rocm"
    outside = re.search(r"\S*/opt/rocm\S*", ninja.replace(rocm, ""))
    if outside:
        faults.append(f"a ROCm outside the environment is used: {outside[0]}")
    if f"{rocm}/lib/llvm/bin/clang++" not in ninja:
        faults.append(f"the HIP compiler is not the one of {rocm}")
    return faults


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__.split("\n\n")[1])
    folder, log_file, prefix, gpu = sys.argv[1:]
    # CMake divides build.ninja: rules.ninja holds the compilers
    parts = [*Path(folder).glob("*.ninja"), *Path(folder).glob("CMakeFiles/*.ninja")]
    if not parts:
        sys.exit(f"{folder} has no build.ninja: CMake did not finish")
    ninja = "\n".join(part.read_text() for part in parts)
    faults = find_faults(ninja, Path(log_file).read_text(), prefix, gpu)
    for fault in faults:
        print(f"configuration: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"configuration: {gpu} only, with our AOTriton, nothing to download")

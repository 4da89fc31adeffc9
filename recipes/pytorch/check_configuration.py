# SPDX-License-Identifier: BSD-3-Clause
"""Check right after CMake that torch is configured as intended.

usage: check_configuration.py BUILD_FOLDER CONFIGURE_LOG PREFIX GPU

If torch's CMake does not find a requirement, it turns a feature off and continues. Without this
check, that would be noticed only after hours. The faults are found in CMake's log and in
build.ninja, which lists all compiler commands.
"""

import re
import sys
from pathlib import Path

# Values in the summary that CMake prints at the end.
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
    # torch turns these off if a requirement is missing
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
    """Return the faults of torch's configuration, one line each.

    Args:
        ninja: The text of build.ninja and of the files that it includes.
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
        faults.append("Kineto, the profiler's library, is not built for the GPU")
    if "Found system Eigen at" not in log:
        faults.append("Eigen does not come from the environment, so it would be cloned")
    return [
        *faults,
        *find_rule_faults(ninja, gpu),
        *find_foreign_parts(ninja, prefix),
    ]


def find_rule_faults(ninja: str, gpu: str) -> list[str]:
    """Return the faults of the compiler and linker commands, one line each."""
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
            faults.append(f"{name} is built, although it has no kernel for {gpu}")
    return faults


def find_foreign_parts(ninja: str, prefix: str) -> list[str]:
    """Return a line for each part of the build that does not come from the environment."""
    faults = []
    # CMake's ExternalProject has a stamp file for each download.
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
    # CMake also writes rules.ninja, which has the compilers.
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

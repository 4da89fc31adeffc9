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
    # torch turns these off by itself where it finds something wanting
    "USE_BLAS": "ON",
    "USE_LAPACK": "ON",
    "USE_OPENMP": "ON",
    "USE_DISTRIBUTED": "ON",
    "USE_TENSORPIPE": "ON",
    "USE_FBGEMM": "ON",
    "USE_NNPACK": "ON",
}
TRUE = {"ON", "1", "YES", "TRUE", "Y"}


def wrong(ninja: str, log: str, prefix: str, gpu: str) -> list[str]:
    """What is wrong, by build.ninja, CMake's output, the host prefix and the GPU."""
    found = []
    summary = dict(re.findall(r"^--\s+(\w+)\s*: *(\S*)$", log, re.M))
    for name, expected in SUMMARY.items():
        value = summary.get(name, "not in the summary")
        if name not in summary or (value.upper() in TRUE) != (expected == "ON"):
            found.append(f"{name} is {value}, expected {expected}")
    if "Using Preinstalled AOTriton at" not in log:
        found.append(
            "AOTriton does not come from our package (no line 'Using Preinstalled AOTriton')"
        )
    if "Using Kineto with Roctracer support" not in log or "-DHAS_ROCTRACER" not in ninja:
        found.append("Kineto, the profiler's library, is built for the CPU alone")
    if "Found system Eigen at" not in log:
        found.append("Eigen does not come from the environment, so it would be cloned")
    return found + wrong_rules(ninja, prefix, gpu)


def wrong_rules(ninja: str, prefix: str, gpu: str) -> list[str]:
    """What is wrong by build.ninja alone."""
    found = []
    architectures = set(re.findall(r"--offload-arch=(\w+)", ninja))
    if architectures != {gpu}:
        found.append(f"device code for {sorted(architectures) or 'nothing'}, expected {gpu} only")
    macros = ("USE_FLASH_ATTENTION", "USE_MEM_EFF_ATTENTION")
    found += [f"nothing is compiled with -D{m}" for m in macros if f"-D{m}" not in ninja]
    if "libaotriton_v2.so" not in ninja:
        found.append("nothing is linked with libaotriton_v2.so")
    if "--gcc-install-dir=" not in ninja:
        found.append("HIP files are not compiled against conda's GCC (no --gcc-install-dir)")
    found += [
        f"{name} is built, and has no kernel for {gpu}"
        for name in ("fbgemm_genai", "mslk")
        if re.search(rf"\b(lib)?{name}\.(a|so)\b|/{name}\.dir/", ninja)
    ]
    # ExternalProject marks each of its downloads with a stamp
    stamps = sorted(set(re.findall(r"\S*-stamp/([\w.+-]+)-download\b", ninja)))
    found += [f"{stamp} would be downloaded during the build" for stamp in stamps]
    ours = f"{prefix}/opt/rocm"
    if outside := re.search(r"\S*/opt/rocm\S*", ninja.replace(ours, "")):
        found.append(f"a ROCm outside the environment is used: {outside[0]}")
    if f"{ours}/lib/llvm/bin/clang++" not in ninja:
        found.append(f"the HIP compiler is not the one of {ours}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__.split("\n\n")[1])
    # CMake divides build.ninja: rules.ninja holds the compilers
    parts = [*Path(sys.argv[1]).glob("*.ninja"), *Path(sys.argv[1]).glob("CMakeFiles/*.ninja")]
    if not parts:
        sys.exit(f"{sys.argv[1]} has no build.ninja: CMake did not finish")
    text = "\n".join(part.read_text() for part in parts)
    reasons = wrong(text, Path(sys.argv[2]).read_text(), *sys.argv[3:])
    for reason in reasons:
        print(f"configuration: {reason}", file=sys.stderr)
    if reasons:
        sys.exit(1)
    print(f"configuration: {sys.argv[4]} only, with our AOTriton, nothing to download")

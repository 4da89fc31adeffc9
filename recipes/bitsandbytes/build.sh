#!/usr/bin/env bash
set -euo pipefail

# Activating rocm-sdk-devel sets the compiler, the device libraries and the GPU. CMake reads additional options for HIP
# from HIPFLAGS. Without the two options below, clang would use the headers of the system's GCC.
HIPFLAGS="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPFLAGS="$HIPFLAGS --sysroot=$("$CXX" -print-sysroot)"
export HIPFLAGS
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

# Build the library for the CPU as well, because `import bitsandbytes` loads it if torch finds no GPU.
for backend in hip cpu; do
    # shellcheck disable=SC2086
    cmake -S . -B "build-$backend" -G Ninja ${CMAKE_ARGS:-} -DCMAKE_BUILD_TYPE=Release \
        -DCOMPUTE_BACKEND="$backend" -DBNB_ROCM_ARCH="$PYTORCH_ROCM_ARCH"
    cmake --build "build-$backend" --parallel "$MAX_JOBS"
done
BNB_SKIP_CMAKE=1 "$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

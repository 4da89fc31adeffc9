#!/usr/bin/env bash
set -euo pipefail

# The activation of rocm-sdk-devel sets compiler, device libraries and the GPU.
# CMake reads HIP's flags from here; without them clang takes the headers of the machine's own GCC
HIPFLAGS="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPFLAGS="$HIPFLAGS --sysroot=$("$CXX" -print-sysroot)"
export HIPFLAGS
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

# cpu as well: import asks for that library where torch sees no GPU
for backend in hip cpu; do
    # shellcheck disable=SC2086
    cmake -S . -B "build-$backend" -G Ninja ${CMAKE_ARGS:-} -DCMAKE_BUILD_TYPE=Release \
        -DCOMPUTE_BACKEND="$backend" -DBNB_ROCM_ARCH="$PYTORCH_ROCM_ARCH"
    cmake --build "build-$backend" --parallel "$MAX_JOBS"
done
BNB_SKIP_CMAKE=1 "$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

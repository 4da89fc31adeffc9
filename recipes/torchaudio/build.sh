#!/usr/bin/env bash
set -euo pipefail

# Activating rocm-sdk-devel sets the compiler, the device libraries and the GPU. Without the two additional options
# below, hipcc's clang would use the headers of the system's GCC.
HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPCC_COMPILE_FLAGS_APPEND+=" --sysroot=$("$CXX" -print-sysroot)"
export HIPCC_COMPILE_FLAGS_APPEND
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

# the same options as in TheRock's build
export USE_ROCM=1 USE_CUDA=0 USE_OPENMP=1
# Leave out a decoder for NVIDIA GPUs, and the readers of files, which torchcodec has replaced.
export BUILD_CUDA_CTC_DECODER=0 BUILD_SOX=0 USE_FFMPEG=0
export BUILD_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

#!/usr/bin/env bash
set -euo pipefail

# Activating rocm-sdk-devel sets the compiler, the device libraries and the GPU. These options are additionally
# necessary: without them, hipcc's clang would use the headers of the system's GCC.
HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPCC_COMPILE_FLAGS_APPEND+=" --sysroot=$("$CXX" -print-sysroot)"
export HIPCC_COMPILE_FLAGS_APPEND
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

# build HIP operators on a machine without a GPU
export FORCE_CUDA=1
export TORCHVISION_INCLUDE="$PREFIX/include" TORCHVISION_LIBRARY="$PREFIX/lib"
# Hardware decoders: two are NVIDIA's. rocJPEG is in the SDK, but off in upstream's wheels for ROCm
# too, and nothing here can execute it; setup.py takes it wherever its header is.
export TORCHVISION_USE_NVJPEG=0 TORCHVISION_USE_ROCJPEG=0 TORCHVISION_USE_VIDEO_CODEC=0
export BUILD_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

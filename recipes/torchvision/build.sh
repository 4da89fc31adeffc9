#!/usr/bin/env bash
set -euo pipefail

# Activating rocm-sdk-devel sets the compiler, the device libraries and the GPU. Without the two additional options
# below, hipcc's clang would use the headers of the system's GCC.
HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPCC_COMPILE_FLAGS_APPEND+=" --sysroot=$("$CXX" -print-sysroot)"
export HIPCC_COMPILE_FLAGS_APPEND
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

# Build the HIP operators even if this machine has no GPU.
export FORCE_CUDA=1
export TORCHVISION_INCLUDE="$PREFIX/include" TORCHVISION_LIBRARY="$PREFIX/lib"
# Leave out the three hardware decoders. Two of them are for NVIDIA's GPUs. The third is rocJPEG, which setup.py would
# use, because the SDK has its header. Upstream's wheels for ROCm leave out rocJPEG too, and no test could execute it.
export TORCHVISION_USE_NVJPEG=0 TORCHVISION_USE_ROCJPEG=0 TORCHVISION_USE_VIDEO_CODEC=0
export BUILD_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

#!/usr/bin/env bash
set -euo pipefail

# Compiler, device libraries and gfx1151 come with the activation of rocm-sdk-devel.
# hipcc's clang otherwise takes the headers of the machine's own GCC
HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPCC_COMPILE_FLAGS_APPEND+=" --sysroot=$("$CXX" -print-sysroot)"
export HIPCC_COMPILE_FLAGS_APPEND
export MAX_JOBS="$CPU_COUNT"

# HIP operators, although the build machine has no GPU
export FORCE_CUDA=1
export TORCHVISION_INCLUDE="$PREFIX/include" TORCHVISION_LIBRARY="$PREFIX/lib"
# hardware decoders: what they need is not in the SDK, and found by chance elsewhere
export TORCHVISION_USE_NVJPEG=0 TORCHVISION_USE_ROCJPEG=0 TORCHVISION_USE_VIDEO_CODEC=0
export BUILD_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

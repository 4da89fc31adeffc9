#!/usr/bin/env bash
set -euo pipefail

# torch's CMake files enable HIP, although no file of torchcodec is HIP code. Without the flags below, clang would use
# the headers of the system's GCC or find none, and CMake's check of the HIP compiler would fail.
HIPFLAGS="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPFLAGS="$HIPFLAGS --sysroot=$("$CXX" -print-sysroot)"
export HIPFLAGS
export CMAKE_PREFIX_PATH="$PREFIX:$PREFIX/opt/rocm/lib/cmake:$PREFIX/opt/rocm"
export CMAKE_GENERATOR=Ninja CMAKE_BUILD_TYPE=Release CMAKE_BUILD_PARALLEL_LEVEL="$CPU_COUNT"
# CMake would look for pkg-config first in CMAKE_PREFIX_PATH, where FFmpeg's requirements may have installed another
# one.
export PKG_CONFIG="$BUILD_PREFIX/bin/pkg-config"

# Use the FFmpeg in the host environment, the LGPL variant. Without this variable, the build would download FFmpeg.
export I_CONFIRM_THIS_IS_NOT_A_LICENSE_VIOLATION=1
# Leave out the GPU decoders, because they are for NVIDIA's GPUs, and AMD's port of them has not been released.
export ENABLE_CUDA=0
# Leave out image decoders, because torchvision has them, and AVIF's decoder would download its library.
export TORCHCODEC_BUILD_IMAGE=0
# Do not treat warnings as errors, because our compiler is newer than upstream's and prints more warnings.
export TORCHCODEC_DISABLE_COMPILE_WARNING_AS_ERROR=ON

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

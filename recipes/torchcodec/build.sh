#!/usr/bin/env bash
set -euo pipefail

# torch's CMake files enable HIP, although nothing is compiled with it. Without these flags clang
# takes the headers of the machine's own GCC, or finds none, and CMake's check of it fails.
HIPFLAGS="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPFLAGS="$HIPFLAGS --sysroot=$("$CXX" -print-sysroot)"
export HIPFLAGS
export CMAKE_PREFIX_PATH="$PREFIX:$PREFIX/opt/rocm/lib/cmake:$PREFIX/opt/rocm"
export CMAKE_GENERATOR=Ninja CMAKE_BUILD_TYPE=Release CMAKE_BUILD_PARALLEL_LEVEL="$CPU_COUNT"
# CMake looks for programs in CMAKE_PREFIX_PATH first, where FFmpeg's requirements may have another
export PKG_CONFIG="$BUILD_PREFIX/bin/pkg-config"

# FFmpeg of the host environment, its LGPL variant; upstream would download its own
export I_CONFIRM_THIS_IS_NOT_A_LICENSE_VIOLATION=1
# decoders of NVIDIA's GPUs; AMD's port is no release yet
export ENABLE_CUDA=0
# torchvision decodes images; the build of AVIF's decoder would download its library
export TORCHCODEC_BUILD_IMAGE=0
# a newer compiler than upstream's warns of more
export TORCHCODEC_DISABLE_COMPILE_WARNING_AS_ERROR=ON

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

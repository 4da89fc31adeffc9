#!/usr/bin/env bash
set -euo pipefail

# the SDK of the host environment, whatever the machine has in /opt/rocm
export ROCM_PATH="$PREFIX/opt/rocm" ROCM_HOME="$PREFIX/opt/rocm"
export HIP_DEVICE_LIB_PATH="$ROCM_PATH/lib/llvm/amdgcn/bitcode"
# hipcc's clang otherwise takes the headers of the machine's own GCC
HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPCC_COMPILE_FLAGS_APPEND+=" --sysroot=$("$CXX" -print-sysroot)"
export HIPCC_COMPILE_FLAGS_APPEND
export PYTORCH_ROCM_ARCH=gfx1151
export MAX_JOBS="$CPU_COUNT"

# TheRock's switches
export USE_ROCM=1 USE_CUDA=0 USE_OPENMP=1
# an NVIDIA decoder, and readers that upstream dropped in favour of torchcodec
export BUILD_CUDA_CTC_DECODER=0 BUILD_SOX=0 USE_FFMPEG=0
export BUILD_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

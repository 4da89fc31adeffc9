#!/usr/bin/env bash
set -euo pipefail

# the SDK of the host environment, whatever the machine has in /opt/rocm
export ROCM_PATH="$PREFIX/opt/rocm" ROCM_HOME="$PREFIX/opt/rocm"
# torch's CMake files take the compiler from here
export HIP_CLANG_PATH="$ROCM_PATH/lib/llvm/bin"
export HIP_DEVICE_LIB_PATH="$ROCM_PATH/lib/llvm/amdgcn/bitcode"
# CMake's name for HIP's flags; clang otherwise takes the headers of the machine's own GCC
HIPFLAGS="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
export HIPFLAGS="$HIPFLAGS --sysroot=$("$CXX" -print-sysroot)"
# setup.py splits it on blanks
export CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_HIP_ARCHITECTURES=gfx1151"
export CMAKE_PREFIX_PATH="$PREFIX:$ROCM_PATH"
export CMAKE_BUILD_TYPE=Release VERBOSE=1 VLLM_DISABLE_SCCACHE=1

export VLLM_TARGET_DEVICE=rocm
# without it, the GPU of the build machine decides
export PYTORCH_ROCM_ARCH=gfx1151
# the sdist has no git history; this also leaves out the suffix +rocm
export VLLM_VERSION_OVERRIDE="$PKG_VERSION"
# the only thing that CMake would download
export TRITON_KERNELS_SRC_DIR="$SRC_DIR/triton/python/triton_kernels/triton_kernels"
test -f "$TRITON_KERNELS_SRC_DIR/__init__.py"
export MAX_JOBS="$CPU_COUNT"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

#!/usr/bin/env bash
set -euo pipefail

# Activating rocm-sdk-devel sets the compiler, the device libraries and the GPU. CMake reads additional options for HIP
# from HIPFLAGS. Without the two options below, clang would use the headers of the system's GCC.
HIPFLAGS="--gcc-install-dir=$(dirname "$("$CXX" -print-libgcc-file-name)")"
HIPFLAGS="$HIPFLAGS --sysroot=$("$CXX" -print-sysroot)"
export HIPFLAGS
# setup.py splits CMAKE_ARGS at blanks, so no argument may contain one.
export CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_HIP_ARCHITECTURES=$PYTORCH_ROCM_ARCH"
export CMAKE_BUILD_TYPE=Release VERBOSE=1 VLLM_DISABLE_SCCACHE=1

export VLLM_TARGET_DEVICE=rocm
# Set the version, because the sdist has no git history from which setup.py could read it. As a side effect, setup.py
# does not add the suffix +rocm.
export VLLM_VERSION_OVERRIDE="$PKG_VERSION"
# Without this, CMake would download triton_kernels. It downloads nothing else.
export TRITON_KERNELS_SRC_DIR="$SRC_DIR/triton/python/triton_kernels/triton_kernels"
test -f "$TRITON_KERNELS_SRC_DIR/__init__.py"
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

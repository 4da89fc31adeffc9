# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash disable=SC2034  # build.sh reads these
# torch's build options. Each is passed to CMake as -D, and to setup.py through the environment. The
# -D are needed: in 2.13 CMake's own forwarding takes the environment for one list, so that a value
# with a semicolon (CMAKE_ARGS has one) can swallow others (pytorch/pytorch#190800).
export ROCM_PATH="$PREFIX/opt/rocm"
export HIP_CLANG_PATH="$ROCM_PATH/lib/llvm/bin"
export HIP_DEVICE_LIB_PATH="$ROCM_PATH/lib/llvm/amdgcn/bitcode"
export PYTORCH_ROCM_ARCH="$GPU_ARCH"
export AOTRITON_INSTALLED_PREFIX="$SRC_DIR/aotriton"
export PYTORCH_BUILD_VERSION="$TORCH_VERSION" PYTORCH_BUILD_NUMBER=0

# shellcheck source=recipes/pytorch/gcc_view.sh
source "$RECIPE_DIR/gcc_view.sh"

switches=(
    BUILD_PYTHON=ON BUILD_TEST=OFF INSTALL_TEST=OFF
    USE_ROCM=ON USE_CUDA=OFF USE_XPU=OFF
    USE_FLASH_ATTENTION=ON USE_MEM_EFF_ATTENTION=ON
    # Composable Kernel's attention and products, and MSLK (what FBGEMM GenAI became): gfx9 only
    USE_ROCM_CK_SDPA=OFF USE_ROCM_CK_GEMM=OFF USE_MSLK=OFF
    # hipSOLVER replaces MAGMA, which torch deprecates and AMD's own builds leave out. It would bring
    # linalg.eig and eigvals alone (ldl_solve wants cuSOLVER either way), computed on a copy in the CPU's
    # memory, as `.cpu()` does; and cost 494 HIP files more, and a patch: its build knows no gfx11.
    USE_MAGMA=OFF
    USE_KINETO=ON USE_GLOO=ON USE_NCCL=ON USE_SYSTEM_NCCL=ON USE_MPI=OFF
    USE_NUMA=OFF USE_ITT=OFF USE_NUMPY=ON USE_MKLDNN=ON
    # not in the archive: CMake would clone it
    USE_SYSTEM_EIGEN_INSTALL=ON
    # extensions of several packages share one pybind11
    USE_SYSTEM_PYBIND11=ON
    BLAS=OpenBLAS
)
export "${switches[@]}"
options=(
    "${switches[@]}"
    CMAKE_BUILD_TYPE=Release
    CMAKE_INSTALL_PREFIX="$SRC_DIR/torch"
    CMAKE_PREFIX_PATH="$PREFIX;$ROCM_PATH"
    Python_EXECUTABLE="$PYTHON"
    TORCH_BUILD_VERSION="$TORCH_VERSION"
    # conda's stubs are three libraries, and FindOpenBLAS looks for one
    OpenBLAS_INCLUDE_DIR="$PREFIX/include"
    OpenBLAS_LIB="$PREFIX/lib/liblapack.so;$PREFIX/lib/libcblas.so;$PREFIX/lib/libblas.so"
    # Eigen 5's CMake files set neither variable, and torch 2.13 would clone its own Eigen
    # (pytorch/pytorch#188793 is later); the recipe pins Eigen 3, and these hold for both
    EIGEN3_FOUND=ON
    EIGEN3_INCLUDE_DIR="$PREFIX/include/eigen3"
    # complex dot products by the interface that every BLAS returns in the same way
    BLAS_USE_CBLAS_DOT=ON
    # A kernel for the CPU is compiled from a generated file, which includes the source by its path. With
    # the folder of this build in it, ccache finds none of these objects, the costliest of torch_cpu, in
    # another folder.
    USE_RELATIVE_PATHS=ON
    CMAKE_C_COMPILER_LAUNCHER=ccache
    CMAKE_CXX_COMPILER_LAUNCHER=ccache
    CMAKE_HIP_COMPILER_LAUNCHER=ccache
    CMAKE_HIP_FLAGS="--gcc-install-dir=$gcc_view --sysroot=$CONDA_BUILD_SYSROOT"
)

# for hipcc itself, which older gloo compiles with
export HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$gcc_view --sysroot=$CONDA_BUILD_SYSROOT"
export HIPCC_LINK_FLAGS_APPEND="$HIPCC_COMPILE_FLAGS_APPEND"

# conda-forge's exceptions from its own flags: torch sets the standard itself, links libraries whose
# symbols only other libraries use, and has libraries whose symbols are found at their first call
# (-z lazy). No file of torch needs an executable stack, and newer glibc refuses to load one.
CXXFLAGS=${CXXFLAGS//-std=c++[0-9][0-9]/}
LDFLAGS=${LDFLAGS//-Wl,--as-needed/}
export LDFLAGS="${LDFLAGS//-Wl,-z,now/} -Wl,-z,lazy -Wl,-z,noexecstack"
# FBGEMM and Kineto turn warnings into errors, and GCC 12 warns by mistake of values that AVX-512
# intrinsics leave undefined. TheRock's build of torch has these three, conda-forge's the first. GCC
# 14.4 gives none of them (docs/evidence/2026-11-25-rehearsal-pytorch.md).
no_errors="-Wno-error=maybe-uninitialized -Wno-error=uninitialized -Wno-error=restrict"
export CFLAGS="${CFLAGS:-} $no_errors"
CXXFLAGS+=" $no_errors"
# headers that the SDK's own headers include without their folder
export CXXFLAGS+=" -isystem $ROCM_PATH/include/roctracer -isystem $ROCM_PATH/lib/rocm_sysdeps/include"
# with the source tree not among the roots, CMake does not find the oneDNN in it
CMAKE_ARGS=${CMAKE_ARGS//-DCMAKE_FIND_ROOT_PATH=/-DCMAKE_FIND_ROOT_PATH=$SRC_DIR;}

# shellcheck source=recipes/checks/ccache.sh
source checks/ccache.sh
# ccache rewrites no path inside --option=path, so no HIP object of an earlier attempt was ever found:
# these options are left out of the key. The device libraries change only with rocm-sdk, and so with the
# compiler. Its bytes do not say which HIP compiler it is: clang++ is a driver of 130 kB, and the rest is
# in libraries. So its version is part of the key.
hip_clang=$("$HIP_CLANG_PATH/clang++" --version)
export CCACHE_NAMESPACE="${hip_clang%%$'\n'*}"
export CCACHE_IGNOREOPTIONS="--rocm-device-lib-path=* --gcc-install-dir=*"

# setup.py runs ninja again, with MAX_JOBS
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

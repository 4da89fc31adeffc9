# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash disable=SC2034  # build.sh reads these
# torch's build options. Each is passed to CMake as a -D option, and to setup.py through the environment. The -D options
# are necessary, because torch 2.13's CMake reads the environment as one list. A value with a semicolon, as in
# CMAKE_ARGS, can then hide other options (pytorch/pytorch#190800).
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
    # Composable Kernel's attention and matrix products, and MSLK (formerly FBGEMM GenAI), support only gfx9.
    USE_ROCM_CK_SDPA=OFF USE_ROCM_CK_GEMM=OFF USE_MSLK=OFF
    # hipSOLVER replaces MAGMA, which is deprecated in torch and not in AMD's builds. MAGMA would only add linalg.eig and
    # eigvals, which it computes on a copy in the CPU's memory, like `.cpu()`. (ldl_solve needs cuSOLVER in any case.) It
    # would cost 494 more HIP files, and a patch, because its build does not support gfx11.
    USE_MAGMA=OFF
    USE_KINETO=ON USE_GLOO=ON USE_NCCL=ON USE_SYSTEM_NCCL=ON USE_MPI=OFF
    USE_NUMA=OFF USE_ITT=OFF USE_NUMPY=ON USE_MKLDNN=ON
    # the archive does not contain Eigen, so CMake would clone it
    USE_SYSTEM_EIGEN_INSTALL=ON
    # extensions of several packages must use the same pybind11
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
    # conda-forge's BLAS stubs are three libraries, but FindOpenBLAS looks for one.
    OpenBLAS_INCLUDE_DIR="$PREFIX/include"
    OpenBLAS_LIB="$PREFIX/lib/liblapack.so;$PREFIX/lib/libcblas.so;$PREFIX/lib/libblas.so"
    # Eigen 5's CMake files do not set these variables, and without them torch 2.13 would clone Eigen
    # (pytorch/pytorch#188793 fixes that later). The recipe pins Eigen 3, but these values are right for both versions.
    EIGEN3_FOUND=ON
    EIGEN3_INCLUDE_DIR="$PREFIX/include/eigen3"
    # Compute complex dot products with CBLAS, because Fortran BLAS libraries return them in different ways.
    BLAS_USE_CBLAS_DOT=ON
    # Each kernel for the CPU is compiled from a generated file, which includes the source by its path. With absolute
    # paths, ccache would not find these objects, the most expensive ones of torch_cpu, in another build folder.
    USE_RELATIVE_PATHS=ON
    CMAKE_C_COMPILER_LAUNCHER=ccache
    CMAKE_CXX_COMPILER_LAUNCHER=ccache
    CMAKE_HIP_COMPILER_LAUNCHER=ccache
    CMAKE_HIP_FLAGS="--gcc-install-dir=$gcc_view --sysroot=$CONDA_BUILD_SYSROOT"
)

# the same options for hipcc, with which older gloo is compiled
export HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$gcc_view --sysroot=$CONDA_BUILD_SYSROOT"
export HIPCC_LINK_FLAGS_APPEND="$HIPCC_COMPILE_FLAGS_APPEND"

# conda-forge's pytorch makes the same exceptions from its usual flags. torch sets the C++ standard itself. It links
# libraries whose symbols only other libraries use (no --as-needed), and has symbols that are resolved at their first
# call (-z lazy). -z noexecstack: no file of torch needs an executable stack, and newer glibc refuses to load such files.
CXXFLAGS=${CXXFLAGS//-std=c++[0-9][0-9]/}
LDFLAGS=${LDFLAGS//-Wl,--as-needed/}
export LDFLAGS="${LDFLAGS//-Wl,-z,now/} -Wl,-z,lazy -Wl,-z,noexecstack"
# FBGEMM and Kineto turn warnings into errors, and GCC 12 wrongly warns about values that AVX-512 intrinsics leave
# undefined. TheRock's build of torch has these three options, and conda-forge's has the first one. GCC 14.4 prints none
# of these warnings (docs/evidence/2026-11-25-rehearsal-pytorch.md).
no_errors="-Wno-error=maybe-uninitialized -Wno-error=uninitialized -Wno-error=restrict"
export CFLAGS="${CFLAGS:-} $no_errors"
CXXFLAGS+=" $no_errors"
# folders of headers that the SDK's own headers include without the folder
export CXXFLAGS+=" -isystem $ROCM_PATH/include/roctracer -isystem $ROCM_PATH/lib/rocm_sysdeps/include"
# Add the source tree to CMake's roots, so that CMake finds the oneDNN in it.
CMAKE_ARGS=${CMAKE_ARGS//-DCMAKE_FIND_ROOT_PATH=/-DCMAKE_FIND_ROOT_PATH=$SRC_DIR;}

# shellcheck source=recipes/checks/ccache.sh
source checks/ccache.sh
# ccache does not make paths in --option=path relative, so it would find no HIP object of an earlier build. Leave these
# options out of the key. This is safe, because the device libraries change only with rocm-sdk, and so together with the
# compiler. The content of clang++ does not identify the HIP compiler: it is a driver of 130 kB, and the compiler is in
# libraries. So the key includes the compiler's version.
hip_clang=$("$HIP_CLANG_PATH/clang++" --version)
export CCACHE_NAMESPACE="${hip_clang%%$'\n'*}"
export CCACHE_IGNOREOPTIONS="--rocm-device-lib-path=* --gcc-install-dir=*"

# setup.py runs ninja again, with MAX_JOBS
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

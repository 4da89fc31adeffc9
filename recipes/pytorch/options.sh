# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash disable=SC2034  # build.sh reads these
# torch's build options. Each option is passed to CMake with -D. Those in `switches` are also passed to setup.py as
# environment variables. The -D options are necessary, because torch 2.13's CMake files read all environment variables
# as one list. If a variable such as CMAKE_ARGS has a semicolon in its value, other variables can be lost
# (pytorch/pytorch#190800).
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
    # hipSOLVER replaces MAGMA, which torch has deprecated, and which AMD's builds leave out. MAGMA would add only the
    # functions linalg.eig and eigvals, and it computes both on the CPU, as a user can do with `.cpu()`. (ldl_solve
    # would still be missing, because it needs cuSOLVER.) MAGMA would add 494 HIP files to the build, and a patch,
    # because its build files do not support gfx11.
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

# hipcc compiles gloo in older versions of torch. Give hipcc the same flags as in CMAKE_HIP_FLAGS.
export HIPCC_COMPILE_FLAGS_APPEND="--gcc-install-dir=$gcc_view --sysroot=$CONDA_BUILD_SYSROOT"
export HIPCC_LINK_FLAGS_APPEND="$HIPCC_COMPILE_FLAGS_APPEND"

# Change some of conda's usual flags, as conda-forge's pytorch does. -std is removed, because torch sets the C++
# standard itself. --as-needed is removed, because torch links libraries whose symbols only other libraries use. -z now
# becomes -z lazy, because some symbols can be resolved only at their first call. -z noexecstack is added, because newer
# versions of glibc refuse to load files with an executable stack, and no file of torch needs one.
CXXFLAGS=${CXXFLAGS//-std=c++[0-9][0-9]/}
LDFLAGS=${LDFLAGS//-Wl,--as-needed/}
export LDFLAGS="${LDFLAGS//-Wl,-z,now/} -Wl,-z,lazy -Wl,-z,noexecstack"
# FBGEMM and Kineto turn warnings into errors, and GCC 12 wrongly warns about values that AVX-512 intrinsics leave
# undefined. TheRock's build of torch has these three options, and conda-forge's has the first one. GCC 14.4 prints none
# of these warnings (docs/evidence/2026-11-25-rehearsal-pytorch.md).
no_errors="-Wno-error=maybe-uninitialized -Wno-error=uninitialized -Wno-error=restrict"
export CFLAGS="${CFLAGS:-} $no_errors"
CXXFLAGS+=" $no_errors"
# Add two folders to the include path, because the SDK's own headers include headers in them by name only.
export CXXFLAGS+=" -isystem $ROCM_PATH/include/roctracer -isystem $ROCM_PATH/lib/rocm_sysdeps/include"
# Add the source tree to CMake's roots, so that CMake finds the oneDNN in it.
CMAKE_ARGS=${CMAKE_ARGS//-DCMAKE_FIND_ROOT_PATH=/-DCMAKE_FIND_ROOT_PATH=$SRC_DIR;}

# shellcheck source=recipes/checks/ccache.sh
source checks/ccache.sh
# ccache does not make the path in --OPTION=PATH relative, so it would find no HIP object of an earlier build. Leave the
# two options with such paths out of ccache's key. This is safe, because the device libraries change only with rocm-sdk,
# and so together with the compiler. The content of clang++ does not identify the HIP compiler, because clang++ is a
# driver of 130 kB that loads the compiler from libraries. So the key includes the compiler's version instead.
hip_clang=$("$HIP_CLANG_PATH/clang++" --version)
export CCACHE_NAMESPACE="${hip_clang%%$'\n'*}"
export CCACHE_IGNOREOPTIONS="--rocm-device-lib-path=* --gcc-install-dir=*"

# Set MAX_JOBS for build.sh, and for setup.py, which runs ninja again.
# shellcheck source=recipes/checks/max_jobs.sh
source checks/max_jobs.sh

# Set variables for compilers and CMake. The runtime packages do not set these variables, because programs do not
# need them, and because ROCM_PATH changes the folders in which every clang looks for ROCm.
_rocm_sdk_set() {
    eval "export _ROCM_SDK_HAD_$1=\"\${$1+x}\" _ROCM_SDK_OLD_$1=\"\${$1-}\""
    export "$1=$2"
}
_rocm_sdk_set ROCM_PATH "$CONDA_PREFIX/opt/rocm"
_rocm_sdk_set HIP_PATH "$ROCM_PATH"
_rocm_sdk_set HIP_PLATFORM amd
_rocm_sdk_set HIP_CLANG_PATH "$ROCM_PATH/lib/llvm/bin"
# If only ROCM_PATH were set, clang would use an older copy of the device libraries (ROCm/TheRock#2708).
_rocm_sdk_set HIP_DEVICE_LIB_PATH "$ROCM_PATH/lib/llvm/amdgcn/bitcode"
_rocm_sdk_set PYTORCH_ROCM_ARCH @GPU_ARCH@
_rocm_sdk_set CMAKE_PREFIX_PATH "$ROCM_PATH/lib/cmake:$ROCM_PATH${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
export PATH="$ROCM_PATH/bin:$ROCM_PATH/lib/llvm/bin:$PATH"
# Without these options, ROCm's clang would use the system's GCC, whose headers do not match conda's libraries.
# --gcc-triple is necessary because clang does not know conda's triple. Without it, clang finds no GCC in
# CONDA_PREFIX, and no <cmath>.
if [ -d "$CONDA_PREFIX/x86_64-conda-linux-gnu/sysroot" ]; then
    _rocm_sdk_flags="--gcc-toolchain=$CONDA_PREFIX --gcc-triple=x86_64-conda-linux-gnu"
    _rocm_sdk_flags="$_rocm_sdk_flags --sysroot=$CONDA_PREFIX/x86_64-conda-linux-gnu/sysroot"
    _rocm_sdk_set HIPCC_COMPILE_FLAGS_APPEND "$_rocm_sdk_flags"
    _rocm_sdk_set HIPCC_LINK_FLAGS_APPEND "$_rocm_sdk_flags"
    unset _rocm_sdk_flags
fi
unset -f _rocm_sdk_set

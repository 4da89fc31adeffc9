# For compilers and CMake. Not in the runtime packages: ROCM_PATH changes where clang looks, and
# programs need none of this.
_rocm_sdk_set() {
    eval "export _ROCM_SDK_HAD_$1=\"\${$1+x}\" _ROCM_SDK_OLD_$1=\"\${$1-}\""
    export "$1=$2"
}
_rocm_sdk_set ROCM_PATH "$CONDA_PREFIX/opt/rocm"
_rocm_sdk_set HIP_PATH "$ROCM_PATH"
_rocm_sdk_set HIP_PLATFORM amd
_rocm_sdk_set HIP_CLANG_PATH "$ROCM_PATH/lib/llvm/bin"
# with ROCM_PATH set, clang defaults to an older second copy (ROCm/TheRock#2708)
_rocm_sdk_set HIP_DEVICE_LIB_PATH "$ROCM_PATH/lib/llvm/amdgcn/bitcode"
_rocm_sdk_set PYTORCH_ROCM_ARCH @GPU_ARCH@
_rocm_sdk_set CMAKE_PREFIX_PATH "$ROCM_PATH/lib/cmake:$ROCM_PATH${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
_rocm_sdk_set PATH "$ROCM_PATH/bin:$ROCM_PATH/lib/llvm/bin:$PATH"
# Otherwise the bundled clang finds the host's GCC, whose headers do not match conda's libraries. It
# does not know conda's triple: without its name no GCC below CONDA_PREFIX is found, and no <cmath>.
if [ -d "$CONDA_PREFIX/x86_64-conda-linux-gnu/sysroot" ]; then
    _rocm_sdk_flags="--gcc-toolchain=$CONDA_PREFIX --gcc-triple=x86_64-conda-linux-gnu"
    _rocm_sdk_flags="$_rocm_sdk_flags --sysroot=$CONDA_PREFIX/x86_64-conda-linux-gnu/sysroot"
    _rocm_sdk_set HIPCC_COMPILE_FLAGS_APPEND "$_rocm_sdk_flags"
    _rocm_sdk_set HIPCC_LINK_FLAGS_APPEND "$_rocm_sdk_flags"
    unset _rocm_sdk_flags
fi
unset -f _rocm_sdk_set

# Remove our folders from PATH, instead of restoring its old value. conda and micromamba remove the environment's bin
# from PATH before they run this script, and the old value would put it back.
_rocm_sdk_folders=$CONDA_PREFIX/opt/rocm/bin:$CONDA_PREFIX/opt/rocm/lib/llvm/bin:
case $PATH in
    *"$_rocm_sdk_folders"*) PATH=${PATH%%"$_rocm_sdk_folders"*}${PATH#*"$_rocm_sdk_folders"} ;;
esac
unset _rocm_sdk_folders
for _rocm_sdk_name in ROCM_PATH HIP_PATH HIP_PLATFORM HIP_CLANG_PATH HIP_DEVICE_LIB_PATH \
    PYTORCH_ROCM_ARCH CMAKE_PREFIX_PATH HIPCC_COMPILE_FLAGS_APPEND HIPCC_LINK_FLAGS_APPEND
do
    eval "_rocm_sdk_had=\${_ROCM_SDK_HAD_$_rocm_sdk_name-none}"
    case "${_rocm_sdk_had:-}" in
        x) eval "export $_rocm_sdk_name=\"\$_ROCM_SDK_OLD_$_rocm_sdk_name\"" ;;
        '') unset "$_rocm_sdk_name" ;;
    esac
    unset "_ROCM_SDK_HAD_$_rocm_sdk_name" "_ROCM_SDK_OLD_$_rocm_sdk_name"
done
unset _rocm_sdk_name _rocm_sdk_had

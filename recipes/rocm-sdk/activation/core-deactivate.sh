for _rocm_sdk_name in AMD_COMGR_CACHE_DIR ROCPROFILER_QUEUE_INTERPOSITION MIOPEN_FIND_MODE; do
    if eval "[ \"\${$_rocm_sdk_name:-}\" = \"\${_ROCM_SDK_OURS_$_rocm_sdk_name-none}\" ]"; then
        unset "$_rocm_sdk_name"
    fi
    unset "_ROCM_SDK_OURS_$_rocm_sdk_name"
done
unset _rocm_sdk_name

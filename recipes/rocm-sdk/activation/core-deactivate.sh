if [ "${AMD_COMGR_CACHE_DIR:-}" = "${_ROCM_SDK_COMGR:-none}" ]; then
    unset AMD_COMGR_CACHE_DIR
fi
unset _ROCM_SDK_COMGR

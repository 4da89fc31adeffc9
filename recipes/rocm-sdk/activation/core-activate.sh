# A comgr cache of another ROCm gives undefined hidden symbols and hipErrorOutOfMemory at the first
# stream (ROCm/TheRock#7426), so each version has its own. The user's own value stays.
if [ -z "${AMD_COMGR_CACHE_DIR:-}" ]; then
    export AMD_COMGR_CACHE_DIR="${XDG_CACHE_HOME:-$HOME/.cache}/comgr/rocm-@VERSION@"
    export _ROCM_SDK_COMGR="$AMD_COMGR_CACHE_DIR"
fi

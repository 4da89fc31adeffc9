# Set three variables, unless the user has set them. docs/rocm.md explains the variables. A value that the activation of
# another environment has set is replaced, because that environment may have another version of ROCm.
_rocm_sdk_default() {
    if eval "[ -z \"\${$1:-}\" ] || [ \"\$$1\" = \"\${_ROCM_SDK_OURS_$1:-}\" ]"; then
        export "$1=$2" "_ROCM_SDK_OURS_$1=$2"
    fi
}
# Give each version of ROCm its own comgr cache. With the cache of another version, creating the first stream fails
# with undefined hidden symbols and hipErrorOutOfMemory (ROCm/TheRock#7426).
_rocm_sdk_default AMD_COMGR_CACHE_DIR "${XDG_CACHE_HOME:-$HOME/.cache}/comgr/rocm-@VERSION@"
# torch 2.12 and later load rocprofiler-sdk. Turn off its queue interposition, because it hangs when HSA shuts down.
_rocm_sdk_default ROCPROFILER_QUEUE_INTERPOSITION 0
# Without this mode, MIOpen runs several solvers to find the fastest one. On gfx1151, this fails or locks up the GPU.
_rocm_sdk_default MIOPEN_FIND_MODE FAST
unset -f _rocm_sdk_default

# What docs/rocm.md says of each. The user's own value stays.
_rocm_sdk_default() {
    if eval "[ -z \"\${$1:-}\" ]"; then export "$1=$2" "_ROCM_SDK_OURS_$1=$2"; fi
}
# A comgr cache of another ROCm gives undefined hidden symbols and hipErrorOutOfMemory at the first
# stream (ROCm/TheRock#7426), so each version has its own.
_rocm_sdk_default AMD_COMGR_CACHE_DIR "${XDG_CACHE_HOME:-$HOME/.cache}/comgr/rocm-@VERSION@"
# torch 2.12 and later attach rocprofiler-sdk, whose queue interposition hangs at HSA's teardown
_rocm_sdk_default ROCPROFILER_QUEUE_INTERPOSITION 0
# MIOpen's timing of solvers fails on gfx1151, or locks the GPU up
_rocm_sdk_default MIOPEN_FIND_MODE FAST
unset -f _rocm_sdk_default

# Set variables that docs/rocm.md explains. A value that the user has set is kept.
_rocm_sdk_default() {
    if eval "[ -z \"\${$1:-}\" ]"; then export "$1=$2" "_ROCM_SDK_OURS_$1=$2"; fi
}
# Each version of ROCm has its own comgr cache. With the cache of another version, there are undefined hidden
# symbols and hipErrorOutOfMemory at the first stream (ROCm/TheRock#7426).
_rocm_sdk_default AMD_COMGR_CACHE_DIR "${XDG_CACHE_HOME:-$HOME/.cache}/comgr/rocm-@VERSION@"
# torch 2.12 and later load rocprofiler-sdk. Its queue interposition hangs when HSA shuts down.
_rocm_sdk_default ROCPROFILER_QUEUE_INTERPOSITION 0
# By default, MIOpen times solvers. On gfx1151, this fails or locks up the GPU.
_rocm_sdk_default MIOPEN_FIND_MODE FAST
unset -f _rocm_sdk_default

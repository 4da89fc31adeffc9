# What the variant aotriton_kernels means: `upstream` is `full` as AMD compiled it. Images and library both
# read it: a kernel that only one of them knows would be missing or never used. A head dimension between two of these
# runs padded in the next larger kernel; above the last, and in fp32, `core` and `sample` refuse. `sample` has no padded kernels: what would
# need one fails at the launch.
export AOTRITON_IMAGES=
case $AOTRITON_KERNELS in
    core)
        export AOTRITON_FLASH_BLOCK_DMODEL="64, 96, 128, 256" AOTRITON_ENABLE_FP32=0
        ;;
    full)
        export AOTRITON_ENABLE_FP32=1
        ;;
    upstream)
        # patch 0003 off: the library asks for the tiles that AMD compiled
        export AOTRITON_ENABLE_FP32=1 AOTRITON_GFX1151_TILES=0
        ;;
    sample)
        # no more of the library either: all of it would be 1,955 objects, most of the CPU time
        export AOTRITON_FLASH_BLOCK_DMODEL="64, 128" AOTRITON_ENABLE_FP32=0
        # What the package tests of aotriton and pytorch open: emulate_images.py, check_api.cc and test_with_gpu.py.
        # Head dimensions 64 and 128, not padded; no dropout, causal or not, no bias; these fields stand in another
        # order backward.
        half='FONLY__＊(fp16|bf16)@16_(64|128)_'
        forward="attn_fwd/${half}F_F_[03]_0_" backward="bwd_kernel_[a-z_]+/${half}[03]_F_F_0_"
        AOTRITON_IMAGES="$forward $backward bwd_preprocess/${half}F_"
        ;;
    *)
        echo "aotriton_kernels is $AOTRITON_KERNELS, not core, full, sample or upstream" >&2
        exit 1
        ;;
esac

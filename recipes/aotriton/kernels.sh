# Set the options for the variant aotriton_kernels. `upstream` has the same kernels as `full`, as compiled by AMD. The
# builds of the images and of the library both use these options, because a kernel that only one of them knows would be
# missing or unused. A head dimension between two of the listed ones uses the next larger kernel, with padding. `core`
# and `sample` refuse larger head dimensions and fp32. `sample` has no padded kernels: a call that needs one fails at
# the launch.
export AOTRITON_IMAGES=
case $AOTRITON_KERNELS in
    core)
        export AOTRITON_FLASH_BLOCK_DMODEL="64, 96, 128, 256" AOTRITON_ENABLE_FP32=0
        ;;
    full)
        export AOTRITON_ENABLE_FP32=1
        ;;
    upstream)
        # turns patch 0003 off, so that the library uses the tiles that AMD has compiled
        export AOTRITON_ENABLE_FP32=1 AOTRITON_GFX1151_TILES=0
        ;;
    sample)
        # also limits the library, since all of its 1,955 objects would take most of the CPU time
        export AOTRITON_FLASH_BLOCK_DMODEL="64, 128" AOTRITON_ENABLE_FP32=0
        # The images that the package tests of aotriton and pytorch open: emulate_images.py, check_api.cc and
        # test_with_gpu.py. They are those for the head dimensions 64 and 128, without padding, dropout and bias, causal
        # or not. Forward and backward kernels have these fields in different orders.
        half='FONLY__＊(fp16|bf16)@16_(64|128)_'
        forward="attn_fwd/${half}F_F_[03]_0_" backward="bwd_kernel_[a-z_]+/${half}[03]_F_F_0_"
        AOTRITON_IMAGES="$forward $backward bwd_preprocess/${half}F_"
        ;;
    *)
        echo "aotriton_kernels is $AOTRITON_KERNELS, not core, full, sample or upstream" >&2
        exit 1
        ;;
esac

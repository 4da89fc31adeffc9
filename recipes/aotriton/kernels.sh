# Set the options for the set of kernels that the variant key aotriton_kernels names. The set `upstream` has AMD's own
# images, which cover the same cases as the set `full`. The builds of the images and of the library both use these
# options. Otherwise the images could lack a kernel that the library launches, or have a kernel that it never launches.
# A head dimension between two for which there are kernels uses the kernel for the larger one, with padding. A head
# dimension above the largest one for which there are kernels is refused. The sets `core` and `sample` also refuse fp32.
# The set `sample` has no padded kernels, so a call that needs a padded kernel fails at the launch.
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
        # These options also limit the kernels that the library knows, because compiling all 1,955 objects of the
        # library would take most of the CPU time.
        export AOTRITON_FLASH_BLOCK_DMODEL="64, 128" AOTRITON_ENABLE_FP32=0
        # Select the images that the package tests of aotriton and pytorch (emulate_images.py, check_api.cc and
        # test_with_gpu.py) open. These images are for the head dimensions 64 and 128, without padding, dropout and
        # bias, with and without a causal mask. In the names of forward and backward images, the fields with these
        # values have different orders.
        half='FONLY__＊(fp16|bf16)@16_(64|128)_'
        forward="attn_fwd/${half}F_F_[03]_0_" backward="bwd_kernel_[a-z_]+/${half}[03]_F_F_0_"
        AOTRITON_IMAGES="$forward $backward bwd_preprocess/${half}F_"
        ;;
    *)
        echo "aotriton_kernels is $AOTRITON_KERNELS, not core, full, sample or upstream" >&2
        exit 1
        ;;
esac

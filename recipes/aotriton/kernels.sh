# What the variant aotriton_kernels means: `upstream` is the set of `full`, compiled by AMD. Images and library both read it: a kernel that only one
# of them knows would be missing or never used. A head dimension between two
# of these runs padded in the next larger kernel; above the last, and in fp32, `core` refuses.
case $AOTRITON_KERNELS in
    core)
        export AOTRITON_FLASH_BLOCK_DMODEL="64, 96, 128, 256" AOTRITON_ENABLE_FP32=0
        ;;
    full | upstream)
        export AOTRITON_ENABLE_FP32=1
        ;;
    *)
        echo "aotriton_kernels is $AOTRITON_KERNELS, not core, full or upstream" >&2
        exit 1
        ;;
esac

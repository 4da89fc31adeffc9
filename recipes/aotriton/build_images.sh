#!/usr/bin/env bash
set -euo pipefail
. "$RECIPE_DIR/kernels.sh"

if [[ $AOTRITON_KERNELS == upstream ]]; then
    PYTHONPATH="$SRC_DIR" python "$RECIPE_DIR/select_images.py" upstream/lib/aotriton.images \
        "$PREFIX/lib/aotriton.images" "$AOTRITON_COMMIT"
    exit
fi
read -ra images <<< "$AOTRITON_IMAGES"
# The driver sets FORGE_CACHE to a folder outside the build folder. So after a killed build, the next build uses the
# finished kernels.
export TRITON_CACHE_DIR=${FORGE_CACHE:-$SRC_DIR}/aotriton-kernels
# LLVM and MLIR allocate so often that jemalloc saves a quarter of the CPU time.
LD_PRELOAD=$BUILD_PREFIX/lib/libjemalloc.so.2 \
    python "$RECIPE_DIR/build_images.py" "$SRC_DIR" "$PREFIX/lib/aotriton.images" --build "$SRC_DIR/build" \
    --jobs "$CPU_COUNT" --arch "$GPU_ARCH" --commit "$AOTRITON_COMMIT" --tree "$AOTRITON_TREE" \
    --only "${images[@]}"

#!/usr/bin/env bash
set -euo pipefail

"$PYTHON" -m pip install --no-deps --no-index --no-build-isolation --no-compile ./*.whl

# Patch the installed files, because rattler-build does not unpack wheels and so cannot patch them.
"$PYTHON" "$RECIPE_DIR/apply_patches.py" "$SP_DIR" patches/*.patch

# Remove NVIDIA's tools, headers and libraries. They have 230 MB, are under NVIDIA's licence, and are not used on AMD's
# GPUs. The Python files of the NVIDIA backend are kept, because triton imports every backend that its metadata names.
rm -r "$SP_DIR"/triton/backends/nvidia/{bin,include,lib}
# Remove LLVM's test tool, which only triton's own test suite uses.
rm "$SP_DIR/triton/FileCheck"

"$PYTHON" -m compileall -q -j0 -s "$PREFIX" --invalidation-mode unchecked-hash "$SP_DIR/triton"
cp "$SP_DIR"/triton-*.dist-info/licenses/LICENSE LICENSE

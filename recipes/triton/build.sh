#!/usr/bin/env bash
set -euo pipefail

"$PYTHON" -m pip install --no-deps --no-index --no-build-isolation --no-compile ./*.whl

# rattler-build does not unpack a wheel, so it cannot patch one
"$PYTHON" "$RECIPE_DIR/apply_patches.py" "$SP_DIR" patches/*.patch

# NVIDIA's tools, headers and libraries: 230 MB under NVIDIA's licence, unused here. The
# backend's Python files stay, because triton imports every backend that its metadata names.
rm -r "$SP_DIR"/triton/backends/nvidia/{bin,include,lib}
# LLVM's test tool, which only triton's own test suite calls
rm "$SP_DIR/triton/FileCheck"

"$PYTHON" -m compileall -q -j0 -s "$PREFIX" --invalidation-mode unchecked-hash "$SP_DIR/triton"
cp "$SP_DIR"/triton-*.dist-info/licenses/LICENSE LICENSE

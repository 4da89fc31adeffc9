#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# AMD's own build of torch, in place of build.sh: its wheels, laid out as build.sh lays out ours.
set -euo pipefail

"$PYTHON" -m pip install ./*.whl --no-deps --no-index --no-compile -v
PYTHONPATH="$SRC_DIR" "$PYTHON" "$RECIPE_DIR/from_wheels.py" \
    "$SP_DIR" "$PREFIX" "$SRC_DIR" "$TORCH_VERSION" "$TRITON_VERSION"
"$PYTHON" -m compileall -q -j0 -s "$PREFIX" --invalidation-mode unchecked-hash \
    "$SP_DIR/torch" "$SP_DIR/torchgen" "$SP_DIR/functorch"

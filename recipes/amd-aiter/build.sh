#!/usr/bin/env bash
set -euo pipefail

export AITER_TRITON_ONLY=1
# otherwise setup.py downloads another Triton
export AITER_USE_SYSTEM_TRITON=1
export PREBUILD_KERNELS=0
# the archive has no git history to read the version from
export SETUPTOOLS_SCM_PRETEND_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv
# sources of the C++ kernels, for a build at run time that the Triton-only package never does
rm -rf "$SP_DIR/aiter_meta"

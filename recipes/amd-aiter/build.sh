#!/usr/bin/env bash
set -euo pipefail

export AITER_TRITON_ONLY=1
# Without this, setup.py would download another Triton.
export AITER_USE_SYSTEM_TRITON=1
export PREBUILD_KERNELS=0
# setuptools-scm would read the version from git, but the source has no git history.
export SETUPTOOLS_SCM_PRETEND_VERSION="$PKG_VERSION"

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv
# Remove the sources of the C++ kernels, which AITER compiles at run time. This package has only Triton kernels.
rm -rf "$SP_DIR/aiter_meta"

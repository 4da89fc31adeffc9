#!/usr/bin/env bash
set -euo pipefail

# CUDA-only trees. setup.py would install the first as a top-level module of that name.
rm -r hopper flash_attn/cute csrc

# `auto` asks torch, which is not in the host environment
export BUILD_TARGET=rocm
# the pure Python build; otherwise setup.py requires hipcc
export FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE
# otherwise setup.py first tries to download a wheel
export FLASH_ATTENTION_FORCE_BUILD=TRUE
export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

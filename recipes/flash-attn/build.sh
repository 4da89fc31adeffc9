#!/usr/bin/env bash
set -euo pipefail

# Remove folders that are only for CUDA. setup.py would install the first one as a top-level module `hopper`.
rm -r hopper flash_attn/cute csrc

# With the value `auto`, setup.py would import torch, which is not in the host environment.
export BUILD_TARGET=rocm
# Build only the Python files. Otherwise setup.py requires hipcc.
export FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE
# Without FLASH_ATTENTION_FORCE_BUILD, setup.py would first try to download a wheel.
export FLASH_ATTENTION_FORCE_BUILD=TRUE
export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv

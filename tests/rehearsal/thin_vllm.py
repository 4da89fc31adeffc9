# SPDX-License-Identifier: BSD-3-Clause
"""Changes to the recipe of vllm that make a rehearsal of vLLM cheap.

Only the HIP files that DEVICE_CODE names get device code. The other HIP files are compiled for the
host only, with an empty code object. So vLLM's modules can be loaded, but the kernels of the other
files are not found. The overlay prints the changes.
"""

FOLDER = "recipes/vllm"
BUILD = f"{FOLDER}/build.sh"
# Edits of the recipe's files: the file, a pattern, and its replacement.
EDITS = [
    (
        BUILD,
        r'(?<=-DCMAKE_HIP_ARCHITECTURES=\$PYTORCH_ROCM_ARCH)"',
        ' -DCMAKE_HIP_COMPILER_LAUNCHER=$RECIPE_DIR/thin.sh"',
    )
]
# Names of HIP files without their suffixes. vLLM launches their kernels when it serves a small
# model. skinny_gemms has the matrix products of few rows.
DEVICE_CODE = """
activation_kernels cache_kernels common fused_layernorm_dynamic_per_token_quant
fused_qknorm_rope_kernel fused_silu_mul_block_quant hip_utils_kernels hip_view layernorm_kernels
merge_attn_states moe_align_sum_kernels per_token_group_quant pos_encoding_kernels sampler
skinny_gemms topk topk_softmax_kernels vocab_parallel_embedding_kernels
"""
LAUNCHER = """\
#!/usr/bin/env bash
# Runs the HIP compiler, as in `thin.sh COMPILER ... -x hip -c FILE`.
set -euo pipefail
name=${!#}
name=${name##*/}
if [[ " $* " != *" -x hip "* ]] || grep -qxF "${name%.*}" "${0%/*}/device_code.txt"; then
    exec "$@"
fi
empty=empty.hipfb
if [[ ! -e $empty ]]; then
    "$1" -x hip "--offload-arch=$PYTORCH_ROCM_ARCH" --offload-device-only --gpu-bundle-output \\
        -nogpuinc -nogpulib -c /dev/null -o "$empty.$$"
    mv "$empty.$$" "$empty"
fi
exec "$@" -O0 --offload-host-only -Xclang -fcuda-include-gpubinary -Xclang "$empty"
"""

FILES = {"thin.sh": LAUNCHER}

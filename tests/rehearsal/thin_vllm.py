# SPDX-License-Identifier: BSD-3-Clause
"""What makes vllm cheap in a rehearsal: device code for a few of its HIP files alone.

Edits of the copy's recipes/vllm, which the overlay prints. Any other HIP file is compiled for the
host alone, with an empty code object in it: the modules load, and its kernels are not found.
"""

FOLDER = "recipes/vllm"
BUILD = f"{FOLDER}/build.sh"
EDITS = [
    (
        BUILD,
        r'(?<=-DCMAKE_HIP_ARCHITECTURES=\$PYTORCH_ROCM_ARCH)"',
        ' -DCMAKE_HIP_COMPILER_LAUNCHER=$RECIPE_DIR/thin.sh"',
    )
]
# What serving a small model launches, with matrix products of few rows (skinny_gemms).
DEVICE_CODE = """
activation_kernels cache_kernels common fused_layernorm_dynamic_per_token_quant
fused_qknorm_rope_kernel fused_silu_mul_block_quant hip_utils_kernels hip_view layernorm_kernels
merge_attn_states moe_align_sum_kernels per_token_group_quant pos_encoding_kernels sampler
skinny_gemms topk topk_softmax_kernels vocab_parallel_embedding_kernels
"""
LAUNCHER = """\
#!/usr/bin/env bash
# The launcher of the HIP compiler, for `COMPILER ... -x hip -c FILE`.
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

# SPDX-License-Identifier: BSD-3-Clause
"""Faults to plant in vLLM's kernels: (file, text, what it becomes, the check that fails)."""

_GPU = "vllm/v1/worker/gpu"
_OPS = "vllm/v1/attention/ops"
_FLA = "vllm/third_party/flash_linear_attention/ops"
_LAYERS = "vllm/model_executor/layers"
_TOP = "vllm/v1/sample/ops/topk_topp_triton.py"
_HYBRID = "vllm/model_executor/kernels/linear/mixed_precision/rdna_hybrid_w4a16.py"

SAMPLING = {
    "top-k of the first row": (
        _TOP, "            k = tl.load(K + row_id)", "            k = tl.load(K)", "top-k-top-p",
    ),
    "top-p of the first row": (
        _TOP, "                    p = tl.load(P + row_id)", "                    p = tl.load(P)",
        "top-k-top-p",
    ),
    "penalties of another request": (
        f"{_GPU}/sample/penalties.py",
        "rep_penalty = tl.load(repetition_penalty_ptr + req_state_idx)",
        "rep_penalty = tl.load(repetition_penalty_ptr + token_idx % 4)", "penalties",
    ),
    "negative logits divided": (
        f"{_GPU}/sample/penalties.py", "tl.where(logits > 0, 1.0 / scale, scale)", "1.0 / scale",
        "penalties",
    ),
    "drafted tokens not counted": (
        f"{_GPU}/sample/penalties.py", "tl.range(pos)", "tl.range(pos * 0)", "penalties",
    ),
    "tokens of the prompt forgotten": (
        f"{_GPU}/sample/penalties.py", "prompt_bin_mask | output_bin_mask", "output_bin_mask",
        "penalties",
    ),
    "min-p without its logarithm": (
        f"{_GPU}/sample/min_p.py", "max_val + tl.log(min_p)", "max_val - min_p",
        "temperature-min-p",
    ),
    "temperature multiplied": (
        f"{_GPU}/sample/gumbel.py",
        "    logits = logits / temperature\n", "    logits = logits * temperature\n",
        "temperature-min-p",
    ),
}  # fmt: skip
MLA = {
    "lanes of rope left out": (
        f"{_OPS}/triton_decode_attention.py", "qk += tl.dot(qpe, kpe.to(qpe.dtype))", "qk += 0.0",
        "mla-decode",
    ),
    "splits merged without their maximum": (
        f"{_OPS}/triton_decode_attention.py", "            acc *= old_scale\n", "", "mla-decode",
    ),
    "a key too many": (
        f"{_OPS}/triton_decode_attention.py", "tl.minimum(split_kv_start + kv_len_per_split, ",
        "tl.minimum(split_kv_start + kv_len_per_split + 1, ", "mla-decode",
    ),
    "the scale of fp8 keys": (
        f"{_OPS}/triton_decode_attention.py", "kpe = (kpe.to(tl.float32) * ks)",
        "kpe = (kpe.to(tl.float32))", "mla-decode-fp8",
    ),
    "the prefix not weighted": (
        f"{_OPS}/triton_merge_attn_states.py", "p_scale = p_se / out_se", "p_scale = p_se",
        "merge-states",
    ),
}  # fmt: skip
LINEAR_ATTENTION = {
    "a state that does not decay": (
        f"{_FLA}/fused_recurrent.py", "b_h *= exp(g_val)", "b_h *= 1.0", "gdn-decode",
    ),
    "beta left out": (
        f"{_FLA}/fused_recurrent.py", "b_v *= beta_val", "b_v *= 1.0", "gdn-decode",
    ),
    "a state for a sequence that has none": (
        f"{_FLA}/fused_recurrent.py", "    if state_idx <= 0:\n        zero",
        "    if state_idx < 0:\n        zero", "gdn-decode",
    ),
    "the state of a convolution not written": (
        f"{_LAYERS}/mamba/ops/causal_conv1d.py",
        "tl.store(conv_state_ptrs_target, new_conv_state, mask)",
        "tl.store(conv_state_ptrs_target, new_conv_state, mask & False)", "conv1d",
    ),
    "a gate without its sigmoid": (
        f"{_FLA}/layernorm_guard.py", "            y *= z * tl.sigmoid(z)", "            y *= z",
        "gated-norm",
    ),
}  # fmt: skip
QUANTIZED = {
    "AWQ's nibbles in order": (
        f"{_LAYERS}/quantization/awq_triton.py", "    shifts = reverse_awq_order_tensor * 4",
        "    shifts = tl.arange(0, 8) * 4 + reverse_awq_order_tensor * 0", "awq",
    ),
    "AWQ's zero points": (
        f"{_LAYERS}/quantization/awq_triton.py", "zeros = (zeros >> shifts) & 0xF",
        "zeros = (zeros >> shifts) & 0x7", "awq",
    ),
    "zero points of the neighbour": (
        _HYBRID, "zp_raw = (zp_word >> (4 * (offs_n % 8)))",
        "zp_raw = (zp_word >> (4 * (offs_n % 4)))", "w4a16-zeros",
    ),
    "a scale of the first group": (
        _HYBRID, "group_idx = (k_start * BLOCK_K) // group_size",
        "group_idx = (k_start * 0) // group_size", "w4a16",
    ),
    "a scale of weights": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py", "a_s[:, None] * b_s[None, :]",
        "a_s[:, None]", "fp8-blocks",
    ),
    "a scale of the first block": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "b_s = tl.load(Bs_ptrs + offs_ks * stride_Bs_k)", "b_s = tl.load(Bs_ptrs)", "fp8-blocks",
    ),
}  # fmt: skip
_LORA = "vllm/lora/ops/triton_ops"
LORA = {
    "the next adapter": (
        f"{_LORA}/lora_expand_op.py", "        lora_id,\n        slice_id,",
        "        (lora_id + 1) % 3,\n        slice_id,", "lora-one-slice",
    ),
    "scaling left out": (
        f"{_LORA}/lora_shrink_op.py", "accumulator * scaling", "accumulator", "lora-one-slice",
    ),
    "tokens of another adapter": (
        f"{_LORA}/lora_shrink_op.py",
        "lora_m_indices_start = tl.load(lora_token_start_loc + lora_idx)",
        "lora_m_indices_start = tl.load(lora_token_start_loc)", "lora-one-slice",
    ),
}  # fmt: skip
FAULTS = SAMPLING | MLA | LINEAR_ATTENTION | QUANTIZED | LORA

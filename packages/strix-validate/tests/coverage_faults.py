# SPDX-License-Identifier: BSD-3-Clause
"""Faults that have an effect only in a second iteration, in a large batch or with a rare argument.

The entries have the format of vllm_faults.py. Each names a quick check that was added to catch the
fault. Earlier quick checks do not catch it. A fault has two entries if two checks were added for
it.
"""

from vllm_faults import (
    _FLA,
    _GPU,
    _HELPERS,
    _LAYERS,
    _MOE,
    _ROPE,
    _TOP,
    _UNIFIED,
)

_CONV = f"{_LAYERS}/mamba/ops/causal_conv1d.py"
_BATCH = ("    right = num_seqs\n", "    right = tl.minimum(num_seqs, 32)\n")
_FIRST_PICTURE = "mm_prefix_range_ptr + seq_idx * MAX_MM_RANGES * 2 + i * 2"
#: Faults to plant in vLLM. Most need a later iteration of a loop, or a later program of a grid
#: axis. The others need many sequences, or a chunk shorter than the state.
TRIPS = {
    "search finds only the first 32 sequences": (_HELPERS, *_BATCH, "prefill-batch-40"),
    "search finds only the first 32 sequences in decoding": (
        _HELPERS,
        *_BATCH,
        "decode-batch-40",
    ),
    "keys after the 4096th ignored": (
        _HELPERS,
        "        loop_hi = tile_end\n",
        "        loop_hi = tl.minimum(tile_end, 4096 // TILE_SIZE)\n",
        "prefill-4200",
    ),
    "keys after the 4096th ignored in decoding": (
        _HELPERS,
        "(segm_idx_or_0 + 1) * tiles_per_segment_or_0, tile_end)",
        "(segm_idx_or_0 + 1) * tiles_per_segment_or_0, min(tile_end, 4096 // TILE_SIZE))",
        "decode-4200",
    ),
    "only the first block of a prompt penalized": (
        f"{_GPU}/sample/penalties.py",
        "    if block_idx * BLOCK_SIZE < prompt_len:\n",
        "    if block_idx == 0:\n",
        "penalties",
    ),
    "sampler computes only one row per program": (
        _TOP,
        "tl.range(pid, BATCH_SIZE, num_programs)",
        "tl.range(pid, pid + 1, num_programs)",
        "top-k-batch",
    ),
    "only the first block of log probabilities written": (
        f"{_GPU}/sample/logprob.py",
        "    for j in range(0, topk, TOPK_BLOCK_SIZE):\n",
        "    for j in range(0, min(topk, 1), TOPK_BLOCK_SIZE):\n",
        "logprobs-many",
    ),
    "LoRA sums only the first block of the inner dimension": (
        "vllm/lora/ops/triton_ops/kernel_utils.py",
        "    for k in range(num_iters):\n",
        "    for k in range(1):\n",
        "lora-prompt",
    ),
    "AWQ: first tile of columns used for all tiles": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "    offsets_x = pid_x * BLOCK_SIZE_X + tl.arange(0, BLOCK_SIZE_X)\n",
        "    offsets_x = tl.arange(0, BLOCK_SIZE_X)\n",
        "awq",
    ),
    "convolution's state wrong after a chunk shorter than the state": (
        _CONV,
        "((idx_tokens_conv + seqlen) * stride_conv_state_tok)[:, None]",
        "(idx_tokens_conv * stride_conv_state_tok)[:, None]",
        "conv1d-short",
    ),
}
#: Faults of vLLM that depend on a flag or an argument.
ARGUMENTS = {
    "causal mask applied to the tokens of an image": (
        _HELPERS,
        "mm_mask = q_in_range & k_in_range\n",
        "mm_mask = q_in_range & k_in_range & (seq_offset[None, :] <= query_abs_pos)\n",
        "prefill-pictures",
    ),
    "tokens of an image see keys beyond the window": (
        _HELPERS,
        "mm_mask = mm_mask & ((query_abs_pos - seq_offset) < SLIDING_WINDOW)",
        "mm_mask = mm_mask & True",
        "prefill-pictures-window",
    ),
    "first sequence's images used for all sequences": (
        _HELPERS,
        _FIRST_PICTURE,
        _FIRST_PICTURE.replace("seq_idx", "0"),
        "prefill-pictures",
    ),
    "tokens outside of an image see all its tokens": (
        _HELPERS,
        "mm_mask = q_in_range & k_in_range\n",
        "mm_mask = k_in_range\n",
        "decode-pictures",
    ),
    "queries see one chunk too many": (
        _HELPERS,
        "            <= CHUNK_LOOKBACK\n",
        "            <= CHUNK_LOOKBACK + 1\n",
        "prefill-chunked",
    ),
    "queries see one chunk too many in decoding": (
        _HELPERS,
        "            <= CHUNK_LOOKBACK\n",
        "            <= CHUNK_LOOKBACK + 1\n",
        "decode-chunked",
    ),
    "first sequence's causal flag used for all sequences": (
        _HELPERS,
        "tl.load(per_seq_causal_ptr + seq_idx)",
        "tl.load(per_seq_causal_ptr)",
        "prefill-causal-each",
    ),
    "first sequence's prefix length used for all sequences": (
        _HELPERS,
        "tl.load(rswa_prefix_lens_ptr + seq_idx)",
        "tl.load(rswa_prefix_lens_ptr)",
        "prefill-prefix-window",
    ),
    "per-token scales of keys used for values": (
        _UNIFIED,
        "v_scale_cache_ptr + v_scale_idx",
        "k_scale_cache_ptr + v_scale_idx",
        "prefill-fp8-tokens",
    ),
    "first head's per-token scales used for all heads": (
        _UNIFIED,
        "kv_head_idx * stride_ks_head",
        "0 * stride_ks_head",
        "decode-int8-tokens",
    ),
    "tokens computed although their expert is on another GPU": (
        _MOE,
        "tl.load(expert_ids_ptr + pid_m).to(tl.int64)",
        "tl.abs(tl.load(expert_ids_ptr + pid_m)).to(tl.int64)",
        "moe-unrouted",
    ),
    "tokens computed although their 4-bit expert is on another GPU": (
        _MOE,
        "tl.load(expert_ids_ptr + pid_m).to(tl.int64)",
        "tl.abs(tl.load(expert_ids_ptr + pid_m)).to(tl.int64)",
        "moe-int4-zeros",
    ),
    "padded rows of weights read as contiguous": (
        _MOE,
        "(offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)",
        "(offs_k[:, None] * stride_bk + offs_bn[None, :] * K)",
        "moe-padded",
    ),
    "first expert's per-channel scales used for all experts": (
        _MOE,
        "b_scale_ptr + off_experts * stride_bse + offs_bn[None, :] * stride_bsn",
        "b_scale_ptr + offs_bn[None, :] * stride_bsn",
        "moe-fp8-channels",
    ),
    "first expert's scale used for all experts": (
        _MOE,
        "b_scale = tl.load(b_scale_ptr + off_experts)",
        "b_scale = tl.load(b_scale_ptr)",
        "moe-fp8-tensor",
    ),
    "rows of q and k read as contiguous": (
        _ROPE,
        "        q.stride(0),\n        k.stride(0),\n",
        "        q.shape[1],\n        k.shape[1],\n",
        "rope-slice",
    ),
    "first channel's bias used for the whole convolution": (
        _CONV,
        "bias = bias_ptr + idx_feats\n",
        "bias = bias_ptr + idx_feats * 0\n",
        "conv1d-bias",
    ),
    "convolution continues from the wrong state after a refused draft": (
        _CONV,
        "tl.load(num_accepted_tokens_ptr + idx_seq).to(tl.int64) - 1",
        "tl.load(num_accepted_tokens_ptr + idx_seq).to(tl.int64) * 0",
        "conv1d-drafts",
    ),
    "linear attention continues from the wrong state after a refused draft": (
        f"{_FLA}/fused_sigmoid_gating.py",
        "i_t = tl.load(num_accepted_tokens + i_n).to(tl.int64) - 1",
        "i_t = tl.load(num_accepted_tokens + i_n).to(tl.int64) * 0",
        "gdn-drafts",
    ),
    "softplus overflows for large inputs": (
        f"{_FLA}/fused_recurrent.py",
        "tl.where(x <= SOFTPLUS_THRESHOLD,",
        "tl.where(x <= 1000.0,",
        "gdn-decode",
    ),
    "log probabilities read rows of logits as contiguous": (
        f"{_GPU}/sample/logprob.py",
        "    row_ptr = logits_ptr + req_idx * logits_stride\n\n    max_val",
        "    row_ptr = logits_ptr + req_idx * vocab_size\n\n    max_val",
        "logprobs",
    ),
    "log probabilities computed without subtracting the maximum": (
        f"{_GPU}/sample/logprob.py",
        "    max_val = max_val.to(tl.float32)",
        "    max_val = max_val.to(tl.float32) * 0",
        "logprobs-low",
    ),
    "sampler reads rows of logits as contiguous": (
        _TOP,
        "LOGITS + row_id.to(tl.int64) * LOGITS_STRIDE_0",
        "LOGITS + row_id.to(tl.int64) * VOCAB_SIZE",
        "top-k-top-p-masked",
    ),
    "sigmoid of the gated norm not recognized": (
        f"{_FLA}/layernorm_guard.py",
        'elif ACTIVATION == "sigmoid":',
        'elif ACTIVATION == "none":',
        "gated-norm-sigmoid",
    ),
    "first row's top-p used for all rows if there is no top-k": (
        _TOP,
        "    p = tl.load(P + row)\n",
        "    p = tl.load(P)\n",
        "top-p-alone",
    ),
    "too many tokens with equal logits kept: one more than top-k allows": (
        _TOP,
        "duplicate_keep_mask = (duplicate_count <= num_keep) & duplicate_mask",
        "duplicate_keep_mask = (duplicate_count <= num_keep + 1) & duplicate_mask",
        "top-k-ties",
    ),
}
VLLM = TRIPS | ARGUMENTS

_FLASH = "flash_attn/flash_attn_triton_amd"
#: Faults of other packages, in the format of triton_faults.py.
PACKAGES = {
    "flash_attn: keys of a cache after the 4096th ignored": (
        f"{_FLASH}/fwd_decode.py",
        "    for start_n in range(lo, hi, BLOCK_N):",
        "    for start_n in range(lo, tl.minimum(hi, 4096), BLOCK_N):",
        "flash-attn/interpreter/cache-4200-float16",
    ),
    "flash_attn: keys of a cache read as contiguous": (
        f"{_FLASH}/fwd_decode.py",
        "        stride_kn=stride_kc_n,",
        "        stride_kn=nheads_kc * dim_kc,",
        "flash-attn/interpreter/cache-strided-float16",
    ),
    "flash_attn: in a call that is not causal, queries are rotated at different positions": (
        f"{_FLASH}/interface_fa.py",
        "        if metadata.causal:     # NOTE",
        "        if True:     # NOTE",
        "flash-attn/interpreter/cache-full-rotary-float16",
    ),
    "flash_attn: logsumexp is in base 2 if a call has a KV cache": (
        f"{_FLASH}/fwd_decode.py",
        "(g_m + tl.math.log2(g_sum)) / 1.44269504",
        "(g_m + tl.math.log2(g_sum))",
        "flash-attn/interpreter/cache-integer-float16",
    ),
    "flash_attn: gradient of keys computed for only 16 sequences": (
        f"{_FLASH}/bwd_prefill_split.py",
        "    bid = tl.program_id(1)\n",
        "    bid = tl.program_id(1) % 16\n",
        "flash-attn/interpreter/varlen-20-float16",
    ),
    "flash_attn: only 16 sequences of a batch computed": (
        f"{_FLASH}/fwd_prefill.py",
        "    off_z = tl.program_id(2)\n",
        "    off_z = tl.program_id(2) % 16\n",
        "flash-attn/interpreter/batch-17-float16",
    ),
    "liger_kernel: first sequence's positions used for all sequences": (
        "liger_kernel/ops/rope.py",
        "        cos_bs == 1,",
        "        cos_bs >= 1,",
        "liger-rope-own",
    ),
    "liger_kernel: mean of losses returned instead of the sum": (
        "liger_kernel/ops/cross_entropy.py",
        'if reduction == "mean":',
        'if reduction != "none":',
        "liger-loss-sum",
    ),
    "liger_kernel: GeGLU's gradient has only half of tanh's derivative": (
        "liger_kernel/ops/geglu.py",
        "    term2 = 0.5 * a_row",
        "    term2 = 0.25 * a_row",
        "liger-geglu",
    ),
}

# SPDX-License-Identifier: BSD-3-Clause
"""Faults to plant in vLLM's kernels: (file, its text, the new text, the check that must fail)."""

_GPU = "vllm/v1/worker/gpu"
_OPS = "vllm/v1/attention/ops"
_FLA = "vllm/third_party/flash_linear_attention/ops"
_LAYERS = "vllm/model_executor/layers"
_TOP = "vllm/v1/sample/ops/topk_topp_triton.py"
_HYBRID = "vllm/model_executor/kernels/linear/mixed_precision/rdna_hybrid_w4a16.py"

SAMPLING = {
    "first row's top-k used for all rows": (
        _TOP,
        "            k = tl.load(K + row_id)",
        "            k = tl.load(K)",
        "top-k-top-p",
    ),
    "first row's top-p used for all rows": (
        _TOP,
        "                    p = tl.load(P + row_id)",
        "                    p = tl.load(P)",
        "top-k-top-p",
    ),
    "exp computed without subtracting the maximum": (
        _TOP,
        "probs_blk = probs_blk - max_logit\n",
        "probs_blk = probs_blk\n",
        "top-k-top-p-low",
    ),
    "repetition penalty of another request used": (
        f"{_GPU}/sample/penalties.py",
        "rep_penalty = tl.load(repetition_penalty_ptr + req_state_idx)",
        "rep_penalty = tl.load(repetition_penalty_ptr + token_idx % 4)",
        "penalties",
    ),
    "negative logits divided by the repetition penalty": (
        f"{_GPU}/sample/penalties.py",
        "tl.where(logits > 0, 1.0 / scale, scale)",
        "1.0 / scale",
        "penalties",
    ),
    "penalties do not count drafted tokens": (
        f"{_GPU}/sample/penalties.py",
        "tl.range(pos)",
        "tl.range(pos * 0)",
        "penalties",
    ),
    "token before a draft is counted": (
        f"{_GPU}/sample/penalties.py",
        "token_ids_ptr + start_idx + prev_pos + 1)",
        "token_ids_ptr + start_idx + prev_pos)",
        "penalties",
    ),
    "prompt's tokens not penalized": (
        f"{_GPU}/sample/penalties.py",
        "prompt_bin_mask | output_bin_mask",
        "output_bin_mask",
        "penalties",
    ),
    "threshold of min-p computed without the logarithm": (
        f"{_GPU}/sample/min_p.py",
        "max_val + tl.log(min_p)",
        "max_val - min_p",
        "temperature-min-p",
    ),
    "probability of the draft left out": (
        f"{_GPU}/spec_decode/rejection_sampler_utils.py",
        "target_logprob > tl.log(u) + draft_logprob",
        "target_logprob > tl.log(u)",
        "rejection",
    ),
    "same noise at each position": (
        f"{_GPU}/sample/gumbel.py",
        "h = _murmur3_mix(h, (pos & 0xFFFFFFFF).to(tl.uint32))\n",
        "h = _murmur3_mix(h, (pos & 0).to(tl.uint32))\n",
        "gumbel",
    ),
    "logits multiplied by the temperature": (
        f"{_GPU}/sample/gumbel.py",
        "    logits = logits / temperature\n",
        "    logits = logits * temperature\n",
        "temperature-min-p",
    ),
}
MLA = {
    "latent attention's scores leave out the rotary part of the head dim": (
        f"{_OPS}/triton_decode_attention.py",
        "qk += tl.dot(qpe, kpe.to(qpe.dtype))",
        "qk += 0.0",
        "mla-decode",
    ),
    "masked keys of latent attention get the score -100": (
        f"{_OPS}/triton_decode_attention.py",
        '< split_kv_end), qk, float("-inf")',
        "< split_kv_end), qk, -100.0",
        "mla-decode-low",
    ),
    "merged states: the maximum never falls below -100": (
        f"{_OPS}/triton_merge_attn_states.py",
        "max_lse = tl.maximum(p_lse, s_lse)",
        "max_lse = tl.maximum(tl.maximum(p_lse, s_lse), -100.0)",
        "merge-states-low",
    ),
    "splits of the keys merged without rescaling": (
        f"{_OPS}/triton_decode_attention.py",
        "            acc *= old_scale\n",
        "",
        "mla-decode",
    ),
    "each split of the keys reads one key too many": (
        f"{_OPS}/triton_decode_attention.py",
        "tl.minimum(split_kv_start + kv_len_per_split, ",
        "tl.minimum(split_kv_start + kv_len_per_split + 1, ",
        "mla-decode",
    ),
    "scale of FP8 keys ignored in the rotary part of the head dim": (
        f"{_OPS}/triton_decode_attention.py",
        "kpe = (kpe.to(tl.float32) * ks)",
        "kpe = (kpe.to(tl.float32))",
        "mla-decode-fp8",
    ),
    "weight of the prefix not normalized": (
        f"{_OPS}/triton_merge_attn_states.py",
        "p_scale = p_se / out_se",
        "p_scale = p_se",
        "merge-states",
    ),
}
LINEAR_ATTENTION = {
    "linear attention's state does not decay": (
        f"{_FLA}/fused_recurrent.py",
        "b_h *= exp(g_val)",
        "b_h *= 1.0",
        "gdn-decode",
    ),
    "linear attention leaves out beta": (
        f"{_FLA}/fused_recurrent.py",
        "b_v *= beta_val",
        "b_v *= 1.0",
        "gdn-decode",
    ),
    "linear attention reads a state for a sequence that has none": (
        f"{_FLA}/fused_recurrent.py",
        "    if state_idx <= 0:\n        zero",
        "    if state_idx < 0:\n        zero",
        "gdn-decode",
    ),
    "convolution's state not written": (
        f"{_LAYERS}/mamba/ops/causal_conv1d.py",
        "tl.store(conv_state_ptrs_target, new_conv_state, mask)",
        "tl.store(conv_state_ptrs_target, new_conv_state, mask & False)",
        "conv1d",
    ),
    "gated norm leaves out the sigmoid of the gate": (
        f"{_FLA}/layernorm_guard.py",
        "            y *= z * tl.sigmoid(z)",
        "            y *= z",
        "gated-norm",
    ),
}
QUANTIZED = {
    "AWQ: codes unpacked in the order of their bits, not in AWQ's order": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "    shifts = reverse_awq_order_tensor * 4",
        "    shifts = tl.arange(0, 8) * 4 + reverse_awq_order_tensor * 0",
        "awq",
    ),
    "AWQ: zero points cut to three bits": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "zeros = (zeros >> shifts) & 0xF",
        "zeros = (zeros >> shifts) & 0x7",
        "awq",
    ),
    "W4A16: zero points of columns 0 to 3 used for columns 4 to 7": (
        _HYBRID,
        "zp_raw = (zp_word >> (4 * (offs_n % 8)))",
        "zp_raw = (zp_word >> (4 * (offs_n % 4)))",
        "w4a16-zeros",
    ),
    "W4A16: first group's scale used for all groups": (
        _HYBRID,
        "group_idx = (k_start * BLOCK_K) // group_size",
        "group_idx = (k_start * 0) // group_size",
        "w4a16",
    ),
    "FP8: scale of weights ignored": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "a_s[:, None] * b_s[None, :]",
        "a_s[:, None]",
        "fp8-blocks",
    ),
    "FP8: first block's scale used for all blocks": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "b_s = tl.load(Bs_ptrs + offs_ks * stride_Bs_k)",
        "b_s = tl.load(Bs_ptrs)",
        "fp8-blocks",
    ),
}
_LORA = "vllm/lora/ops/triton_ops"
LORA = {
    "LoRA's second product uses the next adapter": (
        f"{_LORA}/lora_expand_op.py",
        "        lora_id,\n        slice_id,",
        "        (lora_id + 1) % 3,\n        slice_id,",
        "lora-one-slice",
    ),
    "LoRA's scaling left out": (
        f"{_LORA}/lora_shrink_op.py",
        "accumulator * scaling",
        "accumulator",
        "lora-one-slice",
    ),
    "LoRA: tokens of the first adapter used for all adapters": (
        f"{_LORA}/lora_shrink_op.py",
        "lora_m_indices_start = tl.load(lora_token_start_loc + lora_idx)",
        "lora_m_indices_start = tl.load(lora_token_start_loc)",
        "lora-one-slice",
    ),
}
FAULTS = SAMPLING | MLA | LINEAR_ATTENTION | QUANTIZED | LORA

_HELPERS = f"{_OPS}/triton_attention_helpers.py"
_UNIFIED = f"{_OPS}/triton_unified_attention.py"
_WRITER = f"{_OPS}/triton_reshape_and_cache_flash.py"
_MOE = f"{_LAYERS}/fused_moe/fused_moe.py"
_ROPE = f"{_LAYERS}/rotary_embedding/mrope.py"
_NORM = "vllm/model_executor/determinism/batch_invariant.py"
_WIDER = (
    "(query_abs_pos - seq_offset) < SLIDING_WINDOW",
    "(query_abs_pos - seq_offset) <= SLIDING_WINDOW",
)
_SCALE = ("    score_scale = scale\n", "    score_scale = 1.0 / HEAD_SIZE**0.5\n")
_SOFTCAP = ("            S = apply_softcap(S, softcap)", "            S = S * 1.0")
_GROUP = ("+ offs_m % num_queries_per_kv", "+ offs_m % (num_queries_per_kv // 2 * 2)")
_BEYOND = ("seq_offset[None, :] <= query_abs_pos\n", "seq_offset[None, :] <= query_abs_pos + 1\n")
_FOURTH = ("    right = num_seqs\n", "    right = tl.minimum(num_seqs, 4)\n")
_LANES = ("tl.where(offs_d < HEAD_SIZE, 1, 0)", "tl.where(offs_d < min(HEAD_SIZE, 128), 1, 0)")
_SLOPE = ("alibi_slopes_ptr + query_offset_1, mask", "alibi_slopes_ptr + query_offset_1 * 0, mask")
_KEYS_SCALE = ("V_load, Q, v_scale, KV", "V_load, Q, k_scale, KV")
_SINK = ("sink_ptr + query_offset_1,", "sink_ptr + query_offset_1 * 0,")
_ROWS = (
    "query_offset_0[:, None] * query_stride_0",
    "query_offset_0[:, None] * (num_query_heads * HEAD_SIZE)",
)
_OUTSIDE = ("V = tl.where(sw_mask_v, V, 0.0)", "V = V * 1.0")
_BLOCKS = "block_tables_ptr + block_table_offset + seq_offset // BLOCK_SIZE\n        ).to(tl.int64)"
_NEXT_SLOT = (
    "block_offset = slot_idx % block_size",
    "block_offset = (slot_idx + 1) % block_size",
)
_FIRST_EXPERT = ("tl.load(expert_ids_ptr + pid_m)", "tl.load(expert_ids_ptr)")
_KV_HEADS = "(num_query_heads // num_queries_per_kv)"
#: The faults in strides have an effect because the server's tensors are slices or interleaved. Most
#: of the other faults need batches of several tiles, several key heads, or a few queries.
LAYOUT = {
    "queries read as contiguous": (_UNIFIED, *_ROWS, "prefill"),
    "queries read as contiguous in decoding": (_UNIFIED, *_ROWS, "decode"),
    "blocks of the key cache read as contiguous": (
        _UNIFIED,
        "physical_block_idx[None, :] * stride_k_cache_0",
        f"physical_block_idx[None, :] * (BLOCK_SIZE * HEAD_SIZE * {_KV_HEADS})",
        "prefill",
    ),
    "slots of the value cache read as contiguous": (
        _UNIFIED,
        "(seq_offset % BLOCK_SIZE)[:, None] * stride_v_cache_1",
        f"(seq_offset % BLOCK_SIZE)[:, None] * (HEAD_SIZE * {_KV_HEADS})",
        "mixed",
    ),
    "heads of the value cache read as contiguous": (
        _UNIFIED,
        "kv_head_idx * stride_v_cache_2",
        "kv_head_idx * HEAD_SIZE",
        "mixed",
    ),
    "new values read as contiguous": (
        _WRITER,
        "        value_stride=value_stride,",
        "        value_stride=n,",
        "reshape-and-cache",
    ),
    "keys and values written as if cache slots were contiguous": (
        _WRITER,
        "    page_stride = key_cache.stride()[1]",
        "    page_stride = num_heads * head_size",
        "reshape-and-cache",
    ),
    "NaN of values outside the window reaches the result": (_UNIFIED, *_OUTSIDE, "prefill-window"),
    "NaN of values outside the window reaches the result in decoding": (
        _UNIFIED,
        *_OUTSIDE,
        "decode-window",
    ),
    "decoding: all queries of a sequence see only the first one's keys": (
        _UNIFIED,
        "query_abs_pos = context_len + query_pos[:, None]",
        "query_abs_pos = context_len + query_pos[:, None] * (0 if IS_3D else 1)",
        "verify",
    ),
    "cache offsets computed in 32 bits": (
        _UNIFIED,
        _BLOCKS,
        f"{_BLOCKS} % ((1 << 31) // (BLOCK_SIZE * HEAD_SIZE * 4))",
        "far",
    ),
    "decoding: value heads read a neighbour's key head": (
        f"{_FLA}/fused_recurrent.py",
        "i_h = i_hv // (HV // H)",
        "i_h = i_hv % H",
        "gdn-decode",
    ),
    "chunks: value heads read a neighbour's key head": (
        f"{_FLA}/chunk_delta_h.py",
        "i_h // (H // Hg)",
        "i_h % Hg",
        "gdn-prefill",
    ),
    "linear attention leaves out the last chunk if it is full": (
        f"{_FLA}/chunk_delta_h.py",
        "        NT = tl.cdiv(T, BT)",
        "        NT = tl.cdiv(T, BT) - (1 if T % BT == 0 else 0)",
        "gdn-prefill",
    ),
    "AWQ: first tile of tokens used for all tiles": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "offsets_am = pid_m * BLOCK_SIZE_M + tl",
        "offsets_am = pid_m * 0 + tl",
        "awq",
    ),
    "W4A16: first tile of tokens used for all tiles": (
        _HYBRID,
        "offs_m = pid_m * BLOCK_M + tl",
        "offs_m = pid_m * 0 + tl",
        "w4a16",
    ),
    "W4A16: 4-bit codes off by one after conversion to float16": (
        _HYBRID,
        "0x64006400",
        "0x64006401",
        "w4a16-packed",
    ),
    "FP8: first tile of tokens used for all tiles": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M",
        "offs_am = tl.arange(0, BLOCK_SIZE_M) % M",
        "fp8-blocks",
    ),
    "all tokens use the first expert if they are not sorted by expert": (
        _MOE,
        *_FIRST_EXPERT,
        "moe-one-token",
    ),
    "last group of tiles treated as a full group": (
        _MOE,
        "group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)",
        "group_size_m = GROUP_SIZE_M",
        "moe-swizzle",
    ),
}
_MASKED = ('& seq_mask, S, float("-inf")', "& seq_mask, S, -100.0")
#: Faults in paged attention, the cache's writer, rope, norms and experts, and in whole models.
ATTENTION = {
    "masked keys get the score -100": (_UNIFIED, *_MASKED, "prefill-low"),
    "masked keys get the score -100 in decoding": (_UNIFIED, *_MASKED, "decode-low"),
    "queries see one future key": (_HELPERS, *_BEYOND, "prefill"),
    "queries of a mixed batch see one future key": (_HELPERS, *_BEYOND, "mixed"),
    "window is one key too wide": (_HELPERS, *_WIDER, "prefill-window"),
    "window is one key too wide in decoding": (_HELPERS, *_WIDER, "decode-window"),
    "window limited to 512 keys": (
        _HELPERS,
        "q_abs - SLIDING_WINDOW + 1",
        "q_abs - tl.minimum(SLIDING_WINDOW, 512) + 1",
        "prefill-window-600",
    ),
    "no softcap": (_UNIFIED, *_SOFTCAP, "prefill-softcap"),
    "no softcap in decoding": (_UNIFIED, *_SOFTCAP, "decode-softcap"),
    "softcap overflows for large scores": (
        _HELPERS,
        "x * (1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))",
        "x * (tl.exp(y) - tl.exp(-y)) / (tl.exp(y) + tl.exp(-y))",
        "prefill-softcap-large",
    ),
    "first head's sink used for all heads": (_HELPERS, *_SINK, "prefill-sinks"),
    "first head's sink used for all heads in decoding": (_HELPERS, *_SINK, "decode-sinks"),
    "sink added in every segment": (
        _HELPERS,
        "(not IS_3D) or (segm_idx_or_0 == 0)",
        "True",
        "decode-sinks",
    ),
    "scale argument ignored": (_UNIFIED, *_SCALE, "prefill-scale"),
    "scale argument ignored in decoding": (_UNIFIED, *_SCALE, "decode-scale"),
    "causal mask applied to an encoder's keys": (
        _HELPERS,
        "seq_mask = seq_offset[None, :] < seq_len",
        "seq_mask = seq_offset[None, :] <= query_abs_pos",
        "prefill-not-causal",
    ),
    "queries see one key after an encoder's last key": (
        _HELPERS,
        "seq_mask = seq_offset[None, :] < seq_len",
        "seq_mask = seq_offset[None, :] <= seq_len",
        "decode-not-causal",
    ),
    "key scale used for values": (_UNIFIED, *_KEYS_SCALE, "prefill-fp8-kv"),
    "key scale used for values in decoding": (_UNIFIED, *_KEYS_SCALE, "decode-fp8-kv"),
    "groups of 3 query heads treated as groups of 2": (
        _UNIFIED,
        *_GROUP,
        "layer-Phi-4-mini-window-prefill",
    ),
    "groups of 3 query heads treated as groups of 2 in decoding": (
        _UNIFIED,
        *_GROUP,
        "layer-Granite-3.1-3B-A800M-decode-fp8",
    ),
    "groups of 7 query heads treated as groups of 6": (
        _UNIFIED,
        *_GROUP,
        "layer-Qwen2.5-0.5B-prefill",
    ),
    "groups of 7 query heads treated as groups of 6 in decoding": (
        _UNIFIED,
        *_GROUP,
        "layer-Qwen2.5-7B-decode-fp8",
    ),
    "block numbers cut to 15 bits": (
        _UNIFIED,
        _BLOCKS,
        f"{_BLOCKS} & 32767",
        "prefill-block-33000",
    ),
    "search finds only the first four sequences": (_HELPERS, *_FOURTH, "prefill-batch6"),
    "search finds only the first four sequences in decoding": (
        _HELPERS,
        *_FOURTH,
        "decode-batch6",
    ),
    "only 128 elements of head dim 256 read": (
        _UNIFIED,
        *_LANES,
        "layer-Gemma-3-1B-window-prefill",
    ),
    "only 128 elements of head dim 256 read in decoding": (
        _UNIFIED,
        *_LANES,
        "layer-Gemma-2-9B-decode-fp8",
    ),
    "only 128 elements of head dim 512 read": (_UNIFIED, *_LANES, "layer-Gemma-4-31B-prefill"),
    "only 128 elements of head dim 512 read in decoding": (
        _UNIFIED,
        *_LANES,
        "layer-Gemma-4-31B-decode-fp8",
    ),
    "keys after the 2048th ignored in decoding": (
        _HELPERS,
        "(segm_idx_or_0 + 1) * tiles_per_segment_or_0, tile_end)",
        "(segm_idx_or_0 + 1) * tiles_per_segment_or_0, min(tile_end, 2048 // TILE_SIZE))",
        "decode-2100",
    ),
    "segments of the keys merged without rescaling": (
        _UNIFIED,
        "    segm_output *= segment_scale[:, None]\n",
        "",
        "decode",
    ),
    "blocks of 1056 slots treated as blocks of 1024": (
        _UNIFIED,
        "(seq_offset % BLOCK_SIZE)[None, :]",
        "(seq_offset % 1024)[None, :]",
        "decode-d80-block1056",
    ),
    "padding of the head dim read": (
        _UNIFIED,
        _LANES[0],
        "tl.where(offs_d < HEAD_SIZE_PADDED, 1, 0)",
        "layer-Phi-3-mini-decode",
    ),
    "first head's ALiBi slope used for all heads": (_UNIFIED, *_SLOPE, "prefill-alibi"),
    "first head's ALiBi slope used for all heads in decoding": (_UNIFIED, *_SLOPE, "decode-alibi"),
    "keys and values written to the next slot": (_WRITER, *_NEXT_SLOT, "reshape-and-cache"),
    "key scale used for written values": (
        _WRITER,
        "value_load / tl.load(v_scale)",
        "value_load / tl.load(k_scale)",
        "reshape-and-cache-fp8",
    ),
    "keys written without their scale": (
        _WRITER,
        "key_load / tl.load(k_scale)",
        "key_load",
        "reshape-and-cache-fp8",
    ),
    "rotary section of one axis also used for a second axis": (
        _ROPE,
        "((cos_offsets % 3) == 1)",
        "((cos_offsets % 3) >= 1)",
        "rope-interleaved",
    ),
    "rotary section is one element too short": (
        _ROPE,
        "(cos_offsets < h_end)",
        "(cos_offsets < h_end - 1)",
        "rope",
    ),
    "rotary embedding pairs halves of the whole head, not of its rotated part": (
        _ROPE,
        "second_q_offsets = first_q_offsets + (rd // 2)",
        "second_q_offsets = first_q_offsets + (hd // 2)",
        "rope-partial",
    ),
    "keys rotated backwards": (
        _ROPE,
        "k_tile_2 * cos_row + k_tile_1 * sin_row",
        "k_tile_2 * cos_row - k_tile_1 * sin_row",
        "rope",
    ),
    "norm without eps": (_NORM, "tl.sqrt(mean_sq + eps)", "tl.sqrt(mean_sq)", "rms-norm-eps"),
    "norm divides by the padded size": (
        _NORM,
        "sum_sq / n_cols",
        "sum_sq / BLOCK_SIZE",
        "rms-norm",
    ),
    "experts: padding of the last tile read as ones": (
        _MOE,
        "b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)",
        "b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=1.0)\n"
        "            a = tl.where(offs_k[None, :] < K - k * BLOCK_SIZE_K, a, 1.0).to(a.dtype)",
        "moe-ragged",
    ),
    "first expert's bias used for all experts": (
        _MOE,
        "b_bias_ptr + off_experts * stride_bbe",
        "b_bias_ptr",
        "moe-bias",
    ),
    "only half of an expert's bias added": (
        _MOE,
        "    if HAS_BIAS:\n        accumulator += bias[None, :]\n",
        "    if HAS_BIAS:\n        accumulator += 0.5 * bias[None, :]\n",
        "moe-bias",
    ),
    "routing weights of another token used": (
        _MOE,
        "    topk_weights_ptr + offs_token,",
        "    topk_weights_ptr + offs_token // 2,",
        "moe",
    ),
    "experts in FP8: first block's scale used for all blocks": (
        _MOE,
        "b_scale = tl.load(b_scale_ptrs + offs_ks * stride_bsk)",
        "b_scale = tl.load(b_scale_ptrs)",
        "moe-fp8",
    ),
    "experts in 4 bits: zero points of even columns used for odd columns": (
        _MOE,
        "b_zp_shifter = (offs_bn[None, :] % 2) * 4",
        "b_zp_shifter = (offs_bn[None, :] % 1) * 4",
        "moe-int4-zeros",
    ),
    "whole model: queries see one future key": (_HELPERS, *_BEYOND, "model"),
    "whole model: keys and values written to the next slot": (_WRITER, *_NEXT_SLOT, "model"),
    "whole model: window is one key too wide": (_HELPERS, *_WIDER, "model-window"),
    "whole model: first expert used for all tokens": (_MOE, *_FIRST_EXPERT, "model-experts"),
    **{
        f"whole model: {name}": (*LINEAR_ATTENTION[fault][:3], "model-hybrid")
        for name, fault in (
            ("linear attention's state does not decay", "linear attention's state does not decay"),
            ("linear attention leaves out beta", "linear attention leaves out beta"),
            ("convolution's state not written", "convolution's state not written"),
            (
                "gated norm leaves out the sigmoid of the gate",
                "gated norm leaves out the sigmoid of the gate",
            ),
        )
    },
}
#: Faults that need the head dims, group sizes, ranks and other sizes of real models.
GENERATED = {
    "token index computed as if a token had at most 8 experts": (
        _MOE,
        "offs_token[:, None] // top_k * stride_am + offs_k[None, :] * stride_ak",
        "offs_token[:, None] // min(top_k, 8) * stride_am + offs_k[None, :] * stride_ak",
        "experts-Qwen3-Next-80B-A3B-up-prefill",
    ),
    "experts in 4 bits: groups limited to 64 weights": (
        _MOE,
        "((offs_k[:, None] + BLOCK_SIZE_K * k) // group_size) * stride_bsk",
        "((offs_k[:, None] + BLOCK_SIZE_K * k) // min(group_size, 64)) * stride_bsk",
        "experts-Qwen3-30B-A3B-gptq-up-decode",
    ),
    "only the first tile of heads written to the cache": (
        _WRITER,
        "tile_pos = tile_i * TILE_SIZE + tile_offs",
        "tile_pos = tile_offs",
        "reshape-and-cache-Phi-3-mini",
    ),
    "rotary embedding applied to only two key heads": (
        _ROPE,
        "first_k_mask = (tl.arange(0, pad_n_kh)[:, None] < n_kh)",
        "first_k_mask = (tl.arange(0, pad_n_kh)[:, None] < min(n_kh, 2))",
        "rope-Qwen3-8B",
    ),
    "linear attention always uses two value heads per key head": (
        f"{_FLA}/fused_recurrent.py",
        "i_h = i_hv // (HV // H)",
        "i_h = i_hv // 2",
        "gdn-Qwen3.6-27B-one",
    ),
    "linear attention uses only 64 elements of the key head dim": (
        f"{_FLA}/fused_recurrent.py",
        "mask_k = o_k < K",
        "mask_k = o_k < min(K, 64)",
        "gdn-Qwen3-Next-80B-A3B-one",
    ),
    "linear attention's state decays only in the first 64 elements of the key head dim": (
        f"{_FLA}/chunk_delta_h.py",
        "                b_h2 *= b_g_last\n",
        "                b_h2 *= 1.0\n",
        "gdn-Qwen3.6-27B-chunks",
    ),
    "latent attention computes only the first 16 heads": (
        f"{_OPS}/triton_decode_attention.py",
        "cur_head = cur_head_id * VALID_BLOCK_H + tl.arange(0, BLOCK_H)",
        "cur_head = cur_head_id * 0 + tl.arange(0, BLOCK_H)",
        "mla-decode-GLM-4.7-Flash",
    ),
    "AWQ: groups limited to 64 weights": (
        f"{_LAYERS}/quantization/awq_triton.py",
        ") // group_size + tl.arange(0, 1)",
        ") // tl.minimum(group_size, 64) + tl.arange(0, 1)",
        "awq-Llama-3.1-8B-up-decode",
    ),
    "LoRA: all tiles stored in the first columns": (
        f"{_LORA}/kernel_utils.py",
        "offset_cn = tl.arange(0, BLOCK_N) + pid_n * BLOCK_N\n",
        "offset_cn = tl.arange(0, BLOCK_N)\n",
        "lora-Llama-3.1-8B-qkv-32-mixed",
    ),
    "norm sums only the first 2048 numbers of a row": (
        _NORM,
        "range(0, n_cols, BLOCK_SIZE)",
        "range(0, tl.minimum(n_cols, 2048), BLOCK_SIZE)",
        "rms-norm-8192",
    ),
    "only the first eight blocks of the vocabulary get the temperature": (
        f"{_GPU}/sample/gumbel.py",
        "    block_idx = tl.program_id(1)\n",
        "    block_idx = tl.program_id(1) % 8\n",
        "temperature-min-p-Llama-4-Scout",
    ),
}
#: Faults that other tiers catch. The tier's name precedes the check's.
TIERS = {
    "prefill tile has twice the size and exceeds LDS": (
        _UNIFIED,
        "    TILE_SIZE_PREFILL = _get_tile_size(",
        "    TILE_SIZE_PREFILL = 2 * _get_tile_size(",
        "kernels/prefill-d512",
    ),
    "first expert used for all tokens under emulation": (_MOE, *_FIRST_EXPERT, "emulated/moe"),
}

# SPDX-License-Identifier: BSD-3-Clause
"""Faults to plant in vLLM's kernels: (file, its text, the new text, the check that must fail)."""

_GPU = "vllm/v1/worker/gpu"
_OPS = "vllm/v1/attention/ops"
_FLA = "vllm/third_party/flash_linear_attention/ops"
_LAYERS = "vllm/model_executor/layers"
_TOP = "vllm/v1/sample/ops/topk_topp_triton.py"
_HYBRID = "vllm/model_executor/kernels/linear/mixed_precision/rdna_hybrid_w4a16.py"

SAMPLING = {
    "top-k of the first row": (
        _TOP,
        "            k = tl.load(K + row_id)",
        "            k = tl.load(K)",
        "top-k-top-p",
    ),
    "top-p of the first row": (
        _TOP,
        "                    p = tl.load(P + row_id)",
        "                    p = tl.load(P)",
        "top-k-top-p",
    ),
    "exp without a maximum": (
        _TOP,
        "probs_blk = probs_blk - max_logit\n",
        "probs_blk = probs_blk\n",
        "top-k-top-p-low",
    ),
    "penalties of another request": (
        f"{_GPU}/sample/penalties.py",
        "rep_penalty = tl.load(repetition_penalty_ptr + req_state_idx)",
        "rep_penalty = tl.load(repetition_penalty_ptr + token_idx % 4)",
        "penalties",
    ),
    "negative logits divided": (
        f"{_GPU}/sample/penalties.py",
        "tl.where(logits > 0, 1.0 / scale, scale)",
        "1.0 / scale",
        "penalties",
    ),
    "drafted tokens not counted": (
        f"{_GPU}/sample/penalties.py",
        "tl.range(pos)",
        "tl.range(pos * 0)",
        "penalties",
    ),
    "tokens of the prompt forgotten": (
        f"{_GPU}/sample/penalties.py",
        "prompt_bin_mask | output_bin_mask",
        "output_bin_mask",
        "penalties",
    ),
    "min-p without its logarithm": (
        f"{_GPU}/sample/min_p.py",
        "max_val + tl.log(min_p)",
        "max_val - min_p",
        "temperature-min-p",
    ),
    "noise that is the same at each position": (
        f"{_GPU}/sample/gumbel.py",
        "h = _murmur3_mix(h, (pos & 0xFFFFFFFF).to(tl.uint32))\n",
        "h = _murmur3_mix(h, (pos & 0).to(tl.uint32))\n",
        "gumbel",
    ),
    "temperature multiplied": (
        f"{_GPU}/sample/gumbel.py",
        "    logits = logits / temperature\n",
        "    logits = logits * temperature\n",
        "temperature-min-p",
    ),
}
MLA = {
    "lanes of rope left out": (
        f"{_OPS}/triton_decode_attention.py",
        "qk += tl.dot(qpe, kpe.to(qpe.dtype))",
        "qk += 0.0",
        "mla-decode",
    ),
    "keys shut out by -100 in latent attention": (
        f"{_OPS}/triton_decode_attention.py",
        '< split_kv_end), qk, float("-inf")',
        "< split_kv_end), qk, -100.0",
        "mla-decode-low",
    ),
    "a first maximum of -100 where states are merged": (
        f"{_OPS}/triton_merge_attn_states.py",
        "max_lse = tl.maximum(p_lse, s_lse)",
        "max_lse = tl.maximum(tl.maximum(p_lse, s_lse), -100.0)",
        "merge-states-low",
    ),
    "splits merged without their maximum": (
        f"{_OPS}/triton_decode_attention.py",
        "            acc *= old_scale\n",
        "",
        "mla-decode",
    ),
    "a key too many": (
        f"{_OPS}/triton_decode_attention.py",
        "tl.minimum(split_kv_start + kv_len_per_split, ",
        "tl.minimum(split_kv_start + kv_len_per_split + 1, ",
        "mla-decode",
    ),
    "the scale of fp8 keys": (
        f"{_OPS}/triton_decode_attention.py",
        "kpe = (kpe.to(tl.float32) * ks)",
        "kpe = (kpe.to(tl.float32))",
        "mla-decode-fp8",
    ),
    "the prefix not weighted": (
        f"{_OPS}/triton_merge_attn_states.py",
        "p_scale = p_se / out_se",
        "p_scale = p_se",
        "merge-states",
    ),
}
LINEAR_ATTENTION = {
    "a state that does not decay": (
        f"{_FLA}/fused_recurrent.py",
        "b_h *= exp(g_val)",
        "b_h *= 1.0",
        "gdn-decode",
    ),
    "beta left out": (
        f"{_FLA}/fused_recurrent.py",
        "b_v *= beta_val",
        "b_v *= 1.0",
        "gdn-decode",
    ),
    "a state for a sequence that has none": (
        f"{_FLA}/fused_recurrent.py",
        "    if state_idx <= 0:\n        zero",
        "    if state_idx < 0:\n        zero",
        "gdn-decode",
    ),
    "the state of a convolution not written": (
        f"{_LAYERS}/mamba/ops/causal_conv1d.py",
        "tl.store(conv_state_ptrs_target, new_conv_state, mask)",
        "tl.store(conv_state_ptrs_target, new_conv_state, mask & False)",
        "conv1d",
    ),
    "a gate without its sigmoid": (
        f"{_FLA}/layernorm_guard.py",
        "            y *= z * tl.sigmoid(z)",
        "            y *= z",
        "gated-norm",
    ),
}
QUANTIZED = {
    "AWQ's nibbles in order": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "    shifts = reverse_awq_order_tensor * 4",
        "    shifts = tl.arange(0, 8) * 4 + reverse_awq_order_tensor * 0",
        "awq",
    ),
    "AWQ's zero points": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "zeros = (zeros >> shifts) & 0xF",
        "zeros = (zeros >> shifts) & 0x7",
        "awq",
    ),
    "zero points of the neighbour": (
        _HYBRID,
        "zp_raw = (zp_word >> (4 * (offs_n % 8)))",
        "zp_raw = (zp_word >> (4 * (offs_n % 4)))",
        "w4a16-zeros",
    ),
    "a scale of the first group": (
        _HYBRID,
        "group_idx = (k_start * BLOCK_K) // group_size",
        "group_idx = (k_start * 0) // group_size",
        "w4a16",
    ),
    "a scale of weights": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "a_s[:, None] * b_s[None, :]",
        "a_s[:, None]",
        "fp8-blocks",
    ),
    "a scale of the first block": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "b_s = tl.load(Bs_ptrs + offs_ks * stride_Bs_k)",
        "b_s = tl.load(Bs_ptrs)",
        "fp8-blocks",
    ),
}
_LORA = "vllm/lora/ops/triton_ops"
LORA = {
    "the next adapter": (
        f"{_LORA}/lora_expand_op.py",
        "        lora_id,\n        slice_id,",
        "        (lora_id + 1) % 3,\n        slice_id,",
        "lora-one-slice",
    ),
    "scaling left out": (
        f"{_LORA}/lora_shrink_op.py",
        "accumulator * scaling",
        "accumulator",
        "lora-one-slice",
    ),
    "tokens of another adapter": (
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
#: Faults in strides, which show because the server's tensors are slices or interleaved, and faults
#: that show only with batches of several tiles, several heads of keys, or a few queries.
LAYOUT = {
    "queries taken as contiguous": (_UNIFIED, *_ROWS, "prefill"),
    "queries taken as contiguous in decoding": (_UNIFIED, *_ROWS, "decode"),
    "blocks of keys taken as contiguous": (
        _UNIFIED,
        "physical_block_idx[None, :] * stride_k_cache_0",
        f"physical_block_idx[None, :] * (BLOCK_SIZE * HEAD_SIZE * {_KV_HEADS})",
        "prefill",
    ),
    "slots of values taken as contiguous": (
        _UNIFIED,
        "(seq_offset % BLOCK_SIZE)[:, None] * stride_v_cache_1",
        f"(seq_offset % BLOCK_SIZE)[:, None] * (HEAD_SIZE * {_KV_HEADS})",
        "mixed",
    ),
    "heads of values taken as contiguous": (
        _UNIFIED,
        "kv_head_idx * stride_v_cache_2",
        "kv_head_idx * HEAD_SIZE",
        "mixed",
    ),
    "new values taken as contiguous": (
        _WRITER,
        "        value_stride=value_stride,",
        "        value_stride=n,",
        "reshape-and-cache",
    ),
    "slots written as contiguous": (
        _WRITER,
        "    page_stride = key_cache.stride()[1]",
        "    page_stride = num_heads * head_size",
        "reshape-and-cache",
    ),
    "NaN outside the window": (_UNIFIED, *_OUTSIDE, "prefill-window"),
    "NaN outside the window in decoding": (_UNIFIED, *_OUTSIDE, "decode-window"),
    "a few queries that see the first one's keys": (
        _UNIFIED,
        "query_abs_pos = context_len + query_pos[:, None]",
        "query_abs_pos = context_len + query_pos[:, None] * (0 if IS_3D else 1)",
        "verify",
    ),
    "cache offsets in 32 bits": (
        _UNIFIED,
        _BLOCKS,
        f"{_BLOCKS} % ((1 << 31) // (BLOCK_SIZE * HEAD_SIZE * 4))",
        "far",
    ),
    "keys of the neighbour for a head of values": (
        f"{_FLA}/fused_recurrent.py",
        "i_h = i_hv // (HV // H)",
        "i_h = i_hv % H",
        "gdn-decode",
    ),
    "keys of the neighbour in chunks": (
        f"{_FLA}/chunk_delta_h.py",
        "i_h // (H // Hg)",
        "i_h % Hg",
        "gdn-prefill",
    ),
    "a last chunk that is full": (
        f"{_FLA}/chunk_delta_h.py",
        "        NT = tl.cdiv(T, BT)",
        "        NT = tl.cdiv(T, BT) - (1 if T % BT == 0 else 0)",
        "gdn-prefill",
    ),
    "AWQ's first tile of tokens": (
        f"{_LAYERS}/quantization/awq_triton.py",
        "offsets_am = pid_m * BLOCK_SIZE_M + tl",
        "offsets_am = pid_m * 0 + tl",
        "awq",
    ),
    "W4A16's first tile of tokens": (
        _HYBRID,
        "offs_m = pid_m * BLOCK_M + tl",
        "offs_m = pid_m * 0 + tl",
        "w4a16",
    ),
    "codes of 4 bits off by one in 16 bits": (_HYBRID, "0x64006400", "0x64006401", "w4a16-packed"),
    "FP8's first tile of tokens": (
        f"{_LAYERS}/quantization/utils/fp8_utils.py",
        "offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M",
        "offs_am = tl.arange(0, BLOCK_SIZE_M) % M",
        "fp8-blocks",
    ),
    "tokens that are not sorted, of the first expert": (_MOE, *_FIRST_EXPERT, "moe-one-token"),
    "a last group of tiles counted whole": (
        _MOE,
        "group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)",
        "group_size_m = GROUP_SIZE_M",
        "moe-swizzle",
    ),
}
#: Faults in paged attention, the cache's writer, rope, norms and experts, and in whole models.
_MASKED = ('& seq_mask, S, float("-inf")', "& seq_mask, S, -100.0")
ATTENTION = {
    "keys shut out by -100": (_UNIFIED, *_MASKED, "prefill-low"),
    "keys shut out by -100 in decoding": (_UNIFIED, *_MASKED, "decode-low"),
    "a key of the future": (_HELPERS, *_BEYOND, "prefill"),
    "a key of the future in a batch": (_HELPERS, *_BEYOND, "mixed"),
    "a window one wider": (_HELPERS, *_WIDER, "prefill-window"),
    "a window one wider in decoding": (_HELPERS, *_WIDER, "decode-window"),
    "a window of 512": (
        _HELPERS,
        "q_abs - SLIDING_WINDOW + 1",
        "q_abs - tl.minimum(SLIDING_WINDOW, 512) + 1",
        "prefill-window-600",
    ),
    "no softcap": (_UNIFIED, *_SOFTCAP, "prefill-softcap"),
    "no softcap in decoding": (_UNIFIED, *_SOFTCAP, "decode-softcap"),
    "a softcap that overflows": (
        _HELPERS,
        "x * (1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))",
        "x * (tl.exp(y) - tl.exp(-y)) / (tl.exp(y) + tl.exp(-y))",
        "prefill-softcap-large",
    ),
    "sinks of the first head": (_HELPERS, *_SINK, "prefill-sinks"),
    "sinks of the first head in decoding": (_HELPERS, *_SINK, "decode-sinks"),
    "sinks once per segment": (
        _HELPERS,
        "(not IS_3D) or (segm_idx_or_0 == 0)",
        "True",
        "decode-sinks",
    ),
    "the head dim's scale": (_UNIFIED, *_SCALE, "prefill-scale"),
    "the head dim's scale in decoding": (_UNIFIED, *_SCALE, "decode-scale"),
    "causal over an encoder's keys": (
        _HELPERS,
        "seq_mask = seq_offset[None, :] < seq_len",
        "seq_mask = seq_offset[None, :] <= query_abs_pos",
        "prefill-not-causal",
    ),
    "a key behind an encoder's last": (
        _HELPERS,
        "seq_mask = seq_offset[None, :] < seq_len",
        "seq_mask = seq_offset[None, :] <= seq_len",
        "decode-not-causal",
    ),
    "keys' scale for values": (_UNIFIED, *_KEYS_SCALE, "prefill-fp8-kv"),
    "keys' scale for values in decoding": (_UNIFIED, *_KEYS_SCALE, "decode-fp8-kv"),
    "a group of 3 as 2": (_UNIFIED, *_GROUP, "layer-Phi-4-mini-window-prefill"),
    "a group of 3 as 2 in decoding": (_UNIFIED, *_GROUP, "layer-Granite-3.1-3B-A800M-decode-fp8"),
    "a group of 7 as 6": (_UNIFIED, *_GROUP, "layer-Qwen2.5-0.5B-prefill"),
    "a group of 7 as 6 in decoding": (_UNIFIED, *_GROUP, "layer-Qwen2.5-7B-decode-fp8"),
    "blocks in 15 bits": (_UNIFIED, _BLOCKS, f"{_BLOCKS} & 32767", "prefill-block-33000"),
    "four sequences": (_HELPERS, *_FOURTH, "prefill-batch6"),
    "four sequences in decoding": (_HELPERS, *_FOURTH, "decode-batch6"),
    "128 lanes of 256": (_UNIFIED, *_LANES, "layer-Gemma-3-1B-window-prefill"),
    "128 lanes of 256 in decoding": (_UNIFIED, *_LANES, "layer-Gemma-2-9B-decode-fp8"),
    "128 lanes of 512": (_UNIFIED, *_LANES, "layer-Gemma-4-31B-prefill"),
    "128 lanes of 512 in decoding": (_UNIFIED, *_LANES, "layer-Gemma-4-31B-decode-fp8"),
    "2048 keys": (
        _HELPERS,
        "(segm_idx_or_0 + 1) * tiles_per_segment_or_0, tile_end)",
        "(segm_idx_or_0 + 1) * tiles_per_segment_or_0, min(tile_end, 2048 // TILE_SIZE))",
        "decode-2100",
    ),
    "segments not rescaled": (
        _UNIFIED,
        "    segm_output *= segment_scale[:, None]\n",
        "",
        "decode",
    ),
    "blocks of a power of two": (
        _UNIFIED,
        "(seq_offset % BLOCK_SIZE)[None, :]",
        "(seq_offset % 1024)[None, :]",
        "decode-d80-block1056",
    ),
    "lanes of padding": (
        _UNIFIED,
        _LANES[0],
        "tl.where(offs_d < HEAD_SIZE_PADDED, 1, 0)",
        "layer-Phi-3-mini-decode",
    ),
    "slopes of the first head": (_UNIFIED, *_SLOPE, "prefill-alibi"),
    "slopes of the first head in decoding": (_UNIFIED, *_SLOPE, "decode-alibi"),
    "the next slot": (_WRITER, *_NEXT_SLOT, "reshape-and-cache"),
    "keys' scale for written values": (
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
    "a section twice": (
        _ROPE,
        "((cos_offsets % 3) == 1)",
        "((cos_offsets % 3) >= 1)",
        "rope-interleaved",
    ),
    "a section one short": (
        _ROPE,
        "(cos_offsets < h_end)",
        "(cos_offsets < h_end - 1)",
        "rope",
    ),
    "halves of the whole head": (
        _ROPE,
        "second_q_offsets = first_q_offsets + (rd // 2)",
        "second_q_offsets = first_q_offsets + (hd // 2)",
        "rope-partial",
    ),
    "keys turned back": (
        _ROPE,
        "k_tile_2 * cos_row + k_tile_1 * sin_row",
        "k_tile_2 * cos_row - k_tile_1 * sin_row",
        "rope",
    ),
    "eps left out": (_NORM, "tl.sqrt(mean_sq + eps)", "tl.sqrt(mean_sq)", "rms-norm-eps"),
    "the block's mean": (_NORM, "sum_sq / n_cols", "sum_sq / BLOCK_SIZE", "rms-norm"),
    "the last tile whole": (
        _MOE,
        "b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)",
        "b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=1.0)\n"
        "            a = tl.where(offs_k[None, :] < K - k * BLOCK_SIZE_K, a, 1.0).to(a.dtype)",
        "moe-ragged",
    ),
    "the first expert's bias": (
        _MOE,
        "b_bias_ptr + off_experts * stride_bbe",
        "b_bias_ptr",
        "moe-bias",
    ),
    "the bias not routed": (
        _MOE,
        "    if HAS_BIAS:\n        accumulator += bias[None, :]\n",
        "    if HAS_BIAS:\n        accumulator += 0.5 * bias[None, :]\n",
        "moe-bias",
    ),
    "routed by the next token": (
        _MOE,
        "    topk_weights_ptr + offs_token,",
        "    topk_weights_ptr + offs_token // 2,",
        "moe",
    ),
    "scales of the first block of an expert": (
        _MOE,
        "b_scale = tl.load(b_scale_ptrs + offs_ks * stride_bsk)",
        "b_scale = tl.load(b_scale_ptrs)",
        "moe-fp8",
    ),
    "zero points of the neighbour for experts": (
        _MOE,
        "b_zp_shifter = (offs_bn[None, :] % 2) * 4",
        "b_zp_shifter = (offs_bn[None, :] % 1) * 4",
        "moe-int4-zeros",
    ),
    "a model sees the future": (_HELPERS, *_BEYOND, "model"),
    "a model's keys one slot on": (_WRITER, *_NEXT_SLOT, "model"),
    "a model's window one wider": (_HELPERS, *_WIDER, "model-window"),
    "a model's experts": (_MOE, *_FIRST_EXPERT, "model-experts"),
    **{
        f"a model's {name}": (*LINEAR_ATTENTION[fault][:3], "model-hybrid")
        for name, fault in (
            ("state that does not decay", "a state that does not decay"),
            ("state without beta", "beta left out"),
            ("convolution that stays", "the state of a convolution not written"),
            ("gate without its sigmoid", "a gate without its sigmoid"),
        )
    },
}
#: Faults that only the lanes, groups, ranks and sizes of models show.
GENERATED = {
    "experts of a token behind the eighth": (
        _MOE,
        "offs_token[:, None] // top_k * stride_am + offs_k[None, :] * stride_ak",
        "offs_token[:, None] // min(top_k, 8) * stride_am + offs_k[None, :] * stride_ak",
        "experts-Qwen3-Next-80B-A3B-up-prefill",
    ),
    "a group of 64 at most for experts": (
        _MOE,
        "((offs_k[:, None] + BLOCK_SIZE_K * k) // group_size) * stride_bsk",
        "((offs_k[:, None] + BLOCK_SIZE_K * k) // min(group_size, 64)) * stride_bsk",
        "experts-Qwen3-30B-A3B-gptq-up-decode",
    ),
    "the cache's first tile of heads alone": (
        _WRITER,
        "tile_pos = tile_i * TILE_SIZE + tile_offs",
        "tile_pos = tile_offs",
        "reshape-and-cache-Phi-3-mini",
    ),
    "angles of two heads of keys": (
        _ROPE,
        "first_k_mask = (tl.arange(0, pad_n_kh)[:, None] < n_kh)",
        "first_k_mask = (tl.arange(0, pad_n_kh)[:, None] < min(n_kh, 2))",
        "rope-Qwen3-8B",
    ),
    "two heads of values for one of keys": (
        f"{_FLA}/fused_recurrent.py",
        "i_h = i_hv // (HV // H)",
        "i_h = i_hv // 2",
        "gdn-Qwen3.6-27B-one",
    ),
    "64 lanes of a state": (
        f"{_FLA}/fused_recurrent.py",
        "mask_k = o_k < K",
        "mask_k = o_k < min(K, 64)",
        "gdn-Qwen3-Next-80B-A3B-one",
    ),
    "lanes behind the 64th that do not decay": (
        f"{_FLA}/chunk_delta_h.py",
        "                b_h2 *= b_g_last\n",
        "                b_h2 *= 1.0\n",
        "gdn-Qwen3.6-27B-chunks",
    ),
    "16 heads of latent attention": (
        f"{_OPS}/triton_decode_attention.py",
        "cur_head = cur_head_id * VALID_BLOCK_H + tl.arange(0, BLOCK_H)",
        "cur_head = cur_head_id * 0 + tl.arange(0, BLOCK_H)",
        "mla-decode-GLM-4.7-Flash",
    ),
    "a group of 64 at most for AWQ": (
        f"{_LAYERS}/quantization/awq_triton.py",
        ") // group_size + tl.arange(0, 1)",
        ") // tl.minimum(group_size, 64) + tl.arange(0, 1)",
        "awq-Llama-3.1-8B-up-decode",
    ),
    "the first tile of an adapter's rank": (
        f"{_LORA}/kernel_utils.py",
        "offset_cn = tl.arange(0, BLOCK_N) + pid_n * BLOCK_N\n",
        "offset_cn = tl.arange(0, BLOCK_N)\n",
        "lora-Llama-3.1-8B-qkv-32-mixed",
    ),
    "a norm of 2048 numbers": (
        _NORM,
        "range(0, n_cols, BLOCK_SIZE)",
        "range(0, tl.minimum(n_cols, 2048), BLOCK_SIZE)",
        "rms-norm-8192",
    ),
    "temperature for eight blocks of the vocabulary": (
        f"{_GPU}/sample/gumbel.py",
        "    block_idx = tl.program_id(1)\n",
        "    block_idx = tl.program_id(1) % 8\n",
        "temperature-min-p-Llama-4-Scout",
    ),
}
#: Faults that other tiers catch. The tier's name precedes the check's.
TIERS = {
    "LDS of twice the tile": (
        _UNIFIED,
        "    TILE_SIZE_PREFILL = _get_tile_size(",
        "    TILE_SIZE_PREFILL = 2 * _get_tile_size(",
        "kernels/prefill-d512",
    ),
    "another expert under emulation": (_MOE, *_FIRST_EXPERT, "emulated/moe"),
}

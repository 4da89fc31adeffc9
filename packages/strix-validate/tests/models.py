# SPDX-License-Identifier: BSD-3-Clause
"""What the config.json of public models says about attention and experts, written by hand."""

_GEMMA_3 = {"model_type": "gemma3_text", "sliding_window": 1024}
_QWEN_3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}


def _heads(heads: int, kv_heads: int, hidden: int = 0, **more) -> dict:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden or heads * 128,
        "torch_dtype": "bfloat16",
        **more,
    }


CONFIGS = {
    "Llama-3.1-8B": _heads(32, 8, model_type="llama"),
    "Llama-3.2-3B": _heads(24, 8, model_type="llama", head_dim=128),
    "Qwen3-8B": _heads(32, 8, **_QWEN_3),
    "Qwen3-14B": _heads(40, 8, **_QWEN_3),
    "Qwen3-30B-A3B": _heads(
        32, 4, 2048, **_QWEN_3, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "Qwen3-235B-A22B": _heads(
        64, 4, 4096, **_QWEN_3, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536
    ),
    "Qwen3.6-27B": {
        "text_config": _heads(
            24,
            4,
            5120,
            head_dim=256,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        )
    },
    "Gemma-2-9B": _heads(
        16,
        8,
        3584,
        model_type="gemma2",
        head_dim=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        query_pre_attn_scalar=256,
    ),
    "Gemma-3-4B": {"text_config": _GEMMA_3 | {"hidden_size": 2560}, "torch_dtype": "bfloat16"},
    "Gemma-3-27B": {
        "text_config": _GEMMA_3 | _heads(32, 16, 5376, head_dim=128, query_pre_attn_scalar=168)
    },
    "Gemma-4-31B": {
        "text_config": _heads(
            32,
            16,
            5376,
            model_type="gemma4_text",
            head_dim=256,
            global_head_dim=512,
            num_global_key_value_heads=4,
            sliding_window=1024,
            **_MIXED,
        )
    },
    "Mistral-7B": _heads(32, 8, model_type="mistral", sliding_window=4096),
    "Mistral-Small": _heads(32, 8, 5120, model_type="mistral", head_dim=128, sliding_window=None),
    "Phi-4": _heads(40, 10, model_type="phi3", sliding_window=None),
    "Phi-4-mini": _heads(24, 8, model_type="phi3", sliding_window=262144),
    "gpt-oss-20b": _heads(
        64, 8, 2880, model_type="gpt_oss", head_dim=64, sliding_window=128, **_MIXED
    ),
    "GLM-4.5-Air": _heads(
        96,
        8,
        4096,
        model_type="glm4_moe",
        head_dim=128,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
    ),
    "Seed-OSS-36B": _heads(80, 8, 5120, model_type="seed_oss", head_dim=128),
    "MiniMax-M2": _heads(
        48,
        8,
        3072,
        model_type="minimax_m2",
        head_dim=128,
        num_local_experts=256,
        num_experts_per_tok=8,
        intermediate_size=1536,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "Llama-4-Scout": {
        "text_config": _heads(
            40,
            8,
            model_type="llama4_text",
            head_dim=128,
            num_local_experts=16,
            num_experts_per_tok=1,
            intermediate_size=8192,
            attention_chunk_size=8192,
            layer_types=["chunked_attention", "full_attention"],
        )
    },
    "Qwen2.5-VL-7B": _heads(
        28, 4, model_type="qwen2_5_vl", sliding_window=32768, use_sliding_window=False
    ),
    "Whisper-large-v3": {
        "model_type": "whisper",
        "decoder_attention_heads": 20,
        "d_model": 1280,
        "is_encoder_decoder": True,
        "torch_dtype": "float16",
    },
}

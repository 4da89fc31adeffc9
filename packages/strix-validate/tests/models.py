# SPDX-License-Identifier: BSD-3-Clause
"""config.json of public models: whole files, and hand-written keys of attention and experts."""

import json
from pathlib import Path

_QWEN_3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
}


def _heads(heads: int, kv_heads: int, hidden: int = 0, **more) -> dict:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden or heads * 128,
        "torch_dtype": "bfloat16",
        **more,
    }


def _hybrid(values: int, *heads: int) -> dict:
    linear = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    kinds = ["linear_attention", "full_attention"]
    text = _heads(*heads, head_dim=256, layer_types=kinds, vocab_size=248320, **linear)
    return {"text_config": text}


_BY_HAND = {
    "Llama-3.2-3B": _heads(24, 8, model_type="llama", head_dim=128, vocab_size=128256),
    "Qwen3-14B": _heads(40, 8, **_QWEN_3, vocab_size=151936),
    "Qwen3-235B-A22B": _heads(
        64,
        4,
        4096,
        **_QWEN_3,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        vocab_size=151936,
    ),
    "Qwen3.5-9B": _hybrid(32, 16, 4, 4096),
    "Qwen3.6-27B": _hybrid(48, 24, 4, 5120),
    "Gemma-2-9B": _heads(
        16,
        8,
        3584,
        model_type="gemma2",
        head_dim=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        query_pre_attn_scalar=256,
        vocab_size=256000,
    ),
    # The file leaves out the keys that have transformers' defaults.
    "Gemma-3-4B": {
        "text_config": {
            "model_type": "gemma3_text",
            "sliding_window": 1024,
            "hidden_size": 2560,
            "vocab_size": 262208,
        },
        "torch_dtype": "bfloat16",
    },
    "Mixtral-8x7B": _heads(
        32,
        8,
        model_type="mixtral",
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=14336,
        vocab_size=32000,
    ),
    "Phi-3.5-mini": _heads(
        32, 32, 3072, model_type="phi3", sliding_window=262144, vocab_size=32064
    ),
    "Phi-4-mini": _heads(24, 8, model_type="phi3", sliding_window=262144, vocab_size=200064),
    "OLMo-2-7B": _heads(32, 32, model_type="olmo2", vocab_size=100352),
    "OLMo-3-7B": _heads(
        32,
        32,
        model_type="olmo3",
        sliding_window=4096,
        vocab_size=100278,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "GLM-4-9B": _heads(32, 2, model_type="glm4", head_dim=128, vocab_size=151552),
    "Granite-3.3-8B": _heads(32, 8, model_type="granite", vocab_size=49159),
    "Granite-3.1-3B-A800M": _heads(
        24,
        8,
        1536,
        model_type="granitemoe",
        num_local_experts=40,
        num_experts_per_tok=8,
        intermediate_size=512,
        vocab_size=49155,
    ),
    "Seed-OSS-36B": _heads(80, 8, 5120, model_type="seed_oss", head_dim=128, vocab_size=155136),
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
        vocab_size=200064,
    ),
}
#: Models that are not in CONFIGS, most of them because they have sparse attention or Mamba layers,
#: or generate no tokens.
_WITHOUT = (
    "DeepSeek-V4-Flash",
    "GLM-5",
    "Granite-4.0-H-Small",
    "Mistral-Small-4-119B",
    "Qwen3-Embedding-0.6B",
    "multilingual-e5-large",
)


def _read(folder: str) -> dict[str, dict]:
    files = sorted((Path(__file__).parent / folder).glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


FILES = _read("configs")
FORMATS = FILES.pop("formats")
#: Models that were in use in 2026, with the values of transformers 5.24's configurations and of
#: publishers' files.
SHAPES = _read("shapes")
#: Models from public issue threads.
THREADS = _read("threads")
CONFIGS = _BY_HAND | {
    name: config for name, config in (FILES | SHAPES).items() if name not in _WITHOUT
}

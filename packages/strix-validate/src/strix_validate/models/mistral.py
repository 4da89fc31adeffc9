# SPDX-License-Identifier: BSD-3-Clause
"""Mistral's own format: a params.json, as vLLM reads it with --config-format mistral."""

from collections.abc import Mapping
from typing import Any

from strix_validate.models.defaults import NoModel

FILE = "params.json"
FLAGS = "--tokenizer-mode mistral --config-format mistral --load-format mistral"
#: Their names in a config.json (vllm/transformers_utils/configs/mistral.py of 0.33.0).
_NAMES = {
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
}
_LENGTH = 128_000


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a params.json in the words of a config.json.

    Raises:
        NoModel: It is none, or its quantization is one that vLLM does not read.
    """
    text = {_NAMES.get(key, key): value for key, value in params.items()}
    if not text.get("hidden_size") or not text.get("num_hidden_layers"):
        raise NoModel(f"{FILE} has no dim or no n_layers: is it Mistral's?")
    # what its file leaves out is off, and not as in transformers' class
    text = {"tie_word_embeddings": False, "sliding_window": None} | text
    longest = text.get("max_seq_len") or _LENGTH
    text["max_position_embeddings"] = text.get("max_position_embeddings") or longest
    text["model_type"], name = "mistral", "MistralForCausalLM"
    experts = text.pop("moe", None)
    if experts:
        text |= {_EXPERTS.get(key, key): value for key, value in experts.items()}
        shared = experts.get("num_shared_experts")
        text["model_type"] = "deepseek_v3" if shared else "mixtral"
        name = "MistralLarge3ForCausalLM" if shared else "MixtralForCausalLM"
    if text.get("yarn"):
        text["rope_parameters"] = {"rope_type": "yarn"}
    config = {"quantization_config": _quantization(text.pop("quantization", None))}
    window = text.get("sliding_window")
    if isinstance(window, list):
        kinds = ["sliding_attention" if size else "full_attention" for size in window]
        text["layer_types"] = kinds * (text["num_hidden_layers"] // max(len(kinds), 1))
        text["sliding_window"] = next(filter(None, window), None)
    vision = text.pop("vision_encoder", None)
    if vision is None:
        return text | config | {"architectures": [name]}
    encoder = {"model_type": "pixtral", "hidden_act": "silu", **vision}
    parts = {"text_config": text, "vision_config": encoder}
    return {"model_type": "mistral3", **parts, **config} | {
        "architectures": ["PixtralForConditionalGeneration"]
    }


def _quantization(quantization: Mapping | None) -> dict[str, Any] | None:
    """Return what a config.json would say of the format."""
    if not quantization:
        return None
    if quantization.get("qformat_weight") == "fp8_e4m3":
        return {"quant_method": "fp8", "activation_scheme": "static"}
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**quantization, "quant_method": method}
    raise NoModel(f"vLLM knows no such quantization in {FILE}: {quantization!s:.100}")

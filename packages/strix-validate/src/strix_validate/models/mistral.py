# SPDX-License-Identifier: BSD-3-Clause
"""Convert Mistral's own format, a params.json, as vLLM does with --config-format mistral."""

from collections.abc import Mapping
from typing import Any

from strix_validate.layers.defaults import NoModel

FILE = "params.json"
FLAGS = "--tokenizer-mode mistral --config-format mistral --load-format mistral"
#: Names in a config.json by their names in a params.json
#: (vllm/transformers_utils/configs/mistral.py of 0.33.0).
_NAMES = {
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
}
#: Names in a config.json, by their names in the part "moe" of a params.json.
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
}
#: Context length in tokens if the file does not state it.
_DEFAULT_LENGTH = 128_000


def convert_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a params.json to the keys of a config.json.

    Raises:
        NoModel: The file describes no model, or has a quantization that vLLM does not read.
    """
    # without these keys in the file, both features are off, whatever the default of transformers'
    # class
    text: dict[str, Any] = {"tie_word_embeddings": False, "sliding_window": None}
    for key, value in params.items():
        text[_NAMES.get(key, key)] = value
    if not text.get("hidden_size") or not text.get("num_hidden_layers"):
        raise NoModel(f"{FILE} has no dim or no n_layers: is it Mistral's?")
    if not text.get("max_position_embeddings"):
        text["max_position_embeddings"] = text.get("max_seq_len") or _DEFAULT_LENGTH
    architecture = _convert_experts(text)
    if text.get("yarn"):
        text["rope_parameters"] = {"rope_type": "yarn"}
    quantization = _quantization(text.pop("quantization", None))
    _convert_windows(text)
    vision = text.pop("vision_encoder", None)
    if vision is None:
        return text | {"quantization_config": quantization, "architectures": [architecture]}
    return {
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": {"model_type": "pixtral", "hidden_act": "silu", **vision},
        "quantization_config": quantization,
        "architectures": ["PixtralForConditionalGeneration"],
    }


def _convert_experts(text: dict[str, Any]) -> str:
    """Convert the part "moe" in place, set model_type, and return the architecture."""
    experts = text.pop("moe", None)
    if not experts:
        text["model_type"] = "mistral"
        return "MistralForCausalLM"
    for key, value in experts.items():
        text[_EXPERTS.get(key, key)] = value
    if experts.get("num_shared_experts"):
        text["model_type"] = "deepseek_v3"
        return "MistralLarge3ForCausalLM"
    text["model_type"] = "mixtral"
    return "MixtralForCausalLM"


def _convert_windows(text: dict[str, Any]) -> None:
    """Convert a list of windows in place; the layers use its entries in turn."""
    windows = text.get("sliding_window")
    if not isinstance(windows, list):
        return
    kinds = []
    for size in windows:
        kind = "sliding_attention" if size else "full_attention"
        kinds.append(kind)
    text["layer_types"] = kinds * (text["num_hidden_layers"] // max(len(kinds), 1))
    text["sliding_window"] = next(filter(None, windows), None)


def _quantization(quantization: Mapping | None) -> dict[str, Any] | None:
    """Return the quantization_config of a config.json for a quantization of a params.json.

    Raises:
        NoModel: vLLM does not know the quantization.
    """
    if not quantization:
        return None
    if quantization.get("qformat_weight") == "fp8_e4m3":
        return {"quant_method": "fp8", "activation_scheme": "static"}
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**quantization, "quant_method": method}
    raise NoModel(f"vLLM does not know this quantization in {FILE}: {quantization!s:.100}")

# SPDX-License-Identifier: BSD-3-Clause
"""How much memory a model's weights take, and each token that its server keeps."""

import json
from collections.abc import Mapping
from pathlib import Path

from strix_validate.models.table import format_of

#: Bytes of a weight in a layer's matrices, with its share of a scale; 4 bits in groups of 128.
_BYTES = {
    "16 bits": 2.0, "fp8": 1.0, "fp8-blocks": 1.0,
    "w4a16": 0.5 + 2 / 128, "gptq": 0.5 + 2.5 / 128, "awq": 0.5 + 2.5 / 128,
    "w8a16": 1 + 2 / 128, "w8a16-channels": 1.0, "mxfp4": 0.5 + 1 / 32, "gguf": 0.5 + 2 / 32,
}  # fmt: skip


def weights_of_files(folder: Path) -> int:
    """Return bytes of the folder's safetensors, or what their index says; 0 if it has neither."""
    if found := sum(f.stat().st_size for f in folder.glob("*.safetensors") if f.is_file()):
        return found
    try:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text()) if file.is_file() else {}
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0


def weights(config: Mapping) -> int:
    """Count bytes of a model's weights from its dimensions; norms and biases are left out."""
    text = config.get("text_config") or config
    hidden = text.get("hidden_size") or text["d_model"]
    form, vocabulary = format_of(config), text["vocab_size"]
    matrix = 2.0 if form == "mxfp4" else _BYTES[form]
    total = 2.0 * vocabulary * hidden * (1 if _is_tied(config) or _is_encoder(text) else 2)
    if "encoder_layers" in text:  # an encoder, and a decoder that looks at it
        own = 4 * hidden**2 + 2 * hidden * text["encoder_ffn_dim"]
        across = 8 * hidden**2 + 2 * hidden * text["decoder_ffn_dim"]
        layers = text["encoder_layers"] * own + text["decoder_layers"] * across
        return int(total + matrix * layers)
    count = text["num_hidden_layers"]
    linear, mamba = _linear_layers(text), _mamba_layers(text)
    total += matrix * (count - linear - mamba) * _attention(text, hidden)
    total += matrix * (linear * _delta(text, hidden) + mamba * _mamba(text, hidden))
    wide = 2 if _is_encoder(text) else 3
    experts = next((n for k in _EXPERTS if (n := text.get(k))), 0)
    dense = _dense_layers(text) if experts else count
    # where every layer has experts, the size of a dense one is not in the file
    inner = text["intermediate_size"] if dense else 0
    if not experts:  # Granite 4 calls its dense layers shared
        inner = text.get("shared_intermediate_size") or inner
    total += matrix * dense * wide * hidden * inner
    if experts:
        size = text.get("moe_intermediate_size") or text["intermediate_size"]
        shared = (
            text.get("shared_expert_intermediate_size")
            or text.get("shared_intermediate_size")
            or size * (text.get("n_shared_experts") or 0)
        )
        routed = 3 * experts * hidden * size
        if form == "mxfp4":  # padded by vLLM
            routed = 3 * experts * _padded(hidden) * _padded(size)
        total += (count - dense) * (_BYTES[form] * routed + 3 * matrix * hidden * shared)
    vision = config.get("vision_config") or {}
    if depth := vision.get("depth") or vision.get("num_hidden_layers"):
        side, inner = vision["hidden_size"], vision["intermediate_size"]
        total += 2.0 * depth * (4 * side**2 + 3 * side * inner)
    return int(total)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _padded(size: int) -> int:
    return -(-size // 256) * 256


def _is_encoder(text: Mapping) -> bool:
    return "type_vocab_size" in text


#: Families whose head is the embedding where config.json does not say; the others have their own.
_TIED = ("gemma", "cohere", "command", "gpt2", "opt", "bloom", "falcon", "starcoder2", "whisper")


def _is_tied(config: Mapping) -> bool:
    """Return whether a model's head is its embedding, by its file or else its family's default."""
    text = config.get("text_config") or config
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    kind = str(text.get("model_type") or config.get("model_type") or "")
    return kind.startswith(_TIED) if said is None else bool(said) or "encoder_layers" in text


def _dense_layers(text: Mapping) -> int:
    """Count the layers without experts of a model that has some."""
    if (first := text.get("first_k_dense_replace")) is not None:
        return first
    every = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1
    plain = set(text.get("mlp_only_layers") or ())
    return sum((i + 1) % every != 0 or i in plain for i in range(text["num_hidden_layers"]))


def _mamba_layers(text: Mapping) -> int:
    return (text.get("layer_types") or []).count("mamba")


def _mamba(text: Mapping, hidden: int) -> int:
    """Count the weights of a layer of Mamba 2: its two projections, and the convolution."""
    if not (heads := text.get("mamba_n_heads")):
        return 0
    wide = heads * text["mamba_d_head"]
    states = 2 * text["mamba_n_groups"] * text["mamba_d_state"]
    return hidden * (3 * wide + states + heads) + (wide + states) * text["mamba_d_conv"]


def uncounted(config: Mapping) -> list[str]:
    """Name the parts of a model that :func:`weights` leaves out: it is then a lower bound."""
    text = config.get("text_config") or config
    kinds = set(text.get("layer_types") or ()) - _KINDS
    if "mamba" in kinds and text.get("mamba_n_heads"):
        kinds.remove("mamba")
    found = [f"layers of {kind}" for kind in sorted(map(str, kinds))]
    return found + [name for key, name in _UNCOUNTED.items() if text.get(key)]


def not_in_table(config: Mapping) -> list[str]:
    """Name the kinds of layers that the table has no row for, with how many there are."""
    kinds = list((config.get("text_config") or config).get("layer_types") or ())
    return [f"{kinds.count(kind)} layers of {kind}" for kind in sorted(set(kinds) - _KINDS)]


_KINDS = {
    "attention", "full_attention", "sliding_attention", "chunked_attention", "linear_attention",
}  # fmt: skip
_UNCOUNTED = {
    "index_topk": "the indexer of sparse attention",
    "hc_mult": "hyper-connections",
    "ssm_cfg": "state space layers",
    "hybrid_override_pattern": "state space layers",
}


def _linear_layers(text: Mapping) -> int:
    """Count a model's layers of linear attention."""
    if not text.get("linear_num_value_heads"):
        return 0
    if kinds := text.get("layer_types"):
        return kinds.count("linear_attention")
    count = text["num_hidden_layers"]
    return count - count // text.get("full_attention_interval", 4)


def _head(text: Mapping) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _attention(text: Mapping, hidden: int) -> int:
    heads = text["num_attention_heads"]
    if rank := text.get("kv_lora_rank"):
        query, rope = text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["qk_rope_head_dim"]
        low = text.get("q_lora_rank")
        queries = low * (hidden + heads * query) if low else hidden * heads * query
        keys = hidden * (rank + rope) + rank * heads * (
            text["qk_nope_head_dim"] + text["v_head_dim"]
        )
        return queries + keys + heads * text["v_head_dim"] * hidden
    size, keys = _head(text), text.get("num_key_value_heads") or heads
    gate = heads if text.get("linear_num_value_heads") else 0  # Qwen3-Next gates its output
    return hidden * size * (2 * heads + gate + 2 * keys)


def _delta(text: Mapping, hidden: int) -> int:
    if not (values := text.get("linear_num_value_heads")):
        return 0
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    wide = values * text["linear_value_head_dim"]
    return hidden * (2 * keys + 3 * wide + 2 * values)


def cache_of_token(config: Mapping) -> int:
    """Return bytes of a token's keys and values in 16 bits, at most: windows keep fewer tokens."""
    text = config.get("text_config") or config
    if _is_encoder(text):
        return 0
    if "decoder_layers" in text:
        return 4 * text["decoder_layers"] * text["d_model"]
    count = text["num_hidden_layers"] - _linear_layers(text) - _mamba_layers(text)
    if rank := text.get("kv_lora_rank"):
        return 2 * count * (rank + text["qk_rope_head_dim"])
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    return 4 * count * heads * _head(text)

# SPDX-License-Identifier: BSD-3-Clause
"""How much memory a model's weights take, and each token that its server keeps."""

import re
from collections.abc import Mapping
from pathlib import Path

from strix_validate.json_file import json_object
from strix_validate.models.table import EXPERTS, NoModel, contents, format_of

#: Bytes of a weight in a layer's matrices, with its share of a scale; 4 bits in groups of 128.
_BYTES = {
    "16 bits": 2.0, "fp8": 1.0, "fp8-blocks": 1.0,
    "w4a16": 0.5 + 2 / 128, "gptq": 0.5 + 2.5 / 128, "awq": 0.5 + 2.5 / 128,
    "w8a16": 1 + 2 / 128, "w8a16-channels": 1.0, "mxfp4": 0.5 + 1 / 32, "gguf": 0.5 + 2 / 32,
}  # fmt: skip
#: Layers are counted one by one: a damaged number took for ever. The deepest model known has 126.
_MOST_LAYERS = 1000


def weights_of_files(folder: Path) -> int:
    """Return bytes of the folder's safetensors, or what their index says; 0 if it has neither."""
    if found := sum(f.stat().st_size for f in folder.glob("*.safetensors") if f.is_file()):
        return found
    try:
        index = json_object(folder / "model.safetensors.index.json")
        found = int(index["metadata"]["total_size"])
        return found if 0 < found < 1 << 60 else 0
    except (ValueError, LookupError, TypeError, OverflowError):
        return 0


def _text(config: Mapping) -> Mapping:
    return config.get("text_config") or config


def weights(config: Mapping) -> int:
    """Count bytes of a model's weights from its dimensions; norms and biases are left out."""
    text = _text(config)
    hidden = text.get("hidden_size") or text["d_model"]
    form, vocabulary = format_of(config), text["vocab_size"]
    matrix = 2.0 if form == "mxfp4" else _BYTES[form]
    total = 2.0 * vocabulary * hidden * (1 if _is_tied(config) or _is_encoder(text) else 2)
    if "encoder_layers" in text:  # an encoder, and a decoder that looks at it
        own = 4 * hidden**2 + 2 * hidden * text["encoder_ffn_dim"]
        across = 8 * hidden**2 + 2 * hidden * text["decoder_ffn_dim"]
        layers = text["encoder_layers"] * own + text["decoder_layers"] * across
        return int(total + matrix * layers)
    sparse = _sparse(text)
    for number, kind in enumerate(_kinds(text)):
        total += matrix * _mixer(text, hidden, kind, number)
        if number not in sparse or text.get("enable_moe_block"):
            total += matrix * _dense(text, hidden, number)
        if number in sparse:
            total += 2.0 * hidden * _experts(text)
            total += matrix * 3 * hidden * _shared(text)
            weight = _BYTES["mxfp4" if text.get("expert_dtype") == "fp4" else form]
            total += weight * 3 * _experts(text) * _expert(text, hidden, form)
    # hyper-connections are in float32, a layer has two
    streams = text.get("hc_mult") or 0
    total += 4 * len(_kinds(text)) * 2 * streams * hidden * (2 * streams + streams**2)
    return int(total + 2.0 * (_each_layers_input(text, hidden) + _vision(config)))


def _layers(text: Mapping) -> int:
    if (count := text["num_hidden_layers"]) > _MOST_LAYERS:
        raise NoModel(f"no model has num_hidden_layers = {count!s:.20}")
    return count


def _kinds(text: Mapping) -> list[str]:
    """Return what each layer mixes tokens by, in the words of config.json's layer_types."""
    count = _layers(text)
    if kinds := text.get("layer_types"):
        return [str(kind) for kind in kinds]
    if ratios := text.get("compress_ratios"):  # the prediction head's ratio is the last
        return [f"compressed {ratio}" if ratio else "sliding_attention" for ratio in ratios[:count]]
    every = text.get("full_attention_interval", 4) if text.get("linear_num_value_heads") else 1
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def _mixer(text: Mapping, hidden: int, kind: str, number: int) -> int:
    if kind == "linear_attention":
        return _delta(text, hidden)
    if kind == "mamba":
        return _mamba(text, hidden)
    if text.get("o_lora_rank"):
        return _compressed(text, hidden, kind)
    return _latent(text, hidden) if text.get("kv_lora_rank") else _heads(text, hidden, kind, number)


def _heads(text: Mapping, hidden: int, kind: str, number: int) -> int:
    heads, (keys, size) = text["num_attention_heads"], _keys(text, kind)
    gate = heads if text.get("attn_output_gate", text.get("linear_num_value_heads")) else 0
    each = 1 if _is_global(text, kind) and text.get("attention_k_eq_v") else 2
    if number >= _own_keys(text):
        each = 0
    return hidden * size * (2 * heads + gate + each * keys)


def _own_keys(text: Mapping) -> int:
    """Count the layers that make keys and values; the rest read those of earlier ones."""
    return _layers(text) - (text.get("num_kv_shared_layers") or 0)


def _is_global(text: Mapping, kind: str) -> bool:
    return bool(text.get("global_head_dim")) and kind == "full_attention"


def _keys(text: Mapping, kind: str) -> tuple[int, int]:
    """Return the number of a layer's heads of keys, and their size."""
    keys = text.get("num_key_value_heads") or text["num_attention_heads"]
    if not _is_global(text, kind):
        return keys, text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if text.get("attention_k_eq_v"):
        keys = text.get("num_global_key_value_heads") or keys
    return keys, text["global_head_dim"]


def _latent(text: Mapping, hidden: int) -> int:
    heads, rank, rope = text["num_attention_heads"], text["kv_lora_rank"], text["qk_rope_head_dim"]
    query, value, low = text["qk_nope_head_dim"] + rope, text["v_head_dim"], text.get("q_lora_rank")
    queries = low * (hidden + heads * query) if low else hidden * heads * query
    keys = hidden * (rank + rope) + rank * heads * (text["qk_nope_head_dim"] + value)
    total = queries + keys + heads * value * hidden
    return total + (hidden * text["index_head_dim"] + _index(text, hidden) if _indexes(text) else 0)


def _indexes(text: Mapping) -> bool:
    return bool(text.get("index_topk") and text.get("index_n_heads"))


def _index(text: Mapping, hidden: int) -> int:
    """Count what scores tokens for sparse attention, without its keys."""
    return text["index_n_heads"] * (text["q_lora_rank"] * text["index_head_dim"] + hidden)


def _compressed(text: Mapping, hidden: int, kind: str) -> int:
    """Count a layer of DeepSeek-V4: one head of keys, queries and output of low rank."""
    wide = text["num_attention_heads"] * text["head_dim"]
    total = text["q_lora_rank"] * (hidden + wide) + hidden * text["head_dim"]
    total += text["o_lora_rank"] * (wide + text["o_groups"] * hidden)
    if kind == "compressed 4":  # keys of overlapping windows, and of the tokens' scores
        sizes = text["head_dim"] + text["index_head_dim"]
        return total + 4 * hidden * sizes + _index(text, hidden)
    return total + (2 * hidden * text["head_dim"] if kind != "sliding_attention" else 0)


def _delta(text: Mapping, hidden: int) -> int:
    if not (values := text.get("linear_num_value_heads")):
        return 0
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    wide = values * text["linear_value_head_dim"]
    return hidden * (2 * keys + 3 * wide + 2 * values)


def _mamba(text: Mapping, hidden: int) -> int:
    """Count the weights of a layer of Mamba 2: its two projections, and the convolution."""
    if not (heads := text.get("mamba_n_heads")):
        return 0
    wide = heads * text["mamba_d_head"]
    states = 2 * text["mamba_n_groups"] * text["mamba_d_state"]
    return hidden * (3 * wide + states + heads) + (wide + states) * text["mamba_d_conv"]


def _dense(text: Mapping, hidden: int, number: int) -> int:
    """Count the matrices of a layer's feed-forward part that each token passes."""
    # Granite 4 calls its dense layers shared; Llama 4 has a size of its own for them
    names = ("intermediate_size_mlp", "shared_intermediate_size", "intermediate_size")
    inner = next((n for name in names[not _experts(text) :] if (n := text.get(name))), None)
    if inner is None:
        raise KeyError("intermediate_size")
    wide = 2 if text.get("use_double_wide_mlp") and number >= _own_keys(text) else 1
    return (2 if _is_encoder(text) else 3) * hidden * inner * wide


def _experts(text: Mapping) -> int:
    return next((n for name in EXPERTS if (n := text.get(name))), 0)


def _sparse(text: Mapping) -> range | set[int]:
    """Return the numbers of the layers with experts."""
    count = _layers(text)
    if not _experts(text):
        return range(0)
    if (first := text.get("first_k_dense_replace")) is not None:
        return range(first, count)
    if kinds := text.get("mlp_layer_types"):
        return {i for i, kind in enumerate(kinds) if kind != "dense"}
    every = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1
    plain = set(text.get("mlp_only_layers") or ())
    return {i for i in range(count) if (i + 1) % every == 0} - plain


def _expert_size(text: Mapping) -> int:
    return text.get("moe_intermediate_size") or text["intermediate_size"]


def _expert(text: Mapping, hidden: int, form: str) -> int:
    if form != "mxfp4":
        return hidden * _expert_size(text)
    padded = [-(-size // 256) * 256 for size in (hidden, _expert_size(text))]  # by vLLM
    return padded[0] * padded[1]


def _shared(text: Mapping) -> int:
    """Return the width of the experts that each token passes."""
    if str(text.get("model_type")).startswith("llama4"):
        return _expert_size(text)
    said = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size")
    return said or _expert_size(text) * (text.get("n_shared_experts") or 0)


def _each_layers_input(text: Mapping, hidden: int) -> int:
    """Count the embeddings that Gemma adds to each layer, and their projections."""
    if not (size := text.get("hidden_size_per_layer_input")):
        return 0
    rows = text.get("vocab_size_per_layer_input") or text["vocab_size"]
    return _layers(text) * size * (rows + 3 * hidden)


def _vision(config: Mapping) -> int:
    vision = config.get("vision_config") or {}
    if not (depth := vision.get("depth") or vision.get("num_hidden_layers")):
        return 0
    side, inner = vision["hidden_size"], vision["intermediate_size"]
    gated = vision.get("hidden_act") == "silu" or vision.get("model_type") == "gemma4_vision"
    total = depth * (4 * side**2 + (3 if gated else 2) * side * inner)
    if out := vision.get("out_hidden_size"):
        merged = side * vision.get("spatial_merge_size", 2) ** 2
        total += merged * (merged + out)
    return total


def _is_encoder(text: Mapping) -> bool:
    return "type_vocab_size" in text


#: Families whose head is the embedding where config.json does not say; the others have their own.
_TIED = ("gemma", "cohere", "command", "gpt2", "opt", "bloom", "falcon", "starcoder2", "whisper")


def _is_tied(config: Mapping) -> bool:
    """Return whether a model's head is its embedding, by its file or else its family's default."""
    text = _text(config)
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    kind = str(text.get("model_type") or config.get("model_type") or "")
    return kind.startswith(_TIED) if said is None else bool(said) or "encoder_layers" in text


def uncounted(config: Mapping) -> list[str]:
    """Name the parts of a model that :func:`weights` leaves out: it is then a lower bound."""
    text = _text(config)
    kinds = set(text.get("layer_types") or ()) - _KINDS
    if "mamba" in kinds and text.get("mamba_n_heads"):
        kinds.remove("mamba")
    found = [f"layers of {kind}" for kind in sorted(map(str, kinds))]
    found += [name for key, name in _UNCOUNTED.items() if text.get(key)]
    if config.get("audio_config") and "encoder_layers" not in text:
        found.append("the encoder of sound")
    known = contents()["known"]
    sizes = [key for key, value in text.items() if type(value) is int and value > 0]
    return found + [f"what {k} sizes" for k in sizes if _SIZE.search(k) and k not in known]


def not_in_table(config: Mapping) -> list[str]:
    """Name the kinds of layers that the table has no row for, with how many there are."""
    kinds = list(_text(config).get("layer_types") or ())
    return [f"{kinds.count(kind)} layers of {kind}" for kind in sorted(set(kinds) - _KINDS)]


_KINDS = {
    "attention", "full_attention", "sliding_attention", "chunked_attention", "linear_attention",
}  # fmt: skip
_UNCOUNTED = {"ssm_cfg": "state space layers", "hybrid_override_pattern": "state space layers"}
#: Keys that size something; those that table.toml does not know make the count a lower bound.
_SIZE = re.compile(r"(size|dim|rank|heads|layers|experts|groups|mult|count|base)$")


def cache_of_token(config: Mapping) -> int:
    """Return bytes of a token's keys and values in 16 bits, at most: windows keep fewer tokens."""
    text = _text(config)
    if _is_encoder(text):
        return 0
    if "decoder_layers" in text:
        return 4 * text["decoder_layers"] * text["d_model"]
    each = [_cached(text, kind) for kind in _kinds(text)[: _own_keys(text)]]
    return int(2 * sum(each))


def _cached(text: Mapping, kind: str) -> float:
    """Return how many numbers a layer keeps of a token."""
    if kind in ("linear_attention", "mamba"):
        return 0
    scores = text["index_head_dim"] if _indexes(text) else 0
    if kind.startswith("compressed "):
        ratio = int(kind.split()[1])
        return (text["head_dim"] + scores * (ratio == 4)) / ratio
    if text.get("o_lora_rank"):  # one head, whose keys are its values
        return text["head_dim"]
    if rank := text.get("kv_lora_rank"):
        return rank + text["qk_rope_head_dim"] + scores
    keys, size = _keys(text, kind)
    return 2 * keys * size

# SPDX-License-Identifier: BSD-3-Clause
"""How much memory a model's weights take, and each token that its server keeps."""

import re
from collections.abc import Mapping
from pathlib import Path

from strix_validate.json_file import json_object
from strix_validate.models import defaults
from strix_validate.models.formats import format_of
from strix_validate.models.parts import ATTENTION, Layer, encoders_of, layers_of, text_of
from strix_validate.models.table import contents

#: The format whose head is no layer of 16 bits.
_HEAD_TOO = "mxfp8, its head too"
#: Bytes of a weight in a layer's matrices, with its share of a scale; 4 bits in groups of 128.
_BYTES = {
    "16 bits": 2.0,
    "fp8": 1.0,
    "fp8-blocks": 1.0,
    "w8a8": 1.0,
    "w8a8, of a tensor": 1.0,
    "mxfp8": 1 + 1 / 32,
    _HEAD_TOO: 1 + 1 / 32,
    "mxfp8 by modelopt": 1 + 1 / 32,
    "w4a8": 0.5 + 2 / 128,
    "w4a16": 0.5 + 2 / 128,
    "gptq": 0.5 + 2.5 / 128,
    "awq": 0.5 + 2.5 / 128,
    "w4a16-channels": 0.5,
    "auto-round": 0.5 + 2.5 / 128,
    "auto-round of 8 bits": 1 + 2 / 128,
    "bitsandbytes": 0.5,
    "w8a16": 1 + 2 / 128,
    "w8a16-channels": 1.0,
    "gguf": 0.25,
    "mxfp4": 0.5 + 1 / 32,
    "mxfp4, not of experts alone": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "nvfp4 by modelopt": 0.5 + 1 / 16,
    "nvfp4, weights alone": 0.5 + 1 / 16,
}
#: Of formats that are not named: hardly a weight takes less than two bits.
_FEWEST = 0.25
#: Formats of experts alone: the other matrices stay in 16 bits.
_EXPERTS_ALONE = ("mxfp4",)
#: Mixers whose weights are counted, beside "compressed N".
_COUNTED = {*ATTENTION, "linear_attention", "mamba", "mamba and attention", "conv", ""}


def weights_of_files(folder: Path) -> int:
    """Return bytes of the folder's safetensors, or what their index says; 0 if it has neither."""
    files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    consolidated = [file for file in files if file.name.startswith("consolidated")]
    if consolidated and len(consolidated) < len(files):
        # Mistral's folders hold the same weights twice, and vLLM loads one of the two
        files = [file for file in files if file not in consolidated]
    if size := sum(file.stat().st_size for file in files):
        return size
    try:
        index = json_object(folder / "model.safetensors.index.json")
        size = int(index["metadata"]["total_size"])
        return size if 0 < size < 1 << 60 else 0
    except (ValueError, LookupError, TypeError, OverflowError):
        return 0


def bytes_of(form: str) -> float:
    """Return how many bytes a weight of a matrix takes in a format."""
    return _BYTES.get(form, _FEWEST)


def weights(config: Mapping) -> int:
    """Count bytes of a model's weights from its dimensions; norms and biases are left out.

    Layers of kinds that are not known count as nothing: the count is then a lower bound.
    """
    text = text_of(config)
    hidden = text["hidden_size"]
    form, vocabulary = format_of(config), text["vocab_size"]
    matrix = 2.0 if form in _EXPERTS_ALONE else bytes_of(form)
    total = 2.0 * vocabulary * hidden
    if not _is_tied(config) and not _is_encoder(text):
        total += (matrix if form == _HEAD_TOO else 2.0) * vocabulary * hidden
    if "encoder_layers" in text:  # an encoder, and a decoder that looks at it
        own = 4 * hidden**2 + 2 * hidden * text["encoder_ffn_dim"]
        across = 8 * hidden**2 + 2 * hidden * text["decoder_ffn_dim"]
        layers = text["encoder_layers"] * own + text["decoder_layers"] * across
        return int(total + matrix * layers)
    layers = layers_of(text)
    for number, layer in enumerate(layers):
        if not _is_counted(layer):
            continue
        total += matrix * _mixer(text, hidden, layer.mixer, number)
        if layer.feed_forward == "dense" or (layer.feed_forward and text.get("enable_moe_block")):
            total += matrix * _dense(text, hidden, number)
        if layer.feed_forward == "sparse":
            total += 2.0 * hidden * text["num_experts"]
            total += matrix * _matrices(text) * hidden * _shared(text)
            weight = bytes_of("mxfp4" if text.get("expert_dtype") == "fp4" else form)
            expert = _expert(text, hidden, form)
            total += weight * _matrices(text) * text["num_experts"] * expert
    # hyper-connections are in float32, a layer has two
    streams = text.get("hc_mult") or 0
    total += 4 * len(layers) * 2 * streams * hidden * (2 * streams + streams**2)
    return int(
        total + 2.0 * (_each_layers_input(text, hidden, len(layers)) + encoder_parameters(config))
    )


def is_counted(config: Mapping) -> bool:
    """Return whether the count was compared with transformers' own class of this family.

    Of other families :func:`weights` is an estimate: their layers may be unlike Llama's.
    """
    return str(text_of(config).get("model_type")) in contents()["counted"]


def _is_counted(layer: Layer) -> bool:
    return layer.mixer in _COUNTED or layer.mixer.startswith("compressed ")


def _mixer(text: Mapping, hidden: int, kind: str, number: int) -> int:
    if not kind:
        return 0
    if kind == "linear_attention":
        return _linear(text, hidden)
    if kind == "conv":
        return 4 * hidden**2
    if kind == "mamba":
        return _mamba(text, hidden)
    state_space = _mamba(text, hidden) if kind == "mamba and attention" else 0
    if text.get("o_lora_rank"):
        return _compressed(text, hidden, kind)
    if text.get("kv_lora_rank"):
        return _latent(text, hidden)
    return state_space + _heads(text, hidden, kind, number)


def _heads(text: Mapping, hidden: int, kind: str, number: int) -> int:
    heads, (keys, size) = text["num_attention_heads"], _keys(text, kind)
    gated = "linear_num_value_heads" in text and not _is_plain_delta(text)
    gate = heads if text.get("attn_output_gate", gated) else 0
    each = 1 if _is_global(text, kind) and text.get("attention_k_eq_v") else 2
    if number >= _own_keys(text):
        each = 0
    return hidden * size * (2 * heads + gate + each * keys)


def _own_keys(text: Mapping) -> int:
    """Count the layers that make keys and values; the rest read those of earlier ones."""
    return len(layers_of(text)) - (text.get("num_kv_shared_layers") or 0)


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


def _is_plain_delta(text: Mapping) -> bool:
    """Return whether attention beside a gated delta rule has no gate of its own."""
    return text.get("model_type") == "olmo_hybrid"


def _linear(text: Mapping, hidden: int) -> int:
    """Count a layer of linear attention: a gated delta rule, Kimi's, or lightning attention."""
    if values := text.get("linear_num_value_heads"):
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        wide = values * text["linear_value_head_dim"]
        return hidden * (2 * keys + 3 * wide + 2 * values)
    own = text.get("linear_attn_config") or {}
    heads = text.get("linear_num_heads") or own.get("num_heads")
    size = text.get("linear_head_dim") or own.get("head_dim")
    if heads and size:  # decay and gate pass a vector of a head's size
        wide = heads * size
        return hidden * (4 * wide + heads + 2 * size) + 2 * size * wide
    if str(text.get("model_type")).startswith("minimax"):
        size = text.get("head_dim") or hidden // text["num_attention_heads"]
        return 5 * hidden * text["num_attention_heads"] * size
    return 0


def _mamba(text: Mapping, hidden: int) -> int:
    """Count a layer of Mamba: its projections and the convolution."""
    states, width = text["mamba_d_state"], text["mamba_d_conv"]
    if not (heads := text.get("mamba_n_heads")):  # Mamba 1
        wide = text["mamba_expand"] * hidden
        if str(text.get("model_type")).startswith(("mamba", "falcon_mamba")):
            wide = text.get("intermediate_size") or wide
        rank = text.get("mamba_dt_rank")
        rank = rank if isinstance(rank, int) else -(-hidden // 16)
        return wide * (3 * hidden + 2 * rank + 3 * states + width)
    wide = text.get("mamba_d_ssm")
    if not wide:
        size = text.get("mamba_d_head")
        wide = heads * size if isinstance(size, int) else text["mamba_expand"] * hidden
    states = 2 * text["mamba_n_groups"] * states
    return hidden * (3 * wide + states + heads) + (wide + states) * width


def _matrices(text: Mapping) -> int:
    """Return how many matrices a feed-forward part has: three with a gate, which most have."""
    return 2 if text.get("model_type") in contents()["without_gate"] else 3


def _dense(text: Mapping, hidden: int, number: int) -> int:
    """Count the matrices of a layer's feed-forward part that each token passes."""
    # Granite 4 calls its dense layers shared; Llama 4 has a size of its own for them
    names = ("intermediate_size_mlp", "shared_intermediate_size", "intermediate_size")
    sizes = [text.get(name) for name in names[not text.get("num_experts") :]]
    inner = next((size for size in sizes if size), None)
    if inner is None:
        raise KeyError("intermediate_size")
    if isinstance(inner, list):
        inner = int(inner[number % len(inner)])
    if text.get("conv_L_cache") and text.get("block_auto_adjust_ff_dim"):
        inner = _adjusted(text, inner)
    wide = 2 if text.get("use_double_wide_mlp") and number >= _own_keys(text) else 1
    return (2 if _is_encoder(text) else _matrices(text)) * hidden * inner * wide


def _adjusted(text: Mapping, inner: int) -> int:
    """Return the inner size that LFM2 makes of what its config.json says."""
    multiplier, step = text.get("block_ffn_dim_multiplier"), text.get("block_multiple_of") or 256
    inner = int((multiplier or 1.0) * int(2 * inner / 3))
    return step * -(-inner // step)


def _expert_size(text: Mapping) -> int:
    return text.get("moe_intermediate_size") or text["intermediate_size"]


def _expert(text: Mapping, hidden: int, form: str) -> int:
    if form != "mxfp4":
        return (text.get("moe_latent_size") or hidden) * _expert_size(text)
    padded = [-(-size // 256) * 256 for size in (hidden, _expert_size(text))]  # by vLLM
    return padded[0] * padded[1]


def _shared(text: Mapping) -> int:
    """Return the width of the experts that each token passes."""
    if str(text.get("model_type")).startswith("llama4"):
        return _expert_size(text)
    shared = (
        text.get("shared_expert_intermediate_size")
        or text.get("moe_shared_expert_intermediate_size")
        or text.get("shared_intermediate_size")
    )
    return shared or _expert_size(text) * (text.get("n_shared_experts") or 0)


def _each_layers_input(text: Mapping, hidden: int, layers: int) -> int:
    """Count the embeddings that Gemma adds to each layer, and their projections."""
    if not (size := text.get("hidden_size_per_layer_input")):
        return 0
    rows = text.get("vocab_size_per_layer_input") or text["vocab_size"]
    return layers * size * (rows + 3 * hidden)


def encoder_parameters(config: Mapping) -> int:
    """Count an encoder of images, if its family's count was compared."""
    vision = encoders_of(config).get("vision_config", {})
    depth = vision.get("depth") or vision.get("num_hidden_layers")
    if not depth or not _is_vision_counted(vision):
        return 0
    side, inner = vision["hidden_size"], vision["intermediate_size"]
    gated = vision.get("hidden_act") == "silu" or vision.get("model_type") == "gemma4_vision"
    total = depth * (4 * side**2 + (3 if gated else 2) * side * inner)
    if out := vision.get("out_hidden_size"):
        merged = side * vision.get("spatial_merge_size", 2) ** 2
        total += merged * (merged + out)
    return total


def _is_vision_counted(vision: Mapping) -> bool:
    return vision.get("model_type") in contents()["encoders"]


def _is_encoder(text: Mapping) -> bool:
    return "type_vocab_size" in text


#: Families whose head is the embedding where config.json does not say; the others have their own.
_TIED = ("gemma", "cohere", "command", "gpt2", "opt", "bloom", "falcon", "starcoder2", "whisper")


def _is_tied(config: Mapping) -> bool:
    """Return whether a model's head is its embedding, by its file or else its family's default."""
    text = text_of(config)
    own, root = _own_text(config), defaults.complete(config)
    tied = own.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is None and "text_config" in root:  # the class of the whole model decides
        tied = root.get("tie_word_embeddings")
    if tied is None:
        kind = str(text.get("model_type") or config.get("model_type") or "")
        tied = text.get("tie_word_embeddings") or kind.startswith(_TIED)
    return bool(tied) or "encoder_layers" in text


def uncounted(config: Mapping) -> list[str]:
    """Name the parts of a model that :func:`weights` leaves out: it is then a lower bound."""
    text = text_of(config)
    layers = [] if "encoder_layers" in text else layers_of(text)
    kinds = {layer.mixer for layer in layers if not _is_counted(layer)}
    names = [f"layers of {kind}" for kind in sorted(kinds)]
    if text.get("ssm_cfg"):
        names.append("state space layers")
    if "encoder_layers" not in text:
        names += [
            _ENCODERS[name]
            for name, part in encoders_of(config).items()
            if name == "audio_config" or not _is_vision_counted(part)
        ]
    # what the class itself has was there when the count was compared with it
    known = {*contents()["known"], *defaults.keys_of(str(text.get("model_type")))}
    own = _own_text(config)
    sizes = [key for key, value in own.items() if type(value) is int and value > 0]
    return names + [f"what {k} sizes" for k in sizes if _SIZE.search(k) and k not in known]


def _own_text(config: Mapping) -> Mapping:
    """Return what the file itself says of the text."""
    root = config.get("thinker_config") or config
    return root.get("text_config") or root


_ENCODERS = {"vision_config": "the encoder of images", "audio_config": "the encoder of sound"}


def not_in_table(config: Mapping) -> list[str]:
    """Name the kinds of layers that the table has no row for, with how many there are."""
    text = text_of(config)
    if "encoder_layers" in text:
        return []
    kinds = [layer.mixer for layer in layers_of(text)]
    known = {*ATTENTION, ""}
    if text.get("linear_num_value_heads"):
        known.add("linear_attention")
    compressed = {kind for kind in kinds if kind.startswith("compressed ")}
    return [
        f"{kinds.count(kind)} layers of {kind}" for kind in sorted(set(kinds) - known - compressed)
    ]


#: Keys that size something; those that table.toml does not know make the count a lower bound.
_SIZE = re.compile(r"(size|dim|rank|heads|layers|experts|groups|mult|count|base)$")


def cache_of_token(config: Mapping) -> int:
    """Return bytes of a token's keys and values in 16 bits, at most: windows keep fewer tokens."""
    text = text_of(config)
    if _is_encoder(text):
        return 0
    if "decoder_layers" in text:
        return 4 * text["decoder_layers"] * text["hidden_size"]
    return int(2 * sum(_cached(text, layer.mixer) for layer in layers_of(text)[: _own_keys(text)]))


def _cached(text: Mapping, kind: str) -> float:
    """Return how many numbers a layer keeps of a token."""
    if kind in ("linear_attention", "mamba", "conv", ""):
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

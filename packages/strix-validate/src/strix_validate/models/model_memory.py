# SPDX-License-Identifier: BSD-3-Clause
"""Count the memory of a model's weights, and the memory of each token in the KV cache."""

import re
from collections.abc import Mapping
from pathlib import Path

from strix_validate.json_file import read_json_object
from strix_validate.layers import defaults
from strix_validate.layers.parts import ATTENTION, Layer, find_encoders, find_text, list_layers
from strix_validate.layers.quantization import LayerQuantization, find_mixer_part
from strix_validate.models.formats import find_quantization, name_format, read_format
from strix_validate.models.table import read_table

#: The format for which :func:`weights` counts the output head as quantized too.
_HEAD_TOO = "mxfp8, its head too"
#: bitsandbytes' other format, in which a weight has 8 bits instead of 4.
_BITSANDBYTES_8 = "bitsandbytes of 8 bits"
#: Bytes of a weight in a layer's matrices by format, including the weight's share of its group's
#: scale and zero point, except for bitsandbytes and fp8-blocks. If a format does not fix the size
#: of a group, 128 weights are assumed. For gguf, the number is a lower bound.
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
    _BITSANDBYTES_8: 1.0,
    "w8a16": 1 + 2 / 128,
    "w8a16-channels": 1.0,
    "gguf": 0.25,
    "mxfp4": 0.5 + 1 / 32,
    "mxfp4, not of experts alone": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "nvfp4 by modelopt": 0.5 + 1 / 16,
    "nvfp4, weights alone": 0.5 + 1 / 16,
}
#: Assumed bytes of a weight in formats that _BYTES lacks. Few formats have less than two bits.
_FEWEST_BYTES = 0.25
#: Formats in which only experts are quantized, and the other matrices stay in 16 bits.
_EXPERTS_ALONE = ("mxfp4",)
#: Mixers (see layers.parts.Layer) whose weights are counted, besides "compressed N".
_COUNTED = {
    *ATTENTION,
    "linear_attention",
    "mamba",
    "mamba and attention",
    "conv",
    "",
}
#: Prefixes of model_type. The output head of these models is the embedding by default. Other models
#: have a separate head unless transformers' class for them has another default. config.json
#: overrides both.
_TIED = ("gemma", "cohere", "command", "gpt2", "opt", "bloom", "falcon", "starcoder2", "whisper")
#: Names of the encoders in messages.
_ENCODERS = {"vision_config": "the encoder of images", "audio_config": "the encoder of sound"}
#: The end of a key that states a size. If a config.json has such a key, and neither table.toml nor
#: the defaults of the model's class list the key, the count is a lower bound.
_SIZE = re.compile(r"(size|dim|rank|heads|layers|experts|groups|mult|count|base)$")
#: Bytes that no model exceeds.
_MAX_BYTES = 1 << 60


def weights_of_files(folder: Path) -> int:
    """Return the bytes of a folder's safetensors files, or the total in their index, or 0.

    The total is used if a file of the index is missing, as in a download that was interrupted.
    """
    files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    others = [file for file in files if not file.name.startswith("consolidated")]
    if others:
        # Mistral's folders have the same weights twice, and vLLM loads only one copy
        files = others
    size = sum(file.stat().st_size for file in files)
    try:
        index = read_json_object(folder / "model.safetensors.index.json")
        names = set(map(str, dict(index.get("weight_map") or {}).values()))
        if size and names <= {file.name for file in files}:
            return size
        total = int(index["metadata"]["total_size"])
    except (ValueError, LookupError, TypeError, OverflowError):
        return size
    return total if 0 < total < _MAX_BYTES else size


def weight_bytes(form: str) -> float:
    """Return how many bytes a weight of a matrix takes in a format."""
    return _BYTES.get(form, _FEWEST_BYTES)


def weights(config: Mapping) -> int:
    """Count the bytes of a model's weights from its dimensions, without norms and biases.

    Layers of unknown kinds are not counted. With such layers, the result is a lower bound.
    """
    text = find_text(config)
    hidden = text["hidden_size"]
    form = read_format(config)
    embedding = text["vocab_size"] * hidden
    total = 2.0 * embedding
    if not _is_tied(config) and not _is_encoder(text):
        head_bytes = weight_bytes(form) if form == _HEAD_TOO else 2.0
        total += head_bytes * embedding
    quantization = LayerQuantization(find_quantization(config))
    if "encoder_layers" in text:
        matrix_bytes = _matrix_bytes(quantization, "attention", 0)
        return int(total + matrix_bytes * _encoder_decoder_layers(text, hidden))
    layers = list_layers(text)
    for number, layer in enumerate(layers):
        if not _is_counted(layer):
            continue
        mixer_bytes = _matrix_bytes(quantization, find_mixer_part(layer.mixer), number)
        total += mixer_bytes * _mixer(text, hidden, layer.mixer, number)
        has_dense = layer.feed_forward == "dense"
        if has_dense or (layer.feed_forward and text.get("enable_moe_block")):
            dense_bytes = _matrix_bytes(quantization, "dense", number)
            total += dense_bytes * _dense(text, hidden, number)
        if layer.feed_forward == "sparse":
            total += _sparse_bytes(text, hidden, quantization, number)
    # hyper-connections are in float32, and each layer has two
    streams = text.get("hc_mult") or 0
    total += 4 * len(layers) * 2 * streams * hidden * (2 * streams + streams**2)
    in_16_bits = _layer_inputs(text, hidden, len(layers)) + encoder_parameters(config)
    return int(total + 2.0 * in_16_bits)


def _matrix_bytes(quantization: LayerQuantization, part: str, number: int) -> float:
    """Return how many bytes a weight of a matrix takes in a part of a layer.

    Args:
        quantization: The quantization of the model.
        part: A part that LayerQuantization knows.
        number: Number of the layer.
    """
    own = quantization.read(part, number)
    form = name_format(own)
    if form == "bitsandbytes" and own.get("load_in_8bit"):
        form = _BITSANDBYTES_8
    if form in _EXPERTS_ALONE and part != "experts":
        return 2.0
    return weight_bytes(form)


def _encoder_decoder_layers(text: Mapping, hidden: int) -> int:
    """Count the weights in the layers of an encoder, and of a decoder that attends to it."""
    encoder_layer = 4 * hidden**2 + 2 * hidden * text["encoder_ffn_dim"]
    decoder_layer = 8 * hidden**2 + 2 * hidden * text["decoder_ffn_dim"]
    return text["encoder_layers"] * encoder_layer + text["decoder_layers"] * decoder_layer


def _sparse_bytes(
    text: Mapping,
    hidden: int,
    quantization: LayerQuantization,
    number: int,
) -> float:
    """Return the bytes of a layer's router, shared experts and experts.

    Args:
        text: The text model.
        hidden: Its hidden_size.
        quantization: The quantization of the model.
        number: Number of the layer.
    """
    router = 2.0 * hidden * text["num_experts"]
    shared_bytes = _matrix_bytes(quantization, "shared experts", number)
    shared = shared_bytes * _num_matrices(text) * hidden * _shared_size(text)
    expert_bytes = _matrix_bytes(quantization, "experts", number)
    if text.get("expert_dtype") == "fp4":
        expert_bytes = weight_bytes("mxfp4")
    form = name_format(quantization.read("experts", number))
    weights_of_expert = _num_matrices(text) * _expert_matrix(text, hidden, form)
    return router + shared + expert_bytes * text["num_experts"] * weights_of_expert


def is_counted(config: Mapping) -> bool:
    """Return whether the count was compared with transformers' own class for this family of models.

    For other families, :func:`weights` is an estimate, because their layers may differ from
    Llama's.
    """
    return str(find_text(config).get("model_type")) in read_table()["counted"]


def _is_counted(layer: Layer) -> bool:
    return layer.mixer in _COUNTED or layer.mixer.startswith("compressed ")


def _mixer(text: Mapping, hidden: int, kind: str, number: int) -> int:
    """Count the weights of a layer's mixer.

    Args:
        text: The text model.
        hidden: Its hidden_size.
        kind: Mixer of the layer.
        number: Number of the layer.
    """
    if not kind:
        return 0
    if kind == "linear_attention":
        return _linear_attention(text, hidden)
    if kind == "conv":
        return 4 * hidden**2
    if kind == "mamba":
        return _mamba(text, hidden)
    if text.get("o_lora_rank"):
        return _compressed(text, hidden, kind)
    if text.get("kv_lora_rank"):
        return _latent(text, hidden)
    total = _heads(text, hidden, kind, number)
    if kind == "mamba and attention":
        total += _mamba(text, hidden)
    return total


def _heads(text: Mapping, hidden: int, kind: str, number: int) -> int:
    """Count the weights of multi-head attention: queries, keys, values, output, and any gate."""
    heads = text["num_attention_heads"]
    kv_heads, head_dim = _kv_heads(text, kind)
    # Olmo Hybrid has a gated delta rule in other layers, but its attention has no gate
    has_gated_delta = "linear_num_value_heads" in text and text.get("model_type") != "olmo_hybrid"
    has_gate = text.get("attn_output_gate", has_gated_delta)
    if number >= _num_layers_with_keys(text):
        kv_matrices = 0
    elif _is_global(text, kind) and text.get("attention_k_eq_v"):
        kv_matrices = 1
    else:
        kv_matrices = 2
    query_heads = 3 * heads if has_gate else 2 * heads
    return hidden * head_dim * (query_heads + kv_matrices * kv_heads)


def _num_layers_with_keys(text: Mapping) -> int:
    """Count the layers that compute keys and values. Other layers use those of earlier layers."""
    return len(list_layers(text)) - (text.get("num_kv_shared_layers") or 0)


def _is_global(text: Mapping, kind: str) -> bool:
    return bool(text.get("global_head_dim")) and kind == "full_attention"


def _kv_heads(text: Mapping, kind: str) -> tuple[int, int]:
    """Return the number of a layer's key heads, and the size of a head."""
    kv_heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    if not _is_global(text, kind):
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return kv_heads, head_dim
    if text.get("attention_k_eq_v"):
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
    return kv_heads, text["global_head_dim"]


def _latent(text: Mapping, hidden: int) -> int:
    """Count a layer of latent attention (MLA)."""
    heads = text["num_attention_heads"]
    rank = text["kv_lora_rank"]
    rope = text["qk_rope_head_dim"]
    nope = text["qk_nope_head_dim"]
    value = text["v_head_dim"]
    query = heads * (nope + rope)
    query_rank = text.get("q_lora_rank")
    queries = query_rank * (hidden + query) if query_rank else hidden * query
    keys = hidden * (rank + rope) + rank * heads * (nope + value)
    total = queries + keys + heads * value * hidden
    if _has_indexer(text):
        total += hidden * text["index_head_dim"] + _indexer(text, hidden)
    return total


def _has_indexer(text: Mapping) -> bool:
    return bool(text.get("index_topk") and text.get("index_n_heads"))


def _indexer(text: Mapping, hidden: int) -> int:
    """Count the indexer, which scores tokens for sparse attention, without its key projection."""
    return text["index_n_heads"] * (text["q_lora_rank"] * text["index_head_dim"] + hidden)


def _compressed(text: Mapping, hidden: int, kind: str) -> int:
    """Count a layer of DeepSeek-V4: one head of keys, low-rank queries and a low-rank output."""
    head_dim = text["head_dim"]
    inner = text["num_attention_heads"] * head_dim
    total = text["q_lora_rank"] * (hidden + inner) + hidden * head_dim
    total += text["o_lora_rank"] * (inner + text["o_groups"] * hidden)
    if kind == "compressed 4":
        # projections to the keys of overlapping windows, both attention's and the indexer's keys
        sizes = head_dim + text["index_head_dim"]
        return total + 4 * hidden * sizes + _indexer(text, hidden)
    if kind != "sliding_attention":
        total += 2 * hidden * head_dim
    return total


def _linear_attention(text: Mapping, hidden: int) -> int:
    """Count a layer of linear attention: a gated delta rule, Kimi's, or lightning; 0 for others."""
    value_heads = text.get("linear_num_value_heads")
    if value_heads:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = value_heads * text["linear_value_head_dim"]
        return hidden * (2 * keys + 3 * values + 2 * value_heads)
    config = text.get("linear_attn_config") or {}
    heads = text.get("linear_num_heads") or config.get("num_heads")
    head_dim = text.get("linear_head_dim") or config.get("head_dim")
    if heads and head_dim:
        # decay and gate have two matrices each, with a vector of a head's size between them
        inner = heads * head_dim
        return hidden * (4 * inner + heads + 2 * head_dim) + 2 * head_dim * inner
    if str(text.get("model_type")).startswith("minimax"):
        heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or hidden // heads
        return 5 * hidden * heads * head_dim
    return 0


def _mamba(text: Mapping, hidden: int) -> int:
    """Count a layer of Mamba: its projections and the convolution."""
    states = text["mamba_d_state"]
    width = text["mamba_d_conv"]
    heads = text.get("mamba_n_heads")
    if not heads:
        return _mamba_1(text, hidden)
    inner = text.get("mamba_d_ssm")
    if not inner:
        head_dim = text.get("mamba_d_head")
        inner = heads * head_dim if isinstance(head_dim, int) else text["mamba_expand"] * hidden
    group_states = 2 * text["mamba_n_groups"] * states
    projections = hidden * (3 * inner + group_states + heads)
    return projections + (inner + group_states) * width


def _mamba_1(text: Mapping, hidden: int) -> int:
    """Count a layer of Mamba-1, which has no heads."""
    inner = text["mamba_expand"] * hidden
    if str(text.get("model_type")).startswith(("mamba", "falcon_mamba")):
        inner = text.get("intermediate_size") or inner
    rank = text.get("mamba_dt_rank")
    if not isinstance(rank, int):
        rank = _divide_up(hidden, 16)
    states = text["mamba_d_state"]
    return inner * (3 * hidden + 2 * rank + 3 * states + text["mamba_d_conv"])


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _num_matrices(text: Mapping) -> int:
    """Return the number of matrices of a feed-forward part: three with a gate, or two without."""
    return 2 if text.get("model_type") in read_table()["without_gate"] else 3


def _dense(text: Mapping, hidden: int, number: int) -> int:
    """Count the weights of a layer's dense feed-forward part, which processes every token.

    Args:
        text: The text model.
        hidden: Its hidden_size.
        number: Number of the layer.

    Raises:
        KeyError: The config does not state the inner size.
    """
    inner = _dense_size(text)
    if isinstance(inner, list):
        inner = int(inner[number % len(inner)])
    if text.get("conv_L_cache") and text.get("block_auto_adjust_ff_dim"):
        inner = _adjust_size(text, inner)
    if text.get("use_double_wide_mlp") and number >= _num_layers_with_keys(text):
        inner *= 2
    num_matrices = 2 if _is_encoder(text) else _num_matrices(text)
    return num_matrices * hidden * inner


def _dense_size(text: Mapping) -> int | list[int]:
    """Return the inner size of dense layers, or a list of sizes that the layers use in turn."""
    # Granite 4 calls its dense layers "shared", so shared_intermediate_size is their size
    names = ["shared_intermediate_size", "intermediate_size"]
    if text.get("num_experts"):
        # Llama 4 has a separate key for the size of dense layers
        names.insert(0, "intermediate_size_mlp")
    for name in names:
        if text.get(name):
            return text[name]
    raise KeyError("intermediate_size")


def _adjust_size(text: Mapping, inner: int) -> int:
    """Return the inner size that LFM2 computes from the size in its config.json."""
    multiplier = text.get("block_ffn_dim_multiplier") or 1.0
    step = text.get("block_multiple_of") or 256
    inner = int(multiplier * int(2 * inner / 3))
    return step * _divide_up(inner, step)


def _expert_size(text: Mapping) -> int:
    return text.get("moe_intermediate_size") or text["intermediate_size"]


def _expert_matrix(text: Mapping, hidden: int, form: str) -> int:
    """Count the weights of one of an expert's matrices."""
    size = _expert_size(text)
    if form == "mxfp4":
        # vLLM pads both sides
        return 256 * _divide_up(hidden, 256) * 256 * _divide_up(size, 256)
    return (text.get("moe_latent_size") or hidden) * size


def _shared_size(text: Mapping) -> int:
    """Return the inner size of the shared experts, which process every token."""
    if str(text.get("model_type")).startswith("llama4"):
        return _expert_size(text)
    shared = (
        text.get("shared_expert_intermediate_size")
        or text.get("moe_shared_expert_intermediate_size")
        or text.get("shared_intermediate_size")
    )
    return shared or _expert_size(text) * (text.get("n_shared_experts") or 0)


def _layer_inputs(text: Mapping, hidden: int, num_layers: int) -> int:
    """Count the embeddings that Gemma adds to each layer, and their projections."""
    size = text.get("hidden_size_per_layer_input")
    if not size:
        return 0
    vocabulary = text.get("vocab_size_per_layer_input") or text["vocab_size"]
    return num_layers * size * (vocabulary + 3 * hidden)


def encoder_parameters(config: Mapping) -> int:
    """Count the weights of an image encoder; 0 if its family is not in table.toml's `encoders`."""
    vision = find_encoders(config).get("vision_config", {})
    depth = vision.get("depth") or vision.get("num_hidden_layers")
    if not depth or not _is_vision_counted(vision):
        return 0
    hidden = vision["hidden_size"]
    has_gate = vision.get("hidden_act") == "silu" or vision.get("model_type") == "gemma4_vision"
    num_matrices = 3 if has_gate else 2
    feed_forward = num_matrices * hidden * vision["intermediate_size"]
    total = depth * (4 * hidden**2 + feed_forward)
    out_hidden = vision.get("out_hidden_size")
    if out_hidden:
        merged = hidden * vision.get("spatial_merge_size", 2) ** 2
        total += merged * (merged + out_hidden)
    return total


def _is_vision_counted(vision: Mapping) -> bool:
    return vision.get("model_type") in read_table()["encoders"]


def _is_encoder(text: Mapping) -> bool:
    return "type_vocab_size" in text


def _is_tied(config: Mapping) -> bool:
    """Return whether a model's output head is its embedding, as config.json or a default states."""
    text = find_text(config)
    if "encoder_layers" in text:
        return True
    tied = _file_text(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is None:
        full_config = defaults.complete(config)
        if "text_config" in full_config:  # the whole model's class decides
            tied = full_config.get("tie_word_embeddings")
    if tied is None:
        kind = str(text.get("model_type") or config.get("model_type") or "")
        tied = text.get("tie_word_embeddings") or kind.startswith(_TIED)
    return bool(tied)


def uncounted(config: Mapping) -> list[str]:
    """Name the parts of a model that :func:`weights` leaves out, so that its result is too low.

    Norms and biases are not named.
    """
    text = find_text(config)
    names = []
    if "encoder_layers" not in text:
        layers = list_layers(text)
        kinds = {layer.mixer for layer in layers if not _is_counted(layer)}
        names += [f"layers of {kind}" for kind in sorted(kinds)]
    if text.get("ssm_cfg"):
        names.append("state space layers")
    if "encoder_layers" not in text:
        for name, part in find_encoders(config).items():
            if name == "audio_config" or not _is_vision_counted(part):
                names.append(_ENCODERS[name])
    # keys that transformers' class has too are not named: the count was compared with that class,
    # or is marked as an estimate
    counted_keys = {*read_table()["known"], *defaults.list_keys(str(text.get("model_type")))}
    for key, value in _file_text(config).items():
        is_size = type(value) is int and value > 0 and _SIZE.search(key)
        if is_size and key not in counted_keys:
            names.append(f"the parts whose size is {key}")
    form = read_format(config)
    if form not in _BYTES:
        names.append(
            f"the bits beyond 2 of each weight, because the bits of the format {form} are unknown"
        )
    return names


def _file_text(config: Mapping) -> Mapping:
    """Return the text model's keys that the file itself contains, without defaults."""
    root = config.get("thinker_config") or config
    return root.get("text_config") or root


def not_in_table(config: Mapping) -> list[str]:
    """Name the kinds of layers that the table has no row for, with the number of such layers."""
    text = find_text(config)
    if "encoder_layers" in text:
        return []
    mixers = [layer.mixer for layer in list_layers(text)]
    in_table = {*ATTENTION, ""}
    if text.get("linear_num_value_heads"):
        in_table.add("linear_attention")
    names = []
    for mixer in sorted(set(mixers) - in_table):
        if not mixer.startswith("compressed "):
            names.append(f"{mixers.count(mixer)} layers of {mixer}")
    return names


def cache_of_token(config: Mapping) -> int:
    """Return the bytes of a token's keys and values in 16 bits, an upper bound.

    Layers with a window store fewer tokens.
    """
    text = find_text(config)
    if _is_encoder(text):
        return 0
    if "decoder_layers" in text:
        return 4 * text["decoder_layers"] * text["hidden_size"]
    layers = list_layers(text)[: _num_layers_with_keys(text)]
    numbers = sum(_cached_numbers(text, layer.mixer) for layer in layers)
    return int(2 * numbers)


def _cached_numbers(text: Mapping, kind: str) -> float:
    """Return how many numbers a layer stores for a token."""
    if kind in ("linear_attention", "mamba", "conv", ""):
        return 0
    index_keys = text["index_head_dim"] if _has_indexer(text) else 0
    if kind.startswith("compressed "):
        ratio = int(kind.split()[1])
        numbers = text["head_dim"]
        if ratio == 4:
            numbers += index_keys
        return numbers / ratio
    if text.get("o_lora_rank"):  # the layer has one head, in which the keys are also the values
        return text["head_dim"]
    rank = text.get("kv_lora_rank")
    if rank:
        return rank + text["qk_rope_head_dim"] + index_keys
    kv_heads, head_dim = _kv_heads(text, kind)
    return 2 * kv_heads * head_dim

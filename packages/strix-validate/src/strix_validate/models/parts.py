# SPDX-License-Identifier: BSD-3-Clause
"""What a config.json describes: its text model, under the usual names, and each of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strix_validate.models import defaults
from strix_validate.models.defaults import NoModel

#: Where a config has its text model; of a model that also speaks, vLLM serves the thinker.
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config")
#: Other names of usual keys, in families that transformers' class does not map.
_NAMES = {
    "num_hidden_layers": ("num_layers", "n_layers", "n_layer"),
    "num_attention_heads": ("n_heads", "n_head"),
    "hidden_size": ("dim", "d_model", "n_embd"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner", "d_ff"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "num_experts_per_token", "moe_topk"),
    "n_shared_experts": ("moe_num_shared_experts", "num_shared_experts", "num_shared_expert"),
    "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
    "mamba_d_head": ("mamba_head_dim", "mamba_headdim"),
    "mamba_d_state": ("ssm_state_size", "state_size"),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_n_groups": ("n_groups", "mamba_ngroups"),
    "mamba_dt_rank": ("time_step_rank",),
    "mamba_expand": ("expand",),
}
#: Of hybrid_override_pattern, one letter a layer.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
#: DeepSeek-V4's layers by how many tokens a key stands for.
_COMPRESSED = {
    "compressed_sparse_attention": "compressed 4",
    "heavily_compressed_attention": "compressed 128",
}
#: Layers that attend to tokens, in the words of layer_types.
ATTENTION = (
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "hybrid",
    "hybrid_sliding",
)
#: Layers that are a feed-forward part alone.
_ALONE = {"mlp": "dense", "moe": "sparse"}
#: Keys whose numbers are multiplied with others.
_SIZES = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size_mlp",
    "shared_intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "num_experts",
    "n_shared_experts",
    "q_lora_rank",
    "kv_lora_rank",
    "o_lora_rank",
    "o_groups",
    "v_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "index_head_dim",
    "index_n_heads",
    "hc_mult",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_heads",
    "linear_head_dim",
    "mamba_n_heads",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_n_groups",
    "mamba_expand",
    "mamba_d_ssm",
    "global_head_dim",
    "num_global_key_value_heads",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "encoder_layers",
    "decoder_layers",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "depth",
    "out_hidden_size",
    "spatial_merge_size",
)
#: Layers are counted one by one: a damaged number took for ever. The deepest model known has 126.
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        mixer: What mixes tokens, in the words of layer_types; "" where nothing does.
        feed_forward: "dense", "sparse" (experts), or "" for none.
    """

    mixer: str
    feed_forward: str


def text_of(config: Mapping) -> dict[str, Any]:
    """Return the text model of a config.json, with its class's defaults and under usual names.

    Raises:
        NoModel: A part of it is not an object.
    """
    text: dict[str, Any] = defaults.complete(config)
    for name in _TEXT:
        part = text.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise NoModel(f"{name} is not an object: {part!a:.40}")
        text = dict(part)
    # Ernie's experts of text and of images: the smaller, for a lower bound
    for key in ("num_experts", "moe_num_experts", "moe_intermediate_size"):
        if isinstance(text.get(key), list) and text[key]:
            text[key] = min(text[key])
    for usual, names in _NAMES.items():
        if not text.get(usual):
            values = [text[name] for name in names if text.get(name)]
            numbers = [value for value in values if not isinstance(value, str | list)]
            if numbers:
                text[usual] = numbers[0]
    _check_numbers(text)
    return text


def _check_numbers(part: Mapping) -> None:
    """Refuse words and lists in place of sizes, whose multiples would fill the memory.

    Raises:
        NoModel: A size is not a number.
    """
    for key in _SIZES:
        if isinstance(part.get(key), str | list):
            raise NoModel(f"a dimension is not a number: {key} = {part[key]!a:.40}")


def encoders_of(config: Mapping) -> dict[str, dict[str, Any]]:
    """Return the parts of a config.json that read images or sound, with their class's defaults."""
    root: Mapping = defaults.complete(config)
    if isinstance(root.get("thinker_config"), Mapping):
        root = root["thinker_config"]
    names = ("vision_config", "audio_config")
    encoders = {name: dict(root[name]) for name in names if isinstance(root.get(name), Mapping)}
    for part in encoders.values():
        _check_numbers(part)
    return encoders


def count_layers(text: Mapping) -> int:
    """Return the number of layers.

    Raises:
        NoModel: There are more than any model has.
        KeyError: No key says it.
    """
    kinds = _kinds(text)
    count = text.get("num_hidden_layers") or len(kinds)
    if not count:
        raise KeyError("num_hidden_layers")
    if max(count, len(kinds)) > _MOST_LAYERS:
        raise NoModel(f"no model has num_hidden_layers = {max(count, len(kinds))!s:.20}")
    return min(count, len(kinds)) if kinds else count


def layers_of(text: Mapping) -> list[Layer]:
    """Return each layer of a text model, from the keys by which its family arranges them."""
    mixers = _mixers(text)
    sparse = _sparse(text)
    return [
        Layer("", _ALONE[mixer]) if mixer in _ALONE else Layer(mixer, _feed(text, number, sparse))
        for number, mixer in enumerate(mixers)
    ]


def _kinds(text: Mapping) -> list[str]:
    """Return what config.json names each layer, or nothing where it names none."""
    pattern = text.get("hybrid_override_pattern")
    if pattern:
        return [_LETTERS.get(letter, f"letter {letter}") for letter in pattern]
    return [str(kind) for kind in text.get("layers_block_type") or text.get("layer_types") or ()]


def _feed(text: Mapping, number: int, sparse: set[int]) -> str:
    if str(text.get("model_type")).startswith(("nemotron_h", "mamba", "falcon_mamba")):
        return ""  # layers there are a mixer or a feed-forward part, not both
    return "sparse" if number in sparse else "dense"


def _mixers(text: Mapping) -> list[str]:
    """Return what each layer mixes tokens by, in the words of config.json's layer_types."""
    count = count_layers(text)
    kinds = [_COMPRESSED.get(kind, kind) for kind in _kinds(text)[:count]]
    if not kinds or text.get("compress_ratios"):
        return _periodic(text, count)
    state_space = "mamba" if _has_mamba(text) else "linear_attention"
    return [state_space if kind == "linear_attention" else kind for kind in kinds]


def _periodic(text: Mapping, count: int) -> list[str]:
    """Return the mixers of families that place them by numbers instead of names."""
    numbers = range(count)
    ratios = text.get("compress_ratios")
    if ratios:  # the prediction head's ratio is the last
        return [f"compressed {ratio}" if ratio else "sliding_attention" for ratio in ratios[:count]]
    kinds = text.get("block_types")
    if kinds:
        return [str(kinds[number % len(kinds)]) for number in numbers]
    places = _attention_places(text, count)
    if places is not None:
        other = "mamba" if _has_mamba(text) else "linear_attention"
        other = "conv" if text.get("conv_L_cache") else other
        return ["full_attention" if number in places else other for number in numbers]
    if text.get("model_type") == "falcon_h1":
        return ["mamba and attention"] * count
    if str(text.get("model_type")).startswith(("mamba", "falcon_mamba")):
        return ["mamba"] * count
    if text.get("sliding_window") and text.get("sliding_window_pattern"):
        interval = text["sliding_window_pattern"]
        return ["sliding_attention" if (n + 1) % interval else "full_attention" for n in numbers]
    return ["full_attention"] * count


def _attention_places(text: Mapping, count: int) -> set[int] | None:
    """Return the layers of a hybrid model that attend to tokens; None if all of them do."""
    numbers = range(count)
    period = text.get("attn_layer_period")
    if period:
        return {n for n in numbers if n % period == (text.get("attn_layer_offset") or 0)}
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(text.get(key), list):
            return set(text[key])
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers"):
        return {n - 1 for n in linear["full_attn_layers"]}  # counted from one
    kinds = text.get("attn_type_list")
    if kinds:
        return {n for n in numbers if kinds[n % len(kinds)] == 1}
    interval = text.get("full_attention_interval") or text.get("layer_group_size")
    if interval or text.get("linear_num_value_heads"):
        return {n for n in numbers if (n + 1) % (interval or 4) == 0}
    if text.get("model_type") == "bamba":
        return set()
    return None


def _has_mamba(text: Mapping) -> bool:
    return bool(text.get("mamba_d_state"))


def _sparse(text: Mapping) -> set[int]:
    """Return the numbers of the layers with experts."""
    numbers = range(count_layers(text))
    if not text.get("num_experts"):
        return set()
    kinds = text.get("mlp_layer_types")
    if kinds:
        return {n for n, kind in enumerate(kinds) if kind != "dense"}
    first = text.get("first_k_dense_replace")
    if first is not None:
        return set(numbers[first:])
    period = text.get("expert_layer_period")
    if period:
        return {n for n in numbers if n % period == (text.get("expert_layer_offset") or 0)}
    if "num_dense_layers" in text:
        return set(numbers[text["num_dense_layers"] or 0 :])
    start = text.get("moe_layer_start_index")
    if start is not None:
        end = text.get("moe_layer_end_index", -1)
        chosen = numbers[_first_of(start) : (_last_of(end) + 1) or None]
        return {n for n in chosen if (n + 1) % (text.get("moe_layer_interval") or 1) == 0}
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return {n for n, sparse in enumerate(frequency) if sparse}
    step = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1
    plain = set(text.get("mlp_only_layers") or ())
    return {n for n in numbers if (n + 1) % step == 0} - plain


def _first_of(value: Any) -> int:
    return min(value) if isinstance(value, list) else value


def _last_of(value: Any) -> int:
    return max(value) if isinstance(value, list) else value

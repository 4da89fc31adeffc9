# SPDX-License-Identifier: BSD-3-Clause
"""Read the text model, its layers and the encoders from a config.json, under the usual names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strix_validate.layers import defaults
from strix_validate.layers.defaults import NoModel

#: Keys under which a config.json has its text model. Of a model that also speaks, vLLM serves only
#: the thinker.
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config")
#: Other names of usual keys, in models whose class in transformers does not map these names.
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
#: Kinds of layers by their letters in hybrid_override_pattern.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
#: DeepSeek-V4's kinds of layers. In "compressed N", a key stands for N tokens.
_COMPRESSED = {
    "compressed_sparse_attention": "compressed 4",
    "heavily_compressed_attention": "compressed 128",
}
#: Kinds of layers in layer_types that attend to tokens.
ATTENTION = (
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "hybrid",
    "hybrid_sliding",
)
#: Feed-forward parts of layers that have no mixer.
_FEED_FORWARD_ONLY = {"mlp": "dense", "moe": "sparse"}
#: Keys whose values must not be texts or lists, because the sizes are multiplied with each other.
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
#: Maximum number of layers. Layers are counted one by one, so a damaged number would take hours.
#: The deepest known model has 126.
_MAX_LAYERS = 1000


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        mixer: The operation that mixes tokens, as layer_types names it; "" if there is none.
        feed_forward: "dense", "sparse" (experts), or "" for none.
    """

    mixer: str
    feed_forward: str


def find_text(config: Mapping) -> dict[str, Any]:
    """Return the text model of a config.json.

    Missing keys have the defaults of the model's class, and keys with other names have their usual
    names as well.

    Raises:
        NoModel: A part in _TEXT is not an object, or a size is a text or a list.
    """
    text: dict[str, Any] = defaults.complete(config)
    for name in _TEXT:
        part = text.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise NoModel(f"{name} is not an object: {part!a:.40}")
        text = dict(part)
    # Ernie's numbers of experts and sizes of an expert are lists: one value for text, and one for
    # images. The smaller value gives a lower bound of the memory.
    for key in ("num_experts", "moe_num_experts", "moe_intermediate_size"):
        if isinstance(text.get(key), list) and text[key]:
            text[key] = min(text[key])
    for usual_name, other_names in _NAMES.items():
        if text.get(usual_name):
            continue
        for name in other_names:
            value = text.get(name)
            if value and not isinstance(value, str | list):
                text[usual_name] = value
                break
    _check_numbers(text)
    return text


def _check_numbers(part: Mapping) -> None:
    """Refuse sizes that are texts or lists. A multiple of a text or list would fill the memory.

    Raises:
        NoModel: A size is not a number.
    """
    for key in _SIZES:
        if isinstance(part.get(key), str | list):
            raise NoModel(f"a dimension is not a number: {key} = {part[key]!a:.40}")


def find_encoders(config: Mapping) -> dict[str, dict[str, Any]]:
    """Return the encoders of images and sound in a config.json, with their class's defaults."""
    root: Mapping = defaults.complete(config)
    if isinstance(root.get("thinker_config"), Mapping):
        root = root["thinker_config"]
    encoders = {}
    for name in ("vision_config", "audio_config"):
        if isinstance(root.get(name), Mapping):
            encoders[name] = dict(root[name])
            _check_numbers(encoders[name])
    return encoders


def count_layers(text: Mapping) -> int:
    """Return the number of layers.

    Raises:
        NoModel: There are more layers than in any model.
        KeyError: No key has the number of layers.
    """
    num_kinds = len(_kinds(text))
    count = text.get("num_hidden_layers") or num_kinds
    if not count:
        raise KeyError("num_hidden_layers")
    largest = max(count, num_kinds)
    if largest > _MAX_LAYERS:
        raise NoModel(f"no model has num_hidden_layers = {largest!s:.20}")
    return min(count, num_kinds) if num_kinds else count


def list_layers(text: Mapping) -> list[Layer]:
    """Return each layer of a text model, in the order that the config's keys describe."""
    mixers = _mixers(text)
    sparse = _sparse(text)
    layers = []
    for number, mixer in enumerate(mixers):
        if mixer in _FEED_FORWARD_ONLY:
            layers.append(Layer("", _FEED_FORWARD_ONLY[mixer]))
        elif _has_separate_layers(text):
            layers.append(Layer(mixer, ""))
        elif number in sparse:
            layers.append(Layer(mixer, "sparse"))
        else:
            layers.append(Layer(mixer, "dense"))
    return layers


def _kinds(text: Mapping) -> list[str]:
    """Return the kind of each layer, or an empty list if the config does not name them."""
    pattern = text.get("hybrid_override_pattern")
    if pattern:
        return [_LETTERS.get(letter, f"letter {letter}") for letter in pattern]
    kinds = text.get("layers_block_type") or text.get("layer_types") or ()
    return [str(kind) for kind in kinds]


def _is_mamba_model(text: Mapping) -> bool:
    return str(text.get("model_type")).startswith(("mamba", "falcon_mamba"))


def _has_separate_layers(text: Mapping) -> bool:
    """Return whether each layer is either a mixer or a feed-forward part, not both."""
    return _is_mamba_model(text) or str(text.get("model_type")).startswith("nemotron_h")


def _mixers(text: Mapping) -> list[str]:
    """Return the mixer of each layer, as config.json's layer_types names it.

    DeepSeek-V4's mixers have the names in _COMPRESSED instead. Layers of Mamba that are listed as
    "linear_attention" are named "mamba".
    """
    count = count_layers(text)
    kinds = _kinds(text)[:count]
    if not kinds or text.get("compress_ratios"):
        return _mixers_by_numbers(text, count)
    mixers = []
    for kind in kinds:
        mixer = _COMPRESSED.get(kind, kind)
        if mixer == "linear_attention" and _has_mamba(text):
            mixer = "mamba"
        mixers.append(mixer)
    return mixers


def _mixers_by_numbers(text: Mapping, count: int) -> list[str]:
    """Return each layer's mixer, from a config that does not name the mixer of each layer."""
    numbers = range(count)
    ratios = text.get("compress_ratios")
    if ratios:
        # the last ratio belongs to the prediction head, which is not one of the layers
        return [_compressed_mixer(ratio) for ratio in ratios[:count]]
    kinds = text.get("block_types")
    if kinds:
        return [str(kinds[number % len(kinds)]) for number in numbers]
    attention_layers = _attention_layers(text, count)
    if attention_layers is not None:
        return _mark(
            numbers,
            attention_layers,
            "full_attention",
            _other_mixer(text),
        )
    if text.get("model_type") == "falcon_h1":
        return ["mamba and attention"] * count
    if _is_mamba_model(text):
        return ["mamba"] * count
    interval = text.get("sliding_window_pattern")
    if text.get("sliding_window") and interval:
        full = _last_of_each(numbers, interval)
        return _mark(numbers, full, "full_attention", "sliding_attention")
    return ["full_attention"] * count


def _compressed_mixer(ratio: int) -> str:
    """Return the mixer of a DeepSeek-V4 layer.

    Args:
        ratio: Number of tokens that a key stands for; 0 for a layer with a sliding window.
    """
    return f"compressed {ratio}" if ratio else "sliding_attention"


def _mark(
    numbers: Sequence[int],
    members: set[int],
    mixer: str,
    other: str,
) -> list[str]:
    """Return each layer's mixer: `mixer` if its number is in `members`, otherwise `other`."""
    mixers = []
    for number in numbers:
        if number in members:
            mixers.append(mixer)
        else:
            mixers.append(other)
    return mixers


def _other_mixer(text: Mapping) -> str:
    """Return the mixer of a hybrid model's layers that do not attend to tokens."""
    if text.get("conv_L_cache"):
        return "conv"
    return "mamba" if _has_mamba(text) else "linear_attention"


def _attention_layers(text: Mapping, count: int) -> set[int] | None:
    """Return the layers of a hybrid model that attend to tokens; None if no key selects layers.

    The result is empty for a Bamba model without such a key, because it has no such layers.
    """
    numbers = range(count)
    period = text.get("attn_layer_period")
    if period:
        return _every(numbers, period, text.get("attn_layer_offset") or 0)
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(text.get(key), list):
            return set(text[key])
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers"):
        return {n - 1 for n in linear["full_attn_layers"]}  # the file counts layers from one
    kinds = text.get("attn_type_list")
    if kinds:
        return {n for n in numbers if kinds[n % len(kinds)] == 1}
    interval = text.get("full_attention_interval") or text.get("layer_group_size")
    if interval or text.get("linear_num_value_heads"):
        return _last_of_each(numbers, interval or 4)
    if text.get("model_type") == "bamba":
        return set()
    return None


def _every(numbers: Sequence[int], period: int, offset: int) -> set[int]:
    return {n for n in numbers if n % period == offset}


def _last_of_each(numbers: Sequence[int], interval: int) -> set[int]:
    """Return the last number of each interval: of 0 to 7, 3 and 7 for an interval of 4."""
    return {n for n in numbers if (n + 1) % interval == 0}


def _has_mamba(text: Mapping) -> bool:
    return bool(text.get("mamba_d_state"))


def _sparse(text: Mapping) -> set[int]:
    """Return the indices of the layers with experts."""
    numbers = range(count_layers(text))
    if not text.get("num_experts"):
        return set()
    kinds = text.get("mlp_layer_types")
    if kinds:
        return {n for n, kind in enumerate(kinds) if kind != "dense"}
    num_dense = text.get("first_k_dense_replace")
    if num_dense is not None:
        return set(numbers[num_dense:])
    period = text.get("expert_layer_period")
    if period:
        return _every(numbers, period, text.get("expert_layer_offset") or 0)
    if "num_dense_layers" in text:
        return set(numbers[text["num_dense_layers"] or 0 :])
    if text.get("moe_layer_start_index") is not None:
        return _sparse_between(text, numbers)
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return {n for n, is_sparse in enumerate(frequency) if is_sparse}
    step = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1
    dense = set(text.get("mlp_only_layers") or ())
    return _last_of_each(numbers, step) - dense


def _sparse_between(text: Mapping, numbers: Sequence[int]) -> set[int]:
    """Return Ernie's layers with experts. Text and images may each have a range of layers."""
    start = text["moe_layer_start_index"]
    end = text.get("moe_layer_end_index", -1)
    if isinstance(start, list):
        start = min(start)
    if isinstance(end, list):
        end = max(end)
    # an end of -1 is the last layer
    in_range = numbers[start : (end + 1) or None]
    return _last_of_each(in_range, text.get("moe_layer_interval") or 1)

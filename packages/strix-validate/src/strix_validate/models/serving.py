# SPDX-License-Identifier: BSD-3-Clause
"""Suggest a server's flags for context length, parsers and drafts, and cite published speeds."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from strix_validate.json_file import read_json_object
from strix_validate.layers.defaults import complete
from strix_validate.layers.parts import find_text, list_layers
from strix_validate.models.formats import read_format

#: Keys of a text config that limit a model's length, as vLLM 0.33.0's ModelArchConfigConvertorBase
#: reads them (transformers_utils/model_arch_config_convertor.py).
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
#: The length that vLLM assumes if neither a key nor the tokenizer states one.
_UNKNOWN_LENGTH = 2048
#: Types of rope that do not scale, or whose max_position_embeddings is already the scaled length.
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")
#: If one request of the model's length needs at most this share of the cache, --max-model-len is
#: left out. vLLM rounds to blocks and pads groups of layers, so a request that needs nearly the
#: whole cache may not fit.
_SURE = 0.5
#: Mixers whose layers keep a state, alone or besides keys and values.
_STATE_MIXERS = {
    "linear_attention",
    "mamba",
    "mamba and attention",
    "conv",
}
_MTP_FLAGS = """--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""
_NGRAM_FLAGS = (
    """--speculative-config '{"method":"ngram","num_speculative_tokens":5,"""
    """"prompt_lookup_max":4}'"""
)


@cache
def advice() -> dict[str, Any]:
    """Return the contents of advice.toml."""
    return tomllib.loads(files(__package__).joinpath("advice.toml").read_text())


def read_length(config: Mapping, folder: Path | None = None) -> int:
    """Return the maximum number of tokens of a request if no flag of vLLM limits them.

    This follows _get_and_verify_max_len of vLLM 0.33.0's config/model.py.

    Args:
        config: A config.json.
        folder: The model's folder, whose tokenizer_config.json may set a lower limit.
    """
    text = find_text(config)
    lengths = [text[key] for key in _LENGTHS if _is_number(text.get(key))]
    length: float | None = min(lengths) if lengths else None
    if _is_number(text.get("model_max_length")):
        length = text["model_max_length"]
    if folder:
        length = _limit_by_tokenizer(length, folder)
    if length is None:
        return _UNKNOWN_LENGTH
    ropes = _ropes(text)
    if any(_rope_type(rope) == "longrope" for rope in ropes):
        original = complete(config).get("original_max_position_embeddings")
        return int(original) if original and _is_number(original) else int(length)
    if "gemma3" not in str(config.get("model_type")):
        length *= _rope_factor(ropes)
    return int(length)


def _rope_factor(ropes: Sequence[Mapping]) -> float:
    """Return the factor by which rope lengthens the context; of several factors, the last one."""
    factor: float = 1
    for rope in ropes:
        if _rope_type(rope) not in _SCALED and _is_number(rope.get("factor")):
            factor = rope["factor"]
    return factor


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _limit_by_tokenizer(length: float | None, folder: Path) -> float | None:
    """Return the length, or the tokenizer's model_max_length if that is less or length is None."""
    try:
        limit = read_json_object(folder / "tokenizer_config.json").get("model_max_length")
    except ValueError:
        return length
    if not isinstance(limit, int | float) or not _is_number(limit):
        return length
    return limit if length is None else min(length, limit)


def _ropes(text: Mapping) -> list[Mapping]:
    """Return a text model's rope settings; there may be one set for each kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _rope_type(rope: Mapping) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def length_flag(length: int, token: int | None, cache: int) -> str:
    """Return " --max-model-len auto" if the cache may have no room for `length` tokens, else "".

    vLLM refuses to start if a request of the maximum length does not fit into the cache
    (_check_enough_kv_cache_memory of v1/core/kv_cache_planning.py). With `auto`, vLLM uses the
    largest length that fits (_auto_fit_max_model_len in the same file).

    Args:
        length: Tokens that a request may have.
        token: Bytes of a token's keys and values at most; None if unknown, 0 if there is no cache.
        cache: Bytes of the KV cache.
    """
    if token == 0:
        return ""
    fits = token is not None and token * length <= _SURE * cache
    return "" if fits else " --max-model-len auto"


def _model_types(config: Mapping, text: Mapping) -> set[str]:
    """Return the model_type of a config, and that of its text model."""
    return {str(config.get("model_type")), str(text.get("model_type"))}


def find_parsers(config: Mapping) -> tuple[str, str]:
    """Return the flags of the parsers for tool calls and reasoning, and a note; "" if unknown."""
    kinds = _model_types(config, find_text(config))
    for row in advice()["parsers"]:
        if kinds.isdisjoint(row["types"]):
            continue
        flags = f"--enable-auto-tool-choice --tool-call-parser {row['tool']}"
        if "reasoning" in row:
            flags += f" --reasoning-parser {row['reasoning']}"
        return flags, row.get("note", "")
    return "", ""


def list_draft_flags(config: Mapping) -> list[str]:
    """Return alternative flags of speculative decoding, with notes on their faults or their use."""
    text = find_text(config)
    if "type_vocab_size" in text or "encoder_layers" in text:
        return []
    mixers = {layer.mixer for layer in list_layers(text)}
    speculation = advice()["speculation"]
    lines = []
    has_state = bool(mixers & _STATE_MIXERS)
    has_head = any(text.get(key) for key in speculation["counted_by"])
    is_supported = not _model_types(config, text).isdisjoint(speculation["mtp"])
    if has_head and is_supported:
        flags = _MTP_FLAGS
        if has_state:
            flags += f" --no-enable-prefix-caching; {speculation['hybrid']}"
        lines.append(flags)
    # In hybrid models, drafts from the prompt gave wrong text: see vllm-project/vllm#39273.
    if not has_state:
        lines.append(f"{_NGRAM_FLAGS}, for texts that repeat their prompt")
    return lines


def find_speed(config: Mapping) -> str:
    """Return the published speeds of models in this format on gfx1151, with the source, or ""."""
    text = find_text(config)
    form = read_format(config)
    layers = [] if "encoder_layers" in text else list_layers(text)
    has_experts = any(layer.feed_forward == "sparse" for layer in layers)
    for row in advice()["speed"]:
        if form in row["formats"] and row["experts"] == has_experts:
            return f"{row['figures']} ({row['source']})"
    return ""

# SPDX-License-Identifier: BSD-3-Clause
"""What to start a model's server with: its length, its parsers, drafts, and how fast it may be."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from strix_validate.json_file import json_object
from strix_validate.models.defaults import complete
from strix_validate.models.formats import format_of
from strix_validate.models.parts import layers_of, text_of

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
#: What vLLM takes where no key says it.
_UNKNOWN_LENGTH = 2048
#: Kinds of rope whose max_position_embeddings is the scaled length already, or which do not scale.
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")
#: The part of the cache that one request of a model's length may need without --max-model-len.
#: vLLM rounds to blocks and pads groups of layers, so a need near the whole cache proves nothing.
_SURE = 0.5


@cache
def advice() -> dict[str, Any]:
    """Return what advice.toml has."""
    return tomllib.loads(files(__package__).joinpath("advice.toml").read_text())


def length_of(config: Mapping, folder: Path | None = None) -> int:
    """Return how many tokens vLLM lets a request have if no flag says it.

    Follows _get_and_verify_max_len of vLLM 0.33.0's config/model.py.

    Args:
        config: A config.json.
        folder: Where a tokenizer_config.json may set a lower limit.
    """
    text = text_of(config)
    lengths = [text[key] for key in _LENGTHS if _is_number(text.get(key))]
    length: float | None = min(lengths) if lengths else None
    if _is_number(text.get("model_max_length")):
        length = text["model_max_length"]
    if folder:
        length = _shorter(length, folder)
    if length is None:
        return _UNKNOWN_LENGTH
    ropes = _ropes(text)
    if any(_kind_of(rope) == "longrope" for rope in ropes):
        original = complete(config).get("original_max_position_embeddings")
        return int(original) if original and _is_number(original) else int(length)
    if "gemma3" not in str(config.get("model_type")):
        factors = [
            rope["factor"]
            for rope in ropes
            if _kind_of(rope) not in _SCALED and _is_number(rope.get("factor"))
        ]
        length *= factors[-1] if factors else 1
    return int(length)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _shorter(length: float | None, folder: Path) -> float | None:
    """Return the length, or what the tokenizer's own file says if that is less."""
    try:
        own = json_object(folder / "tokenizer_config.json").get("model_max_length")
    except ValueError:
        return length
    if not isinstance(own, int | float) or not _is_number(own):
        return length
    return own if length is None else min(length, own)


def _ropes(text: Mapping) -> list[Mapping]:
    """Return the scalings of positions, of which there may be one for each kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _kind_of(rope: Mapping) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def length_flag(length: int, token: int | None, cache: int) -> str:
    """Return --max-model-len where the cache may hold less than the model's length, or nothing.

    vLLM refuses to start if a request of its length does not fit into the cache
    (_check_enough_kv_cache_memory of v1/core/kv_cache_planning.py); with `auto` it takes the
    longest that does (_auto_fit_max_model_len, the same file).

    Args:
        length: Tokens that a request may have.
        token: Bytes of a token's keys and values at most; None if unknown, 0 if there is no cache.
        cache: Bytes of the KV cache.
    """
    if token == 0:
        return ""
    is_sure = token is not None and token * length <= _SURE * cache
    return "" if is_sure else " --max-model-len auto"


def parsers_of(config: Mapping) -> tuple[str, str]:
    """Return the flags by which tool calls and reasoning are parsed, and a note; "" if unknown."""
    kinds = {str(config.get("model_type")), str(text_of(config).get("model_type"))}
    for row in advice()["parsers"]:
        if kinds & set(row["types"]):
            flags = f"--enable-auto-tool-choice --tool-call-parser {row['tool']}"
            if "reasoning" in row:
                flags += f" --reasoning-parser {row['reasoning']}"
            return flags, row.get("note", "")
    return "", ""


def drafts_of(config: Mapping) -> list[str]:
    """Return flags of speculative decoding, each with what is known to be wrong with it."""
    text = text_of(config)
    if "type_vocab_size" in text or "encoder_layers" in text:
        return []
    layers = {layer.mixer for layer in layers_of(text)}
    is_hybrid = bool(layers & {"linear_attention", "mamba", "mamba and attention", "conv"})
    known = advice()["speculation"]
    lines = []
    has_head = any(text.get(key) for key in known["counted_by"])
    kinds = {str(text.get("model_type")), str(config.get("model_type"))}
    if has_head and kinds & set(known["mtp"]):
        flags = """--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""
        if is_hybrid:
            flags += f" --no-enable-prefix-caching; {known['hybrid']}"
        lines.append(flags)
    numbers = '"num_speculative_tokens":5,"prompt_lookup_max":4'
    ngram = f"""--speculative-config '{{"method":"ngram",{numbers}}}'"""
    lines.append(f"{ngram}, for texts that repeat their prompt")
    return lines


def speed_of(config: Mapping) -> str:
    """Return the public figures of a model's format on gfx1151, with their source, or nothing."""
    text = text_of(config)
    form = format_of(config)
    layers = [] if "encoder_layers" in text else layers_of(text)
    has_experts = any(layer.feed_forward == "sparse" for layer in layers)
    for row in advice()["speed"]:
        if form in row["formats"] and row["experts"] == has_experts:
            return f"{row['figures']} ({row['source']})"
    return ""

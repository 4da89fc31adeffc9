# SPDX-License-Identifier: BSD-3-Clause
"""Compare the counts of models' weights with transformers' own classes, also for missing keys.

families.json has the counts of transformers (written by tests/families.py), and defaults.json the
defaults of its classes. If the release that defaults.json names is installed, a test collects the
defaults again.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import pytest
from models import FILES, FORMATS, SHAPES, THREADS
from strix_validate.layers import defaults
from strix_validate.layers.parts import find_encoders, find_text
from strix_validate.models import answer, model_memory, table

TESTS = Path(__file__).parent
FAMILIES = json.loads((TESTS / "families.json").read_text())
CONFIGS = FILES | SHAPES | THREADS
#: A count may exceed transformers' count by this factor.
EXACT = 1.002


def rows() -> list[tuple[str, dict, int]]:
    """Return each family's configs with the number of parameters that transformers counts."""
    return [
        (kind, {"model_type": kind} | changes, total)
        for kind, counts in FAMILIES["families"].items()
        for changes, total, _ in counts
    ]


def count(config: dict) -> float | None:
    """Return the number of parameters of a config, or None if the config lacks a dimension."""
    try:
        return model_memory.weights(config) / 2
    except (KeyError, TypeError, table.NoModel):
        return None


@pytest.mark.parametrize("kind", FAMILIES["families"])
def test_a_lower_bound_is_never_more_than_the_truth(kind: str) -> None:
    """The test covers families whose count is called exact or a lower bound, but no estimates."""
    for name, config, total in rows():
        if name == kind and model_memory.is_counted(config):
            counted = count(config)
            assert counted is None or counted <= EXACT * total, config


@pytest.mark.parametrize("kind", table.read_table()["counted"])
def test_counted_families_are_within_three_percent(kind: str) -> None:
    """Only the text model is counted. The config has the keys that its class derives."""
    close = []
    for name, counts in FAMILIES["families"].items():
        changes, total, encoders = counts[-1]
        config = {"model_type": name} | changes
        if find_text(config).get("model_type") == kind:
            counted = (count(config) or 0) - model_memory.encoder_parameters(config)
            close.append(0.97 * (total - encoders) <= counted <= EXACT * total)
    assert any(close)


def test_a_family_that_disagrees_is_an_estimate() -> None:
    """A count that exceeds transformers' count is no lower bound, so it is called an estimate."""
    too_high = {kind for kind, config, total in rows() if (count(config) or 0) > EXACT * total}
    assert {"gpt2", "bart", "falcon", "muse_spark"} & too_high
    assert not any(model_memory.is_counted({"model_type": kind}) for kind in too_high)
    result = answer.answer({"model_type": "muse_spark"}, None, None)
    assert result.is_estimate
    assert result.weights_prefix == "perhaps "


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_that_is_missing_ends_the_command(name: str) -> None:
    """If any key of any part is missing, the command gives an answer or one clear message."""
    for config in without_each_key(CONFIGS[name]):
        try:
            result = answer.answer(config, None, None)
        except table.NoModel:
            continue
        assert answer.describe("NAME", result, answer.Tree())


@pytest.mark.parametrize("name", CONFIGS)
def test_no_strange_value_ends_the_command(name: str) -> None:
    """If any key of any part has an impossible value, the command gives an answer or a message."""
    for config in with_strange_values(CONFIGS[name]):
        try:
            result = answer.answer(config, None, None)
        except table.NoModel:
            continue
        assert answer.describe("NAME", result, answer.Tree())


def with_strange_values(config: dict):
    """Yield copies of the config in which one value of the config or of a part is replaced."""
    for key, value in config.items():
        for strange in (None, "x", -1, 2**70, [1], 1.5):
            yield {**config, key: strange}
        if isinstance(value, dict):
            yield from ({**config, key: part} for part in with_strange_values(value))


def without_each_key(config: dict):
    """Yield copies of the config that lack one key of the config or of a part."""
    for key, value in config.items():
        yield {k: v for k, v in config.items() if k != key}
        if isinstance(value, dict):
            yield from ({**config, key: part} for part in without_each_key(value))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_default_stands_for_a_key_that_is_missing(name: str) -> None:
    """A missing key counts as the class's default."""
    config = CONFIGS[name]
    kind = str(config.get("model_type"))
    sizes = defaults.contents()["types"].get(kind, {}).get("keys", {})
    for key in sizes.keys() & config.keys():
        left_out = {k: v for k, v in config.items() if k != key}
        explicit = {**left_out, key: sizes[key]}
        assert count(left_out) == count(explicit), key


def test_an_encoder_that_leaves_keys_out() -> None:
    """The config lacks intermediate_size, for which transformers' class has the default 4304."""
    config = SHAPES["Qwen3.6-35B-A3B"]
    short = config | {"vision_config": {"model_type": "qwen3_5_moe", "out_hidden_size": 2048}}
    assert model_memory.weights(short) == model_memory.weights(config)
    assert find_encoders(short)["vision_config"]["intermediate_size"] == 4304


def test_names_that_a_class_maps() -> None:
    config = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}
    text = find_text(config)
    assert (text["hidden_size"], text["num_hidden_layers"]) == (1600, 48)
    assert text["max_position_embeddings"] == 1024


#: Hybrid models, by the config key that tells which layers are attention: model_type, config keys,
#: and number of attention layers.
PATTERNS = {
    "hybrid_override_pattern": ("nemotron_h", {"hybrid_override_pattern": "MEM*EM-"}, 1),
    "layers_block_type": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "moe"]}, 1),
    "attn_layer_period": ("jamba", {"num_hidden_layers": 16}, 2),
    "attn_layer_indices": ("bamba", {"attn_layer_indices": [9, 18, 27]}, 3),
    "full_attention_interval": (
        "qwen3_next",
        {"full_attention_interval": 6, "num_hidden_layers": 24},
        4,
    ),
    "layer_types": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention"] * 4, "num_hidden_layers": 8},
        4,
    ),
    "full_attn_idxs": (
        "lfm2",
        {"full_attn_idxs": [2, 5], "num_hidden_layers": 8, "layer_types": None},
        2,
    ),
    "linear_attn_config": (
        "kimi_linear",
        {
            "linear_attn_config": {"full_attn_layers": [4, 8]},
            "num_hidden_layers": 8,
            "kv_lora_rank": None,
        },
        2,
    ),
    "attn_type_list": ("minimax", {"attn_type_list": [0, 0, 0, 1], "num_hidden_layers": 8}, 2),
    "sliding_window_pattern": ("gemma3_text", {"sliding_window_pattern": 6}, 26),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_hybrid_models(name: str) -> None:
    kind, keys, attend = PATTERNS[name]
    text = find_text({"model_type": kind} | keys)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    cached = model_memory.cache_of_token({"model_type": kind} | keys)
    assert cached == attend * 2 * 2 * heads * size


def test_nemotron_fits_where_it_does() -> None:
    """With experts in each layer, the count would be 190.6 GiB. The model's files have 63 GB."""
    config = THREADS["Nemotron-3-Nano-30B-A3B"]
    assert model_memory.weights(config) / 1e9 == pytest.approx(63.2, rel=0.005)
    assert model_memory.uncounted(config) == []
    assert model_memory.cache_of_token(config) == 6 * 2 * 2 * 2 * 128
    assert "23 layers of mamba" in answer.answer(config, None, None).unproven


def test_unknown_layers_count_as_nothing() -> None:
    config = THREADS["Nemotron-3-Nano-30B-A3B"]
    pattern = config["hybrid_override_pattern"].replace("M", "?")
    result = answer.answer(config | {"hybrid_override_pattern": pattern}, None, None)
    assert result.weights_prefix == "at least "
    assert "layers of letter ?" in result.uncounted
    assert result.weights < model_memory.weights(config)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_a_format_takes_no_more_than_its_weights(name: str, form: str) -> None:
    """In each format, a weight takes at least 2 bits, and at most 8 bits and its share of a scale.

    mxfp4 is an exception, because it leaves all weights but those of experts in 16 bits.
    """
    config = FILES[name]
    full = model_memory.weights(config)
    packed = model_memory.weights(config | {"quantization_config": FORMATS[form]})
    assert full / 8 < packed <= (full if form == "mxfp4" else 0.6 * full)


def test_the_text_of_an_omni_model() -> None:
    """The attention heads are those of the thinker, which is the part that vLLM serves."""
    result = answer.answer(THREADS["Qwen3-Omni-30B-A3B"], None, None)
    assert result.token == 48 * 2 * 2 * 4 * 128
    assert result.weights_prefix == "at least "
    assert result.uncounted == ["the encoder of sound"]
    assert not result.is_estimate
    assert result.parts["experts"] == ["TritonExperts"]
    assert result.parts["encoder"]


def installed() -> str:
    """Return the installed release of transformers, or ""."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


@pytest.mark.skipif(
    installed() != defaults.contents()["transformers"],
    reason="the installed transformers is not the version of defaults.json, or there is none",
)
def test_the_table_of_defaults_is_transformers_own() -> None:
    assert defaults.collect() == defaults.contents()


def test_both_tables_are_of_one_transformers() -> None:
    assert FAMILIES["transformers"] == defaults.contents()["transformers"]
    kinds = chain(*(table.read_table()[key] for key in ("counted", "encoders", "without_gate")))
    assert set(kinds) <= defaults.contents()["types"].keys()

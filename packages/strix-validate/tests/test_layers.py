# SPDX-License-Identifier: BSD-3-Clause
"""Check the table of models, and that quick checks cover its values with few cases."""

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from models import FILES
from strix_validate.attention import flash_cases, sdpa, sdpa_pairs
from strix_validate.attention.sdpa_cases import CASES
from strix_validate.checks import Size
from strix_validate.layers import table
from strix_validate.layers.pairs import combine, pairwise
from strix_validate.layers.table import MODELS, plain_layers
from strix_validate.triton_packages import conch, fla, gguf, liger, sage
from strix_validate.vllm import model_cases, vllm_checks


def pairs(rows) -> set:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_few_rows_hold_each_pair():
    rows = list(product("ab", "cde", "fg", "hi"))
    chosen = pairwise([(row, row) for row in rows])
    assert pairs(chosen) == pairs(rows)
    assert len(chosen) < len(rows) / 2


COLUMNS = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2, 3), "d": (0, 1)}


def fits(values) -> bool:
    """Return whether a combination is allowed: c = 3 excludes b = 1 and d = 0."""
    return values.get("c") != 3 or (values.get("b") != 1 and values.get("d") != 0)


def test_few_combinations_hold_each_pair_that_fits():
    rows = combine(COLUMNS, fits)
    assert all(map(fits, rows))
    assert rows == combine(COLUMNS, fits)
    all_rows = [dict(zip(COLUMNS, x, strict=True)) for x in product(*COLUMNS.values())]
    fitting = [tuple(x.values()) for x in all_rows if fits(x)]
    assert pairs(tuple(x.values()) for x in rows) == pairs(fitting)
    assert len(rows) <= 14


def test_a_pair_that_no_combination_has_is_left_out():
    def allows(values) -> bool:
        return len({values[name] for name in "abc" if name in values}) < 3

    rows = combine({"a": (0,), "b": (1,), "c": (0, 1, 2)}, allows)
    assert [x["c"] for x in rows] == [0, 1]


def test_combined_shapes_hold_each_pair_that_fits():
    rows = combine(sdpa_pairs.COLUMNS, sdpa_pairs.fits)
    assert len(rows) == len(sdpa_pairs.cases()) == len({x.name for x in sdpa_pairs.cases()})
    held = pairs(tuple(x.items()) for x in rows)
    columns = list(sdpa_pairs.COLUMNS.items())
    for (i, (a, xs)), (j, (b, ys)) in combinations(enumerate(columns), 2):
        for x, y in product(xs, ys):
            is_held = ((i, (a, x)), (j, (b, y))) in held
            assert is_held == sdpa_pairs.fits({a: x, b: y}), (a, x, b, y)
    assert any("pairs" in check.id for check in sdpa.checks())


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_layers(model):
    row = MODELS[model]
    assert row.layers.attention or row.layers.latent
    assert all(layer.heads % layer.kv_heads == 0 for layer in row.layers.attention)


@pytest.mark.parametrize("model", sorted(MODELS.keys() & FILES.keys()))
def test_a_config_can_be_pasted_into_the_table(model):
    """A whole config gives the same layers and sizes as the table's entry, which has fewer keys."""
    pasted = table.read_model(FILES[model])
    entry = MODELS[model]
    for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"):
        assert getattr(pasted, name) == getattr(entry, name), name
    assert replace(pasted.layers, dtype=torch.bfloat16) == entry.layers


def keywords(cases) -> tuple[list, list]:
    """Return the arguments of quick cases, and the arguments of all cases."""
    quick = [case.build.keywords for case in cases.values() if case.size is Size.QUICK]
    return quick, [case.build.keywords for case in cases.values()]


def test_quick_has_each_group_head_dim_and_block_of_the_table():
    quick, all_cases = keywords(model_cases.attention_cases())
    for part in ("head_dim", "block", "softcap", "sinks", "causal", "fp8"):
        assert {x[part] for x in quick} == {x[part] for x in all_cases}
    groups = [{x["heads"] // x["kv_heads"] for x in rows} for rows in (quick, all_cases)]
    assert groups[0] == groups[1]
    assert 8 < len(quick) < len(all_cases) / 3


def test_sdpa_and_flash_attn_have_the_heads_of_each_model():
    """SDPA's quick checks have each number of query heads per key head, in prompts and decoding.

    flash-attn's checks have each model's decoding.
    """
    quick = [x for x in CASES if x.name.startswith("layer-") and x.size is Size.QUICK]
    for queries in (1, 40):
        groups = {x.heads // x.kv_heads for x in quick if x.seqlen_q == queries}
        assert groups == {x.group for x in plain_layers().values()}
    cases = {case.name for case in flash_cases.cases(torch.float16)}
    assert {f"cache-{name}-float16" for name in plain_layers()} <= cases


MIXTURES = [layer for row in MODELS.values() for layer in row.experts_by_format().values()]
LATENT = [layer for row in MODELS.values() for layer in row.layers.latent]
ANGLES = [row.rope for row in MODELS.values() if row.rope]
LINEAR = [layer for row in MODELS.values() for layer in row.layers.linear]
#: The values that quick checks must have, by group of vLLM's kernels and by argument. Most of them
#: are the values of the table of models, which has no ranks of LoRAs and no groups of dense layers.
QUICK_HAS = {
    ("experts", "top_k"): {layer.top_k for layer in MIXTURES},
    ("experts", "group"): {layer.group for layer in MIXTURES if layer.group},
    ("experts", "zeros"): {False, True},
    ("experts", "bits"): {4, 8, 16},
    ("norm", "columns"): {row.hidden_size for row in MODELS.values()},
    ("rope", "heads"): {layer.heads for layer in ANGLES},
    ("rope", "kv_heads"): {layer.kv_heads for layer in ANGLES},
    ("rope", "sections"): {layer.sections for layer in ANGLES},
    ("linear", "size"): {layer.size for layer in LINEAR},
    ("linear", "value_heads"): {2 * layer.value_heads // layer.heads for layer in LINEAR},
    ("latent", "heads"): {layer.heads for layer in LATENT},
    ("latent", "rank"): {layer.rank for layer in LATENT},
    ("latent", "rope"): {layer.rope for layer in LATENT},
    ("writer", "heads"): {x.kv_heads for row in MODELS.values() for x in row.layers.attention},
    ("writer", "block"): {x.block for row in MODELS.values() for x in row.layers.attention},
    ("quantized", "group"): {128},
    ("lora", "rank"): {8, 16, 32, 64},
}


@pytest.mark.parametrize("part", QUICK_HAS, ids="-".join)
def test_quick_computes_what_models_have(part):
    """Quick checks have exactly the values in QUICK_HAS, apart from top_k = 1."""
    family, argument = part
    quick, all_cases = keywords(model_cases.GENERATED[family])
    values = {x[argument] for x in quick if argument in x}
    ignored_values = {1} if argument == "top_k" else set()
    assert values - ignored_values == QUICK_HAS[part] - ignored_values
    assert len(quick) <= len(all_cases)


def test_full_has_ranks_of_more_than_64():
    _, all_cases = keywords(model_cases.lora_cases())
    assert {x["rank"] for x in all_cases} == set(model_cases.RANKS)


def test_the_writer_has_a_second_tile_at_quick():
    quick, _ = keywords(model_cases.writer_cases())
    for fp8 in (False, True):
        assert any(x["heads"] * x["head_dim"] > 2048 for x in quick if x["fp8"] is fp8)


def test_quick_samples_from_the_largest_and_from_unaligned_vocabularies():
    quick, _ = keywords(model_cases.sampling_cases())
    sizes = {x["vocabulary"] for x in quick}
    assert any(size > 1 << 17 for size in sizes)
    assert any(size % 2 for size in sizes)


@pytest.mark.parametrize("family", model_cases.GENERATED)
def test_the_checks_have_each_family(family):
    cases = model_cases.GENERATED[family]
    assert cases.items() <= vllm_checks.COMPUTED.items()
    assert any(case.size is Size.QUICK for case in cases.values())


def test_packages_compute_what_models_have():
    quick, all_cases = keywords(fla.model_cases())
    elements = {layer.size for layer in LINEAR}
    assert {x["keys"] for x in quick} == {x["values"] for x in quick} == elements
    ratios = {layer.value_heads // layer.heads for layer in LINEAR}
    for step in (False, True):
        rows = [x for x in all_cases if bool(x.get("decode")) is step]
        assert {x["value_heads"] // x["heads"] for x in rows} == ratios
    quick, _ = keywords(liger.model_cases())
    for argument in ("columns", "heads", "kv_heads", "head_dim"):
        values = {x[argument] for x in quick if argument in x}
        assert len(values) > 4 or argument == "head_dim"
    assert {x["head_dim"] for x in quick if "head_dim" in x} == {64, 96, 128, 256}
    quick, _ = keywords(gguf.model_cases())
    assert {x["name"] for x in quick} == set(gguf.TYPES)
    assert min(x["size"] for x in quick) >= 512
    quick, _ = keywords(sage.model_cases())
    masks = {(x["head_dim"], x["causal"]) for x in quick}
    assert masks == set(product((64, 96, 128), (False, True)))
    quick, _ = keywords(conch.model_cases())
    assert {x["group"] for x in quick if x["zeros"]} > {128}


def test_flash_attn_has_each_group_and_head_dim_in_packed_sequences():
    cases = [x for x in flash_cases.CASES if x.label.startswith("layer-") and x.size is Size.QUICK]
    layers = plain_layers().values()
    for kind in ("fixed", "varlen"):
        shapes = [x.build.keywords for x in cases if x.build.func.__name__ == kind]
        assert {x["heads"] // x["kv_heads"] for x in shapes} == {x.group for x in layers}
        assert {x["head_dim"] for x in shapes} == {x.head_dim for x in layers}

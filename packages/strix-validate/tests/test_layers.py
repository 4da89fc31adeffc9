# SPDX-License-Identifier: BSD-3-Clause
"""The table of models, and the few of its rows that quick has."""

from itertools import combinations, product

import pytest
import torch
from strix_validate.attention import flash_cases
from strix_validate.attention.sdpa_shapes import SHAPES
from strix_validate.checks import Size
from strix_validate.layers.table import MODELS, pairwise, plain_layers
from strix_validate.vllm import vllm_checks


def pairs(rows) -> set:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_few_rows_hold_each_pair():
    rows = list(product("ab", "cde", "fg", "hi"))
    chosen = pairwise([(row, row) for row in rows])
    assert pairs(chosen) == pairs(rows) and len(chosen) < len(rows) / 2


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_layers(model):
    row = MODELS[model]
    assert row.attention() or row.compressed()
    assert all(layer.heads % layer.kv_heads == 0 for layer in row.attention())


def test_quick_has_each_group_head_dim_and_block_of_the_table():
    quick = [x.build.keywords for x in vllm_checks.layer_cases().values() if x.size is Size.QUICK]
    every = [x.build.keywords for x in vllm_checks.layer_cases().values()]
    for part in ("head_dim", "block", "softcap", "sinks", "causal", "fp8"):
        assert {x[part] for x in quick} == {x[part] for x in every}
    groups = [{x["heads"] // x["kv_heads"] for x in rows} for rows in (quick, every)]
    assert groups[0] == groups[1] and 8 < len(quick) < len(every) / 3


def test_sdpa_and_flash_attn_have_the_heads_of_each_model():
    """SDPA each group at quick, prompts and decoding; flash-attn each model's decoding."""
    quick = [x for x in SHAPES if x.name.startswith("layer-") and x.size is Size.QUICK]
    for queries in (1, 40):
        groups = {x.heads // x.kv_heads for x in quick if x.seqlen_q == queries}
        assert groups == {x.group for x in plain_layers().values()}
    cases = {case.name for case in flash_cases.cases(torch.float16)}
    assert {f"cache-{name}-float16" for name in plain_layers()} <= cases

# SPDX-License-Identifier: BSD-3-Clause
"""The table of models, and the few of its rows that quick has."""

from itertools import combinations, product

import pytest
from strix_validate.checks import Size
from strix_validate.layers.pairs import pairwise
from strix_validate.layers.table import MODELS
from strix_validate.vllm import model_layers


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
    quick = [x.build.keywords for x in model_layers.cases().values() if x.size is Size.QUICK]
    every = [x.build.keywords for x in model_layers.cases().values()]
    for part in ("head_dim", "block", "softcap", "sinks", "causal", "fp8"):
        assert {x[part] for x in quick} == {x[part] for x in every}
    groups = [{x["heads"] // x["kv_heads"] for x in rows} for rows in (quick, every)]
    assert groups[0] == groups[1] and 8 < len(quick) < len(every) / 3

# SPDX-License-Identifier: BSD-3-Clause
"""The layers of the table of models as calls of vLLM's attention, with as few heads as show faults.

Quick has those that hold each pair of what layers are made of; full has all.
"""

from dataclasses import asdict, replace
from functools import partial

import torch

from strix_validate.checks import Size
from strix_validate.layers.table import OWN_WINDOW, Attention, pairwise, small_layers
from strix_validate.triton.cases import Case
from strix_validate.vllm.attention import paged_attention

_WHY = "a kernel that is correct for other heads, lanes, blocks or windows than this model's"


def _steps(layer: Attention) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return lengths of a step, beyond the window, and in several blocks."""
    far = layer.window + 30 if layer.window else 70
    return {"prefill": ((9, far), (20, 20)), "decode": ((1, 40), (1, far))}


def cases() -> dict[str, Case]:
    """Return a case for each layer, kind of step and of cache."""
    rows = {
        f"layer-{name}-{kind}{'-fp8' * fp8}": (layer, kind, fp8)
        for name, layer in small_layers().items()
        for kind in _steps(layer)
        for fp8 in (False, True)
    }
    quick = set(pairwise([(name, _columns(*row)) for name, row in rows.items()]))
    return {
        name: Case(
            partial(paged_attention, lengths=_steps(layer)[kind], fp8=fp8, **asdict(layer)), _WHY,
            size=Size.QUICK if name in quick else Size.FULL,
        )
        for name, (layer, kind, fp8) in rows.items()
    }  # fmt: skip


#: Layers that are compiled, in 16 bits: by what is particular about each.
_COMPILED = {
    "d64-sinks": "gpt-oss-20b",
    "d128": "Llama-3.1-8B",
    "d128-gqa7": "Qwen2.5-7B",
    "d128-window": "Gemma-3-27B-window",
    "d256-softcap": "Gemma-2-9B-window",
    "d256-block1056": "Qwen3-Next-80B-A3B",
    "d512": "Gemma-4-31B",
}


def compiled(why: str) -> dict[str, Case]:
    """Return cases to compile: prefill and decoding, and with a cache in FP8."""
    rows = {name: (small_layers()[model], False) for name, model in _COMPILED.items()}
    rows["d128-fp8-kv"] = small_layers()["Llama-3.1-8B"], True
    steps = {"prefill": ((128, 128),), "decode": ((1, 300), (1, 70))}
    return {
        f"{kind}-{name}": Case(
            partial(paged_attention, lengths=lengths, fp8=fp8, **asdict(layer)), why, torch.bfloat16
        )
        for kind, lengths in steps.items()
        for name, (layer, fp8) in rows.items()
    }


#: Layers that are executed under emulation, with one head of keys: (model, lengths, dtype).
_EMULATED = {
    "prefill-gqa7": ("Qwen2.5-7B", ((20, 20),), torch.float16),
    "decode-sinks": ("gpt-oss-20b", ((1, 50), (1, 170)), torch.float16),
    "decode-d96": ("Phi-3-mini", ((1, 60),), torch.float16),
    "decode-block1056": ("Qwen3-Next-80B-A3B", ((1, 100),), torch.float16),
    "prefill-d256-bfloat16": ("Gemma-2-9B", ((8, 20),), torch.bfloat16),
    "prefill-d512-bfloat16": ("Gemma-4-31B", ((8, 20),), torch.bfloat16),
}


def emulated() -> dict[str, Case]:
    """Return cases to execute: groups, lanes, blocks and sinks as models have them."""
    found = {}
    for name, (model, lengths, dtype) in _EMULATED.items():
        layer = small_layers()[model]
        layer = replace(layer, heads=layer.group, kv_heads=1)
        build = partial(paged_attention, lengths=lengths, **asdict(layer))
        found[name] = Case(build, _WHY, dtype)
    return found


def _columns(layer: Attention, kind: str, fp8: bool) -> tuple:
    """Return what a kernel is made for."""
    window = (layer.window == OWN_WINDOW) + bool(layer.window)
    shape = (layer.group, layer.head_dim, layer.block)
    return (*shape, window, layer.softcap, layer.sinks, layer.causal, kind, fp8)

# SPDX-License-Identifier: BSD-3-Clause
"""Decoding with latent attention (DeepSeek, GLM-4.7-Flash, Kimi) by vLLM's TRITON_MLA backend.

All query heads read the same head of the cache. A key is the latent vector followed by the elements
of rope; a value is the latent vector alone.
"""

import importlib
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.call import BF16
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.attention import FP8, build_paged_cache
from strix_validate.vllm.source import VllmCall

_OPS = "vllm.v1.attention.ops"
_FP8_SCALE = 0.5


def latent(  # noqa: PLR0913 (the options of a case)
    randn: Randn,
    *,
    keys: tuple[int, ...],
    heads=16,
    rank=512,
    rope=64,
    block=16,
    splits=4,
    scale=0.07,
    fp8=False,
    low=0.0,
) -> tuple[VllmCall, Expected]:
    """Build a call of decode_attention_fwd with one query for each sequence.

    Slots of the cache without a key are NaN.

    Args:
        randn: Draws the numbers.
        keys: Number of keys of each sequence.
        heads: Query heads.
        rank: Size of the latent vector.
        rope: Number of elements of rope.
        block: Number of tokens in a block of the cache.
        splits: Number of parts into which the keys are split.
        scale: Scale of the scores.
        fp8: Whether the cache is stored as e4m3, with a scale.
        low: Level of reference.with_low_scores; 0 for none.
    """
    q = randn(len(keys), heads, rank + rope)
    sequences = [randn(n, rank + rope) for n in keys]
    if low:
        sequences = [reference.with_low_scores(q, rows, low, scale)[1] for rows in sequences]
        q, _ = reference.with_low_scores(q, q, low, scale)
    cache, table = build_paged_cache([rows[:, None] for rows in sequences], block)
    if fp8:
        sequences = [rows.to(FP8).to(q.dtype) * _FP8_SCALE for rows in sequences]
    tensors = {
        "q": q,
        "cache": cache.squeeze(1),
        "keys": torch.tensor(keys).int(),
        "table": torch.nn.functional.pad(table, (0, 1)),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        outs = []
        sums = []
        for row, rows in zip(q, sequences, strict=True):
            query = row[None, :, None]
            key = rows[None, None]
            results = reference.attention(
                query,
                key,
                key[..., :rank],
                query[..., :rank],
                scale=scale,
                lse=True,
                dtype=dtype,
            )
            outs.append(results["out"][0, :, 0])
            # vLLM stores the logsumexp in 16 bits.
            sums.append(reference.store(results["lse"][0, :, 0], dtype))
        return {"out": torch.stack(outs), "logsumexp": torch.stack(sums)}

    options = {"rank": rank, "splits": splits, "scale": scale, "fp8": fp8}
    return VllmCall(_latent, tensors, options, products=1), expected


def _latent(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    keys: Tensor,
    *,
    rank: int,
    splits: int,
    scale: float,
    fp8: bool,
) -> dict[str, Tensor]:
    if fp8:
        # The cache is converted here, because FP8 tensors cannot be pickled.
        cache = cache.to(FP8)
    cache = cache.unsqueeze(2)
    sequences, heads = q.shape[:2]
    out = q.new_full((sequences, heads, rank), torch.nan)
    sums = q.new_full((sequences, heads), torch.nan)
    scratch_shape = (sequences, heads, splits, rank + 1)
    scratch = q.new_full(scratch_shape, torch.nan, dtype=torch.float32)
    cache_scale = torch.ones((), device=q.device)
    if fp8:
        cache_scale *= _FP8_SCALE
    importlib.import_module(f"{_OPS}.triton_decode_attention").decode_attention_fwd(
        q,
        cache,
        cache[..., :rank],
        out,
        sums,
        table,
        keys,
        scratch,
        splits,
        scale,
        cache.shape[1],
        k_scale=cache_scale,
        v_scale=cache_scale,
        is_mla=True,
    )
    return {"out": out, "logsumexp": sums}


def merged_states(
    randn: Randn,
    *,
    tokens=5,
    heads=3,
    head_dim=80,
    cached=3,
    low=0.0,
) -> tuple[VllmCall, Expected]:
    """Build a call of merge_attn_states, which merges attention over cached and over new keys.

    One token has no cached key in one head, so the logsumexp of its cached keys is infinite.

    Args:
        randn: Draws the numbers.
        tokens: Number of tokens.
        heads: Query heads.
        head_dim: Size of a head.
        cached: How many tokens, from the first, have cached keys.
        low: Number that is added to all finite logsumexps.
    """
    names = ("prefix", "suffix")
    tensors = {name: randn(tokens, heads, head_dim) for name in names}
    for name in names:
        tensors[f"{name}_lse"] = randn(heads, tokens).float() * 3 + low
    tensors["prefix_lse"][1, 0] = float("inf")

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working_dtype(dtype)
        sums = torch.stack([tensors[f"{name}_lse"].to(work) for name in names])
        sums[sums == float("inf")] = -float("inf")
        sums[0, :, cached:] = -float("inf")
        shares = sums.softmax(0).transpose(1, 2)[..., None]
        parts = torch.stack([tensors[name].to(work) for name in names])
        lse = sums.logsumexp(0)
        if dtype == reference.TERMS:
            parts = parts.abs()
            lse = lse.abs() + 1
        return {"out": reference.store((parts * shares).sum(0), dtype), "lse": lse}

    return VllmCall(_merge, tensors, {"cached": cached}), expected


def _merge(
    prefix: Tensor,
    suffix: Tensor,
    prefix_lse: Tensor,
    suffix_lse: Tensor,
    *,
    cached: int,
) -> dict[str, Tensor]:
    out = torch.full_like(prefix, torch.nan)
    lse = torch.full_like(prefix_lse, torch.nan)
    importlib.import_module(f"{_OPS}.triton_merge_attn_states").merge_attn_states(
        out,
        prefix,
        prefix_lse,
        suffix,
        suffix_lse,
        lse,
        cached,
    )
    return {"out": out, "lse": lse}


_LATENT = "the rotary part of the head dim left out, or parts of the keys merged wrongly (DeepSeek)"
_MERGE = "wrong weights for cached and new keys if a prompt is prefilled in parts"
_SMALL: dict = {"rank": 128, "rope": 32}
COMPUTED = {
    "mla-decode": Case(partial(latent, keys=(1, 70), **_SMALL), _LATENT),
    "mla-decode-low": Case(
        partial(latent, keys=(1, 70), low=-1000, **_SMALL),
        reference.LOW_SCORES_FAULT,
    ),
    "mla-decode-512": Case(partial(latent, keys=(100, 33), heads=20), _LATENT, size=Size.FULL),
    "mla-decode-fp8": Case(
        partial(latent, keys=(40,), fp8=True, **_SMALL),
        "the scale of an fp8 cache left out",
        size=Size.FULL,
    ),
    "merge-states": Case(merged_states, _MERGE),
    "merge-states-low": Case(partial(merged_states, low=-1000.0), reference.LOW_SCORES_FAULT),
}
COMPILED = {
    # With DeepSeek's number of heads, the kernel spills registers.
    "mla-decode": Case(
        partial(latent, keys=(300, 70), heads=128),
        "a kernel that no longer compiles for gfx1151, or needs more LDS than the chip has",
        BF16,
    ),
}

# SPDX-License-Identifier: BSD-3-Clause
"""Decoding with latent attention (DeepSeek, GLM-4.7-Flash, Kimi), as vLLM's TRITON_MLA does it.

All query heads read one head of the cache: the latent vector, which is the value as well, and
behind it the lanes of rope.
"""

import importlib
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.attention import FP8, paged
from strix_validate.vllm.source import VllmCall

_OPS = "vllm.v1.attention.ops"
_FP8_SCALE = 0.5


def latent(  # noqa: PLR0913 (a case's options)
    randn: Randn, *, keys: tuple[int, ...], heads=16, rank=512, rope=64, block=16, splits=4,
    scale=0.07, fp8=False, low=0.0,
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of decode_attention_fwd: a query of each sequence; slots of the cache without a
    key are NaN.

    low: if not 0, see reference.with_low_scores.
    """
    q = randn(len(keys), heads, rank + rope)
    kept = [randn(n, rank + rope) for n in keys]
    if low:
        kept = [reference.with_low_scores(q, rows, low, scale)[1] for rows in kept]
        q, _ = reference.with_low_scores(q, q, low, scale)
    cache, table = paged([rows[:, None] for rows in kept], block)
    if fp8:
        kept = [x.to(FP8).to(q.dtype) * _FP8_SCALE for x in kept]
    tensors = {"q": q, "cache": cache.squeeze(1), "keys": torch.tensor(keys).int()}
    tensors["table"] = torch.nn.functional.pad(table, (0, 1))

    def expected(dtype: Precision) -> dict[str, Tensor]:
        parts = []
        for row, own in zip(q, kept, strict=True):
            query, key = row[None, :, None], own[None, None]
            value, grad = key[..., :rank], query[..., :rank]
            found = reference.attention(query, key, value, grad, scale=scale, lse=True, dtype=dtype)
            # vLLM keeps the logsumexp in 16 bits
            size = reference.stored(found["lse"][0, :, 0], dtype)
            parts.append((found["out"][0, :, 0], size))
        out, size = (torch.stack(x) for x in zip(*parts, strict=True))
        return {"out": out, "logsumexp": size}

    options = {"rank": rank, "splits": splits, "scale": scale, "fp8": fp8}
    return VllmCall(_latent, tensors, options, products=1), expected


def _latent(
    q: Tensor, cache: Tensor, table: Tensor, keys: Tensor, *, rank: int, splits: int, scale: float,
    fp8: bool,
) -> dict[str, Tensor]:  # fmt: skip
    if fp8:  # only here: tensors of fp8 cannot be pickled
        cache = cache.to(FP8)
    cache = cache.unsqueeze(2)
    out, size = (q.new_full((*q.shape[:2], *more), torch.nan) for more in ((rank,), ()))
    scratch = q.new_full((*q.shape[:2], splits, rank + 1), torch.nan, dtype=torch.float32)
    one = torch.tensor(_FP8_SCALE if fp8 else 1.0, device=q.device)
    importlib.import_module(f"{_OPS}.triton_decode_attention").decode_attention_fwd(
        q, cache, cache[..., :rank], out, size, table, keys, scratch, splits, scale,
        cache.shape[1], k_scale=one, v_scale=one, is_mla=True,
    )  # fmt: skip
    return {"out": out, "logsumexp": size}


def merged(
    randn: Randn, *, tokens=5, heads=3, head_dim=80, cached=3, low=0.0
) -> tuple[VllmCall, Expected]:
    """Build a call of merge_attn_states: attention over cached and over new keys, of tokens that
    have both.

    One of them has no cached key, which a logsumexp of infinity says. low: added to all others.
    """
    names = ("prefix", "suffix")
    tensors = {name: randn(tokens, heads, head_dim) for name in names}
    tensors |= {f"{name}_lse": randn(heads, tokens).float() * 3 + low for name in names}
    tensors["prefix_lse"][1, 0] = float("inf")

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        sizes = torch.stack([tensors[f"{name}_lse"].to(work) for name in names])
        sizes[sizes == float("inf")] = -float("inf")
        sizes[0, :, cached:] = -float("inf")
        shares = sizes.softmax(0).transpose(1, 2)[..., None]
        both = torch.stack([tensors[name].to(work) for name in names])
        both = both.abs() if dtype == reference.TERMS else both
        lse = sizes.logsumexp(0)
        terms = lse.abs() + 1 if dtype == reference.TERMS else lse
        return {"out": reference.stored((both * shares).sum(0), dtype), "lse": terms}

    return VllmCall(_merge, tensors, {"cached": cached}), expected


def _merge(
    prefix: Tensor, suffix: Tensor, prefix_lse: Tensor, suffix_lse: Tensor, *, cached: int
) -> dict[str, Tensor]:
    out, lse = (torch.full_like(x, torch.nan) for x in (prefix, prefix_lse))
    importlib.import_module(f"{_OPS}.triton_merge_attn_states").merge_attn_states(
        out, prefix, prefix_lse, suffix, suffix_lse, lse, cached
    )
    return {"out": out, "lse": lse}


_LATENT = "the lanes of rope left out, or a split of the keys merged wrongly (DeepSeek)"
_MERGE = "cached and new keys weighted wrongly, where a prompt is prefilled in parts"
COMPUTED = {
    "mla-decode": Case(partial(latent, keys=(1, 70), rank=128, rope=32), _LATENT),
    "mla-decode-low": Case(
        partial(latent, keys=(1, 70), rank=128, rope=32, low=-1000), reference.WHY_LOW
    ),
    "mla-decode-512": Case(partial(latent, keys=(100, 33), heads=20), _LATENT, size=Size.FULL),
    "mla-decode-fp8": Case(
        partial(latent, keys=(40,), rank=128, rope=32, fp8=True),
        "the scale of an fp8 cache left out", size=Size.FULL,
    ),
    "merge-states": Case(merged, _MERGE),
    "merge-states-low": Case(partial(merged, low=-1000.0), reference.WHY_LOW),
}  # fmt: skip
COMPILED = {
    # DeepSeek's heads, which spill
    "mla-decode": Case(
        partial(latent, keys=(300, 70), heads=128),
        "a kernel that no longer compiles for gfx1151, or needs more LDS than the chip has",
        torch.bfloat16,
    )
}

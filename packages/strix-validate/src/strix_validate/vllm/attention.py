# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's attention over a paged cache as its server launches it, and what it must return.

Follows vllm/v1/attention/backends/triton_attn.py: a cache holds keys and values interleaved by
head, queries are a slice of what one product gives, and scratch for split keys is always there.
"""

import importlib
import sys
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from strix_validate.layers.table import Attention
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.source import VllmCall

#: Segments into which vLLM splits the keys of a decode (3d) launch.
SEGMENTS = 16
FP8 = torch.float8_e4m3fn
#: Of keys and of values: one for both would hide that they are swapped.
FP8_SCALES = {"k": 0.5, "v": 0.125}
#: Unless a call says otherwise.
_SMALL: dict = {"heads": 4, "kv_heads": 2, "head_dim": 128}


def halves(cache: Tensor, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Return a cache's keys and values, (blocks, block, kv_heads, head_dim) each.

    Args:
        cache: (blocks, kv_heads, block, 2 * head_dim).
        fp8: stored in it as e4m3; only here, as tensors of that cannot be pickled.
    """
    cache = cache.to(FP8) if fp8 else cache
    keys, values = cache.transpose(1, 2).chunk(2, -1)
    return keys, values


def attend(  # noqa: PLR0913 (what the kernels take)
    q: Tensor, caches: tuple[Tensor, Tensor], layer: Attention, *, starts: Tensor, keys: Tensor,
    table: Tensor, queries: int, most: int, scale: float | None = None, sinks: Tensor | None = None,
    slopes: Tensor | None = None, fp8: tuple[float, float] | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """Run unified_attention; what it does not write is NaN.

    Args:
        q: (tokens, heads, head_dim), of any strides between tokens. caches: see halves.
        queries, most: the largest number of a sequence's queries, and of its keys.
        fp8: the scales of keys and values.
        more: other arguments of unified_attention.
    """
    module = importlib.import_module(vllm_source.KERNELS[0])
    place, rows = {"device": q.device}, 128 // layer.kv_heads
    modes = sys.modules["vllm.v1.kv_cache_interface"].KVQuantMode
    shape, padded = (
        (max(rows, len(q)), layer.heads, SEGMENTS),
        1 << (layer.head_dim - 1).bit_length(),
    )
    k_scale, v_scale = (
        torch.tensor(x, **place).expand(len(keys), layer.kv_heads) for x in fp8 or (1.0, 1.0)
    )
    scratch = {
        f"softmax_segm_{name}": torch.full(size, float("nan"), **place)
        for name, size in (("output", (*shape, padded)), ("max", shape), ("expsum", shape))
    }
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, **place)
    arguments = {
        "q": q,
        "k": caches[0],
        "v": caches[1],
        "out": out,
        "cu_seqlens_q": starts,
        "max_seqlen_q": queries,
        "seqused_k": keys,
        "max_seqlen_k": most,
        "causal": layer.causal,
        "block_table": table,
        "softmax_scale": layer.head_dim**-0.5 if scale is None else scale,
        "window_size": (layer.window - 1, 0) if layer.window else (-1, -1),
        # an integer where there is none: another type for Triton
        "softcap": layer.softcap or 0,
        "q_descale": None,
        "k_descale": k_scale,
        "v_descale": v_scale,
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": SEGMENTS,
        "alibi_slopes": slopes,
        "sinks": sinks,
        "kv_quant_mode": modes.FP8_PER_TENSOR if fp8 else modes.NONE,
    }
    module.unified_attention(**arguments | scratch | more)
    return out


def store(
    k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor, *scales: float
) -> None:
    """Run triton_reshape_and_cache_flash; scales: of keys and values, where they become FP8."""
    one = torch.ones((), device=k.device)
    both = [torch.full_like(one, x) for x in scales] or [one, one]
    importlib.import_module(vllm_source.KERNELS[1]).triton_reshape_and_cache_flash(
        k, v, *caches, slots, "fp8" if caches[0].dtype == FP8 else "auto", *both
    )


def paged_attention(  # noqa: PLR0913 (a case's options)
    randn: Randn,
    *,
    lengths: tuple[tuple[int, int], ...],
    fp8: bool = False,
    scale: float | None = None,
    alibi: bool = False,
    gain: float = 1.0,
    low: float = 0.0,
    first_block: int = 2,
    far: bool = False,
    **layer,
) -> tuple[VllmCall, Expected]:
    """Build a call of unified_attention: attention over a paged cache.

    Everything in the cache that no query sees is NaN, as is the scratch. Batches that only decode
    are padded, as captured graphs are: rows without a sequence, and a sequence without tokens.

    Args:
        lengths: (queries, keys) of each sequence. With eight queries each or fewer, keys are
            split: 3d.
        fp8: keys and values are stored as fp8 e4m3 with a scale each.
        scale: None is 1 / sqrt(head_dim). gain: q times this. low: if not 0, see
            reference.with_low_scores. first_block: the least in use.
        far: the cache's blocks in use lie behind 2^31 numbers, of memory that nothing writes.
        layer: of Attention, what is not 4 heads, 2 of keys, of 128 lanes.
    """
    own = Attention(**_SMALL | layer)
    queries, keys = zip(*lengths, strict=True)
    padding = 2 * (max(queries) == 1)
    q = randn(sum(queries), own.heads, own.head_dim) * gain
    kept = [tuple(randn(n, own.kv_heads, own.head_dim) for _ in "kv") for n in keys]
    if low:
        scores = (low, scale or own.head_dim**-0.5)
        kept = [(reference.with_low_scores(q, k, *scores)[1], v) for k, v in kept]
        q, _ = reference.with_low_scores(q, q, *scores)
    rows = torch.full((len(q) + padding, own.heads + 2 * own.kv_heads, own.head_dim), torch.nan)
    rows[: len(q), : own.heads] = q
    rows_of_both = [torch.cat(pair, -1) for pair in kept]
    for (new, n), both in zip(lengths, rows_of_both, strict=True):
        if own.window:  # freed, and written by whoever has it now
            both[: max(n - new - own.window + 1, 0)] = torch.nan
    cache, table = paged(rows_of_both, own.block, first_block)
    ends = [0, *accumulate(queries), *[len(q)] * bool(padding)]
    tensors = {
        "rows": rows.to(q.dtype),
        "cache": cache,
        "starts": torch.tensor(ends, dtype=torch.int32),
        "keys": torch.tensor([*keys, *[0] * bool(padding)], dtype=torch.int32),
        # vLLM's tables are wider than needed, and 0 there
        "table": torch.nn.functional.pad(table, (0, 2, 0, int(bool(padding)))),
    }
    if own.sinks:
        tensors["sinks"] = randn(own.heads)
    if alibi:
        tensors["slopes"] = torch.exp2(-torch.arange(1.0, own.heads + 1))
    if fp8:
        scales = FP8_SCALES.values()
        kept = [
            tuple(x.to(FP8).to(q.dtype) * s for x, s in zip(pair, scales, strict=True))
            for pair in kept
        ]
    options = {"layer": own, "queries": max(queries), "most": max(keys), "fp8": fp8}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        parts = []
        for part, pair in zip(q.split(queries), kept, strict=True):
            # (tokens, heads, head_dim) to (1, heads, tokens, head_dim)
            rows = [x.transpose(0, 1)[None] for x in (part, *pair, part)]
            bias = None
            if alibi:
                place = torch.arange(len(part))[:, None] + len(pair[0]) - len(part)
                behind = place - torch.arange(len(pair[0]))
                bias = -tensors["slopes"][:, None, None].double() * behind
            found = reference.attention(
                *rows, causal="bottom-right" if own.causal else None, attn_mask=bias, scale=scale,
                window=(own.window - 1, 0) if own.window else (-1, -1), softcap=own.softcap,
                sinks=tensors.get("sinks"), dtype=dtype,
            )  # fmt: skip
            parts.append(found["out"][0].transpose(0, 1))
        rest = torch.ones(padding, dtype=torch.float64)
        return {"out": torch.cat(parts)} | ({"rest": rest} if padding else {})

    options |= {"scale": scale, "padding": padding, "far": far}
    return VllmCall(_unified_attention, tensors, options, products=1), expected


def paged(kept: list[Tensor], block: int, first_block: int = 2) -> tuple[Tensor, Tensor]:
    """Return a cache with the rows of sequences, NaN elsewhere, and the blocks that each has.

    Args:
        kept: of each sequence (tokens, heads, width).

    Returns:
        (blocks, heads, block, width), and (sequences, blocks of the longest).
    """
    blocks = [-(-len(rows) // block) for rows in kept]
    count, (_, heads, width) = sum(blocks) + first_block, kept[0].shape
    cache = kept[0].new_full((count, heads, block, width), torch.nan)
    table = torch.zeros(len(kept), max(blocks), dtype=torch.int32)
    order = iter(range(count - 1, first_block - 1, -1))  # not in sequence
    for i, rows in enumerate(kept):
        own = torch.tensor([next(order) for _ in range(blocks[i])])
        table[i, : blocks[i]] = own
        whole = rows.new_full((blocks[i] * block, heads, width), torch.nan)
        whole[: len(rows)] = rows
        cache[own] = whole.unflatten(0, (-1, block)).transpose(1, 2)
    return cache, table


def _unified_attention(
    rows: Tensor, cache: Tensor, table: Tensor, *, layer: Attention, padding: int, fp8: bool,
    far: bool, **given,
) -> dict[str, Tensor]:  # fmt: skip
    if far:
        before = (1 << 31) // cache[0].numel() + 1
        wide = cache.new_empty(before + len(cache), *cache.shape[1:])
        wide[before:] = cache
        cache, table = wide, table + before
    scales = (FP8_SCALES["k"], FP8_SCALES["v"]) if fp8 else None
    q = rows[:, : layer.heads]
    out = attend(q, halves(cache, fp8), layer, table=table, fp8=scales, **given)
    kept = len(out) - padding
    rest = {"rest": out[kept:].isnan().double().flatten(1).mean(1)} if padding else {}
    return {"out": out[:kept]} | rest


def store_keys(
    randn: Randn, *, tokens=7, heads=3, head_dim=128, block=16, fp8=False, exact=False
) -> tuple[VllmCall, Expected]:
    """Build a call of the cache's writer: new keys and values go to their slots, padding to none.

    fp8: divided by a scale each, and stored as e4m3. exact: of values that this does not round, as
    Triton's interpreter loses the carry into the exponent: 7.9 becomes 4.
    """
    rows = randn(tokens, 4 * heads, head_dim)  # queries as well: twice as many
    new = dict(zip("kv", rows[:, 2 * heads :].chunk(2, 1), strict=True))
    if exact:
        for name, x in new.items():
            x.copy_(x.to(FP8).float() * FP8_SCALES[name])
    blocks = 4 if block < 64 else 2
    cache, slots = (
        randn(blocks, heads, block, 2 * head_dim),
        torch.arange(tokens) * (block // 4 + 1) % (blocks * block),
    )
    slots[tokens // 2] = -1
    cache = cache.to(FP8).to(cache.dtype) if fp8 else cache
    tensors = {"rows": rows, "cache": cache, "slots": slots}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        after = cache.clone()
        for name, part in zip("kv", halves(after), strict=True):
            own = new[name][slots >= 0]
            if fp8:
                own = (own.float() / FP8_SCALES[name]).to(FP8).to(own.dtype)
            part[slots[slots >= 0] // block, slots[slots >= 0] % block] = own
        return {"cache": after.double()}

    return VllmCall(_reshape_and_cache, tensors, {"heads": heads, "fp8": fp8}), expected


def _reshape_and_cache(
    rows: Tensor, cache: Tensor, slots: Tensor, *, heads: int, fp8: bool
) -> dict[str, Tensor]:
    k, v = rows[:, 2 * heads :].chunk(2, 1)
    own = cache.to(FP8) if fp8 else cache
    store(k, v, halves(own), slots, *(FP8_SCALES.values() if fp8 else ()))
    return {"cache": own.to(cache.dtype)}

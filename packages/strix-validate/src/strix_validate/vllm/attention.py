# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's attention over a paged cache, launched as in its server, and its expected results.

This module follows vllm/v1/attention/backends/triton_attn.py. The cache interleaves keys and values
by head, queries are a slice of a product's result, and scratch memory for split keys is always
passed.
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
from strix_validate.vllm.source import ATTENTION_MODULE, CACHE_MODULE, VllmCall

#: Number of segments into which vLLM splits the keys of a decode (3d) launch.
SEGMENTS = 16
FP8 = torch.float8_e4m3fn
#: Scales of keys and of values. They differ, so that a test shows if they are swapped.
FP8_SCALES = {"k": 0.5, "v": 0.125}
#: The default values of a layer's fields.
_SMALL: dict = {"heads": 4, "kv_heads": 2, "head_dim": 128}
#: Keys and values of a sequence, (tokens, kv_heads, head_dim) each.
_KeysAndValues = tuple[Tensor, Tensor]


def split_cache(cache: Tensor, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Return a cache's keys and values, (blocks, block, kv_heads, head_dim) each.

    Args:
        cache: (blocks, kv_heads, block, 2 * head_dim).
        fp8: Whether to convert the cache to e4m3. It is converted here, because tensors of this
            dtype cannot be pickled.
    """
    cache = cache.to(FP8) if fp8 else cache
    keys, values = cache.transpose(1, 2).chunk(2, -1)
    return keys, values


def attend(  # noqa: PLR0913 (the parameters of the kernels)
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    layer: Attention,
    *,
    starts: Tensor,
    keys: Tensor,
    table: Tensor,
    queries: int,
    most: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    fp8: tuple[float, float] | None = None,
    **more: Any,
) -> Tensor:
    """Run unified_attention. Elements of the result that it does not write are NaN.

    Args:
        q: (tokens, heads, head_dim), with any stride between tokens.
        caches: The caches of keys and values; see split_cache.
        layer: The layer's heads, head dim, window, softcap and mask.
        starts: Index of each sequence's first query, followed by the total number of queries.
        keys: Number of keys of each sequence.
        table: Blocks of each sequence.
        queries: The largest number of queries of a sequence.
        most: The largest number of keys of a sequence.
        scale: Scale of the scores; None is 1 / sqrt(head_dim).
        sinks: See reference.attention.
        slopes: ALiBi's slopes, (heads,).
        fp8: The scales of keys and values if they are stored as FP8, otherwise None.
        more: Other arguments of unified_attention.
    """
    module = importlib.import_module(ATTENTION_MODULE)
    modes = sys.modules["vllm.v1.kv_cache_interface"].KVQuantMode
    quant_mode = modes.FP8_PER_TENSOR if fp8 else modes.NONE
    if scale is None:
        scale = layer.head_dim**-0.5
    rows = 128 // layer.kv_heads
    k_scale, v_scale = fp8 or (1.0, 1.0)
    scales_shape = (len(keys), layer.kv_heads)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
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
        "softmax_scale": scale,
        "window_size": _window_size(layer),
        # Without a softcap, pass 0 as vLLM does, because Triton compiles another kernel for 0.0.
        "softcap": layer.softcap or 0,
        "q_descale": None,
        "k_descale": torch.tensor(k_scale, device=q.device).expand(scales_shape),
        "v_descale": torch.tensor(v_scale, device=q.device).expand(scales_shape),
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": SEGMENTS,
        "alibi_slopes": slopes,
        "sinks": sinks,
        "kv_quant_mode": quant_mode,
    }
    scratch = _allocate_scratch(layer, max(rows, len(q)), q.device)
    module.unified_attention(**arguments | scratch | more)
    return out


def _window_size(layer: Attention) -> tuple[int, int]:
    """Return how many keys a query sees before and after its own key; -1 is all."""
    return (layer.window - 1, 0) if layer.window else (-1, -1)


def _allocate_scratch(layer: Attention, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return unified_attention's scratch for split keys, full of NaN."""
    shape = (rows, layer.heads, SEGMENTS)
    padded_head_dim = 1 << (layer.head_dim - 1).bit_length()
    nan = float("nan")
    return {
        "softmax_segm_output": torch.full((*shape, padded_head_dim), nan, device=device),
        "softmax_segm_max": torch.full(shape, nan, device=device),
        "softmax_segm_expsum": torch.full(shape, nan, device=device),
    }


def store(
    k: Tensor,
    v: Tensor,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    *scales: float,
) -> None:
    """Run triton_reshape_and_cache_flash, which writes keys and values to a cache.

    Args:
        k: (tokens, kv_heads, head_dim).
        v: Like k.
        caches: The caches of keys and values; see split_cache.
        slots: The slot of each token; -1 for a token that is not stored.
        scales: The scales of keys and of values if they are stored as FP8, otherwise nothing.
    """
    module = importlib.import_module(CACHE_MODULE)
    scale_tensors = [torch.full((), scale, device=k.device) for scale in scales or (1.0, 1.0)]
    dtype_name = "fp8" if caches[0].dtype == FP8 else "auto"
    module.triton_reshape_and_cache_flash(k, v, *caches, slots, dtype_name, *scale_tensors)


def paged_attention(  # noqa: PLR0913 (the options of a case)
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
    """Build a call of unified_attention, which computes attention over a paged cache.

    Entries of the cache that no query sees are NaN, and so is the scratch memory. Batches that only
    decode are padded like batches of captured graphs: with rows that belong to no sequence, and
    with a sequence without tokens.

    Args:
        randn: Draws the numbers.
        lengths: (queries, keys) of each sequence. vLLM splits the keys (3d) if there are few
            sequences, and each has at most eight queries, or one query without a causal mask.
        fp8: Whether keys and values are stored as e4m3, with a scale each.
        scale: Scale of the scores; None is 1 / sqrt(head_dim).
        alibi: Whether ALiBi's bias is added to the scores.
        gain: Factor of q.
        low: Level of reference.with_low_scores; 0 for none.
        first_block: The lowest number of a block that is used.
        far: Whether at least 2^31 unwritten elements, with any values, precede the cache.
        layer: Fields of Attention that differ from 4 query heads, 2 key heads and head dim 128.
    """
    shape = Attention(**_SMALL | layer)
    queries, keys = zip(*lengths, strict=True)
    only_decodes = max(queries) == 1
    padding = 2 if only_decodes else 0
    q = randn(sum(queries), shape.heads, shape.head_dim) * gain
    pairs = []
    for n in keys:
        k = randn(n, shape.kv_heads, shape.head_dim)
        v = randn(n, shape.kv_heads, shape.head_dim)
        pairs.append((k, v))
    if low:
        q, pairs = _lower_scores(q, pairs, low, scale or shape.head_dim**-0.5)
    ends = [0, *accumulate(queries)]
    key_counts = [*keys]
    if only_decodes:
        ends.append(len(q))
        key_counts.append(0)
    cache, table = _fill_cache(lengths, pairs, shape, first_block)
    tensors = {
        "rows": _embed_queries(q, shape, padding),
        "cache": cache,
        "starts": torch.tensor(ends, dtype=torch.int32),
        "keys": torch.tensor(key_counts, dtype=torch.int32),
        # vLLM's tables are wider than necessary; the unused entries are 0.
        "table": torch.nn.functional.pad(table, (0, 2, 0, int(only_decodes))),
    }
    if shape.sinks:
        tensors["sinks"] = randn(shape.heads)
    if alibi:
        tensors["slopes"] = torch.exp2(-torch.arange(1.0, shape.heads + 1))
    if fp8:
        pairs = [_round_to_fp8(k, v) for k, v in pairs]
    options = {
        "layer": shape,
        "queries": max(queries),
        "most": max(keys),
        "fp8": fp8,
        "scale": scale,
        "padding": padding,
        "far": far,
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        outs = []
        for rows, pair in zip(q.split(queries), pairs, strict=True):
            out = _compute_sequence(
                rows,
                pair,
                shape,
                scale,
                tensors.get("sinks"),
                tensors.get("slopes"),
                dtype,
            )
            outs.append(out)
        expected_tensors = {"out": torch.cat(outs)}
        if padding:
            expected_tensors["rest"] = torch.ones(padding, dtype=torch.float64)
        return expected_tensors

    return VllmCall(_unified_attention, tensors, options, products=1), expected


def _lower_scores(
    q: Tensor,
    pairs: list[_KeysAndValues],
    low: float,
    scale: float,
) -> tuple[Tensor, list[_KeysAndValues]]:
    """Move all scores of a batch to about `low`; see reference.with_low_scores."""
    lowered = []
    for k, v in pairs:
        _, low_k = reference.with_low_scores(q, k, low, scale)
        lowered.append((low_k, v))
    low_q, _ = reference.with_low_scores(q, q, low, scale)
    return low_q, lowered


def _embed_queries(q: Tensor, layer: Attention, padding: int) -> Tensor:
    """Return rows of queries, keys and values; keys, values and rows of padding are NaN."""
    heads = layer.heads + 2 * layer.kv_heads
    rows = torch.full((len(q) + padding, heads, layer.head_dim), torch.nan)
    rows[: len(q), : layer.heads] = q
    return rows.to(q.dtype)


def _fill_cache(
    lengths: tuple[tuple[int, int], ...],
    pairs: list[_KeysAndValues],
    layer: Attention,
    first_block: int,
) -> tuple[Tensor, Tensor]:
    """Return a cache of the sequences, and the blocks of each; see build_paged_cache."""
    sequences = []
    for (new, n), pair in zip(lengths, pairs, strict=True):
        sequence = torch.cat(pair, -1)
        if layer.window:
            # The slots before the window were freed, and another sequence may have written to them.
            freed = max(n - new - layer.window + 1, 0)
            sequence[:freed] = torch.nan
        sequences.append(sequence)
    return build_paged_cache(sequences, layer.block, first_block)


def _round_to_fp8(k: Tensor, v: Tensor) -> _KeysAndValues:
    """Round keys and values to FP8, and multiply them by their scales."""
    rounded_k = k.to(FP8).to(k.dtype) * FP8_SCALES["k"]
    rounded_v = v.to(FP8).to(v.dtype) * FP8_SCALES["v"]
    return rounded_k, rounded_v


def _compute_sequence(
    rows: Tensor,
    pair: _KeysAndValues,
    layer: Attention,
    scale: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    dtype: Precision,
) -> Tensor:
    """Compute the attention of one sequence, (tokens, heads, head_dim).

    Args:
        rows: The queries, (tokens, heads, head_dim).
        pair: The keys and values.
        layer: The layer's window, softcap and mask.
        scale: See attend.
        sinks: See attend.
        slopes: See attend.
        dtype: Precision; see cases.Expected.
    """
    k, v = pair
    bias = None
    if slopes is not None:
        bias = _compute_bias(slopes, len(rows), len(k))
    causal: reference.Causal = "bottom-right" if layer.causal else None
    # Convert (tokens, heads, head_dim) to (1, heads, tokens, head_dim).
    inputs = [x.transpose(0, 1)[None] for x in (rows, k, v, rows)]
    results = reference.attention(
        *inputs,
        causal=causal,
        attn_mask=bias,
        scale=scale,
        window=_window_size(layer),
        softcap=layer.softcap,
        sinks=sinks,
        dtype=dtype,
    )
    return results["out"][0].transpose(0, 1)


def _compute_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """Return ALiBi's bias of the scores, (heads, queries, keys)."""
    positions = torch.arange(queries)[:, None] + keys - queries
    distances = positions - torch.arange(keys)
    return -slopes[:, None, None].double() * distances


def build_paged_cache(
    sequences: list[Tensor], block: int, first_block: int = 2
) -> tuple[Tensor, Tensor]:
    """Return a cache with the rows of sequences and NaN elsewhere, and the table of blocks.

    Args:
        sequences: The rows of each sequence, (tokens, heads, width).
        block: Number of tokens in a block.
        first_block: The lowest number of a block that is used.

    Returns:
        The cache, (blocks, heads, block, width), and the blocks of each sequence, (sequences,
        number of blocks of the longest sequence), in int32.
    """
    counts = [-(-len(rows) // block) for rows in sequences]
    total = sum(counts) + first_block
    _, heads, width = sequences[0].shape
    cache = sequences[0].new_full((total, heads, block, width), torch.nan)
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    # The blocks of a sequence are in descending order.
    free_blocks = iter(range(total - 1, first_block - 1, -1))
    for i, rows in enumerate(sequences):
        blocks = torch.tensor([next(free_blocks) for _ in range(counts[i])])
        table[i, : counts[i]] = blocks
        padded = rows.new_full((counts[i] * block, heads, width), torch.nan)
        padded[: len(rows)] = rows
        cache[blocks] = padded.unflatten(0, (-1, block)).transpose(1, 2)
    return cache, table


def _unified_attention(
    rows: Tensor,
    cache: Tensor,
    table: Tensor,
    *,
    layer: Attention,
    padding: int,
    fp8: bool,
    far: bool,
    **arguments,
) -> dict[str, Tensor]:
    if far:
        offset = (1 << 31) // cache[0].numel() + 1
        large_cache = cache.new_empty(offset + len(cache), *cache.shape[1:])
        large_cache[offset:] = cache
        cache = large_cache
        table = table + offset
    scales = (FP8_SCALES["k"], FP8_SCALES["v"]) if fp8 else None
    out = attend(
        rows[:, : layer.heads],
        split_cache(cache, fp8),
        layer,
        table=table,
        fp8=scales,
        **arguments,
    )
    tokens = len(out) - padding
    results = {"out": out[:tokens]}
    if padding:
        # The share of NaN in each row of padding.
        results["rest"] = out[tokens:].isnan().double().flatten(1).mean(1)
    return results


def store_keys(
    randn: Randn,
    *,
    tokens=7,
    heads=3,
    head_dim=128,
    block=16,
    fp8=False,
    exact=False,
) -> tuple[VllmCall, Expected]:
    """Build a call of the cache's writer, which stores new keys and values in their slots.

    One token is padding, which the kernel must not store.

    Args:
        randn: Draws the numbers.
        tokens: Number of new tokens.
        heads: Key heads.
        head_dim: Size of a head.
        block: Number of tokens in a block.
        fp8: Whether keys and values are divided by a scale each, and stored as e4m3.
        exact: Whether the keys and values are such that FP8 does not round them. When Triton's
            interpreter rounds, it loses a carry into the exponent: 7.9 becomes 4.
    """
    # Each row begins with the queries, which have twice as many heads as the keys.
    rows = randn(tokens, 4 * heads, head_dim)
    k, v = rows[:, 2 * heads :].chunk(2, 1)
    new = {"k": k, "v": v}
    if exact:
        for name, x in new.items():
            x.copy_(x.to(FP8).float() * FP8_SCALES[name])
    blocks = 4 if block < 64 else 2
    cache = randn(blocks, heads, block, 2 * head_dim)
    if fp8:
        cache = cache.to(FP8).to(cache.dtype)
    slots = torch.arange(tokens) * (block // 4 + 1) % (blocks * block)
    slots[tokens // 2] = -1
    tensors = {"rows": rows, "cache": cache, "slots": slots}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        after = cache.clone()
        is_stored = slots >= 0
        stored_slots = slots[is_stored]
        for name, half in zip(("k", "v"), split_cache(after), strict=True):
            values = new[name][is_stored]
            if fp8:
                scaled = values.float() / FP8_SCALES[name]
                values = scaled.to(FP8).to(values.dtype)
            half[stored_slots // block, stored_slots % block] = values
        return {"cache": after.double()}

    return VllmCall(_reshape_and_cache, tensors, {"heads": heads, "fp8": fp8}), expected


def _reshape_and_cache(
    rows: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    heads: int,
    fp8: bool,
) -> dict[str, Tensor]:
    k, v = rows[:, 2 * heads :].chunk(2, 1)
    written = cache.to(FP8) if fp8 else cache
    scales = FP8_SCALES.values() if fp8 else ()
    store(k, v, split_cache(written), slots, *scales)
    return {"cache": written.to(cache.dtype)}

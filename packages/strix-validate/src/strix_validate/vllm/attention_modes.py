# SPDX-License-Identifier: BSD-3-Clause
"""Modes of vLLM's paged attention that few models use: masks, and a scale per token and head.

In Gemma 3 and 4, the tokens of an image see each other. In Llama 4, tokens see only their own
chunk. Some models keep the prompt visible outside of a sliding window.
"""

import importlib
import sys
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from strix_validate.layers.table import Attention
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.attention import FP8, attend, build_paged_cache, split_cache
from strix_validate.vllm.source import CACHE_MODULE, VllmCall

_SHAPE: dict = {"heads": 4, "kv_heads": 2, "head_dim": 64}
#: The images in a sequence: the first and the last token of each. (0, 0) stands for no image.
Images = tuple[tuple[int, int], ...]


def _build_mask(
    new: int,
    keys: int,
    *,
    causal: bool,
    window: int,
    lookback: int,
    clamped: bool,
    images: Images,
    prefix: int | None,
) -> Tensor:
    """Return which keys the last tokens of a sequence see, Boolean (new, keys).

    Args:
        new: Number of queries, which are the last tokens of the sequence.
        keys: Number of tokens of the sequence.
        causal: Whether the sequence is causal.
        window: See masked_attention.
        lookback: See masked_attention.
        clamped: See masked_attention.
        images: The images of the sequence.
        prefix: How many tokens, from the first, stay visible outside of the window; None for a mask
            without a prefix.
    """
    key = torch.arange(keys)[None]
    query = torch.arange(keys - new, keys)[:, None]
    visible = (key <= query) | torch.tensor(not causal)
    in_window = torch.ones_like(visible)
    if window:
        in_window = query - key < window
    if lookback >= 0:
        chunk = window // (lookback + 1)
        visible &= query // chunk - key // chunk <= lookback
    elif prefix is not None:
        visible &= in_window | (key < prefix)
    elif window and not causal:
        visible &= in_window & (key - query < window)
    else:
        visible &= in_window
    for first, last in images:
        if first >= last:
            continue
        query_inside = (query >= first) & (query <= last)
        key_inside = (key >= first) & (key <= last)
        in_image = query_inside & key_inside
        visible |= in_image & in_window if clamped else in_image
    return visible


def masked_attention(
    randn: Randn,
    *,
    lengths: tuple[tuple[int, int], ...],
    images: tuple[Images, ...] = (),
    window=0,
    lookback=-1,
    clamped=False,
    causal: tuple[bool, ...] = (),
    prefixes: tuple[int, ...] = (),
) -> tuple[VllmCall, Expected]:
    """Build a call of unified_attention with a mask that differs between tokens or sequences.

    Args:
        randn: Draws the numbers.
        lengths: (queries, keys) of each sequence.
        images: The images of each sequence. Each sequence has the same number of them. The tokens
            of an image see each other.
        window: Number of keys that a token sees; 0 is all.
        lookback: Number of chunks that a token sees before its own chunk; -1 for no chunks. With
            chunks, the window is divided into lookback + 1 chunks.
        clamped: Whether the tokens of an image see each other only within the window (Gemma 4).
        causal: Whether each sequence is causal (a draft model's is not); () if all are.
        prefixes: How many tokens of each sequence, from the first, stay visible outside of the
            window; () for no prefixes.
    """
    # With prefixes, the window is passed as rswa_window instead of as the layer's window.
    layer_window = 0 if prefixes else window
    layer = Attention(**_SHAPE, window=layer_window)
    queries, keys = zip(*lengths, strict=True)
    q = randn(sum(queries), layer.heads, layer.head_dim)
    pairs = []
    for n in keys:
        k = randn(n, layer.kv_heads, layer.head_dim)
        v = randn(n, layer.kv_heads, layer.head_dim)
        pairs.append((k, v))
    cache, table = build_paged_cache([torch.cat(pair, -1) for pair in pairs], layer.block)
    tensors = {
        "q": q,
        "cache": cache,
        "starts": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "keys": torch.tensor(keys, dtype=torch.int32),
        "table": table,
    }
    if images:
        tensors["mm_prefix_range"] = torch.tensor(images, dtype=torch.int32)
    if causal:
        tensors["causal"] = torch.tensor(causal)
    if prefixes:
        tensors["rswa_prefix_lens"] = torch.tensor(prefixes, dtype=torch.int32)
    options = {
        "layer": layer,
        "queries": max(queries),
        "most": max(keys),
        "chunk_lookback": lookback,
        "mm_prefix_clamp_sliding_window": clamped,
    }
    if prefixes:
        options["rswa_window"] = window

    def expected(dtype: Precision) -> dict[str, Tensor]:
        outs = []
        for i, (rows, (k, v)) in enumerate(zip(q.split(queries), pairs, strict=True)):
            visible = _build_mask(
                *lengths[i],
                window=window,
                lookback=lookback,
                clamped=clamped,
                **_select_sequence(i, causal, images, prefixes),
            )
            outs.append(_compute_masked(rows, k, v, visible, dtype))
        return {"out": torch.cat(outs)}

    return VllmCall(_attend_masked, tensors, options, products=1), expected


def _compute_masked(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    dtype: Precision,
) -> Tensor:
    """Compute the attention of one sequence, (tokens, heads, head_dim).

    Args:
        rows: The queries, (tokens, heads, head_dim).
        k: The keys, (tokens, kv_heads, head_dim).
        v: Like k.
        visible: The result of _build_mask.
        dtype: Precision; see cases.Expected.
    """
    bias = torch.zeros(visible.shape, dtype=torch.float64)
    bias = bias.masked_fill(~visible, -torch.inf)
    # Convert (tokens, heads, head_dim) to (1, heads, tokens, head_dim).
    inputs = [x.transpose(0, 1)[None] for x in (rows, k, v, rows)]
    out = reference.attention(*inputs, attn_mask=bias, dtype=dtype)["out"]
    return out[0].transpose(0, 1)


def _select_sequence(
    i: int,
    causal: tuple[bool, ...],
    images: tuple[Images, ...],
    prefixes: tuple[int, ...],
) -> dict[str, Any]:
    """Return the arguments of _build_mask that differ by sequence, for sequence i."""
    arguments: dict[str, Any] = {"causal": True, "images": (), "prefix": None}
    if causal:
        arguments["causal"] = causal[i]
    if images:
        arguments["images"] = images[i]
    if prefixes:
        arguments["prefix"] = prefixes[i]
    return arguments


def _attend_masked(
    q: Tensor,
    cache: Tensor,
    *,
    layer: Attention,
    **arguments,
) -> dict[str, Tensor]:
    return {"out": attend(q, split_cache(cache), layer, **arguments)}


#: By kind of cache, the largest code, and the exponent of the largest scale. Scales are powers of
#: 2. With the largest scale, the largest number is about 4.
_CODES = {"int8": (127, -5), "fp8": (448, -7)}


def _draw_codes(randn: Randn, tokens: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes and their scales. In each token and head, one element has the largest code.

    Args:
        randn: Draws the numbers.
        tokens: Number of tokens in the cache.
        kind: Kind of the cache; a key of _CODES.

    Returns:
        The codes, (tokens, kv_heads, head_dim), and the scales, (tokens, kv_heads), in float32.
    """
    kv_heads = _SHAPE["kv_heads"]
    head_dim = _SHAPE["head_dim"]
    largest, exponent = _CODES[kind]
    codes = randn(tokens, kv_heads, head_dim).float() * largest / 4
    codes = codes.clamp(-largest, largest)
    codes = codes.round() if kind == "int8" else codes.to(FP8).float()
    number = torch.arange(tokens)[:, None] * 7 + torch.arange(kv_heads)
    element = (number % head_dim)[..., None]
    codes.scatter_(2, element, float(largest))
    scales = torch.exp2((exponent - number % 3).float())
    return codes, scales


def scaled_attention(
    randn: Randn,
    *,
    lengths: tuple[tuple[int, int], ...],
    kind: str,
) -> tuple[VllmCall, Expected]:
    """Build a call that writes keys and values to the cache and then computes attention from it.

    The cache has two scales for each token and head, one for the key and one for the value.

    Args:
        randn: Draws the numbers.
        lengths: (queries, keys) of each sequence.
        kind: Type of the cache, "int8" or "fp8". Each key and value is a number of this type times
            a power of 2, so that storing it does not round it.
    """
    queries, keys = zip(*lengths, strict=True)
    layer = Attention(**_SHAPE)
    q = randn(sum(queries), layer.heads, layer.head_dim)
    k_codes, k_scales = _draw_codes(randn, sum(keys), kind)
    v_codes, v_scales = _draw_codes(randn, sum(keys), kind)
    k = (k_codes * k_scales[..., None]).to(q.dtype)
    v = (v_codes * v_scales[..., None]).to(q.dtype)
    positions = [torch.arange(n, dtype=torch.float32)[:, None, None] for n in keys]
    cache, table = build_paged_cache(positions, layer.block)
    # The slot of each token in the cache, whose blocks are out of order.
    slots = []
    for i, n in enumerate(keys):
        first_slots = table[i].long().repeat_interleave(layer.block)[:n] * layer.block
        slots.append(first_slots + torch.arange(n) % layer.block)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "slots": torch.cat(slots),
        "starts": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "keys": torch.tensor(keys, dtype=torch.int32),
        "table": table,
    }
    options = {
        "layer": layer,
        "queries": max(queries),
        "most": max(keys),
        "kind": kind,
        "blocks": len(cache),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        outs = []
        sequences = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        for rows, own_k, own_v in sequences:
            inputs = [x.transpose(0, 1)[None] for x in (rows, own_k, own_v, rows)]
            out = reference.attention(*inputs, causal="bottom-right", dtype=dtype)["out"]
            outs.append(out[0].transpose(0, 1))
        return {
            "out": torch.cat(outs),
            "k_scales": k_scales.double(),
            "v_scales": v_scales.double(),
        }

    return VllmCall(_attend_scaled, tensors, options, products=1), expected


def _attend_scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    layer: Attention,
    kind: str,
    blocks: int,
    **arguments,
) -> dict[str, Tensor]:
    modes = sys.modules["vllm.v1.kv_cache_interface"].KVQuantMode
    if kind == "fp8":
        dtype = FP8
        mode = modes.FP8_PER_TOKEN_HEAD
    else:
        dtype = torch.int8
        mode = modes.INT8_PER_TOKEN_HEAD
    shape = (blocks, layer.block, layer.kv_heads)
    cache = torch.zeros(*shape, 2 * layer.head_dim, device=q.device).to(dtype)
    caches = cache.chunk(2, -1)
    scales = torch.full((*shape, 2), float("nan"), device=q.device)
    k_scales, v_scales = scales.unbind(-1)
    module = importlib.import_module(CACHE_MODULE)
    write = module.triton_reshape_and_cache_flash_per_token_head_quant
    write(k, v, *caches, k_scales, v_scales, slots, mode)
    out = attend(
        q,
        caches,
        layer,
        kv_quant_mode=mode,
        k_scale_cache=k_scales,
        v_scale_cache=v_scales,
        **arguments,
    )
    return {
        "out": out,
        "k_scales": k_scales.flatten(0, 1)[slots],
        "v_scales": v_scales.flatten(0, 1)[slots],
    }


_IMAGE = "tokens of an image that do not see each other, or see another image (Gemma 3)"
_OUTSIDE = "a token that sees all of an image that it does not belong to, even beyond its window"
_CLAMPED = "tokens of an image that see each other outside of the window (Gemma 4)"
_CHUNKED = "a chunk that sees the chunk before it, or begins at the wrong token (Llama 4)"
_EACH = "one sequence's mask used for all sequences (some are not causal with a draft model)"
_PREFIX = "a prompt that is hidden from later tokens because it is outside of their window"
_TOKEN = "the scale of another token or head, or the scale of keys used for values"
COMPUTED = {
    "prefill-pictures": Case(
        partial(
            masked_attention,
            lengths=((30, 70), (9, 80)),
            images=(((42, 60), (62, 66)), ((75, 78), (0, 0))),
        ),
        _IMAGE,
    ),
    "prefill-pictures-window": Case(
        partial(
            masked_attention,
            lengths=((40, 120),),
            images=(((70, 100), (104, 112)),),
            window=16,
            clamped=True,
        ),
        _CLAMPED,
    ),
    "decode-pictures": Case(
        partial(
            masked_attention,
            lengths=((1, 70), (1, 40)),
            images=(((20, 50),), ((3, 10),)),
            window=16,
        ),
        _OUTSIDE,
    ),
    "prefill-chunked": Case(
        partial(masked_attention, lengths=((40, 90),), window=32, lookback=0),
        _CHUNKED,
    ),
    "decode-chunked": Case(
        partial(masked_attention, lengths=((1, 90), (1, 33)), window=40, lookback=1),
        _CHUNKED,
    ),
    "prefill-causal-each": Case(
        partial(masked_attention, lengths=((20, 60), (9, 50)), causal=(True, False)),
        _EACH,
    ),
    "prefill-prefix-window": Case(
        partial(masked_attention, lengths=((20, 90), (9, 60)), window=16, prefixes=(30, 5)),
        _PREFIX,
    ),
    "prefill-fp8-tokens": Case(
        partial(scaled_attention, lengths=((20, 60), (9, 40)), kind="fp8"), _TOKEN
    ),
    "decode-int8-tokens": Case(
        partial(scaled_attention, lengths=((1, 70), (1, 40)), kind="int8"), _TOKEN
    ),
}

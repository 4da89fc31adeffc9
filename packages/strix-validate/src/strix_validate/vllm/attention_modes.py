# SPDX-License-Identifier: BSD-3-Clause
"""What few models ask of vLLM's paged attention: other masks, and a scale for each token and head.

Gemma 3 and 4 let the tokens of a picture see each other, Llama 4's chunks see themselves alone,
and a model may keep a prompt in sight of a window.
"""

import importlib
import sys
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from strix_validate.layers.table import Attention
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.attention import FP8, attend, halves, paged
from strix_validate.vllm.source import VllmCall

_SHAPE: dict = {"heads": 4, "kv_heads": 2, "head_dim": 64}
#: A sequence's pictures: the first and the last token of each; (0, 0) is none.
Pictures = tuple[tuple[int, int], ...]


def _mask(
    new: int, keys: int, *, causal: bool, window: int, lookback: int, clamped: bool,
    pictures: Pictures, prefix: int | None,
) -> Tensor:  # fmt: skip
    """Return which keys each of a sequence's last tokens sees; see masked."""
    key, own = torch.arange(keys)[None], torch.arange(keys - new, keys)[:, None]
    seen = (key <= own) | torch.tensor(not causal)
    near = own - key < window if window else torch.ones_like(seen)
    if lookback >= 0:
        chunk = window // (lookback + 1)
        seen &= own // chunk - key // chunk <= lookback
    elif prefix is not None:
        seen &= near | (key < prefix)
    else:
        seen &= near if causal or not window else near & (key - own < window)
    for first, last in pictures:
        both = (own >= first) & (own <= last) & (key >= first) & (key <= last)
        if first < last:
            seen |= both & near if clamped else both
    return seen


def masked(
    randn: Randn, *, lengths: tuple[tuple[int, int], ...], pictures: tuple[Pictures, ...] = (),
    window=0, lookback=-1, clamped=False, causal: tuple[bool, ...] = (),
    prefixes: tuple[int, ...] = (),
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of unified_attention with a mask that is not one for all tokens.

    Args:
        lengths: (queries, keys) of each sequence.
        pictures: of each sequence, as many for each; their tokens see each other.
        window: keys that a token sees, 0 is all.
        lookback: chunks before its own that a token sees; a window is that many and one.
        clamped: a picture's tokens see each other within the window alone (Gemma 4).
        causal: of each sequence, whether it is (a draft model's is not).
        prefixes: of each sequence, first tokens that stay in sight behind the window.
    """
    # with prefixes, the window is no window of the layer's
    layer = Attention(**_SHAPE, window=0 if prefixes else window)
    queries, keys = zip(*lengths, strict=True)
    q = randn(sum(queries), layer.heads, layer.head_dim)
    kept = [tuple(randn(n, layer.kv_heads, layer.head_dim) for _ in "kv") for n in keys]
    cache, table = paged([torch.cat(pair, -1) for pair in kept], layer.block)
    tensors = {
        "q": q,
        "cache": cache,
        "starts": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "keys": torch.tensor(keys, dtype=torch.int32),
        "table": table,
    }
    if pictures:
        tensors["mm_prefix_range"] = torch.tensor(pictures, dtype=torch.int32)
    if causal:
        tensors["causal"] = torch.tensor(causal)
    if prefixes:
        tensors["rswa_prefix_lens"] = torch.tensor(prefixes, dtype=torch.int32)
    options = {"layer": layer, "queries": max(queries), "most": max(keys)}
    more = {"chunk_lookback": lookback, "mm_prefix_clamp_sliding_window": clamped}
    more |= {"rswa_window": window} if prefixes else {}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        parts = []
        for i, (part, pair) in enumerate(zip(q.split(queries), kept, strict=True)):
            seen = _mask(
                *lengths[i],
                causal=causal[i] if causal else True,
                window=window,
                lookback=lookback,
                clamped=clamped,
                pictures=pictures[i] if pictures else (),
                prefix=prefixes[i] if prefixes else None,
            )
            shut = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
            # (tokens, heads, head_dim) to (1, heads, tokens, head_dim)
            rows = [x.transpose(0, 1)[None] for x in (part, *pair, part)]
            out = reference.attention(*rows, attn_mask=shut, dtype=dtype)["out"]
            parts.append(out[0].transpose(0, 1))
        return {"out": torch.cat(parts)}

    return VllmCall(_attend_masked, tensors, options | more, products=1), expected


def _attend_masked(q: Tensor, cache: Tensor, *, layer: Attention, **given) -> dict[str, Tensor]:
    return {"out": attend(q, halves(cache), layer, **given)}


#: By kind of cache: how many codes there are on one side of 0, and the largest power of 2 of a
#: scale with which the largest is about 4.
_CODES = {"int8": (127, -5), "fp8": (448, -7)}


def _coded(randn: Randn, tokens: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes, of which a head's largest is the largest of all, and the scales they have."""
    heads, lanes = _SHAPE["kv_heads"], _SHAPE["head_dim"]
    most, power = _CODES[kind]
    codes = (randn(tokens, heads, lanes).float() * most / 4).clamp(-most, most)
    codes = codes.round() if kind == "int8" else codes.to(FP8).float()
    place = torch.arange(tokens)[:, None] * 7 + torch.arange(heads)
    codes.scatter_(2, (place % lanes)[..., None], float(most))
    return codes, torch.exp2((power - place % 3).float())


def scaled(
    randn: Randn, *, lengths: tuple[tuple[int, int], ...], kind: str
) -> tuple[VllmCall, Expected]:
    """Build a call of a cache's writer with a scale for each token and head, then of attention.

    Args:
        lengths: (queries, keys) of each sequence.
        kind: int8 or fp8. Numbers are codes times a power of 2, so that none is rounded.
    """
    queries, keys = zip(*lengths, strict=True)
    total = sum(keys)
    layer = Attention(**_SHAPE)
    q = randn(sum(queries), layer.heads, layer.head_dim)
    both = {name: _coded(randn, total, kind) for name in "kv"}
    new = {name: (codes * scale[..., None]).to(q.dtype) for name, (codes, scale) in both.items()}
    places = [torch.arange(n, dtype=torch.float32)[:, None, None] for n in keys]
    cache, table = paged(places, layer.block)
    # where each token's place stands in the cache, of blocks that are not in order
    slots = [
        table[i].long().repeat_interleave(layer.block)[:n] * layer.block
        + torch.arange(n) % layer.block
        for i, n in enumerate(keys)
    ]
    tensors = {
        "q": q,
        **new,
        "slots": torch.cat(slots),
        "starts": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "keys": torch.tensor(keys, dtype=torch.int32),
        "table": table,
    }
    options = {"layer": layer, "queries": max(queries), "most": max(keys), "kind": kind}
    options["blocks"] = len(cache)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        parts = []
        pairs = zip(*(x.split(keys) for x in new.values()), strict=True)
        for part, pair in zip(q.split(queries), pairs, strict=True):
            rows = [x.transpose(0, 1)[None] for x in (part, *pair, part)]
            out = reference.attention(*rows, causal="bottom-right", dtype=dtype)["out"]
            parts.append(out[0].transpose(0, 1))
        scales = {f"{name}_scales": scale.double() for name, (_, scale) in both.items()}
        return {"out": torch.cat(parts)} | scales

    return VllmCall(_attend_scaled, tensors, options, products=1), expected


def _attend_scaled(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, layer: Attention, kind: str, blocks: int,
    **given,
) -> dict[str, Tensor]:  # fmt: skip
    dtype = FP8 if kind == "fp8" else torch.int8
    modes = sys.modules["vllm.v1.kv_cache_interface"].KVQuantMode
    mode = modes.FP8_PER_TOKEN_HEAD if kind == "fp8" else modes.INT8_PER_TOKEN_HEAD
    place = {"device": q.device}
    shape = (blocks, layer.block, layer.kv_heads)
    whole = torch.zeros(*shape, 2 * layer.head_dim, **place).to(dtype)
    caches = whole.chunk(2, -1)
    scales = torch.full((*shape, 2), float("nan"), **place).unbind(-1)
    module = importlib.import_module(vllm_source.KERNELS[1])
    module.triton_reshape_and_cache_flash_per_token_head_quant(k, v, *caches, *scales, slots, mode)
    out = attend(
        q, caches, layer, kv_quant_mode=mode, k_scale_cache=scales[0], v_scale_cache=scales[1],
        **given,
    )  # fmt: skip
    both = (x.flatten(0, 1)[slots] for x in scales)
    return {"out": out, **dict(zip(("k_scales", "v_scales"), both, strict=True))}


_PICTURE = "tokens of a picture that do not see each other, or see another picture (Gemma 3)"
_SEEN = "a token outside of a picture that sees all of it, window or not"
_CLAMPED = "a picture whose tokens see further than the window (Gemma 4)"
_CHUNKED = "chunks that see the one before, or a chunk that begins elsewhere (Llama 4)"
_EACH = "one sequence's mask taken for each: of a draft model's, some are not causal"
_PREFIX = "a prompt that goes out of sight with the window"
_TOKEN = "a scale of another token or head, or the keys' for the values"
COMPUTED = {
    "prefill-pictures": Case(
        partial(
            masked,
            lengths=((30, 70), (9, 80)),
            pictures=(((42, 60), (62, 66)), ((75, 78), (0, 0))),
        ),
        _PICTURE,
    ),
    "prefill-pictures-window": Case(
        partial(
            masked,
            lengths=((40, 120),),
            pictures=(((70, 100), (104, 112)),),
            window=16,
            clamped=True,
        ),
        _CLAMPED,
    ),
    "decode-pictures": Case(
        partial(masked, lengths=((1, 70), (1, 40)), pictures=(((20, 50),), ((3, 10),)), window=16),
        _SEEN,
    ),
    "prefill-chunked": Case(partial(masked, lengths=((40, 90),), window=32, lookback=0), _CHUNKED),
    "decode-chunked": Case(
        partial(masked, lengths=((1, 90), (1, 33)), window=40, lookback=1), _CHUNKED
    ),
    "prefill-causal-each": Case(
        partial(masked, lengths=((20, 60), (9, 50)), causal=(True, False)), _EACH
    ),
    "prefill-prefix-window": Case(
        partial(masked, lengths=((20, 90), (9, 60)), window=16, prefixes=(30, 5)), _PREFIX
    ),
    "prefill-fp8-tokens": Case(partial(scaled, lengths=((20, 60), (9, 40)), kind="fp8"), _TOKEN),
    "decode-int8-tokens": Case(partial(scaled, lengths=((1, 70), (1, 40)), kind="int8"), _TOKEN),
}

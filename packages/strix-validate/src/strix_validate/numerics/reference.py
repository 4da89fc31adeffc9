# SPDX-License-Identifier: BSD-3-Clause
"""Attention in float64, as correct kernels of a dtype round it, and the sizes of its terms."""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Causal = Literal["top-left", "bottom-right"] | None
#: Instead of a dtype: the sums of the sizes of the terms, see :func:`attention`.
TERMS = "terms"
Precision: TypeAlias = torch.dtype | Literal["terms"]


def working(dtype: Precision) -> torch.dtype:
    """Return the dtype that a reference computes in: float64, or float32 for a smaller one."""
    return torch.float64 if dtype in (torch.float64, TERMS) else torch.float32


def stored(x: Tensor, dtype: Precision) -> Tensor:
    """Return x, rounded as if a kernel of the dtype had stored it; not rounded for TERMS."""
    return x if dtype == TERMS else x.to(dtype).to(working(dtype))


def product(x: Tensor, weight: Tensor, dtype: Precision, rows: int = 8192) -> Tensor:
    """Compute x @ weight^T in the working precision, not rounded; for TERMS sums of magnitudes.

    Args:
        rows: of weight at a time, so that a head of 248,000 tokens fits into memory in float64.
    """
    x = x.to(working(dtype))
    x = x.abs() if dtype == TERMS else x
    parts = (part.to(x.dtype) for part in weight.split(rows))
    return torch.cat([x @ (part.abs() if dtype == TERMS else part).T for part in parts], -1)


def layer(x: Tensor, weight: Tensor) -> Callable[[Precision], dict[str, Tensor]]:
    """Return what a call that computes x @ weight^T, and nothing else, must return as "out"."""
    return lambda dtype: {"out": stored(product(x, weight, dtype), dtype)}


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, dtype: Precision, *, neighbours: bool = False
) -> Tensor:
    """Turn the first lanes of x by angles in the working precision, not rounded.

    Args:
        x: (..., head_dim). cos, sin: (..., lanes / 2), which broadcast to x's.
        neighbours: pairs of lanes are neighbours, otherwise halves.
    """
    x, cos, sin = (t.to(working(dtype)) for t in (x, cos, sin))
    sign = -1.0
    if dtype == TERMS:
        x, cos, sin, sign = x.abs(), cos.abs(), sin.abs(), 1.0
    turned, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if neighbours else turned.chunk(2, -1)
    both = (first * cos + sign * second * sin, second * cos + first * sin)
    found = torch.stack(both, -1).flatten(-2) if neighbours else torch.cat(both, -1)
    return torch.cat([found, rest], -1)


WHY_SINK = (
    "sums kept in 16 bits, in which what follows a large first term is lost; random inputs hide it "
    "(https://github.com/Xilinx/mlir-air/pull/1606)"
)
Sink = Literal["key", "query"] | None


def with_sink(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, sink: Sink
) -> tuple[Tensor, ...]:
    """Turn normal numbers into inputs whose sums begin with a term that outweighs all others.

    Each other term is eps / 256 of the first, and of its sign. A sum kept in 16 bits between blocks
    of up to 64 terms rounds each block's share away.

    Args:
        q, k, v, grad_out: standard normal, (..., seqlen, head_dim), of the dtype under test.
        sink: "key": the first key takes nearly all weight, as in language models; shows in out.
            "query": the first query has nearly all of grad_out; shows in dk and dv.
    """
    rest = torch.finfo(q.dtype).eps / 256
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    v, grad_out = 1 + v / 4, 1 + grad_out / 4
    if sink == "key":
        q[..., 0], k[..., 0], k[..., 0, :] = 4.0, 0.0, 0.0
        k[..., 0, 0] = -math.log(rest) * q.shape[-1] ** 0.5 / 4  # a score of log(1 / rest)
        k[..., 1:, 1:] /= 4
    else:
        v = v + k[..., :1]  # of one sign for a key: what its gradient is
        q, k = 1 + q / 4, k / 4
        grad_out[..., 1:, :] *= rest
        grad_out *= 64  # keeps dk out of fp16's subnormal numbers
    return q, k, v, grad_out


WHY_LOW = (
    "scores that are all far below 0: keys behind the last one score 0, and exp(0 - logsumexp) is "
    "infinite (https://github.com/ROCm/aiter/issues/3551); or a mask or a first maximum that is a "
    "finite number above them"
)


def with_low_scores(q: Tensor, k: Tensor, level: float, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k, copied, with a first lane that moves all scores to about level.

    Args:
        q, k: standard normal, (..., head_dim), of the dtype under test.
        level: negative; a head with one massive activation has such scores. Gradients of the first
            lane cancel, so what is left is rounding: of few rows, its size is left to chance.
        scale: of the scores.
    """
    q, k = q.clone(), k.clone()
    lane = math.sqrt(-level / scale)
    q[..., 0], k[..., 0] = lane, -lane
    return q, k


def mask(seqlen_q: int, seqlen_k: int, causal: Causal, window: tuple[int, int]) -> Tensor:
    """Return which key each query sees.

    Args:
        causal: the corner in which the triangle ends. torch's ``is_causal`` is top-left: query i
            sees keys 0..i. flash-attn's ``causal`` is bottom-right: the last query sees all keys.
            They differ when seqlen_q != seqlen_k.
        window: (left, right), keys before and after the query's own, bottom-right aligned as in
            flash-attn; -1 is unlimited.

    Returns:
        Boolean (seqlen_q, seqlen_k), True where the key is seen.
    """
    query = torch.arange(seqlen_q)[:, None]
    key = torch.arange(seqlen_k)[None]
    own_key = query + seqlen_k - seqlen_q
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal == "top-left":
        seen &= key <= query
    if causal == "bottom-right":
        seen &= key <= own_key
    left, right = window
    if left >= 0:
        seen &= key >= own_key - left
    if right >= 0:
        seen &= key <= own_key + right
    return seen


def attention(  # noqa: C901, PLR0913 (one formula)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    causal: Causal = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    keep: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    lse: bool = False,
    dtype: Precision = torch.float64,
) -> dict[str, Tensor]:
    """Compute plain attention, softmax(scale * q k^T) v, and its gradients.

    In float64 this is the reference. In a smaller dtype it is a correct kernel of that dtype: it
    computes in float32 and rounds what a fused kernel hands to the next matrix product or stores:
    the weights, their gradients, and the results. With TERMS each element is the sum, in float64,
    of the absolute values of what is added up to it: the size that rounding is in proportion to. A
    query that sees no key gives zeros, as in flash-attn and, since 2.5, in torch.

    Args:
        q: (batch, heads, seqlen_q, head_dim), grad_out alike.
        k: (batch, kv_heads, seqlen_k, head_dim), v alike; v's head_dim, that of the output, may be
            another one. Query head h reads key/value head h // (heads / kv_heads).
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        attn_mask: broadcastable to (batch, heads, seqlen_q, seqlen_k); Boolean, True where a key is
            seen, or added to the scores.
        keep: of dropout, what each weight is multiplied by: 0 or 1 / (1 - p).
        sinks: (heads,), the score of one more key for every query, whose value is zero.
        scale: None is 1 / sqrt(head_dim).
        lse: also return the natural logarithm of each query's sum of exp(scores), -inf without
            keys. Kernels keep it in float32, whatever their dtype.

    Returns:
        out, dq, dk, dv with the shapes of q, q, k, v, and lse (batch, heads, seqlen_q), on the
        device of q; in float64, or for a smaller dtype in float32. With an additive attn_mask also
        dmask, its gradient before any sum over what it was broadcast to.

    Raises:
        ValueError: kv_heads does not divide heads.
    """
    group, rest = divmod(q.shape[1], k.shape[1])
    if rest:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} heads")
    work = working(dtype)

    def store(x: Tensor) -> Tensor:
        return stored(x, dtype)

    def per_kv_head(x: Tensor) -> Tensor:
        # kernels without grouped heads sum what they stored for each query head
        return store(store(x).unflatten(1, (-1, group)).sum(2))

    q, k, v, grad_out = (x.detach().to(work) for x in (q, k, v, grad_out))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    scores = q @ k.transpose(-2, -1) * scale
    slope = 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped**2
    seen = mask(q.shape[2], k.shape[2], causal, window).to(q.device)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(work)
    sees_any = seen.any(-1, keepdim=True)
    # a row of only -inf would give NaN: it keeps its scores and gets weight 0
    scores = scores.masked_fill(~seen & sees_any, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]] * sees_any
    found = {}
    if lse:
        found["lse"] = scores.logsumexp(-1).masked_fill(~sees_any[..., 0], float("-inf"))
    if lse and dtype == TERMS:
        sizes = q.abs() @ k.abs().transpose(-2, -1) * scale
        found["lse"] = found["lse"].abs() + sizes.masked_fill(~seen, 0).amax(-1)
    keep = None if keep is None else keep.to(work)
    kept = weights if keep is None else weights * keep

    sign = -1.0
    if dtype == TERMS:
        q, k, v, grad_out = (x.abs() for x in (q, k, v, grad_out))
        sign = 1.0

    out = store(store(kept) @ v)
    grad_v = store(kept).transpose(-2, -1) @ grad_out
    grad_weights = grad_out @ v.transpose(-2, -1)
    if keep is not None:
        grad_weights = grad_weights * keep
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = store(weights * (grad_weights + sign * delta) * slope)
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        found["dmask"] = grad_scores
    return found | {
        "out": out,
        "dq": store(grad_scores @ k * scale),
        "dk": per_kv_head(grad_scores.transpose(-2, -1) @ q * scale),
        "dv": per_kv_head(grad_v),
    }

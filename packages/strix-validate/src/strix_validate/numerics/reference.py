# SPDX-License-Identifier: BSD-3-Clause
"""Compute attention, rope and products: in float64, rounded to a dtype, or from magnitudes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

#: The corner in which a causal mask's triangle ends; see :func:`mask`.
Causal = Literal["top-left", "bottom-right"] | None
#: A value to pass instead of a dtype, for the sums of the terms' magnitudes; see :func:`attention`.
TERMS = "terms"
Precision: TypeAlias = torch.dtype | Literal["terms"]


def working_dtype(dtype: Precision) -> torch.dtype:
    """Return the dtype in which a reference computes: float32 for a dtype of at most 32 bits.

    For float64 and TERMS it is float64.
    """
    return torch.float64 if dtype in (torch.float64, TERMS) else torch.float32


def store(x: Tensor, dtype: Precision) -> Tensor:
    """Return x, rounded as if a kernel of the dtype had stored it. For TERMS, x is not rounded."""
    if dtype == TERMS:
        return x
    return x.to(dtype).to(working_dtype(dtype))


def product(x: Tensor, weight: Tensor, dtype: Precision, rows: int = 8192) -> Tensor:
    """Compute x @ weight^T in the working dtype of `dtype`, and return it in the working dtype.

    The product is not rounded to `dtype`. For TERMS, compute the product of the absolute values.

    Args:
        x: (..., columns).
        weight: (rows of the weight, columns).
        dtype: Precision for which the product is computed; see :func:`working_dtype`.
        rows: Number of the weight's rows that are converted at a time. In float64, a whole LM head
            of 248,000 tokens may not fit into memory.
    """
    x = x.to(working_dtype(dtype))
    if dtype == TERMS:
        x = x.abs()
    products = []
    for part in weight.split(rows):
        part = part.to(x.dtype)
        if dtype == TERMS:
            part = part.abs()
        products.append(x @ part.T)
    return torch.cat(products, -1)


def layer(x: Tensor, weight: Tensor) -> Callable[[Precision], dict[str, Tensor]]:
    """Return a function that takes a precision and returns {"out": x @ weight^T}."""

    def compute(dtype: Precision) -> dict[str, Tensor]:
        return {"out": store(product(x, weight, dtype), dtype)}

    return compute


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: Precision,
    *,
    neighbours: bool = False,
) -> Tensor:
    """Rotate pairs of x's first elements by angles, in the working dtype, without rounding.

    Args:
        x: (..., head_dim).
        cos: (..., rotary_dim / 2), the cosines of the angles. It broadcasts to x's leading
            dimensions.
        sin: The sines, of the same shape.
        dtype: Precision for which the result is computed; see :func:`working_dtype`.
        neighbours: Whether neighbouring elements form a pair; otherwise elements i and
            i + rotary_dim / 2 do.
    """
    x, cos, sin = (t.to(working_dtype(dtype)) for t in (x, cos, sin))
    sign = -1.0
    if dtype == TERMS:
        x, cos, sin = (t.abs() for t in (x, cos, sin))
        sign = 1.0
    rotary, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    if neighbours:
        first = rotary[..., ::2]
        second = rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, -1)
    rotated_pairs = (
        first * cos + sign * second * sin,
        second * cos + first * sin,
    )
    if neighbours:
        rotated = torch.stack(rotated_pairs, -1).flatten(-2)
    else:
        rotated = torch.cat(rotated_pairs, -1)
    return torch.cat([rotated, rest], -1)


#: The fault that inputs of :func:`with_sink` show.
SINK_FAULT = (
    "sums in 16 bits, which lose the terms after a large first one; random inputs hide this fault "
    "(https://github.com/Xilinx/mlir-air/pull/1606)"
)
Sink = Literal["key", "query"] | None


def with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    sink: Sink,
) -> tuple[Tensor, ...]:
    """Turn normal numbers into inputs whose sums start with a term that outweighs all others.

    Each later term is about eps / 256 of the first one, and has the same sign. If a kernel keeps
    its sum in 16 bits after each block of up to 64 terms, the contribution of each block is rounded
    away.

    Args:
        q: Standard normal, (..., seqlen, head_dim), of the dtype under test.
        k: Like q.
        v: Like q.
        grad_out: Like q.
        sink: With "key", the first key has nearly all weight, as in language models, and the fault
            shows in out. With "query", the first query has nearly all of grad_out, and the fault
            shows in dk and dv.
    """
    share = torch.finfo(q.dtype).eps / 256
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    v = 1 + v / 4
    grad_out = 1 + grad_out / 4
    if sink == "key":
        q[..., 0] = 4.0
        k[..., 0] = 0.0
        k[..., 0, :] = 0.0
        k[..., 0, 0] = -math.log(share) * q.shape[-1] ** 0.5 / 4  # its score: log(1 / share)
        k[..., 1:, 1:] /= 4
    else:
        v = v + k[..., :1]  # with this v, all terms of a key's gradient have the same sign
        q = 1 + q / 4
        k = k / 4
        grad_out[..., 1:, :] *= share
        grad_out *= 64  # this factor keeps dk above the subnormal numbers of fp16
    return q, k, v, grad_out


#: The fault that inputs of :func:`with_low_scores` reveal.
LOW_SCORES_FAULT = (
    "wrong results if all scores are far below 0. Either padding after the last key has the score "
    "0, so that exp(0 - logsumexp) is infinite (https://github.com/ROCm/aiter/issues/3551). Or "
    "masked scores or the initial maximum have a finite value above all scores"
)


def with_low_scores(q: Tensor, k: Tensor, level: float, scale: float) -> tuple[Tensor, Tensor]:
    """Return copies of q and k in which each row's first element moves all scores to about `level`.

    The terms of the first element's gradient cancel, so only their rounding errors remain. With few
    queries, the size of these errors is a matter of chance.

    Args:
        q: Standard normal, (..., head_dim), of the dtype under test.
        k: Like q.
        level: The mean of the scores, below 0. A head with one massive activation has such scores.
        scale: Scale of the scores.
    """
    q = q.clone()
    k = k.clone()
    element = math.sqrt(-level / scale)
    q[..., 0] = element
    k[..., 0] = -element
    return q, k


def mask(seqlen_q: int, seqlen_k: int, causal: Causal, window: tuple[int, int]) -> Tensor:
    """Return which keys each query sees.

    Args:
        seqlen_q: Number of queries.
        seqlen_k: Number of keys.
        causal: The corner in which the triangle ends. torch's ``is_causal`` is top-left: query i
            sees keys 0..i. flash-attn's ``causal`` is bottom-right: the last query sees all keys.
            The two differ when seqlen_q != seqlen_k.
        window: (left, right), the number of keys that a query sees before and after its own key; -1
            is unlimited. The last query's own key is the last key, as in flash-attn.

    Returns:
        Boolean (seqlen_q, seqlen_k), True where the query sees the key.
    """
    query = torch.arange(seqlen_q)[:, None]
    key = torch.arange(seqlen_k)[None]
    aligned_key = query + seqlen_k - seqlen_q
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal == "top-left":
        visible &= key <= query
    if causal == "bottom-right":
        visible &= key <= aligned_key
    left, right = window
    if left >= 0:
        visible &= key >= aligned_key - left
    if right >= 0:
        visible &= key <= aligned_key + right
    return visible


@dataclass(frozen=True)
class _Weights:
    """The weights of attention, softmax(scores), and the values that their gradient needs.

    Attributes:
        weights: (batch, heads, seqlen_q, seqlen_k), without the sinks; 0 for a query without keys.
        scores: (batch, heads, seqlen_q, seqlen_k), or one more column for the sinks; -inf for a key
            that the query does not see, unless the query sees no key.
        slope: Derivative of the softcap; 1 without one.
        visible: Boolean, which keys each query sees.
    """

    weights: Tensor
    scores: Tensor
    slope: Tensor | float
    visible: Tensor

    def logsumexp(self) -> Tensor:
        """Return the logarithm of each query's sum of exp(scores); -inf if it sees no key."""
        sees_none = ~self.visible.any(-1)
        return self.scores.logsumexp(-1).masked_fill(sees_none, float("-inf"))


def _weigh(
    q: Tensor,
    k: Tensor,
    scale: float,
    softcap: float,
    visible: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
) -> _Weights:
    """Compute the weights of attention; see :func:`attention`."""
    scores = q @ k.transpose(-2, -1) * scale
    slope: Tensor | float = 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores = softcap * capped
        slope = 1 - capped**2
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
    sees_any = visible.any(-1, keepdim=True)
    # A row of only -inf would give NaN. A query that sees no key keeps its scores instead, and its
    # weights are multiplied by 0 below.
    scores = scores.masked_fill(~visible & sees_any, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    return _Weights(
        weights=scores.softmax(-1)[..., : k.shape[2]] * sees_any,
        scores=scores,
        slope=slope,
        visible=visible,
    )


def attention(  # noqa: PLR0913 (the arguments of attention)
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

    In float64 this is the reference. In a smaller dtype it imitates a correct fused kernel of that
    dtype. It computes in float32, and rounds the values that such a kernel stores or passes to the
    next matrix product: the weights, the gradients of the scores, and the results. With TERMS, each
    element is a sum in float64 of the absolute values of the terms that are summed for it. Rounding
    errors are in proportion to this sum. The output of a query that sees no key is zero, as in
    flash-attn and, since version 2.5, in torch.

    Args:
        q: (batch, heads, seqlen_q, head_dim).
        k: (batch, kv_heads, seqlen_k, head_dim). Query head h reads key/value head
            h // (heads / kv_heads).
        v: (batch, kv_heads, seqlen_k, the output's head_dim), which may differ from k's.
        grad_out: (batch, heads, seqlen_q, the output's head_dim).
        causal: See :func:`mask`.
        window: See :func:`mask`.
        softcap: Scores become softcap * tanh(scores / softcap); 0 is off.
        attn_mask: Broadcastable to (batch, heads, seqlen_q, seqlen_k). A Boolean mask is True where
            the query sees the key. Any other mask is added to the scores.
        keep: The factor by which dropout multiplies each weight: 0 or 1 / (1 - p).
        sinks: (heads,), the score of an additional key for every query. Its value is zero.
        scale: Scale of the scores; None is 1 / sqrt(head_dim).
        lse: Also return the natural logarithm of each query's sum of exp(scores), -inf for a query
            without keys. Kernels keep it in float32, whatever their dtype.
        dtype: Precision for which the result is computed; see :func:`working_dtype`.

    Returns:
        out, dq, dk and dv with the shapes of grad_out, q, k and v; and, if requested, lse (batch,
        heads, seqlen_q). They are on the device of q, in the working dtype. With an additive
        attn_mask there is also dmask, its gradient before any sum over the dimensions that it was
        broadcast to.

    Raises:
        ValueError: kv_heads does not divide heads.
    """
    group, remainder = divmod(q.shape[1], k.shape[1])
    if remainder:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")
    work = working_dtype(dtype)
    q, k, v, grad_out = (x.detach().to(work) for x in (q, k, v, grad_out))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if keep is not None:
        keep = keep.to(work)
    visible = mask(q.shape[2], k.shape[2], causal, window).to(q.device)
    weights = _weigh(q, k, scale, softcap, visible, attn_mask, sinks)
    results = {}
    if lse:
        results["lse"] = weights.logsumexp()
    if lse and dtype == TERMS:
        sizes = q.abs() @ k.abs().transpose(-2, -1) * scale
        largest = sizes.masked_fill(~weights.visible, 0).amax(-1)
        results["lse"] = results["lse"].abs() + largest
    products = _multiply(q, k, v, grad_out, weights, keep, scale, dtype)
    grad_mask = products.pop("dmask")
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        results["dmask"] = grad_mask
    for name in ("dk", "dv"):
        products[name] = _sum_groups(products[name], group, dtype)
    return results | products


def _multiply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    weights: _Weights,
    keep: Tensor | None,
    scale: float,
    dtype: Precision,
) -> dict[str, Tensor]:
    """Compute out and the gradients from the weights, for each query head.

    Returns:
        out, dq, dk, dv, and dmask, the gradient of the scores after the softcap.
    """
    sign = -1.0
    if dtype == TERMS:
        q, k, v, grad_out = (x.abs() for x in (q, k, v, grad_out))
        sign = 1.0
    kept_weights = weights.weights
    if keep is not None:
        kept_weights = kept_weights * keep
    rounded_weights = store(kept_weights, dtype)
    out = store(rounded_weights @ v, dtype)
    grad_v = rounded_weights.transpose(-2, -1) @ grad_out
    grad_weights = grad_out @ v.transpose(-2, -1)
    if keep is not None:
        grad_weights = grad_weights * keep
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_capped = weights.weights * (grad_weights + sign * delta)
    grad_scores = store(grad_capped * weights.slope, dtype)
    return {
        "out": out,
        "dq": store(grad_scores @ k * scale, dtype),
        "dk": grad_scores.transpose(-2, -1) @ q * scale,
        "dv": grad_v,
        "dmask": store(grad_capped, dtype),
    }


def _sum_groups(x: Tensor, group: int, dtype: Precision) -> Tensor:
    """Return the gradient of each key/value head: the sum over the query heads that read it.

    Each query head's gradient is rounded first, because kernels without grouped heads store it, and
    then sum the stored values.
    """
    of_query_heads = store(x, dtype).unflatten(1, (-1, group))
    return store(of_query_heads.sum(2), dtype)

# SPDX-License-Identifier: BSD-3-Clause
"""Attention in double precision, and how far a result may be from it."""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from strix_validate.checks import Check, Result, State

Causal = Literal["top-left", "bottom-right"] | None
#: Instead of a dtype: the sums of the sizes of the terms, see :func:`attention`.
TERMS = "terms"
Precision: TypeAlias = torch.dtype | Literal["terms"]

#: Allowed error in units of the rounding error of a right kernel; see :func:`bounds`.
FACTORS = {torch.float32: 10.0, torch.float16: 4.0, torch.bfloat16: 4.0}

#: Allowed root mean square error in the same units; see :func:`rms_bounds`.
RMS_FACTORS = {torch.float32: 10.0, torch.float16: 3.0, torch.bfloat16: 3.0}

#: Allowed mean signed error in the same units; in float32 no less than the root mean square error.
DRIFT_FACTORS = {torch.float32: 10.0, torch.float16: 0.5, torch.bfloat16: 0.5}

#: Allowed error of an element in units of half the dtype's eps and of the size of its terms.
LOCAL_FACTORS = {torch.float32: 100.0, torch.float16: 4.0, torch.bfloat16: 4.0}


def working(dtype: Precision) -> torch.dtype:
    """What a reference in that precision computes in: float64, or float32 for a smaller dtype."""
    return torch.float64 if dtype in (torch.float64, TERMS) else torch.float32


def stored(x: Tensor, dtype: Precision) -> Tensor:
    """x, rounded as if a kernel of the dtype had stored it; not rounded for TERMS."""
    return x if dtype == TERMS else x.to(dtype).to(working(dtype))


def product(x: Tensor, weight: Tensor, dtype: Precision, rows: int = 8192) -> Tensor:
    """x @ weight^T in the working precision, not rounded; the sums of magnitudes for TERMS.

    Args:
        rows: of weight at a time, so that a head of 248,000 tokens fits into memory in float64.
    """
    x = x.to(working(dtype))
    x = x.abs() if dtype == TERMS else x
    parts = (part.to(x.dtype) for part in weight.split(rows))
    return torch.cat([x @ (part.abs() if dtype == TERMS else part).T for part in parts], -1)


WHY_SINK = (
    "sums kept in 16 bits, in which what follows a large first term is lost; random inputs hide it "
    "(https://github.com/Xilinx/mlir-air/pull/1606)"
)
Sink = Literal["key", "query"] | None


def with_sink(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, sink: Sink
) -> tuple[Tensor, ...]:
    """Normal numbers turned into inputs whose sums begin with a term that outweighs all others.

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


def mask(seqlen_q: int, seqlen_k: int, causal: Causal, window: tuple[int, int]) -> Tensor:
    """Which key each query sees.

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


def attention(
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
    """Plain attention, softmax(scale * q k^T) v, and its gradients.

    In float64 this is the reference. In a smaller dtype it is a right kernel of that dtype: it
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


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite if actual has a NaN, an infinity or another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    error = (actual.detach().to(expected.device).double() - expected.double()).abs()
    return error.max().item() if bool(error.isfinite().all()) else float("inf")


def bounds(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    dtype: torch.dtype,
    factor: float | None = None,
) -> dict[str, float]:
    """The largest error that each tensor may have.

    A fixed tolerance is either blind in float32 or wrong in bfloat16. So the yardstick is the error
    of a right kernel of the dtype under test, on the same inputs: see :func:`attention`. In half
    precision a result may be 4 times as far off: the order of summation and the scaling of the
    weights before they are rounded differ between right kernels, which came to 3.1 times (torch's
    on the CPU, grouped heads, bfloat16). flash-attention's own tests allow 2 and 3 times the larger
    error of attention that rounds every intermediate (tests/test_flash_attn.py,
    test_flash_attn_output). They have no float32. There the kernels' fast exp2 shows, which half
    precision hides: right kernels came to 4 times the error, hence 10. A softmax scale off by 1 %
    exceeds these bounds in float32 and float16.

    The floor, eps(dtype) / 2 * max|exact|, is the rounding of the result alone: the yardstick can
    be exact by chance, for example with a single key. The gradients share their floor: over one key
    those of q and k cancel to zero, and their terms, of the size of v's, do not.

    lse is stored in float32 in any dtype. Its error is that of the sum of weights in parts of the
    sum: a kernel that rounds them first, or takes as good an exp as they need, is half an eps off.

    Args:
        exact: tensors of :func:`attention` in float64, rounded: the same in the dtype under test.
        factor: instead of the dtype's in FACTORS.

    Returns:
        For each name the bound of :func:`max_error`.

    Raises:
        ValueError: the yardstick is not finite; every result would be within such a bound.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    size = {name: value.abs().max().item() for name, value in exact.items()}
    gradients = [name for name in ("dq", "dk", "dv") if name in exact]
    size |= dict.fromkeys(gradients, max((size[name] for name in gradients), default=0.0))
    found = {
        name: (factor or FACTORS[dtype])
        * max(max_error(rounded[name], value), half_ulp * size[name])
        for name, value in exact.items()
    }
    if "lse" in exact:
        least = torch.finfo(torch.float32).eps / 2 * size["lse"]
        float32 = FACTORS[torch.float32] * max(max_error(rounded["lse"], exact["lse"]), least)
        found["lse"] = max(half_ulp, float32)
    if not all(map(math.isfinite, found.values())):
        raise ValueError("the reference is not finite in the dtype under test")
    return found


def rms(x: Tensor) -> float:
    """The root mean square of the elements, 0 without elements."""
    return x.detach().double().square().mean().sqrt().item() if x.numel() else 0.0


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences; infinite where :func:`max_error` is."""
    error = actual.detach().to(expected.device).double() - expected.double()
    return rms(error) if bool(error.isfinite().all()) else float("inf")


def drift(actual: Tensor, expected: Tensor) -> float:
    """The mean error, or if it is larger that towards zero, each in absolute value.

    It shows rounding by truncation: that doubles the root mean square error, within what right
    kernels may have, but its errors have one sign. Of right kernels they cancel: the drift came to
    0.25 of the root mean square error at most (torch's flash attention on the CPU in sink-key), of
    results that were truncated it is 1.7.

    0 where :func:`max_error` is infinite.
    """
    error = actual.detach().to(expected.device).double() - expected.double()
    if not (error.numel() and bool(error.isfinite().all())):
        return 0.0
    return max(abs(error.mean().item()), abs((error * expected.double().sign()).mean().item()))


def rms_bounds(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    terms: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, float]:
    """The largest :func:`rms_error` that each tensor may have.

    A maximum over thousands of elements is that of the few largest, whose rounding hides an error
    that all the others have. The root mean square has no such outliers, so its bound is tighter:
    independent roundings add up as squares, and 3 times the yardstick's error is what a kernel has
    that rounds 9 times where a right kernel rounds once. A sum kept in 16 bits rounds once for each
    block of terms, which random numbers show where the sum is long, and :func:`with_sink` where it
    is short. In float32 the factor is that of :func:`bounds`, for the same reason.

    The yardstick is the error of a right kernel of the dtype, see :func:`attention`; at least what
    storing costs, eps / 2 * exact uniformly distributed, which is its root mean square divided by
    sqrt(3); and at least eps(float32) of the terms, the rounding of the sums, which is all there is
    where the exact value is zero.

    Args:
        exact, rounded, terms: tensors of :func:`attention` in float64, dtype, and of TERMS.
    """
    found = {}
    for name, value in exact.items():
        stores = torch.finfo(dtype).eps / 2 * rms(value) / math.sqrt(3)
        sums = torch.finfo(torch.float32).eps * rms(terms[name])
        found[name] = RMS_FACTORS[dtype] * max(rms_error(rounded[name], value), stores, sums)
    return found


def local_error(actual: Tensor, expected: Tensor, terms: Tensor, dtype: torch.dtype) -> float:
    """Largest error of an element in units of half the dtype's eps and of the size of its terms.

    Right kernels came to 2.4 in half precision and 31 in float32, where the scores' own rounding
    counts, which is that of their size. Weights below fp16's smallest normal number, 6e-5, lose
    more than half an eps; 8 steps of the subnormal numbers are allowed for them.
    """
    error = (actual.detach().to(expected.device).double() - expected.double()).abs()
    kind = torch.finfo(dtype)
    unit = kind.eps / 2 * terms + 8 * kind.smallest_normal * kind.eps
    return (error / unit).max().item()


def compare(
    check: Check,
    actual: dict[str, Tensor],
    expected: Callable[[Precision], dict[str, Tensor]],
    dtype: torch.dtype,
    factor: float | None = None,
) -> Result:
    """Passed if every expected tensor is within its bounds, and every element.

    The bounds of a tensor are :func:`bounds` and, unless a factor is given, :func:`rms_bounds`, of
    which a part is also the bound of :func:`drift`, and more of a few elements.

    The bound of a tensor is tight where its elements are large. A key that only the last query sees
    has a small gradient, which may be missing altogether within that bound; so each element is also
    measured by its own terms: rounding each of them once, and no more than that a few times over.
    """
    exact, terms = expected(torch.float64), expected(TERMS)
    rounded = expected(dtype)
    limits = bounds(exact, rounded, dtype, factor)
    rms_limits = rms_bounds(exact, rounded, terms, dtype)
    wrong, measured = [], {}
    for name, value in exact.items():
        error, local, mean, signed = max_error(actual[name], value), 0.0, 0.0, 0.0
        if math.isfinite(error):
            local = local_error(actual[name], value, terms[name].abs(), dtype)
            mean = rms_error(actual[name], value)
            signed = drift(actual[name], value)
        drifts = DRIFT_FACTORS[dtype] + 4 / math.sqrt(max(value.numel(), 1))
        drift_limit = drifts * rms_limits[name] / RMS_FACTORS[dtype]
        # not "error > limit", which is false for NaN
        within = error <= limits[name] and local <= LOCAL_FACTORS[dtype]
        straight = mean <= rms_limits[name] and signed <= drift_limit
        if not (within and (factor is not None or straight)):
            wrong.append(name)
        measured[name] = {
            "error": error if math.isfinite(error) else None,
            "bound": limits[name],
            "local": local if math.isfinite(local) else None,
            "rms": mean,
            "rms_bound": rms_limits[name],
            "drift": signed,
        }
    if wrong:
        return Result(check, State.FAILED, f"wrong: {', '.join(wrong)}", measured)
    return Result(check, State.PASSED, "", measured)

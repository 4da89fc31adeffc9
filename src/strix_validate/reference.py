# SPDX-License-Identifier: BSD-3-Clause
"""Attention in double precision, and how far from it a result may be."""

from typing import Literal

import torch
from torch import Tensor

Causal = Literal["top-left", "bottom-right"] | None

#: Allowed error in units of the rounding error of plain attention; see :func:`bounds`.
FACTORS = {torch.float32: 10.0, torch.float16: 3.0, torch.bfloat16: 3.0}


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
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Plain attention, softmax(q k^T / sqrt(head_dim)) v, and its gradients.

    Every intermediate is stored in ``dtype``. A query that sees no key gives zeros, as in
    flash-attn.

    Args:
        q: (batch, heads, seqlen_q, head_dim), grad_out alike.
        k: (batch, kv_heads, seqlen_k, head_dim), v alike. Query head h reads key/value head
            h // (heads / kv_heads).
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.

    Returns:
        out, dq, dk, dv with the shapes of q, q, k, v, in ``dtype`` on the CPU.

    Raises:
        ValueError: kv_heads does not divide heads.
    """
    group, rest = divmod(q.shape[1], k.shape[1])
    if rest:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} heads")
    q, k, v, grad_out = (x.detach().cpu().to(dtype) for x in (q, k, v, grad_out))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = q @ k.repeat_interleave(group, 1).transpose(-2, -1) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask(q.shape[2], k.shape[2], causal, window)
    sees_any = seen.any(-1, keepdim=True)
    # A row of -inf alone would give NaN, also in the gradient; it gets scores and then weight 0.
    weights = scores.masked_fill(~seen & sees_any, float("-inf")).softmax(-1) * sees_any
    out = weights @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite if actual has a NaN, an infinity or another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    error = (actual.detach().cpu().double() - expected.double()).abs()
    return error.max().item() if bool(error.isfinite().all()) else float("inf")


def bounds(
    exact: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """The largest error that each tensor may have.

    A fixed tolerance is either blind in float32 or wrong in bfloat16. So the yardstick is the
    error that plain attention makes in the dtype under test, on the same rounded inputs, as in
    flash-attention's own tests (tests/test_flash_attn.py, test_flash_attn_output): in half
    precision they allow 2 times that error in the output and 3 times in the gradients, here it is
    3 for all. They have no float32. There the kernels' fast exp2 and their order of summation
    show, which half precision hides: right kernels came to 4 times the error, hence 10. A softmax
    scale off by 1 % exceeds these bounds in float32 and float16.

    The floor, eps(dtype) * max|exact|, is the rounding of the result alone: plain attention can be
    exact by chance, for example with a single key.

    Args:
        exact: tensors of :func:`attention` in float64, plain: the same in the dtype under test.

    Returns:
        For each name the bound of :func:`max_error`.
    """
    eps = torch.finfo(dtype).eps
    return {
        name: FACTORS[dtype] * max(max_error(plain[name], value), eps * value.abs().max().item())
        for name, value in exact.items()
    }

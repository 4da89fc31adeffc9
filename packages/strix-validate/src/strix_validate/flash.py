# SPDX-License-Identifier: BSD-3-Clause
"""Calls of flash-attn's public functions, and what they must return."""

import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from strix_validate import reference, triton_device
from strix_validate.checks import Size

SDIST_WINDOW_BUG = (
    "the sdist 2.8.3 kernels accept window_size and softcap and read neither, so that Mistral and "
    "Gemma models ran as other models (flash_attn_triton_amd/interface_fa.py; the kernels are gone "
    "since https://github.com/Dao-AILab/flash-attention/pull/2230)"
)


@dataclass(frozen=True)
class Call:
    """The call flash_attn.<function>(**tensors, **options).

    Tensors have flash-attn's layout, (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim).
    With grad_out, shaped like the output, the gradients of q, k and v are computed as well. With
    repeats above 1, the outputs of all calls are compared bit by bit.
    """

    function: str
    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    grad_out: Tensor | None = None
    repeats: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["q"].dtype

    def prepare(self) -> str:
        """Makes flash-attn take CPU tensors; returns which kernels it uses."""
        found = backend()
        triton_device.accept_cpu_tensors()
        return found

    def execute(self, device: str) -> dict[str, Tensor]:
        """See :func:`execute`."""
        return execute(self, device)


@dataclass(frozen=True)
class Case:
    """A call and what it must return.

    expected(dtype) computes the tensors by name, in dtype, on the CPU. may_refuse: raising
    NotImplementedError is also right, as long as a wrong answer is impossible.
    """

    name: str
    title: str
    why: str
    call: Call
    expected: Callable[[torch.dtype], dict[str, Tensor]]
    may_refuse: bool = False
    size: Size = Size.QUICK


def execute(call: Call, device: str) -> dict[str, Tensor]:
    """Makes the call; returns out with dq, dk, dv, or else with the arguments, maybe changed.

    With repeats also "differing": how many calls returned another output than the first.
    flash_attn's own exceptions pass through.
    """
    import flash_attn

    tensors = {name: tensor.to(device) for name, tensor in call.tensors.items()}
    function = getattr(flash_attn, call.function)
    if call.grad_out is None:
        return {"out": function(**tensors, **call.options), **tensors}
    leaves = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
    tensors.update(zip(("q", "k", "v"), leaves, strict=True))
    out = function(**tensors, **call.options)
    grads = torch.autograd.grad(out, leaves, call.grad_out.to(device))
    found = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    if call.repeats > 1:
        again = (function(**tensors, **call.options) for _ in range(call.repeats - 1))
        found["differing"] = torch.tensor(float(sum(not torch.equal(out, x) for x in again)))
    return found


def backend() -> str:
    """The kernels that flash-attn uses: "aiter" or "built-in"; "unknown" if it is not patched."""
    import flash_attn  # noqa: F401

    return getattr(sys.modules["flash_attn.flash_attn_interface"], "BACKEND", "unknown")


def fixed(
    randn,
    *,
    heads=2,
    kv_heads=2,
    seqlen_q=70,
    seqlen_k=70,
    head_dim=64,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    strided=False,
    dropout=0.0,
    repeats=1,
):
    """flash_attn_func of random tensors, see :func:`dense`.

    strided: k and v are slices of one tensor, and the gradient is transposed. With dropout, only
    one thing is expected: that a second call drops other weights.
    """
    q = randn(1, seqlen_q, heads, head_dim)
    kv = randn(1, seqlen_k, 2, kv_heads, head_dim)
    k, v = kv.unbind(2) if strided else (kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous())
    grad_out = randn(1, heads, seqlen_q, head_dim).transpose(1, 2)
    options = {"causal": causal, "window": window, "softcap": softcap, "dropout": dropout}
    grad_out = grad_out if strided else grad_out.contiguous()
    return dense(q, k, v, grad_out, repeats=repeats, **options)


def dense(q, k, v, grad_out, *, causal=False, window=(-1, -1), softcap=0.0, dropout=0.0, repeats=1):
    """flash_attn_func of these tensors."""
    options = {
        "causal": causal,
        "window_size": window,
        "softcap": softcap,
        "dropout_p": dropout,
    }
    call = Call("flash_attn_func", {"q": q, "k": k, "v": v}, options, grad_out, repeats)
    corner = "bottom-right" if causal else None

    def expected(dtype):
        differing = {"differing": torch.tensor(float(repeats - 1 if dropout else 0))}
        if dropout:
            return differing
        found = _attend(q, k, v, grad_out, dtype, causal=corner, window=window, softcap=softcap)
        return found | (differing if repeats > 1 else {})

    return call, expected


def varlen(
    randn,
    *,
    lengths_q=(37, 64, 10),
    lengths_k=(64, 64, 50),
    head_dim=64,
    causal=True,
    window=(-1, -1),
):
    """flash_attn_varlen_func of random tensors, see :func:`packed`."""
    q, grad_out = (randn(sum(lengths_q), 4, head_dim) for _ in range(2))
    k, v = (randn(sum(lengths_k), 2, head_dim) for _ in range(2))
    return packed(q, k, v, grad_out, lengths_q, lengths_k, causal=causal, window=window)


def packed(q, k, v, grad_out, lengths_q, lengths_k, *, causal, window=(-1, -1)):
    """flash_attn_varlen_func of these tensors: sequences of these lengths, one after the other."""
    starts = {
        "cu_seqlens_q": torch.tensor([0, *accumulate(lengths_q)], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, *accumulate(lengths_k)], dtype=torch.int32),
    }
    options = {
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
        "causal": causal,
        "window_size": window,
    }
    call = Call("flash_attn_varlen_func", {"q": q, "k": k, "v": v, **starts}, options, grad_out)
    corner = "bottom-right" if causal else None

    def expected(dtype):
        sequences = zip(
            q.split(lengths_q),
            k.split(lengths_k),
            v.split(lengths_k),
            grad_out.split(lengths_q),
            strict=True,
        )
        parts = [
            _attend(*(x[None] for x in tensors), dtype, causal=corner, window=window)
            for tensors in sequences
        ]
        return {name: torch.cat([part[name][0] for part in parts]) for name in parts[0]}

    return call, expected


def kv_cache(randn, *, new=4, rows=None, leftpad=None, page=None, stale=False, lengths=(50, 77)):
    """flash_attn_with_kvcache, four causal queries for each of two sequences.

    Args:
        new: keys appended; rows: the row of the cache that each sequence has (cache_batch_idx);
        leftpad: entries to leave out in front; page: size of a page of a paged cache; stale: the
        cache holds NaN behind each sequence; lengths: entries in the cache before the call.
    """
    capacity = 100  # no multiple of a block of keys
    q = randn(2, 4, 4, 64)
    k_cache, v_cache = randn(4, capacity, 2, 64), randn(4, capacity, 2, 64)
    k, v = randn(2, new, 2, 64), randn(2, new, 2, 64)
    own_rows = list(rows or (0, 1))
    filled_k, filled_v = k_cache[own_rows], v_cache[own_rows]
    for i, length in enumerate(lengths):
        filled_k[i, length : length + new], filled_v[i, length : length + new] = k[i], v[i]
        if stale:
            k_cache[own_rows[i], length:] = v_cache[own_rows[i], length:] = float("nan")
    if rows is None:
        k_cache, v_cache = k_cache[:2], v_cache[:2]
    tensors = {
        "q": q,
        "k_cache": k_cache.clone(),
        "v_cache": v_cache.clone(),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
    }
    if new:
        tensors |= {"k": k, "v": v}
    if rows:
        tensors["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    if leftpad:
        tensors["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    if page:
        pages = capacity // page
        order = torch.arange(2 * pages).flip(0)
        for name in ("k_cache", "v_cache"):
            tensors[name] = tensors[name].view(2 * pages, page, 2, 64)[order].contiguous()
        tensors["block_table"] = order.view(2, pages).int()
    call = Call("flash_attn_with_kvcache", tensors, {"causal": True})

    def expected(dtype):
        outs = []
        for i, length in enumerate(lengths):
            used = slice((leftpad or (0, 0))[i], length + new)
            keys, values = filled_k[i : i + 1, used], filled_v[i : i + 1, used]
            part = q[i : i + 1]
            outs.append(_attend(part, keys, values, part, dtype, causal="bottom-right")["out"])
        found = {"out": torch.cat(outs), "cache_seqlens": tensors["cache_seqlens"].clone()}
        if new and not page and not stale:
            k_after, v_after = k_cache.clone(), v_cache.clone()
            k_after[own_rows], v_after[own_rows] = filled_k, filled_v
            found |= {"k_cache": k_after, "v_cache": v_after}
        return found

    return call, expected


def _attend(q, k, v, grad_out, dtype, **options) -> dict[str, Tensor]:
    """reference.attention for tensors in flash-attn's layout."""
    swapped = (x.transpose(1, 2) for x in (q, k, v, grad_out))
    found = reference.attention(*swapped, dtype=dtype, **options)
    return {name: tensor.transpose(1, 2) for name, tensor in found.items()}


_MASKS = "a wrong mask at a block's edge, or causal aligned top-left as in torch, not bottom-right"
_GQA = "a query head that reads the wrong key/value head, or gradients not summed over the group"
_CACHE = "keys written to the wrong row or the caller's cache_seqlens changed (aiter 0.1.20.post1)"


_EMPTY = (
    "the logsumexp of a sequence without keys written over that of the next one, its zeros over "
    "the next head, and both past the end (flash_attn_triton_amd/fwd_prefill.py, sdist 2.8.3)"
)
#: The first, a middle and the last sequence are empty; one has keys but no queries.
NO_TOKENS = {"lengths_q": (0, 37, 0, 0, 64, 0), "lengths_k": (0, 64, 0, 20, 50, 0)}
#: Those have queries but no keys, one of them more queries than a block of any kernel has.
NO_KEYS = {"lengths_q": (5, 33, 140, 37, 160, 7), "lengths_k": (0, 70, 0, 64, 170, 0)}


class _Spec(NamedTuple):
    name: str
    build: Callable
    why: str
    may_refuse: bool = False
    size: Size = Size.QUICK


_PADDED = "padding of the head dim to the next power of two that leaks into the result"
_D512 = (
    "values that are wrong without a word above head dim 256: "
    "https://github.com/pytorch/pytorch/issues/189849"
)
_SPECS = (
    _Spec("full", partial(fixed), "wrong scale or a missing mask of the last partial block"),
    _Spec("causal", partial(fixed, causal=True), _MASKS),
    _Spec("long", partial(fixed, causal=True, seqlen_q=200, seqlen_k=200), _MASKS),
    _Spec("short-q", partial(fixed, causal=True, seqlen_q=50, seqlen_k=130), _MASKS),
    _Spec("short-k", partial(fixed, causal=True, seqlen_q=130, seqlen_k=50), _MASKS),
    _Spec("one-query", partial(fixed, causal=True, seqlen_q=1, seqlen_k=133), _MASKS),
    _Spec("one-token", partial(fixed, causal=True, seqlen_q=1, seqlen_k=1), _MASKS),
    _Spec("gqa", partial(fixed, causal=True, heads=4), _GQA),
    _Spec("mqa", partial(fixed, causal=True, heads=4, kv_heads=1), _GQA),
    _Spec("d32", partial(fixed, head_dim=32), "tile sizes of the smallest usual head dim"),
    _Spec("d72", partial(fixed, head_dim=72), _PADDED),
    _Spec("d80", partial(fixed, head_dim=80), "padding of head dim 80 to 128 leaks (ViT)"),
    _Spec("d96", partial(fixed, head_dim=96, causal=True), _PADDED),
    _Spec("d128", partial(fixed, head_dim=128, causal=True), "wrong tile sizes of head dim 128"),
    _Spec("d160", partial(fixed, head_dim=160), _PADDED),
    _Spec("d192", partial(fixed, head_dim=192, causal=True), _PADDED),
    _Spec("d256", partial(fixed, head_dim=256), "LDS of the largest head dim"),
    _Spec("d512", partial(fixed, head_dim=512), _D512, may_refuse=True),
    _Spec(
        "strided",
        partial(fixed, causal=True, strided=True),
        "the sdist 2.8.3 kernels read the output's gradient with the strides of the output",
    ),
    _Spec("window", partial(fixed, causal=True, window=(16, 0)), SDIST_WINDOW_BUG, True),
    _Spec("window-both", partial(fixed, window=(16, 8)), SDIST_WINDOW_BUG, True),
    _Spec("softcap", partial(fixed, softcap=1.0), SDIST_WINDOW_BUG, True),
    _Spec(
        "dropout",
        partial(fixed, dropout=0.2, repeats=2),
        "dropout with a constant seed: the same positions in every layer and step (sdist 2.8.3, "
        "aiter 0.1.20.post1)",
        True,
    ),
    _Spec(
        "deterministic",
        partial(fixed, causal=True, head_dim=80, repeats=3),
        "a race, or memory read that nothing wrote: https://github.com/ROCm/aotriton/issues/183",
    ),
    _Spec(
        "deterministic-100",
        partial(fixed, causal=True, head_dim=80, seqlen_q=513, seqlen_k=513, repeats=100),
        "a race that shows in few of many calls: https://github.com/ROCm/aotriton/issues/183",
        size=Size.FULL,
    ),
    _Spec(
        "n4096-d72",
        partial(fixed, head_dim=72, seqlen_q=4096, seqlen_k=4096),
        "NaN from 4096 keys at head dim 72: https://github.com/ROCm/aotriton/issues/54",
        size=Size.FULL,
    ),
    _Spec("varlen", partial(varlen), "one sequence's keys seen by another"),
    _Spec(
        "varlen-short",
        partial(varlen, lengths_q=(1, 7, 65, 1), lengths_k=(1, 64, 65, 129)),
        "sequences of one token beside long ones: keys of a neighbour in the last block",
    ),
    _Spec("varlen-empty", partial(varlen, **NO_TOKENS), _EMPTY),
    _Spec("varlen-no-keys", partial(varlen, **NO_KEYS), _EMPTY),
    _Spec("varlen-no-keys-full", partial(varlen, **NO_KEYS, causal=False), _EMPTY),
    _Spec("varlen-no-keys-d72", partial(varlen, **NO_KEYS, head_dim=72), _EMPTY),
    _Spec("varlen-window", partial(varlen, window=(16, 0)), SDIST_WINDOW_BUG, True),
    _Spec("cache", partial(kv_cache), _CACHE),
    _Spec("cache-rows", partial(kv_cache, rows=(3, 1)), _CACHE),
    _Spec(
        "cache-stale",
        partial(kv_cache, new=0, stale=True, lengths=(50, 98)),
        "what lies behind the sequence is loaded and gives NaN (sdist 2.8.3, aiter 0.1.20.post1)",
    ),
    _Spec(
        "cache-pages",
        partial(kv_cache, page=20),
        "a block_table that is ignored (sdist 2.8.3)",
        True,
    ),
    _Spec(
        "cache-leftpad",
        partial(kv_cache, new=0, leftpad=(5, 9)),
        "a cache_leftpad that is ignored (sdist 2.8.3, aiter 0.1.20.post1)",
        True,
    ),
)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """All cases, with tensors in dtype; the same case has the same numbers in every run."""
    suffix = str(dtype).removeprefix("torch.")
    for spec in _SPECS:
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        call, expected = spec.build(
            lambda *shape, generator=generator: torch.randn(shape, generator=generator).to(dtype)
        )
        yield Case(
            f"{spec.name}-{suffix}",
            f"{call.function} {spec.name} {suffix}",
            spec.why,
            call,
            expected,
            spec.may_refuse,
            spec.size,
        )

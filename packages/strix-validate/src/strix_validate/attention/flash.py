# SPDX-License-Identifier: BSD-3-Clause
"""Calls of flash-attn's public functions, and their expected results."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.triton import stand_in
from strix_validate.triton.call import move

#: Lengths for varlen. The first and the last sequence and one in the middle are empty. Another
#: sequence has keys but no queries.
NO_TOKENS = {
    "lengths_q": (0, 37, 0, 0, 64, 0),
    "lengths_k": (0, 64, 0, 20, 50, 0),
}
#: Lengths for varlen. The first and the last sequence and one in the middle have queries but no
#: keys. The one in the middle has more queries than a block of any kernel.
NO_KEYS = {
    "lengths_q": (5, 33, 140, 37, 160, 7),
    "lengths_k": (0, 70, 0, 64, 170, 0),
}


@dataclass(frozen=True)
class FlashCall:
    """The call flash_attn.<name>(**tensors, **options).

    Attributes:
        name: Name of a function of flash_attn.
        tensors: Arguments that are tensors. Queries, keys and values have flash-attn's layout:
            (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), with another dimension
            before the heads if they are packed into one tensor.
        options: Other arguments.
        grad_out: Gradient of the output, or None. With a gradient, the gradients of q, k and v, or
            of the packed tensors, are computed too.
        repeats: Number of calls; with more than 1, their outputs are compared bit by bit. It has an
            effect only with grad_out.
        infers: Whether the output is also computed without gradients. It has an effect only with
            grad_out.
    """

    name: str
    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    grad_out: Tensor | None = None
    repeats: int = 1
    infers: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensors."""
        return next(iter(self.tensors.values())).dtype

    def prepare(self) -> str:
        """Make flash-attn accept CPU tensors; return a description of the kernels that it uses."""
        kernels = f"flash-attn's kernels: {backend()}"
        stand_in.accept_cpu_tensors()
        return kernels

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call on a device. Exceptions of flash_attn are not caught.

        Returns:
            "out", and "lse" if the call returns it.
            With grad_out, the gradients, such as "dq" for q. Without grad_out, the tensors that
            were passed, because the call may have changed them.
            With grad_out and infers, "inference", the output without gradients.
            With grad_out and more than 1 repeat, "differing", the number of calls whose output
            differs from the first.
        """
        import flash_attn

        tensors = {name: move(tensor, device) for name, tensor in self.tensors.items()}
        function = getattr(flash_attn, self.name)
        if self.grad_out is None:
            out = function(**tensors, **self.options)
            if self.options.get("return_softmax_lse"):
                return {"out": out[0], "lse": out[1], **tensors}
            return {"out": out, **tensors}
        names = [name for name in ("q", "k", "v", "kv", "qkv") if name in tensors]
        leaves = [tensors[name].detach().requires_grad_() for name in names]
        tensors.update(zip(names, leaves, strict=True))
        out = function(**tensors, **self.options)
        lse = None
        if self.options.get("return_attn_probs"):
            out, lse, _ = out
        grads = torch.autograd.grad(out, leaves, move(self.grad_out, device))
        results = {"out": out.detach()}
        for name, grad in zip(names, grads, strict=True):
            results[f"d{name}"] = grad
        if lse is not None:
            results["lse"] = lse
        if self.infers:
            with torch.no_grad():
                results["inference"] = function(**tensors, **self.options)
        if self.repeats > 1:
            differing = 0.0
            for _ in range(self.repeats - 1):
                differing += not torch.equal(out, function(**tensors, **self.options))
            results["differing"] = torch.tensor(differing)
        return results


def backend() -> str:
    """Return the name of the kernels that flash-attn uses.

    It is "aiter", "built-in" or "cuda"; or "unknown" if flash-attn lacks the patch that names them.
    """
    import flash_attn  # noqa: F401 (it loads the module below)

    return getattr(sys.modules["flash_attn.flash_attn_interface"], "BACKEND", "unknown")


def fixed(  # noqa: PLR0913 (the options of a case)
    randn,
    *,
    batch=1,
    heads=2,
    kv_heads=2,
    seqlen_q=70,
    seqlen_k=70,
    head_dim=64,
    strided=False,
    sink=None,
    alibi="",
    low=0.0,
    **options,
):
    """Build a call of flash_attn_func with random tensors; see :func:`dense`.

    Args:
        randn: Draws normal numbers of a shape; see triton.cases.Randn.
        batch: Number of sequences.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        seqlen_q: Number of queries.
        seqlen_k: Number of keys.
        head_dim: Size of a head.
        strided: Whether the output's gradient is transposed, and k and v are slices of one tensor
            that has NaN between the heads.
        sink: See reference.with_sink.
        alibi: "heads" for slopes by head, "batch" for other slopes in each sequence, "" for none.
        low: Level of reference.with_low_scores; 0 for none.
        options: Options of dense.
    """
    q = randn(batch, seqlen_q, heads, head_dim)
    kv = randn(batch, seqlen_k, 2, kv_heads, head_dim)
    if strided:
        # aiter's wide loads need a stride between heads that is a multiple of 8. With this stride,
        # head_dim + 4, aiter cannot use them.
        kv = torch.nn.functional.pad(kv, (0, 4), value=float("nan"))[..., :head_dim]
    k, v = kv.unbind(2)
    grad_out = randn(batch, heads, seqlen_q, head_dim).transpose(1, 2)
    if not strided:
        k = k.contiguous()
        v = v.contiguous()
        grad_out = grad_out.contiguous()
    if sink:
        swapped = (x.transpose(1, 2) for x in (q, k, v, grad_out))
        inputs = reference.with_sink(*swapped, sink=sink)
        q, k, v, grad_out = (x.transpose(1, 2).contiguous().to(q.dtype) for x in inputs)
    if low:
        q, k = reference.with_low_scores(q, k, low, head_dim**-0.5)
    if alibi:
        options["alibi"] = _make_slopes(batch, heads, alibi)
    return dense(q, k, v, grad_out, **options)


def dense(  # noqa: PLR0913 (the options of a case)
    q,
    k,
    v,
    grad_out,
    *,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    dropout=0.0,
    repeats=1,
    lse=False,
    scale=None,
    alibi=None,
    pack="",
    infers=False,
):
    """Build a call of flash_attn_func with these tensors.

    Args:
        q: Queries, (batch, seqlen_q, heads, head_dim).
        k: Keys, (batch, seqlen_k, kv_heads, head_dim).
        v: Values, like k.
        grad_out: Gradient of the output, like q.
        causal: Whether the last query sees all keys, and each other query sees one key fewer than
            the query after it.
        window: See reference.mask.
        softcap: See reference.attention.
        dropout: Share of weights to drop. With dropout, the only expected result is that each
            repeated call drops other weights.
        repeats: See FlashCall.
        lse: See reference.attention.
        scale: See reference.attention.
        alibi: Slopes, (heads,) or (batch, heads).
        pack: "kv" or "qkv" to pass these tensors packed into one; "" for none.
        infers: See FlashCall.

    Returns:
        The call, and a function that takes a precision and returns the expected tensors by name.
    """
    options = _make_options(causal, window, lse, scale)
    options |= {"softcap": softcap, "dropout_p": dropout}
    tensors = _pack({"q": q, "k": k, "v": v}, pack, 2)
    bias = None
    if alibi is not None:
        tensors["alibi_slopes"] = alibi
        bias = _alibi_bias(alibi, q.shape[1], k.shape[1])
    function = get_function_name(fixed, pack)
    call = FlashCall(function, tensors, options, grad_out, repeats, infers)
    masks = {
        "causal": "bottom-right" if causal else None,
        "window": window,
        "softcap": softcap,
        "attn_mask": bias,
    }

    def expected(dtype):
        if dropout:
            return {"differing": torch.tensor(float(repeats - 1))}
        results = _attend(q, k, v, grad_out, dtype=dtype, lse=lse, scale=scale, **masks)
        results = _pack_gradients(results, pack, 2)
        if infers:
            results["inference"] = results["out"]
        if repeats > 1:
            results["differing"] = torch.tensor(0.0)
        return results

    return call, expected


def _make_slopes(batch: int, heads: int, kind: str) -> Tensor:
    """Return ALiBi slopes: (batch, heads) if the kind is "batch", (heads,) if it is "heads"."""
    slopes = torch.exp2(-torch.arange(1.0, batch * heads + 1)).view(batch, heads)
    return slopes if kind == "batch" else slopes[0]


def _alibi_bias(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the bias of ALiBi: 0 at the query's own key, and negative on both sides of it."""
    aligned_key = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance = (aligned_key - torch.arange(seqlen_k)).abs()
    return -slopes[..., None, None].double() * distance


def varlen(  # noqa: PLR0913 (the options of a case)
    randn,
    *,
    lengths_q=(37, 64, 10),
    lengths_k=(64, 64, 50),
    head_dim=64,
    causal=True,
    window=(-1, -1),
    lse=False,
    heads=4,
    kv_heads=2,
    scale=None,
    pack="",
    low=0.0,
):
    """Build a call of flash_attn_varlen_func, whose sequences follow each other in one tensor.

    Args:
        randn: See :func:`fixed`.
        lengths_q: Number of queries of each sequence.
        lengths_k: Number of keys of each sequence.
        head_dim: Size of a head.
        causal: See :func:`dense`.
        window: See reference.mask.
        lse: See reference.attention.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        scale: See reference.attention.
        pack: See :func:`dense`.
        low: See :func:`fixed`.

    Returns:
        See :func:`dense`.
    """
    q = randn(sum(lengths_q), heads, head_dim)
    grad_out = randn(sum(lengths_q), heads, head_dim)
    k = randn(sum(lengths_k), kv_heads, head_dim)
    v = randn(sum(lengths_k), kv_heads, head_dim)
    if low:
        q, k = reference.with_low_scores(q, k, low, scale or head_dim**-0.5)
    options = _make_options(causal, window, lse, scale)
    starts_q = torch.tensor([0, *accumulate(lengths_q)], dtype=torch.int32)
    starts_k = torch.tensor([0, *accumulate(lengths_k)], dtype=torch.int32)
    if pack == "qkv":
        starts = {"cu_seqlens": starts_q}
        options["max_seqlen"] = max(lengths_q)
    else:
        starts = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        options["max_seqlen_q"] = max(lengths_q)
        options["max_seqlen_k"] = max(lengths_k)
    tensors = _pack({"q": q, "k": k, "v": v}, pack, 1) | starts
    call = FlashCall(get_function_name(varlen, pack), tensors, options, grad_out)
    masks = {
        "causal": "bottom-right" if causal else None,
        "window": window,
        "lse": lse,
        "scale": scale,
    }

    def expected(dtype):
        sequences = zip(
            q.split(lengths_q),
            k.split(lengths_k),
            v.split(lengths_k),
            grad_out.split(lengths_q),
            strict=True,
        )
        parts = []
        for tensors in sequences:
            batch_of_one = (x[None] for x in tensors)
            parts.append(_attend(*batch_of_one, dtype=dtype, **masks))
        results = {}
        for name in parts[0]:
            # lse has the shape (heads, tokens), out and the gradients (tokens, heads, head_dim)
            axis = 1 if name == "lse" else 0
            results[name] = torch.cat([part[name][0] for part in parts], axis)
        return _pack_gradients(results, pack, 1)

    return call, expected


def _make_options(
    causal: bool,
    window: tuple[int, int],
    lse: bool,
    scale: float | None,
) -> dict[str, Any]:
    """Return the arguments that calls of :func:`dense` and :func:`varlen` share, except tensors."""
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window,
        "return_attn_probs": lse,
    }
    if scale is not None:
        options["softmax_scale"] = scale
    return options


def _pack(tensors: dict[str, Tensor], pack: str, axis: int) -> dict[str, Tensor]:
    """Stack the tensors that `pack` names by letter; return the stack and the others by name."""
    packed = {name: x for name, x in tensors.items() if name not in pack}
    if pack:
        packed[pack] = torch.stack([tensors[name] for name in pack], axis)
    return packed


def _pack_gradients(results: dict[str, Tensor], pack: str, axis: int) -> dict[str, Tensor]:
    """Stack the gradients of the tensors in `pack`; return the stack and the others by name."""
    gradients = [f"d{name}" for name in pack]
    packed = {name: x for name, x in results.items() if name not in gradients}
    if pack:
        packed[f"d{pack}"] = torch.stack([results[name] for name in gradients], axis)
    return packed


def kv_cache(  # noqa: PLR0913 (the options of a case)
    randn,
    *,
    new=4,
    rows=None,
    leftpad=None,
    page=None,
    stale=False,
    lengths=(50, 77),
    rotary="",
    scale=None,
    queries=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    capacity=100,
    batch=4,
    window=(-1, -1),
    low=0.0,
    causal=True,
    lse=False,
    integer=False,
    strided=False,
    alibi="",
):
    """Build a call of flash_attn_with_kvcache with a few queries for each sequence.

    Args:
        randn: See :func:`fixed`.
        new: Number of entries (a key and a value) that the call appends to each sequence.
        rows: The row of the cache that belongs to each sequence (cache_batch_idx); None if sequence
            i has row i.
        leftpad: For each sequence, the number of entries to ignore at its start; None for none.
        page: Size of a page of a paged cache; None for a cache without pages.
        stale: Whether the cache contains NaN after the entries of each sequence.
        lengths: Number of entries in the cache before the call, for each sequence.
        rotary: How the first 32 elements of each head of q and k are paired for the rotation,
            "neighbours" or "halves"; "" for no rotation.
        scale: See reference.attention.
        queries: Number of queries of each sequence.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        capacity: Number of entries in a row of the cache. The default is not a multiple of the
            number of keys that a kernel reads in one block.
        batch: Number of rows of the cache. Without `rows`, the cache has one row for each sequence
            instead.
        window: See reference.mask.
        low: See :func:`fixed`.
        causal: See :func:`dense`. Without it, all queries of a sequence are rotated by the angles
            of one position, the sequence's number of entries before the call.
        lse: See reference.attention.
        integer: Whether cache_seqlens is one number, the first length, instead of a tensor.
        strided: Whether the key and the value of an entry lie side by side in one tensor.
        alibi: See :func:`fixed`.

    Returns:
        See :func:`dense`.
    """
    count = len(lengths)
    q = randn(count, queries, heads, head_dim)
    k_cache = randn(batch, capacity, kv_heads, head_dim)
    v_cache = randn(batch, capacity, kv_heads, head_dim)
    k = randn(count, new, kv_heads, head_dim)
    v = randn(count, new, kv_heads, head_dim)
    if low:
        score_scale = scale or head_dim**-0.5
        _, k = reference.with_low_scores(q, k, low, score_scale)
        q, k_cache = reference.with_low_scores(q, k_cache, low, score_scale)
    rotated_q = q
    rotated_k = k
    angles: dict[str, Tensor] = {}
    if rotary:
        angles = _make_angles(capacity, q.dtype)
        rotated_q = _rotate(q, angles, lengths, rotary, queries if causal else 1)
        rotated_k = _rotate(k, angles, lengths, rotary, new)
    cache_rows = list(rows or range(count))
    filled_k = _append(k_cache[cache_rows], rotated_k, lengths)
    filled_v = _append(v_cache[cache_rows], v, lengths)
    if stale:
        _fill_with_nan(k_cache, cache_rows, lengths)
        _fill_with_nan(v_cache, cache_rows, lengths)
    if rows is None:
        k_cache = k_cache[:count]
        v_cache = v_cache[:count]
    tensors = {"q": q} | _lay_out_cache(k_cache, v_cache, page, strided)
    tensors |= _make_integers(cache_seqlens=None if integer else lengths)
    if new:
        tensors |= {"k": k, "v": v}
    tensors |= _make_integers(cache_batch_idx=rows, cache_leftpad=leftpad)
    if alibi:
        tensors["alibi_slopes"] = _make_slopes(count, heads, alibi)
    options = {
        "causal": causal,
        "rotary_interleaved": rotary == "neighbours" if rotary else None,
        "return_softmax_lse": lse or None,
        "cache_seqlens": lengths[0] if integer else None,
        "softmax_scale": scale,
        "window_size": None if window == (-1, -1) else window,
    }
    options = {name: value for name, value in options.items() if value is not None}
    call = FlashCall(get_function_name(kv_cache), tensors | angles, options)
    starts = leftpad or (0,) * count
    masks = {
        "causal": "bottom-right" if causal else None,
        "window": window,
        "scale": scale,
        "lse": lse,
    }

    def expected(dtype):
        used = [slice(start, n + new) for start, n in zip(starts, lengths, strict=True)]
        slopes = tensors.get("alibi_slopes")
        results = _attend_to_cache(
            rotated_q, filled_k, filled_v, used, slopes, dtype=dtype, **masks
        )
        if not integer:
            results["cache_seqlens"] = tensors["cache_seqlens"].clone()
        if new and not page and not stale:
            results["k_cache"] = k_cache.clone()
            results["v_cache"] = v_cache.clone()
            results["k_cache"][cache_rows] = filled_k
            results["v_cache"][cache_rows] = filled_v
        return results

    return call, expected


def _append(cache: Tensor, new: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Write the new entries of each sequence after its existing entries; return the cache.

    Args:
        cache: A copy of each sequence's row, (sequences, capacity, kv_heads, head_dim).
        new: New entries, (sequences, tokens, kv_heads, head_dim).
        lengths: Entries of each sequence.
    """
    count = new.shape[1]
    for i, length in enumerate(lengths):
        cache[i, length : length + count] = new[i]
    return cache


def _fill_with_nan(cache: Tensor, rows: list[int], lengths: tuple[int, ...]) -> None:
    """Write NaN after the entries of each sequence; `rows` has each sequence's row of the cache."""
    for row, length in zip(rows, lengths, strict=True):
        cache[row, length:] = float("nan")


def _make_integers(**values: tuple[int, ...] | None) -> dict[str, Tensor]:
    """Return the given values as tensors, by name; leave out None."""
    return {name: torch.tensor(x, dtype=torch.int32) for name, x in values.items() if x}


def _attend_to_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    used: list[slice],
    slopes: Tensor | None,
    **options,
) -> dict[str, Tensor]:
    """Return the output of attention to each sequence's used entries, and lse if requested.

    Args:
        q: Queries, (sequences, queries, heads, head_dim).
        k_cache: A copy of each sequence's row, (sequences, capacity, kv_heads, head_dim).
        v_cache: Like k_cache.
        used: The used entries of each sequence.
        slopes: ALiBi slopes, (heads,) or (sequences, heads), or None.
        options: Options of reference.attention.
    """
    parts = []
    for i, entries in enumerate(used):
        own_q = q[i : i + 1]
        own_k = k_cache[i : i + 1, entries]
        own_v = v_cache[i : i + 1, entries]
        bias = None
        if slopes is not None:
            own_slopes = slopes.expand(len(q), -1)[i]
            bias = _alibi_bias(own_slopes, own_q.shape[1], own_k.shape[1])
        parts.append(_attend(own_q, own_k, own_v, own_q, attn_mask=bias, **options))
    names = ("out", "lse") if options["lse"] else ("out",)
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _lay_out_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    page: int | None,
    strided: bool,
) -> dict[str, Tensor]:
    """Return the arguments for a cache, in pages or strided if requested; see :func:`kv_cache`."""
    caches = {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()}
    table = {}
    if page:
        rows, capacity, *shape = k_cache.shape
        order = torch.arange(rows * (capacity // page)).flip(0)
        for name, x in caches.items():
            caches[name] = x.view(-1, page, *shape)[order].contiguous()
        table["block_table"] = order.view(rows, -1).int()
    if strided:
        parts = torch.stack(list(caches.values()), 2).unbind(2)
        caches = dict(zip(caches, parts, strict=True))
    return caches | table


def get_function_name(build: Callable, pack: str = "") -> str:
    """Return the name of the flash_attn function that a builder's call uses.

    Args:
        build: fixed, varlen or kv_cache.
        pack: See :func:`dense`.
    """
    packed = f"{pack}packed_" if pack else ""
    if build is fixed:
        return f"flash_attn_{packed}func"
    if build is varlen:
        return f"flash_attn_varlen_{packed}func"
    return "flash_attn_with_kvcache"


def _make_angles(capacity: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the cosines and sines for each position in a cache, (capacity, 16)."""
    angle = torch.arange(capacity)[:, None] * torch.exp2(-torch.arange(16.0) / 2)
    return {
        "rotary_cos": angle.cos().to(dtype),
        "rotary_sin": angle.sin().to(dtype),
    }


def _rotate(
    x: Tensor,
    angles: dict[str, Tensor],
    lengths: tuple[int, ...],
    rotary: str,
    count: int,
) -> Tensor:
    """Rotate x by the angles of the positions that follow each sequence's entries.

    Args:
        x: (sequences, tokens, heads, head_dim).
        angles: The result of _make_angles.
        lengths: Number of entries of each sequence.
        rotary: See :func:`kv_cache`.
        count: Number of positions. With 1, all tokens are rotated by the same angles.
    """
    parts = []
    for i, length in enumerate(lengths):
        positions = slice(length, length + count)
        part = reference.rotate(
            x[i],
            angles["rotary_cos"][positions, None],
            angles["rotary_sin"][positions, None],
            torch.float64,
            neighbours=rotary == "neighbours",
        )
        parts.append(part.to(x.dtype))
    return torch.stack(parts)


def _attend(q, k, v, grad_out, *, dtype, **options) -> dict[str, Tensor]:
    """Run reference.attention on tensors in flash-attn's layout."""
    swapped = (x.transpose(1, 2) for x in (q, k, v, grad_out))
    results = reference.attention(*swapped, dtype=dtype, **options)
    results.pop("dmask", None)
    for name, x in results.items():
        if name != "lse":
            results[name] = x.transpose(1, 2)
    return results

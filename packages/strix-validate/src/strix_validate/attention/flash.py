# SPDX-License-Identifier: BSD-3-Clause
"""Calls of flash-attn's public functions, and what they must return."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.triton import stand_in
from strix_validate.triton.call import move

#: The first, a middle and the last sequence are empty; one has keys but no queries.
NO_TOKENS = {"lengths_q": (0, 37, 0, 0, 64, 0), "lengths_k": (0, 64, 0, 20, 50, 0)}
#: Those have queries but no keys, one of them more queries than a block of any kernel has.
NO_KEYS = {"lengths_q": (5, 33, 140, 37, 160, 7), "lengths_k": (0, 70, 0, 64, 170, 0)}


@dataclass(frozen=True)
class FlashCall:
    """The call flash_attn.<name>(**tensors, **options).

    Tensors have flash-attn's layout, (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim).
    With grad_out, shaped like the output, the gradients of q, k and v, or of the tensors that hold
    them, are computed as well; with infers, the output again without gradients. With repeats above
    1, the outputs of all calls are compared bit by bit.
    """

    name: str
    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    grad_out: Tensor | None = None
    repeats: int = 1
    infers: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the tensors."""
        return next(iter(self.tensors.values())).dtype

    def prepare(self) -> str:
        """Make flash-attn take CPU tensors; return which kernels it uses."""
        found = f"flash-attn's kernels: {backend()}"
        stand_in.accept_cpu_tensors()
        return found

    def execute(self, device: str) -> dict[str, Tensor]:
        """Make the call; return out with dq, dk, dv, or else with the arguments, maybe changed.

        With repeats also "differing": how many calls returned another output than the first.
        flash_attn's own exceptions pass through.
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
        lse = {}
        if self.options.get("return_attn_probs"):
            out, lse["lse"], _ = out
        grads = torch.autograd.grad(out, leaves, move(self.grad_out, device))
        grads = {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
        found = {"out": out.detach(), **grads, **lse}
        if self.infers:
            with torch.no_grad():
                found["inference"] = function(**tensors, **self.options)
        if self.repeats > 1:
            again = (function(**tensors, **self.options) for _ in range(self.repeats - 1))
            found["differing"] = torch.tensor(float(sum(not torch.equal(out, x) for x in again)))
        return found


def backend() -> str:
    """Return the kernels that flash-attn uses: "aiter", "built-in", or "unknown" if not patched."""
    import flash_attn  # noqa: F401

    return getattr(sys.modules["flash_attn.flash_attn_interface"], "BACKEND", "unknown")


def fixed(  # noqa: PLR0913 (a case's options)
    randn, *, batch=1, heads=2, kv_heads=2, seqlen_q=70, seqlen_k=70, head_dim=64, strided=False,
    sink=None, alibi="", low=0.0, **options,
):  # fmt: skip
    """Build a call of flash_attn_func with random tensors; see :func:`dense`.

    strided: k and v are slices of one tensor, and the gradient is transposed. sink: see
    reference.with_sink. low: if not 0, see reference.with_low_scores. alibi: "heads" for slopes by
    head, "batch" for other ones in each sequence. options: of dense.
    """
    q = randn(batch, seqlen_q, heads, head_dim)
    kv = randn(batch, seqlen_k, 2, kv_heads, head_dim)
    k, v = kv.unbind(2) if strided else (kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous())
    grad_out = randn(batch, heads, seqlen_q, head_dim).transpose(1, 2)
    grad_out = grad_out if strided else grad_out.contiguous()
    if sink:
        swapped = (x.transpose(1, 2) for x in (q, k, v, grad_out))
        found = reference.with_sink(*swapped, sink=sink)
        q, k, v, grad_out = (x.transpose(1, 2).contiguous().to(q.dtype) for x in found)
    if low:
        q, k = reference.with_low_scores(q, k, low, head_dim**-0.5)
    if alibi:
        slopes = torch.exp2(-torch.arange(1.0, batch * heads + 1)).view(batch, heads)
        options["alibi"] = slopes if alibi == "batch" else slopes[0]
    return dense(q, k, v, grad_out, **options)


def dense(  # noqa: PLR0913 (a case's options)
    q, k, v, grad_out, *, causal=False, window=(-1, -1), softcap=0.0, dropout=0.0, repeats=1,
    lse=False, scale=None, alibi=None, pack="", infers=False,
):  # fmt: skip
    """Build a call of flash_attn_func with these tensors; lse and scale: see reference.attention.

    With dropout, only one thing is expected: that a second call drops other weights. alibi: slopes,
    (heads,) or (batch, heads). pack: "kv" or "qkv" passes these as one tensor.
    """
    options = _options(causal, window, lse, scale) | {"softcap": softcap, "dropout_p": dropout}
    tensors = _packed({"q": q, "k": k, "v": v}, pack, 2)
    function = function_of(fixed, pack)
    more = {"alibi_slopes": alibi} if alibi is not None else {}
    call = FlashCall(function, tensors | more, options, grad_out, repeats, infers)
    corner = "bottom-right" if causal else None
    bias = None
    if alibi is not None:
        # 0 at the query's own key, and less on both sides
        own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        bias = -alibi[..., None, None].double() * (own - torch.arange(k.shape[1])).abs()

    def expected(dtype):
        differing = {"differing": torch.tensor(float(repeats - 1 if dropout else 0))}
        if dropout:
            return differing
        masks = {"causal": corner, "window": window, "softcap": softcap}
        found = _attend(
            q, k, v, grad_out, dtype=dtype, lse=lse, attn_mask=bias, scale=scale, **masks
        )
        found = _packed_gradients(found, pack, 2)
        if infers:
            found["inference"] = found["out"]
        return found | (differing if repeats > 1 else {})

    return call, expected


def varlen(  # noqa: PLR0913 (a case's options)
    randn, *, lengths_q=(37, 64, 10), lengths_k=(64, 64, 50), head_dim=64, causal=True,
    window=(-1, -1), lse=False, heads=4, kv_heads=2, scale=None, pack="", low=0.0,
):  # fmt: skip
    """Build a call of flash_attn_varlen_func: sequences of these lengths, one after the other.

    pack: see :func:`dense`. low: see :func:`fixed`.
    """
    q, grad_out = (randn(sum(lengths_q), heads, head_dim) for _ in range(2))
    k, v = (randn(sum(lengths_k), kv_heads, head_dim) for _ in range(2))
    if low:
        q, k = reference.with_low_scores(q, k, low, scale or head_dim**-0.5)
    starts = {
        "cu_seqlens_q": torch.tensor([0, *accumulate(lengths_q)], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, *accumulate(lengths_k)], dtype=torch.int32),
    }
    options = _options(causal, window, lse, scale)
    options |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    function = function_of(varlen, pack)
    if pack == "qkv":
        starts = {"cu_seqlens": starts["cu_seqlens_q"]}
        del options["max_seqlen_k"]
        options["max_seqlen"] = options.pop("max_seqlen_q")
    tensors = _packed({"q": q, "k": k, "v": v}, pack, 1)
    call = FlashCall(function, tensors | starts, options, grad_out)
    corner = "bottom-right" if causal else None

    def expected(dtype):
        lengths = (lengths_q, lengths_k, lengths_k, lengths_q)
        sequences = [x.split(n) for x, n in zip((q, k, v, grad_out), lengths, strict=True)]
        masks = {"causal": corner, "window": window, "lse": lse, "scale": scale}
        parts = [
            _attend(*(x[None] for x in tensors), dtype=dtype, **masks)
            for tensors in zip(*sequences, strict=True)
        ]
        found = {
            # the logarithms are (heads, tokens)
            name: torch.cat([part[name][0] for part in parts], 1 if name == "lse" else 0)
            for name in parts[0]
        }
        return _packed_gradients(found, pack, 1)

    return call, expected


def _options(causal: bool, window: tuple[int, int], lse: bool, scale: float | None) -> dict:
    """Return what a call of flash-attn takes beside tensors."""
    options = {"causal": causal, "window_size": window, "return_attn_probs": lse}
    return options | ({"softmax_scale": scale} if scale is not None else {})


def _packed(tensors: dict[str, Tensor], pack: str, axis: int) -> dict[str, Tensor]:
    """Return the tensors, with those of the letters in pack stacked into one."""
    alone = {name: x for name, x in tensors.items() if name not in pack}
    return alone | ({pack: torch.stack([tensors[name] for name in pack], axis)} if pack else {})


def _packed_gradients(found: dict[str, Tensor], pack: str, axis: int) -> dict[str, Tensor]:
    """Return what was found, with the gradients of the letters in pack stacked into one."""
    alone = {name: x for name, x in found.items() if name not in [f"d{n}" for n in pack]}
    if pack:
        alone[f"d{pack}"] = torch.stack([found[f"d{name}"] for name in pack], axis)
    return alone


def kv_cache(  # noqa: C901, PLR0913 (a case and what it should give)
    randn, *, new=4, rows=None, leftpad=None, page=None, stale=False, lengths=(50, 77),
    rotary="", scale=None, queries=4, heads=4, kv_heads=2, head_dim=64, capacity=100, batch=4,
    window=(-1, -1), low=0.0, causal=True, lse=False, integer=False, strided=False,
):  # fmt: skip
    """Build a call of flash_attn_with_kvcache: a few queries for each sequence.

    Args:
        new: keys appended; rows: the row of the cache that each sequence has (cache_batch_idx);
        leftpad: entries to leave out in front; page: size of a page of a paged cache; stale: the
        cache holds NaN behind each sequence; lengths: entries in the cache before the call;
        rotary: "neighbours" or "halves" of the first 32 lanes of q and k are turned; batch: rows of
        the cache; capacity: entries of each, by default no multiple of a block of keys; low: see
        :func:`fixed`; causal: otherwise all queries are turned as one at the cache's length;
        lse: see reference.attention; integer: cache_seqlens is a number, the first length;
        strided: keys and values of an entry lie side by side in one tensor.
    """
    count, shape = len(lengths), (kv_heads, head_dim)
    q = randn(count, queries, heads, head_dim)
    k_cache, v_cache = (randn(batch, capacity, *shape) for _ in "kv")
    k, v = (randn(count, new, *shape) for _ in "kv")
    if low:
        scores = (low, scale or head_dim**-0.5)
        q, k_cache = reference.with_low_scores(q, k_cache, *scores)
        _, k = reference.with_low_scores(q, k, *scores)
    own_rows = list(rows or range(count))
    angles: dict[str, Tensor] = {}
    turned_q, new_k = q, k
    if rotary:
        angles, (turned_q, new_k) = _turned((q, k), lengths, capacity, rotary, causal)
    filled_k, filled_v = k_cache[own_rows], v_cache[own_rows]
    for i, length in enumerate(lengths):
        filled_k[i, length : length + new], filled_v[i, length : length + new] = new_k[i], v[i]
        if stale:
            k_cache[own_rows[i], length:] = v_cache[own_rows[i], length:] = float("nan")
    if rows is None:
        k_cache, v_cache = k_cache[:count], v_cache[:count]
    tensors = {"q": q} | _laid_out(k_cache, v_cache, page, strided)
    if not integer:
        tensors["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    if new:
        tensors |= {"k": k, "v": v}
    for name, value in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
        if value:
            tensors[name] = torch.tensor(value, dtype=torch.int32)
    plain = {"rotary_interleaved": rotary == "neighbours" if rotary else None,
        "return_softmax_lse": lse or None, "cache_seqlens": lengths[0] if integer else None,
        "softmax_scale": scale, "window_size": None if window == (-1, -1) else window}  # fmt: skip
    options = {"causal": causal} | {n: value for n, value in plain.items() if value is not None}
    call = FlashCall(function_of(kv_cache), tensors | angles, options)

    def expected(dtype):
        outs = []
        for i, length in enumerate(lengths):
            used = slice((leftpad or [0] * count)[i], length + new)
            keys, values = filled_k[i : i + 1, used], filled_v[i : i + 1, used]
            part = turned_q[i : i + 1]
            masks = {"causal": "bottom-right" if causal else None, "scale": scale, "lse": lse}
            outs.append(_attend(part, keys, values, part, dtype=dtype, window=window, **masks))
        names = ("out", "lse") if lse else ("out",)
        found = {name: torch.cat([own[name] for own in outs]) for name in names}
        if not integer:
            found["cache_seqlens"] = tensors["cache_seqlens"].clone()
        if new and not page and not stale:
            k_after, v_after = k_cache.clone(), v_cache.clone()
            k_after[own_rows], v_after[own_rows] = filled_k, filled_v
            found |= {"k_cache": k_after, "v_cache": v_after}
        return found

    return call, expected


def _laid_out(
    k_cache: Tensor, v_cache: Tensor, page: int | None, strided: bool
) -> dict[str, Tensor]:
    """Return a cache as a call takes it; see :func:`kv_cache`."""
    caches, table = {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()}, {}
    if page:
        rows, capacity, *shape = k_cache.shape
        order = torch.arange(rows * (capacity // page)).flip(0)
        for name, x in caches.items():
            caches[name] = x.view(-1, page, *shape)[order].contiguous()
        table["block_table"] = order.view(rows, -1).int()
    if strided:
        both = torch.stack(list(caches.values()), 2).unbind(2)
        caches = dict(zip(caches, both, strict=True))
    return caches | table


def function_of(build: Callable, pack: str = "") -> str:
    """Return the name of the function that a builder's call takes; pack: see :func:`dense`."""
    names = {fixed: "flash_attn_{}func", varlen: "flash_attn_varlen_{}func"}
    return names.get(build, "flash_attn_with_kvcache").format(f"{pack}packed_" if pack else "")


def _turned(
    both: tuple[Tensor, Tensor], lengths: tuple[int, ...], capacity: int, rotary: str, causal: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return angles of each entry of a cache, and what is turned by those behind each sequence.

    both: queries, which all have the first angle if they are not causal, and keys.
    """
    angle = torch.arange(capacity)[:, None] * torch.exp2(-torch.arange(16.0) / 2)
    angles = {f"rotary_{n}": getattr(angle, n)().to(both[0].dtype) for n in ("cos", "sin")}

    def turn(x: Tensor, start: int, count: int) -> Tensor:
        cos, sin = (angles[f"rotary_{n}"][start : start + count, None] for n in ("cos", "sin"))
        neighbours = rotary == "neighbours"
        return reference.rotated(x, cos, sin, torch.float64, neighbours=neighbours).to(x.dtype)

    counts = (both[0].shape[1] if causal else 1, both[1].shape[1])
    return angles, [
        torch.stack([turn(x[i], length, count) for i, length in enumerate(lengths)])
        for x, count in zip(both, counts, strict=True)
    ]


def _attend(q, k, v, grad_out, *, dtype, **options) -> dict[str, Tensor]:
    """Run reference.attention on tensors in flash-attn's layout."""
    swapped = (x.transpose(1, 2) for x in (q, k, v, grad_out))
    found = reference.attention(*swapped, dtype=dtype, **options)
    found.pop("dmask", None)
    return {
        name: tensor if name == "lse" else tensor.transpose(1, 2) for name, tensor in found.items()
    }

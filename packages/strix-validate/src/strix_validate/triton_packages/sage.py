# SPDX-License-Identifier: BSD-3-Clause
"""SageAttention's Triton kernels: attention with queries and keys in 8 bits.

The reference computes attention from queries and keys that are rounded to 8 bits in the same way. A
comparison with exact attention would not show a kernel's fault, because rounding to 8 bits causes
an error of 1.2 % of the output's root mean square on random numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from strix_validate.layers.pairs import Combination, combine
from strix_validate.layers.table import DIFFUSION_MODELS
from strix_validate.numerics import reference
from strix_validate.numerics.reference import LOW_SCORES_FAULT, TERMS, Precision, store
from strix_validate.triton.call import BF16, FP16, PackageCall, Shipped
from strix_validate.triton.cases import Case, Expected, Randn

MODULE = "sageattention"
PACKAGE = "sageattention"
#: Number of rows that share a scale, for queries and for keys.
QUERIES = 128
KEYS = 64
_LOG2_E = 1.44269504


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options) -> dict[str, Tensor]:
    from sageattention import sageattn

    out = sageattn(q, k, v, is_causal=causal, **options)
    return {"out": out, "keys": k}


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    *,
    longest: int,
    causal: bool,
    **options,
) -> dict[str, Tensor]:
    from sageattention import sageattn_varlen

    out = sageattn_varlen(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        is_causal=causal,
        **options,
    )
    return {"out": out, "keys": k}


def _quantize(x: Tensor, rows: int, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each group of rows the codes of x * scale before rounding, and their unit.

    A number is its code times the unit.

    Args:
        x: (heads, tokens, head_dim), float32.
        rows: Number of a head's tokens that share a unit.
        scale: Factor of x.
    """
    for group in (x * scale).split(rows, 1):
        unit = group.abs().amax((1, 2), keepdim=True) / 127
        yield group / unit, unit


def _round(x: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """Round x * scale to 8-bit codes; return the numbers that the codes stand for, in float64."""
    groups = []
    for codes, unit in _quantize(x, rows, scale):
        half = 0.5 * torch.where(codes >= 0, 1.0, -1.0)
        groups.append((codes + half).trunc().double() * unit.double())
    return torch.cat(groups, 1)


def settle(
    x: Tensor,
    lengths: tuple[int, ...],
    rows: int,
    mean: Callable[[Tensor], Tensor] = torch.zeros_like,
    scale: float = 1.0,
) -> None:
    """Move elements away from the middle between two codes, in place.

    Division on a GPU is not always rounded correctly. For an element in the middle, an H100
    sometimes gave the lower and sometimes the higher code. The difference of the results is six
    times a correct kernel's error.

    Args:
        x: (tokens, heads, head_dim).
        lengths: Number of tokens of each sequence.
        rows: Number of tokens that share a scale.
        mean: Returns the mean that a kernel first subtracts from a sequence of x.
        scale: Factor of x.
    """
    is_settled = False
    while not is_settled:
        is_settled = True
        for sequence in x.split(lengths):
            smooth = (sequence - mean(sequence)).transpose(0, 1).float()
            groups = zip(_quantize(smooth, rows, scale), sequence.split(rows), strict=True)
            for (codes, _), group in groups:
                is_middle = ((codes % 1 - 0.5).abs() < 1e-3).transpose(0, 1)
                group[is_middle] *= 1 + 2**-7
                if is_middle.any():
                    is_settled = False


@dataclass(frozen=True)
class _Reference:
    """The expected results of a call of attention.

    Attributes:
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim).
        v: Like k.
        lengths: Number of queries of each sequence.
        lengths_k: Number of keys of each sequence.
        causal: Whether there is a causal mask.
        packed: Whether the sequences are packed.
        transposed: Whether heads come before tokens in the output.
        factor: Scale of the scores, times log2(e).
        smooth: Whether keys are smoothed, which means that their mean is subtracted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool
    packed: bool
    transposed: bool
    factor: float
    smooth: bool

    def compute_mean(self, keys: Tensor) -> Tensor:
        """Return the mean that is subtracted from a sequence's keys, in their dtype.

        If sequences are packed, it is the mean of the keys of all sequences. If keys are not
        smoothed, it is 0.
        """
        if not self.smooth:
            return torch.zeros_like(keys[:1])
        if self.packed:
            return self.k.mean(0, keepdim=True)
        return keys.mean(0, keepdim=True)

    def __call__(self, dtype: Precision) -> dict[str, Tensor]:
        """Return the output, and the keys, which a call must not change."""
        sequences = zip(
            self.q.split(self.lengths),
            self.k.split(self.lengths_k),
            self.v.split(self.lengths_k),
            strict=True,
        )
        outs = [self._attend(dtype, q, k, v) for q, k, v in sequences]
        keys = self.k.double()
        if self.packed:
            return {"out": torch.cat(outs), "keys": keys}
        out = torch.stack(outs)
        keys = keys.unflatten(0, (len(self.lengths), -1))
        if self.transposed:
            out = out.transpose(1, 2)
            keys = keys.transpose(1, 2)
        return {"out": out, "keys": keys}

    def _attend(self, dtype: Precision, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute one sequence's attention, (tokens, heads, head_dim)."""
        group = q.shape[1] // k.shape[1]
        if self.packed and self.smooth:
            mean = self.k.float().mean(0, keepdim=True).to(k.dtype)
        else:
            mean = self.compute_mean(k)
        smooth_keys = (k - mean).transpose(0, 1).float()
        queries = _round(q.transpose(0, 1).float(), QUERIES, self.factor)
        keys = _round(smooth_keys, KEYS).repeat_interleave(group, 0)
        scores = queries @ keys.transpose(1, 2) / _LOG2_E
        if self.causal:
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        exact = torch.float64 if dtype == TERMS else dtype
        weights = scores.to(reference.working_dtype(exact)).softmax(-1)
        values = v.half().transpose(0, 1).repeat_interleave(group, 0).to(weights)
        if dtype == TERMS:
            return (weights @ values.abs()).transpose(0, 1)
        # The kernel sums the products of the blocks of keys in float16.
        narrow = torch.float64 if exact is torch.float64 else torch.float16
        blocks = zip(weights.split(KEYS, -1), values.split(KEYS, 1), strict=True)
        out = sum(store(store(w, narrow) @ x, narrow) for w, x in blocks)
        return store(out.to(weights), exact).transpose(0, 1)


def attention(  # noqa: PLR0913 (the options of a case)
    randn: Randn,
    *,
    lengths=(100,),
    heads=4,
    kv_heads=2,
    head_dim=64,
    causal=False,
    packed=False,
    lengths_k=(),
    layout="HND",
    scale=None,
    low=0.0,
) -> tuple[PackageCall, Expected]:
    """Build a call of attention over sequences of the same length, or packed ones.

    Args:
        randn: Draws the numbers.
        lengths: Number of tokens of each sequence, the same for all unless sequences are packed.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        causal: Whether there is a causal mask.
        packed: Whether the sequences are packed.
        lengths_k: Number of keys of each sequence, if it differs from the number of queries.
        layout: "HND" has heads before tokens, "NHD" tokens before heads.
        scale: Scale of the scores (sm_scale); None is 1 / sqrt(head_dim).
        low: Level of reference.with_low_scores; 0 for none. With low scores, keys are not smoothed,
            because smoothing would raise the scores.
    """
    lengths_k = lengths_k or lengths
    q = randn(sum(lengths), heads, head_dim)
    k = randn(sum(lengths_k), kv_heads, head_dim)
    v = randn(sum(lengths_k), kv_heads, head_dim)
    sm_scale = head_dim**-0.5 if scale is None else scale
    factor = sm_scale * _LOG2_E
    if low:
        q, k = reference.with_low_scores(q, k, low, factor / _LOG2_E)
    expected = _Reference(
        q,
        k,
        v,
        lengths,
        lengths_k,
        causal,
        packed,
        transposed=layout == "HND",
        factor=factor,
        smooth=not low,
    )
    settle(q, lengths, QUERIES, scale=factor)
    settle(k, lengths_k, KEYS, expected.compute_mean)
    options: dict = {"causal": causal}
    if low:
        options["smooth_k"] = False
    if packed:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tensors = {"q": q, "k": k, "v": v, "ends": ends}
        options["longest"] = max(lengths)
        if scale is not None:
            options["sm_scale"] = scale
        return PackageCall(_varlen, tensors, options, 1, package=PACKAGE), expected
    tensors = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        batch = x.unflatten(0, (len(lengths), -1))
        if layout == "HND":
            batch = batch.transpose(1, 2).contiguous()
        tensors[name] = batch
    options["tensor_layout"] = layout
    options["sm_scale"] = scale
    return PackageCall(_attend, tensors, options, 1, package=PACKAGE), expected


_COMPILES = "a kernel that no longer compiles for gfx1151, or multiplies 8-bit numbers without WMMA"
_EDGE = "padding after the last key that gets a share of the weights"
_MASK = "a causal mask that is off by one, or left out in the block on the diagonal"
_GROUP = "a query head that reads another group's keys, or their scale"
_PACKED = "a sequence that reads another sequence's keys or scales"
_MODEL = "a fault with one combination of head dim, mask, layout and group"


def _compiled_cases() -> Iterator[tuple[str, Case]]:
    for head_dim, causal in product((64, 96, 128), (False, True)):
        suffix = "-causal" if causal else ""
        build = partial(
            attention,
            lengths=(512,),
            heads=4,
            head_dim=head_dim,
            causal=causal,
        )
        yield f"d{head_dim}{suffix}", Case(build, _COMPILES, BF16)


COMPILED = dict(_compiled_cases())


def _is_call(values: Combination) -> bool:
    """Return whether SageAttention supports these values, of all columns or only some."""
    is_packed = values.get("form") == "packed"
    if values.get("lengths") == "cross":
        # Calls of packed sequences, and causal calls, have as many queries as keys.
        return not (is_packed or values.get("causal"))
    # There is no kernel for packed sequences with head dim 96.
    return not (is_packed and values.get("head_dim") == 96)


def model_cases() -> dict[str, Case]:
    """Return cases that combine head dims, masks, layouts, groups of heads and kinds of lengths.

    The head dims are those of diffusion models, and Phi's 96, which has separate kernels.
    """
    head_dims = {head_dim for _, head_dim in DIFFUSION_MODELS.values()} | {96}
    columns = {
        "head_dim": sorted(head_dims),
        "causal": (False, True),
        "form": ("HND", "NHD", "packed"),
        "group": (1, 3),
        "lengths": ("one", "two", "cross"),
    }
    cases = {}
    for values in combine(columns, _is_call):
        parts = [f"d{values['head_dim']}"]
        if values["causal"]:
            parts.append("causal")
        parts += [values["form"].lower(), f"gqa{values['group']}", values["lengths"]]
        cases["-".join(parts)] = Case(_build_combination(values), _MODEL)
    return cases


def _build_combination(values: Combination) -> partial:
    packed = values["form"] == "packed"
    lengths: tuple[int, ...] = (130,)
    lengths_k: tuple[int, ...] = ()
    if values["lengths"] == "two":
        lengths = (70, 33) if packed else (70, 70)
    elif values["lengths"] == "cross":
        lengths = (70,)
        lengths_k = (133,)
    layout = "HND" if packed else values["form"]
    return partial(
        attention,
        heads=2 * values["group"],
        kv_heads=2,
        head_dim=values["head_dim"],
        causal=values["causal"],
        packed=packed,
        lengths=lengths,
        lengths_k=lengths_k,
        layout=layout,
    )


_packed = partial(attention, lengths=(100, 40), packed=True)
COMPUTED = {
    "full": Case(partial(attention, lengths=(128, 128)), _GROUP),
    "edge": Case(attention, _EDGE),
    "causal": Case(partial(attention, lengths=(200,), causal=True), _MASK),
    "d96": Case(partial(attention, head_dim=96, lengths=(70,), causal=True), _MASK),
    "d128": Case(
        partial(attention, head_dim=128, lengths=(70,)),
        "wrong tiles for head dim 128 (FLUX.1, Wan2.1)",
    ),
    "cross": Case(
        partial(attention, lengths=(70,), lengths_k=(140,)),
        "the number of queries used as the number of keys",
    ),
    "nhd": Case(partial(attention, layout="NHD"), "heads and tokens in the wrong order"),
    "scale": Case(partial(attention, scale=0.3), "1 / sqrt(head_dim) used instead of sm_scale"),
    "packed": Case(partial(_packed, causal=True), _PACKED),
    "packed-edge": Case(_packed, _EDGE),
    # The first sequence has more queries than a block.
    "packed-blocks": Case(partial(_packed, lengths=(200, 40), scale=0.3), _EDGE),
    "packed-causal-d128": Case(
        partial(_packed, lengths=(150, 40), causal=True, head_dim=128),
        _PACKED,
    ),
    "d96-blocks": Case(partial(attention, head_dim=96, lengths=(200,), heads=2, kv_heads=1), _EDGE),
    "low": Case(partial(attention, low=-120), LOW_SCORES_FAULT),
    "packed-low": Case(partial(_packed, causal=True, low=-1000), LOW_SCORES_FAULT),
    **model_cases(),
}
_small = partial(attention, lengths=(70,), heads=1, kv_heads=1)
EMULATED = {
    "edge": Case(partial(_small, heads=2), _EDGE, BF16),
    "causal": Case(partial(_small, causal=True), _MASK),
    "low": Case(partial(_small, low=-120), LOW_SCORES_FAULT, BF16),
}

#: Numbers of tokens. A stride of the scales is the number of blocks of queries or of keys. Triton
#: compiles separate kernels for a stride of 1, for multiples of 16, and for other strides. All
#: three occur with these numbers of tokens.
_TOKENS = (64, 100, 128, 200, 256, 1000, 1024, 2000, 2048)


def _build_shape(heads: int, head_dim: int, tokens: int) -> partial:
    return partial(
        attention,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        lengths=(tokens,),
    )


def _list_all_calls() -> list[Shipped]:
    builds = []
    for heads, head_dim in DIFFUSION_MODELS.values():
        for tokens in (200, 256):
            builds.append(_build_shape(heads, head_dim, tokens))
    for head_dim, tokens in product((64, 128), _TOKENS):
        builds.append(_build_shape(2, head_dim, tokens))
    return [(build, dtype) for dtype, build in product((BF16, FP16), builds)]


SHIPPED: dict[str, list[Shipped]] = {
    "sample": [(_build_shape(24, 128, tokens), BF16) for tokens in (1000, 1024, 2048)],
    "full": _list_all_calls(),
}

# SPDX-License-Identifier: BSD-3-Clause
"""SageAttention's Triton kernels: attention with queries and keys in 8 bits.

They are judged by what they mean to compute, softmax of the rounded scores: a kernel's fault would
drown in the error of 8 bits, 1.2 % of the output's root mean square on random numbers.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from strix_validate.layers.pairs import Combination, combine
from strix_validate.layers.table import PICTURES
from strix_validate.numerics import reference
from strix_validate.numerics.reference import TERMS, WHY_LOW, Precision, stored
from strix_validate.triton.call import PackageCall, Shipped
from strix_validate.triton.cases import Case, Expected, Randn

MODULE, PACKAGE = "sageattention", "sageattention"
#: Rows that share a scale.
QUERIES, KEYS = 128, 64
_LOG2_E = 1.44269504


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options) -> dict[str, Tensor]:
    from sageattention import sageattn

    out = sageattn(q, k, v, is_causal=causal, **options)
    return {"out": out, "keys": k}


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, longest: int, causal: bool, **options
) -> dict:
    from sageattention import sageattn_varlen

    out = sageattn_varlen(q, k, v, ends, ends, longest, longest, is_causal=causal, **options)
    return {"out": out, "keys": k}


def _codes(x: Tensor, rows: int, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x * scale in 8 bits, not rounded yet, and its unit, for each `rows` rows of a head.

    Args:
        x: (heads, tokens, head_dim), float32.
    """
    for part in (x * scale).split(rows, 1):
        unit = part.abs().amax((1, 2), keepdim=True) / 127
        yield part / unit, unit


def _rounded(x: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """Return what :func:`_codes` stand for after rounding, in float64."""
    parts = []
    for codes, unit in _codes(x, rows, scale):
        codes = (codes + 0.5 * torch.where(codes >= 0, 1.0, -1.0)).trunc()
        parts.append(codes.double() * unit.double())
    return torch.cat(parts, 1)


def settle(
    x: Tensor, lengths: tuple[int, ...], rows: int, mean: Callable[[Tensor], Tensor], scale=1.0
) -> None:
    """Move elements away from the middle between two codes, in place.

    A GPU's division need not be rounded correctly, and gave either code on an H100: six times a
    correct kernel's error.

    Args:
        x: (tokens, heads, head_dim). mean: of a sequence of x, what is subtracted first.
    """
    near = True
    while near:
        near = False
        for part in x.split(lengths):
            smooth = (part - mean(part)).transpose(0, 1).float()
            for codes, own in zip(
                (c for c, _ in _codes(smooth, rows, scale)), part.split(rows), strict=True
            ):
                middle = ((codes % 1 - 0.5).abs() < 1e-3).transpose(0, 1)
                own[middle] *= 1 + 2**-7
                near |= bool(middle.any())


def attention(  # noqa: PLR0913 (a case and what it should give)
    randn: Randn, *, lengths=(100,), heads=4, kv_heads=2, head_dim=64, causal=False, packed=False,
    lengths_k=(), layout="HND", scale=None, low=0.0,
) -> tuple[PackageCall, Expected]:  # fmt: skip
    """Build a call of attention over sequences that are as long as each other, or packed.

    Args:
        lengths: tokens of each sequence; of a batch that is not packed, all the same.
        lengths_k: of keys, where they are others. layout: NHD has tokens before heads.
        scale: sm_scale, None is 1 / sqrt(head_dim).
        low: if not 0, see reference.with_low_scores; keys are not smoothed then, which would raise
            the scores.
    """
    lengths_k = lengths_k or lengths
    q = randn(sum(lengths), heads, head_dim)
    k, v = (randn(sum(lengths_k), kv_heads, head_dim) for _ in "kv")
    factor = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    if low:
        q, k = reference.with_low_scores(q, k, low, factor / _LOG2_E)
    settle(q, lengths, QUERIES, torch.zeros_like, factor)

    def mean_of(sequence: Tensor) -> Tensor:
        """Return what is subtracted from a sequence's keys."""
        whole = k if packed else sequence
        return torch.zeros_like(whole[:1]) if low else whole.mean(0, keepdim=True)

    settle(k, lengths_k, KEYS, mean_of)
    mean = k.float().mean(0, keepdim=True) if packed and not low else None

    def one(dtype: Precision, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute one sequence's attention; q, k, v: (tokens, heads, head_dim) each."""
        own = mean_of(k) if mean is None else mean.to(k.dtype)
        smooth = (k - own).transpose(0, 1).float()
        scores = _rounded(q.transpose(0, 1).float(), QUERIES, factor)
        keys = _rounded(smooth, KEYS).repeat_interleave(heads // kv_heads, 0)
        scores = scores @ keys.transpose(1, 2) / _LOG2_E
        if causal:
            seen = torch.ones(len(q), len(k), dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        exact = torch.float64 if dtype == TERMS else dtype
        weights = scores.to(reference.working(exact)).softmax(-1)
        values = v.half().transpose(0, 1).repeat_interleave(heads // kv_heads, 0).to(weights)
        if dtype == TERMS:
            return (weights @ values.abs()).transpose(0, 1)
        # a block's products are summed up in 16 bits
        narrow = torch.float64 if exact is torch.float64 else torch.float16
        parts = zip(weights.split(KEYS, -1), values.split(KEYS, 1), strict=True)
        out = sum(stored(stored(w, narrow) @ x, narrow) for w, x in parts)
        return stored(out.to(weights), exact).transpose(0, 1)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        sequences = zip(q.split(lengths), *(x.split(lengths_k) for x in (k, v)), strict=True)
        found = [one(dtype, *x) for x in sequences]
        out = torch.cat(found) if packed else torch.stack(found)
        out = out if packed or layout == "NHD" else out.transpose(1, 2)
        # its means are taken from a copy
        return {"out": out, "keys": tensors["k"].double()}

    options: dict = {"causal": causal} | ({"smooth_k": False} if low else {})
    if packed:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tensors = {"q": q, "k": k, "v": v, "ends": ends}
        options |= {"longest": max(lengths)} | ({} if scale is None else {"sm_scale": scale})
        return PackageCall(_varlen, tensors, options, 1, package=PACKAGE), expected
    tensors = {
        name: x.unflatten(0, (len(lengths), -1)) for name, x in (("q", q), ("k", k), ("v", v))
    }
    if layout == "HND":
        tensors = {name: x.transpose(1, 2).contiguous() for name, x in tensors.items()}
    options |= {"tensor_layout": layout, "sm_scale": scale}
    return PackageCall(_attend, tensors, options, 1, package=PACKAGE), expected


_COMPILES = "a kernel that no longer compiles for gfx1151, or multiplies 8 bits without WMMA"
_EDGE = "keys past the end, which are zeros, that get a share of the weights"
_MASK = "a causal mask that is off by one, or left out in the block on the diagonal"
_GROUP = "a query head that reads another group's keys, or their scale"
_PACKED = "sequences that see each other's keys, or take each other's scales"
BF16 = torch.bfloat16

COMPILED = {
    f"d{size}{'-causal' * causal}": Case(
        partial(attention, lengths=(512,), heads=4, head_dim=size, causal=causal), _COMPILES, BF16
    )
    for size in (64, 96, 128)
    for causal in (False, True)
}
_MODEL = "a kernel of another head dim, mask, layout or group"


def _is_call(values: Combination) -> bool:
    """Return whether SageAttention takes these values of some columns."""
    is_packed = values.get("form") == "packed"
    if values.get("lengths") == "cross":  # one list of ends, and causal ones are as many
        return not (is_packed or values.get("causal"))
    # no kernel of packed sequences has that many lanes
    return not (is_packed and values.get("head_dim") == 96)


def model_cases() -> dict[str, Case]:
    """Return each head dim, mask, layout, group of heads and kind of lengths, combined.

    Head dims are those of diffusion models, and Phi's, which has kernels of its own.
    """
    head_dims = {head_dim for _, head_dim in PICTURES.values()} | {96}
    combined = combine(
        {
            "head_dim": sorted(head_dims),
            "causal": (False, True),
            "form": ("HND", "NHD", "packed"),
            "group": (1, 3),
            "lengths": ("one", "two", "cross"),
        },
        _is_call,
    )
    found = {}
    for x in combined:
        packed = x["form"] == "packed"
        lengths = {"one": (130,), "two": (70, 33) if packed else (70, 70), "cross": (70,)}
        shape = {
            "heads": 2 * x["group"],
            "kv_heads": 2,
            "head_dim": x["head_dim"],
            "causal": x["causal"],
            "packed": packed,
            "lengths": lengths[x["lengths"]],
            "lengths_k": (133,) if x["lengths"] == "cross" else (),
            "layout": "HND" if packed else x["form"],
        }
        parts = (f"d{x['head_dim']}", "causal" * x["causal"], x["form"].lower(),
                 f"gqa{x['group']}", x["lengths"])  # fmt: skip
        found["-".join(filter(None, parts))] = Case(partial(attention, **shape), _MODEL)
    return found


COMPUTED = {
    "full": Case(partial(attention, lengths=(128, 128)), _GROUP),
    "edge": Case(attention, _EDGE),
    "causal": Case(partial(attention, lengths=(200,), causal=True), _MASK),
    "d96": Case(partial(attention, head_dim=96, lengths=(70,), causal=True), _MASK),
    "d128": Case(partial(attention, head_dim=128, lengths=(70,)), "tiles of diffusion's head dim"),
    "cross": Case(partial(attention, lengths=(70,), lengths_k=(140,)), "queries' length for keys'"),
    "nhd": Case(partial(attention, layout="NHD"), "heads and tokens in the other order"),
    "scale": Case(partial(attention, scale=0.3), "1 / sqrt(head_dim) instead of sm_scale"),
    "packed": Case(partial(attention, lengths=(100, 40), packed=True, causal=True), _PACKED),
    "packed-edge": Case(partial(attention, lengths=(100, 40), packed=True), _EDGE),
    # more queries than a block has
    "packed-blocks": Case(partial(attention, lengths=(200, 40), packed=True, scale=0.3), _EDGE),
    "packed-causal-d128": Case(
        partial(attention, lengths=(150, 40), packed=True, causal=True, head_dim=128), _PACKED
    ),
    "d96-blocks": Case(partial(attention, head_dim=96, lengths=(200,), heads=2, kv_heads=1), _EDGE),
    "low": Case(partial(attention, low=-120), WHY_LOW),
    "packed-low": Case(
        partial(attention, lengths=(100, 40), packed=True, causal=True, low=-1000), WHY_LOW
    ),
    **model_cases(),
}
EMULATED = {
    "edge": Case(partial(attention, lengths=(70,), heads=2, kv_heads=1), _EDGE, BF16),
    "causal": Case(partial(attention, lengths=(70,), heads=1, kv_heads=1, causal=True), _MASK),
    "low": Case(partial(attention, lengths=(70,), heads=1, kv_heads=1, low=-120), WHY_LOW, BF16),
}

#: Tokens for which each kind of number of blocks comes, of queries and of keys: one, 16, others.
_TOKENS = (64, 100, 128, 200, 256, 1000, 1024, 2000, 2048)


def _shape(heads: int, size: int, tokens: int) -> partial:
    return partial(attention, heads=heads, kv_heads=heads, head_dim=size, lengths=(tokens,))


SHIPPED: dict[str, list[Shipped]] = {
    "sample": [(_shape(24, 128, n), BF16) for n in (1000, 1024, 2048)],
    "full": [
        (shape, dtype)
        for dtype in (BF16, torch.float16)
        for shape in (
            *(_shape(*model, n) for model in PICTURES.values() for n in (200, 256)),
            *(_shape(2, size, n) for size in (64, 128) for n in _TOKENS),
        )
    ],
}

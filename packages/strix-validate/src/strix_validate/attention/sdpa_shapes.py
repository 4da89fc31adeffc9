# SPDX-License-Identifier: BSD-3-Clause
"""The shapes that scaled_dot_product_attention is checked with, each with the bug it catches; their
inputs, and what it must make of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from strix_validate.checks import Size, seed_of
from strix_validate.layers.table import plain_layers
from strix_validate.numerics import reference

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SdpaShape:
    """The arguments of a scaled_dot_product_attention call, and the bug that it would catch.

    Attributes:
        v_dim: of the values, 0 is head_dim.
        attn_mask: "bool" or "additive", random, each query with at least one key; "padding", by
            sequence; "least", causal and padded in front, with the smallest number of the dtype;
            "learned", additive by sequence and head; additive as well: "sequence", (batch, 1, 1,
            seqlen_k); "heads", (1, heads, seqlen_q, seqlen_k); "tiles", -inf for half of the
            queries but for the last keys; "slice", the beginning of wider rows, NaN behind.
        mask_dtype: of an additive mask, "" is the dtype under test.
        dropout: the share of weights that are dropped; the first lanes of the values then show
            which ones.
        layout: "strided", "expanded" (one head of keys and values for all), "packed" (q, k and v in
            one tensor), "strided-values" (v alone), "cache" (k and v are the beginning of longer
            tensors, NaN behind), "summed" (the gradient of out.sum(), of strides 0).
        needs: the gradients that are computed, m is the mask's. again: twice, from one output.
        sink: see reference.with_sink. low: if not 0, the level of reference.with_low_scores.
        may_refuse: an error is also correct.
        on_device: the reference is too large for the CPU.
        gib: memory it takes, where tensors exceed 2 GiB; then the first, middle and last sequences
            are compared.
    """

    name: str
    why: str
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 64
    v_dim: int = 0
    causal: bool = False
    scale: float | None = None
    attn_mask: str = ""
    mask_dtype: str = ""
    dropout: float = 0.0
    layout: str = ""
    needs: str = "qkv"
    again: bool = False
    sink: reference.Sink = None
    low: float = 0.0
    may_refuse: bool = False
    on_device: bool = False
    gib: int = 0
    dtypes: tuple[torch.dtype, ...] = _DTYPES
    size: Size = Size.QUICK


_NAN_D72 = (
    "NaN in fp16 and bf16 at head dim 72 on gfx1151 (SAM 2.1): "
    "https://github.com/ROCm/aotriton/issues/54"
)
_RACE_D80 = (
    "kernels of another chip: NaN at head dim 80, causal: "
    "https://github.com/ROCm/aotriton/issues/183"
)
_D512 = (
    "values that are wrong without a word above head dim 256, of which AOTriton has no kernels on "
    "gfx11 (Stable Diffusion's VAE): https://github.com/pytorch/pytorch/issues/189849"
)
_PADDED = "padding of the head dim to the next power of two that leaks into the result"
_STRIDES = "(batch, seqlen, heads) memory taken for (batch, heads, seqlen)"
_MASK = "a mask read with the wrong strides, or inverted"
_BLOCKS = "the second block of 512 queries or keys left out, or the first sequence read for each"
_LENGTH = "keys read behind the last one, or rows of the last block not written"
_GROUP = "a group of heads rounded up to a power of two, or lanes of another model's number"
_DECODE = (
    "a wrong key/value head where there is one query: decoding, which kernels do in a way of its "
    "own"
)
#: Lengths that fill no tile; at the lowest level a mask also hides keys within one.
_LOW: tuple[tuple[int, dict], ...] = (
    (-20, {"seqlen_q": 40, "seqlen_k": 40}),
    (-120, {"seqlen_q": 133, "seqlen_k": 70, "causal": True}),
    (-1000, {"seqlen_q": 33, "seqlen_k": 133, "attn_mask": "padding"}),
)
_SINKS: tuple[tuple[reference.Sink, str], ...] = (("key", "q"), ("query", "qkv"))


def _of_models() -> Iterator[SdpaShape]:
    """Yield prompts and decoding from a static cache with models' heads; quick has each group."""
    first = {layer.group: name for name, layer in reversed(plain_layers().items())}
    for name, layer in plain_layers().items():
        shape = SdpaShape(
            f"layer-{name}", _GROUP, heads=layer.heads, kv_heads=layer.kv_heads,
            head_dim=layer.head_dim, seqlen_q=40, seqlen_k=40, causal=True,
            dtypes=(torch.bfloat16,), size=Size.QUICK if name in first.values() else Size.FULL,
        )  # fmt: skip
        yield shape
        yield replace(
            shape, name=f"{shape.name}-decode", why=_DECODE, batch=2, seqlen_q=1, seqlen_k=300,
            causal=False, layout="cache",
        )  # fmt: skip


SHAPES = (
    SdpaShape("full", "a wrong scale or a head mixed up with another", batch=2),
    SdpaShape("causal", "a mask off by one", causal=True),
    SdpaShape("ragged", _LENGTH, seqlen_q=113, seqlen_k=113, causal=True),
    SdpaShape("cross", "seqlen_q taken for seqlen_k", seqlen_q=70, seqlen_k=133),
    SdpaShape("cross-causal",
        "causal aligned bottom-right, as in flash-attn, where torch says top-left: "
        "https://github.com/pytorch/pytorch/issues/108108", seqlen_q=70, seqlen_k=133, causal=True),
    SdpaShape("gqa", "a wrong key/value head", heads=8, kv_heads=2, causal=True),
    SdpaShape("mqa", "a wrong key/value head, or gradients not summed over the group", kv_heads=1),
    SdpaShape("one-query", "decoding: a block of queries with one row", seqlen_q=1, seqlen_k=133),
    SdpaShape("one-key", "softmax over one key, which is 1 exactly", seqlen_q=37, seqlen_k=1),
    SdpaShape("one-token", "both lengths below every block size", seqlen_q=1, seqlen_k=1,
        causal=True),
    SdpaShape("strided", _STRIDES, layout="strided"),
    SdpaShape("bool-mask", _MASK, attn_mask="bool", seqlen_k=133),
    SdpaShape("additive-mask", _MASK, attn_mask="additive", seqlen_k=133),
    SdpaShape("blocks", _BLOCKS, batch=2, heads=2, kv_heads=1, seqlen_q=577, seqlen_k=600,
        head_dim=32),
    SdpaShape("blocks-causal", _BLOCKS, batch=2, heads=1, kv_heads=1, seqlen_q=577, seqlen_k=577,
        head_dim=32, causal=True),
    # what the gradients of k and v sum is of one sign in "query" alone
    *(SdpaShape(f"sink-{sink}", reference.WHY_SINK, heads=2, kv_heads=2, seqlen_q=577, seqlen_k=577,
        head_dim=32, sink=sink, needs=needs, dtypes=HALVES) for sink, needs in _SINKS),
    *(SdpaShape(f"low{level}", reference.WHY_LOW, batch=2, heads=2, kv_heads=2, low=level,
        dtypes=HALVES, **other) for level, other in _LOW),
    SdpaShape("scale", "a scale of 1 / sqrt(head_dim), whatever is passed", scale=0.3, causal=True),
    SdpaShape("padding-mask",
        "the mask of the first sequence read for each: batches of padded prompts", batch=3,
        seqlen_q=40, seqlen_k=133, attn_mask="padding", dtypes=HALVES),
    SdpaShape("least-mask",
        "NaN of a tile that a mask of the smallest number shuts out, in base 2 its infinity: "
        "https://github.com/pytorch/pytorch/issues/110213", batch=2, seqlen_q=40, seqlen_k=133,
        attn_mask="least", dtypes=HALVES),
    SdpaShape("learned-mask", "the gradient of a bias: scaled like q's, or one head's for all",
        batch=2, heads=2, kv_heads=2, seqlen_q=72, seqlen_k=136, head_dim=32, attn_mask="learned",
        needs="qkvm"),
    *(SdpaShape(f"value-dim-{v_dim}",
        "values read with the keys' head dim (DeepSeek's MLA has 192 and 128)", heads=2, kv_heads=2,
        seqlen_q=70, seqlen_k=70, head_dim=head_dim, v_dim=v_dim, causal=True,
        dtypes=HALVES) for head_dim, v_dim in ((96, 64), (32, 72))),
    *(SdpaShape(f"gradient-{name}",
        "a gradient that is correct only where the others are computed as well (LoRA, frozen "
        "layers)", heads=2, kv_heads=2, seqlen_q=70, seqlen_k=100, needs=name,
        dtypes=HALVES) for name in "qkv"),
    *(SdpaShape(layout, why, batch=2, heads=3, kv_heads=3, seqlen_q=70, seqlen_k=70, head_dim=32,
        layout=layout, dtypes=HALVES) for layout, why in (("expanded",
        "a stride of 0 taken for the size (keys of one head for all)"), ("packed",
        "q, k and v of one tensor read as if each had its own"), ("strided-values",
        "v read with the strides of k: https://github.com/ROCm/pytorch/issues/3230"), ("cache",
        "strides of a slice of a static cache computed from its shape"), ("summed",
        "the gradient of out.sum().backward(), one number, read as a tensor"))),
    *(SdpaShape(f"{mask}-mask-d128", "a mask left out in the kernels of head dim 128", heads=2,
        kv_heads=2, seqlen_q=40, seqlen_k=133, head_dim=128, attn_mask=mask, dtypes=(torch.bfloat16,
        )) for mask in ("bool", "additive")),
    SdpaShape("d128-full", "head dim 128 without a causal mask: another kernel", heads=2,
        kv_heads=2, seqlen_q=70, seqlen_k=133, head_dim=128, dtypes=HALVES),
    *_of_models(),
    SdpaShape("heads-40", "heads behind the 32nd left out (Qwen3-14B has 40)", heads=40, kv_heads=8,
        seqlen_q=20, seqlen_k=20, head_dim=32, dtypes=HALVES),
    # full: dear, and a CPU has no grid
    SdpaShape("heads-65568",
        "batch and heads in a dimension of the grid, of which there are 65535: "
        "https://github.com/pytorch/pytorch/issues/142228", batch=2049, heads=32, kv_heads=32,
        seqlen_q=1, seqlen_k=2, head_dim=8, dtypes=HALVES, size=Size.FULL),
    SdpaShape("batch-9", "sequences behind the fourth left out", batch=9, heads=2, kv_heads=2,
        seqlen_q=33, seqlen_k=33, head_dim=32, causal=True, dtypes=HALVES),
    SdpaShape("batch-33", "sequences behind the 16th, or the 32nd, left out", batch=33, heads=2,
        kv_heads=1, seqlen_q=17, seqlen_k=17, head_dim=32, dtypes=HALVES),
    SdpaShape("heads-72", "heads behind the 64th left out", batch=2, heads=72, kv_heads=8,
        seqlen_q=20, seqlen_k=20, head_dim=32, causal=True, dtypes=HALVES),
    SdpaShape("d256-keys", "a second block of keys left out in the gradients of head dim 256",
        heads=2, kv_heads=1, seqlen_q=70, seqlen_k=300, head_dim=256, dtypes=HALVES),
    SdpaShape("decode-4100", "a split over keys that are merged wrongly, or of no more than 2048",
        heads=2, kv_heads=2, seqlen_q=1, seqlen_k=4100, dtypes=HALVES),
    SdpaShape("cross-causal-long",
        "queries behind the last key left out, where causal is top-left: they see all keys",
        seqlen_q=133, seqlen_k=70, causal=True, dtypes=HALVES),
    # no fp16: correct kernels lose weights below its smallest number, which a large scale shows
    SdpaShape("peaked",
        "exp of a score that no maximum was taken from, which overflows above 88, in the backward "
        "pass alone", heads=2, kv_heads=2, scale=3.75, dtypes=(torch.bfloat16,)),
    SdpaShape("d32", "tile sizes of the smallest usual head dim", head_dim=32, causal=True),
    SdpaShape("d72", _NAN_D72, batch=2, head_dim=72),
    SdpaShape("d80", _RACE_D80, head_dim=80, causal=True),
    SdpaShape("d96", _PADDED, head_dim=96, causal=True),
    SdpaShape("d128", "LDS or tile sizes of the largest usual head dim", head_dim=128, causal=True),
    SdpaShape("d160", _PADDED, head_dim=160),
    SdpaShape("d192", _PADDED, head_dim=192, causal=True),
    SdpaShape("d256", "LDS of the largest head dim that gfx11 has kernels for", head_dim=256),
    SdpaShape("d512", _D512, head_dim=512, heads=2, kv_heads=2, may_refuse=True),
    *(SdpaShape(f"length-{length}", _LENGTH, seqlen_q=length, seqlen_k=length, causal=causal,
        size=Size.FULL) for length, causal in ((2, True), (63, False), (64, True), (65, True), (127,
        False), (129, True), (511, False), (1000, True))),
    *(SdpaShape(f"d{dim}-gqa", _PADDED, heads=8, kv_heads=2, head_dim=dim, seqlen_q=300,
        seqlen_k=300, causal=True, size=Size.FULL) for dim in (64, 72, 80, 96, 128, 160, 192, 256)),
    SdpaShape("sam2", _NAN_D72, batch=4, heads=8, kv_heads=8, seqlen_q=4096, seqlen_k=4096,
        head_dim=72, on_device=True, size=Size.FULL),
    SdpaShape("long", "an index that overflows, or an error that grows with the length", heads=2,
        kv_heads=2, seqlen_q=8192, seqlen_k=8192, head_dim=128, causal=True, on_device=True,
        size=Size.STRESS),
    SdpaShape("beyond-4-gib",
        "an offset of 32 bits: tensors of more than 2^31 numbers, in more than 2^32 bytes",
        batch=4100, heads=64, kv_heads=64, seqlen_q=64, seqlen_k=64, head_dim=128, causal=True,
        on_device=True, gib=48, dtypes=(torch.bfloat16,), size=Size.STRESS),
    *(SdpaShape(f"random-{i}",
        "a combination of lengths, heads and head dim that no other check has", batch=1 + i % 3,
        heads=(1, 4, 6, 8)[i % 4] * (1, 2)[i % 2], kv_heads=(1, 4, 6, 8)[i % 4],
        seqlen_q=1 + i * 7919 % 701, seqlen_k=1 + i * 6271 % 977, head_dim=(32, 40, 64, 72, 80, 88,
        96, 128, 160, 256)[i % 10], size=Size.STRESS) for i in range(1, 41)),
)  # fmt: skip

#: Sequences of other numbers where tensors exceed 2 GiB: a prime, so that an offset that wraps
#: around never meets the same numbers again.
_POOL = 61


class Problem:
    """The inputs of a shape, the same for a seed, and what attention makes of them.

    compared: the sequences whose results are; all if it is None.
    """

    def __init__(self, shape: SdpaShape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(seed_of(shape.name))

        def randn(heads: int, seqlen: int, head_dim: int = shape.head_dim) -> Tensor:
            batch = min(shape.batch, _POOL) if shape.gib else shape.batch
            size = (batch, heads, seqlen, head_dim)
            if shape.layout == "strided":
                size = (batch, seqlen, heads, head_dim)
            x = torch.randn(size, generator=generator).to(dtype)
            return x.transpose(1, 2) if shape.layout == "strided" else x

        self.shape, self.dtype, self.device = shape, dtype, device
        v_dim, kv_heads = shape.v_dim or shape.head_dim, shape.kv_heads
        q = randn(shape.heads, shape.seqlen_q)
        grad_out = randn(shape.heads, shape.seqlen_q, v_dim)
        k = randn(1 if shape.layout == "expanded" else kv_heads, shape.seqlen_k)
        v = randn(k.shape[1], shape.seqlen_k, v_dim)
        if shape.layout == "summed":
            grad_out = torch.ones((), dtype=dtype).expand_as(grad_out)
        if shape.sink:
            found = reference.with_sink(q, k, v, grad_out, sink=shape.sink)
            q, k, v, grad_out = (x.to(dtype) for x in found)
        if shape.low:
            q, k = reference.with_low_scores(q, k, shape.low, shape.scale or shape.head_dim**-0.5)
        if shape.dropout:
            v[..., : shape.seqlen_k] = torch.eye(shape.seqlen_k, dtype=dtype)
        attn_mask = mask_of(shape, dtype, generator)
        where = device if shape.on_device else "cpu"
        all_heads = (x.expand(-1, kv_heads, -1, -1) for x in (k, v))
        self._reference = [x.to(where) for x in (q, *all_heads, grad_out)]
        self._mask = None if attn_mask is None else attn_mask.to(where)
        self.compared = None
        if shape.gib:
            last = shape.batch - 1
            self.compared = [0, 1, last // 2, last - 1, last]
        self.inputs = self._laid_out(*(x.to(device) for x in (q, k, v, grad_out)))
        self.options: dict[str, Any] = {
            "attn_mask": None if attn_mask is None else self._lay_out_mask(attn_mask.to(device)),
            "is_causal": shape.causal,
            "scale": shape.scale,
            "enable_gqa": shape.heads != shape.kv_heads,
        }
        if shape.dropout:
            self.options["dropout_p"] = shape.dropout
        self.expected = cache(self.expect)

    def _lay_out_mask(self, attn_mask: Tensor) -> Tensor:
        """Lay out the mask as the shape says, on the device."""
        if self.shape.attn_mask != "slice":
            return attn_mask
        wider = torch.nn.functional.pad(attn_mask, (0, 24), value=torch.nan)
        return wider[..., : self.shape.seqlen_k]

    def _laid_out(self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        """Lay out the tensors as the shape says, on the device: a copy to it would change some."""
        if self.shape.layout == "expanded":
            k, v = (x.expand(-1, self.shape.kv_heads, -1, -1) for x in (k, v))
        if self.shape.layout == "packed":
            # (batch, seqlen, 3, heads, head_dim), as one linear layer gives them
            together = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
            q, k, v = (x.transpose(1, 2) for x in together.unbind(2))
        if self.shape.layout == "strided-values":
            v = v.transpose(1, 2).contiguous().transpose(1, 2)
        if self.shape.layout == "cache":
            longer = (torch.nn.functional.pad(x, (0, 0, 0, 51), value=torch.nan) for x in (k, v))
            k, v = (x[:, :, : self.shape.seqlen_k] for x in longer)
        if self.shape.layout == "summed":
            grad_out = grad_out[:1, :1, :1, :1].expand_as(grad_out)
        if self.shape.gib:
            chosen = torch.arange(self.shape.batch, device=q.device) % _POOL
            q, k, v, grad_out = (x[chosen] for x in (q, k, v, grad_out))
        return q, k, v, grad_out

    def expect(self, dtype: reference.Precision, keep: Tensor | None = None) -> dict[str, Tensor]:
        """Return what attention makes of the inputs; see reference.attention.

        Args:
            keep: of dropout, what each weight is multiplied by.
        """
        causal: reference.Causal = "top-left" if self.shape.causal else None
        # one sequence at a time: in float64 the scores of the largest shapes fill the memory
        length = self.shape.seqlen_q * self.shape.seqlen_k
        step = 1 if length > 4096 else max(1, 2**20 // (length * self.shape.heads))
        chosen = [slice(i, i + step) for i in range(0, self.shape.batch, step)]
        if self.compared:
            chosen = [slice(i % _POOL, i % _POOL + 1) for i in self.compared]
        masks = [self._mask] * len(chosen)
        if self._mask is not None and self._mask.dim() == 4 and len(self._mask) > 1:
            masks = [self._mask[rows] for rows in chosen]
        keeps = [None if keep is None else keep[rows] for rows in chosen]
        parts = [
            reference.attention(
                *(x[rows] for x in self._reference),
                causal=causal,
                attn_mask=mask,
                keep=keep,
                scale=self.shape.scale,
                dtype=dtype,
            )
            for rows, mask, keep in zip(chosen, masks, keeps, strict=True)
        ]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if "m" in self.shape.needs and self._mask is not None:
            # what the mask was broadcast to is summed
            found["dmask"] = reference.stored(found["dmask"].sum_to_size(self._mask.shape), dtype)
        return found


def mask_of(shape: SdpaShape, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """Build the shape's mask, of two dimensions where all sequences and heads share it."""
    dtype = getattr(torch, shape.mask_dtype) if shape.mask_dtype else dtype
    scores = torch.randn(shape.seqlen_q, shape.seqlen_k, generator=generator)
    if shape.attn_mask == "bool":
        return (scores > 0).index_fill(1, torch.tensor(0), True)  # every query sees key 0
    if shape.attn_mask == "additive":
        return scores.to(dtype)
    if shape.attn_mask == "learned":
        size = (shape.batch, shape.heads, *scores.shape)
        return torch.randn(size, generator=generator).to(dtype)
    if shape.attn_mask in ("sequence", "heads", "slice", "tiles"):
        size = {
            "sequence": (shape.batch, 1, 1, shape.seqlen_k),
            "heads": (1, shape.heads, *scores.shape),
        }.get(shape.attn_mask, (1, 1, *scores.shape))
        numbers = torch.randn(size, generator=generator)
        if shape.attn_mask == "tiles":
            numbers[..., shape.seqlen_q // 2 :, : shape.seqlen_k - 4] = -torch.inf
        return numbers.to(dtype)
    key, own = torch.arange(shape.seqlen_k), torch.arange(shape.seqlen_q)[:, None]
    sequence = torch.arange(shape.batch)[:, None, None, None]
    if shape.attn_mask == "padding":
        return key < shape.seqlen_k - 37 * sequence
    if shape.attn_mask == "least":
        # all of the first 64 keys of the second sequence are padding
        own = own + shape.seqlen_k - shape.seqlen_q
        seen = (key <= own) & (key >= 70 * sequence)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return None

# SPDX-License-Identifier: BSD-3-Clause
"""The cases of scaled_dot_product_attention, each with the bug that it catches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from strix_validate.checks import Size
from strix_validate.layers.table import plain_layers
from strix_validate.numerics import reference

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SdpaCase:
    """The arguments of a call of scaled_dot_product_attention, and the bug that it catches.

    sdpa_problem.Problem builds the call from it, for a dtype.

    Attributes:
        name: Name in ids of checks. The inputs are drawn with it as their seed.
        catches: The bug that the case catches, with a link.
        batch: Number of sequences.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        seqlen_q: Number of queries.
        seqlen_k: Number of keys.
        head_dim: Size of a head of queries and keys.
        v_dim: Size of a head of values; 0 is head_dim.
        causal: Whether the call passes is_causal.
        scale: Scale of the scores; None is torch's default.
        attn_mask: Kind of mask. "bool" and "additive" are random, with at least one key for each
            query. "padding" depends on the sequence. "least" is causal, with padding in front, and
            shuts keys out by the smallest number of the dtype. "learned" is additive for each
            sequence and head. Others are additive as well: "sequence", (batch, 1, 1, seqlen_k);
            "heads", (1, heads, seqlen_q, seqlen_k); "tiles", -inf for half of the queries except
            for the last keys; "slice", the first columns of wider rows, with NaN in the others.
        mask_dtype: Dtype of an additive mask; "" is the dtype under test.
        dropout: Share of weights that are dropped. The first lanes of the values then show which.
        layout: "strided"; "expanded", one head of keys and values for all; "packed", q, k and v in
            one tensor; "strided-values", v alone; "cache", k and v are the first part of longer
            tensors, with NaN in the rest; "summed", the gradient of out.sum(), with strides of 0.
        needs: The gradients that are computed, one letter each; m is the mask's.
        again: Whether the gradients are computed twice, from one output.
        sink: See reference.with_sink.
        low: Level of reference.with_low_scores; 0 for none.
        may_refuse: Whether an error is also correct.
        on_device: Whether the reference is computed on the device, because it is too large for the
            CPU.
        gib: Memory in GiB that the case takes, if tensors exceed 2 GiB. Only the first, the middle
            and the last sequences are then compared.
        dtypes: Dtypes that the case is checked in.
        size: Size of a run from which on the case is checked.
    """

    name: str
    catches: str
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
    "silently wrong values above head dim 256, for which AOTriton has no kernels on gfx11 "
    "(Stable Diffusion's VAE): https://github.com/pytorch/pytorch/issues/189849"
)
_PADDED = "padding of the head dim to the next power of two that leaks into the result"
_STRIDES = "(batch, seqlen, heads) memory taken for (batch, heads, seqlen)"
_MASK = "a mask read with the wrong strides, or inverted"
_BLOCKS = "the second block of 512 queries or keys left out, or the first sequence read for each"
_LENGTH = "keys read after the last one, or rows of the last block not written"
_GROUP = "a group of heads rounded up to a power of two, or lanes of another model's number"
_DECODE = "a wrong key/value head where there is one query: decoding has kernels of its own"
_VALUE_DIM = "values read with the keys' head dim (DeepSeek's MLA has 192 and 128)"
_ONE_GRADIENT = (
    "a gradient that is correct only where the others are computed as well (LoRA, frozen layers)"
)
_RANDOM = "a combination of lengths, heads and head dim that no other check has"
#: What a layout catches.
_LAYOUTS = {
    "expanded": "a stride of 0 taken for the size (keys of one head for all)",
    "packed": "q, k and v of one tensor read as if each had its own",
    "strided-values": ("v read with the strides of k: https://github.com/ROCm/pytorch/issues/3230"),
    "cache": "strides of a slice of a static cache computed from its shape",
    "summed": "the gradient of out.sum().backward(), one number, read as a tensor",
}


def _sink_cases() -> Iterator[SdpaCase]:
    case = SdpaCase(
        "",
        reference.WHY_SINK,
        heads=2,
        kv_heads=2,
        seqlen_q=577,
        seqlen_k=577,
        head_dim=32,
        dtypes=HALVES,
    )
    yield replace(case, name="sink-key", sink="key", needs="q")
    # only here do the terms of the gradients of k and v have one sign
    yield replace(case, name="sink-query", sink="query", needs="qkv")


def _low_score_cases() -> Iterator[SdpaCase]:
    """Yield cases with lengths that fill no tile; at the lowest level a mask also hides keys."""
    case = SdpaCase(
        "",
        reference.WHY_LOW,
        batch=2,
        heads=2,
        kv_heads=2,
        dtypes=HALVES,
    )
    yield replace(case, name="low-20", low=-20, seqlen_q=40, seqlen_k=40)
    yield replace(case, name="low-120", low=-120, seqlen_q=133, seqlen_k=70, causal=True)
    yield replace(
        case,
        name="low-1000",
        low=-1000,
        seqlen_q=33,
        seqlen_k=133,
        attn_mask="padding",
    )


def _value_dim_cases() -> Iterator[SdpaCase]:
    for head_dim, v_dim in ((96, 64), (32, 72)):
        yield SdpaCase(
            f"value-dim-{v_dim}",
            _VALUE_DIM,
            heads=2,
            kv_heads=2,
            seqlen_q=70,
            seqlen_k=70,
            head_dim=head_dim,
            v_dim=v_dim,
            causal=True,
            dtypes=HALVES,
        )


def _gradient_cases() -> Iterator[SdpaCase]:
    for name in "qkv":
        yield SdpaCase(
            f"gradient-{name}",
            _ONE_GRADIENT,
            heads=2,
            kv_heads=2,
            seqlen_q=70,
            seqlen_k=100,
            needs=name,
            dtypes=HALVES,
        )


def _layout_cases() -> Iterator[SdpaCase]:
    for layout, catches in _LAYOUTS.items():
        yield SdpaCase(
            layout,
            catches,
            batch=2,
            heads=3,
            kv_heads=3,
            seqlen_q=70,
            seqlen_k=70,
            head_dim=32,
            layout=layout,
            dtypes=HALVES,
        )


def _wide_mask_cases() -> Iterator[SdpaCase]:
    for attn_mask in ("bool", "additive"):
        yield SdpaCase(
            f"{attn_mask}-mask-d128",
            "a mask left out in the kernels of head dim 128",
            heads=2,
            kv_heads=2,
            seqlen_q=40,
            seqlen_k=133,
            head_dim=128,
            attn_mask=attn_mask,
            dtypes=(torch.bfloat16,),
        )


def _model_cases() -> Iterator[SdpaCase]:
    """Yield prompts, and decoding from a static cache, with models' heads.

    A quick run has each group of heads once.
    """
    first_of_group = {layer.group: name for name, layer in reversed(plain_layers().items())}
    quick = set(first_of_group.values())
    for name, layer in plain_layers().items():
        prompt = SdpaCase(
            f"layer-{name}",
            _GROUP,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            seqlen_q=40,
            seqlen_k=40,
            causal=True,
            dtypes=(torch.bfloat16,),
            size=Size.QUICK if name in quick else Size.FULL,
        )
        yield prompt
        yield replace(
            prompt,
            name=f"{prompt.name}-decode",
            catches=_DECODE,
            batch=2,
            seqlen_q=1,
            seqlen_k=300,
            causal=False,
            layout="cache",
        )


def _length_cases() -> Iterator[SdpaCase]:
    lengths = {
        2: True,
        63: False,
        64: True,
        65: True,
        127: False,
        129: True,
        511: False,
        1000: True,
    }
    for length, causal in lengths.items():
        yield SdpaCase(
            f"length-{length}",
            _LENGTH,
            seqlen_q=length,
            seqlen_k=length,
            causal=causal,
            size=Size.FULL,
        )


def _grouped_cases() -> Iterator[SdpaCase]:
    for head_dim in (64, 72, 80, 96, 128, 160, 192, 256):
        yield SdpaCase(
            f"d{head_dim}-gqa",
            _PADDED,
            heads=8,
            kv_heads=2,
            head_dim=head_dim,
            seqlen_q=300,
            seqlen_k=300,
            causal=True,
            size=Size.FULL,
        )


def _random_cases() -> Iterator[SdpaCase]:
    head_dims = (32, 40, 64, 72, 80, 88, 96, 128, 160, 256)
    for i in range(1, 41):
        kv_heads = (1, 4, 6, 8)[i % 4]
        group = (1, 2)[i % 2]
        yield SdpaCase(
            f"random-{i}",
            _RANDOM,
            batch=1 + i % 3,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            seqlen_q=1 + i * 7919 % 701,
            seqlen_k=1 + i * 6271 % 977,
            head_dim=head_dims[i % 10],
            size=Size.STRESS,
        )


CASES = (
    SdpaCase(
        "full",
        "a wrong scale or a head mixed up with another",
        batch=2,
    ),
    SdpaCase(
        "causal",
        "a mask off by one",
        causal=True,
    ),
    SdpaCase(
        "ragged",
        _LENGTH,
        seqlen_q=113,
        seqlen_k=113,
        causal=True,
    ),
    SdpaCase(
        "cross",
        "seqlen_q taken for seqlen_k",
        seqlen_q=70,
        seqlen_k=133,
    ),
    SdpaCase(
        "cross-causal",
        (
            "causal aligned bottom-right, as in flash-attn, where torch says "
            "top-left: https://github.com/pytorch/pytorch/issues/108108"
        ),
        seqlen_q=70,
        seqlen_k=133,
        causal=True,
    ),
    SdpaCase(
        "gqa",
        "a wrong key/value head",
        heads=8,
        kv_heads=2,
        causal=True,
    ),
    SdpaCase(
        "mqa",
        "a wrong key/value head, or gradients not summed over the group",
        kv_heads=1,
    ),
    SdpaCase(
        "one-query",
        "decoding: a block of queries with one row",
        seqlen_q=1,
        seqlen_k=133,
    ),
    SdpaCase(
        "one-key",
        "softmax over one key, which is 1 exactly",
        seqlen_q=37,
        seqlen_k=1,
    ),
    SdpaCase(
        "one-token",
        "both lengths below every block size",
        seqlen_q=1,
        seqlen_k=1,
        causal=True,
    ),
    SdpaCase(
        "strided",
        _STRIDES,
        layout="strided",
    ),
    SdpaCase(
        "bool-mask",
        _MASK,
        attn_mask="bool",
        seqlen_k=133,
    ),
    SdpaCase(
        "additive-mask",
        _MASK,
        attn_mask="additive",
        seqlen_k=133,
    ),
    SdpaCase(
        "blocks",
        _BLOCKS,
        batch=2,
        heads=2,
        kv_heads=1,
        seqlen_q=577,
        seqlen_k=600,
        head_dim=32,
    ),
    SdpaCase(
        "blocks-causal",
        _BLOCKS,
        batch=2,
        heads=1,
        kv_heads=1,
        seqlen_q=577,
        seqlen_k=577,
        head_dim=32,
        causal=True,
    ),
    *_sink_cases(),
    *_low_score_cases(),
    SdpaCase(
        "scale",
        "a scale of 1 / sqrt(head_dim), whatever the call passes",
        scale=0.3,
        causal=True,
    ),
    SdpaCase(
        "padding-mask",
        "the mask of the first sequence used for all (batches of padded prompts)",
        batch=3,
        seqlen_q=40,
        seqlen_k=133,
        attn_mask="padding",
        dtypes=HALVES,
    ),
    SdpaCase(
        "least-mask",
        (
            "NaN where a mask of the smallest number hides a whole tile: in base 2 that "
            "number is infinite: https://github.com/pytorch/pytorch/issues/110213"
        ),
        batch=2,
        seqlen_q=40,
        seqlen_k=133,
        attn_mask="least",
        dtypes=HALVES,
    ),
    SdpaCase(
        "learned-mask",
        "the gradient of a bias scaled like q's, or one head's gradient for all heads",
        batch=2,
        heads=2,
        kv_heads=2,
        seqlen_q=72,
        seqlen_k=136,
        head_dim=32,
        attn_mask="learned",
        needs="qkvm",
    ),
    *_value_dim_cases(),
    *_gradient_cases(),
    *_layout_cases(),
    *_wide_mask_cases(),
    SdpaCase(
        "d128-full",
        "head dim 128 without a causal mask: another kernel",
        heads=2,
        kv_heads=2,
        seqlen_q=70,
        seqlen_k=133,
        head_dim=128,
        dtypes=HALVES,
    ),
    *_model_cases(),
    SdpaCase(
        "heads-40",
        "heads after the 32nd left out (Qwen3-14B has 40)",
        heads=40,
        kv_heads=8,
        seqlen_q=20,
        seqlen_k=20,
        head_dim=32,
        dtypes=HALVES,
    ),
    # only from full on: it takes long, and a CPU has no grid
    SdpaCase(
        "heads-65568",
        (
            "batch times heads in one dimension of the grid, which ends at 65535: "
            "https://github.com/pytorch/pytorch/issues/142228"
        ),
        batch=2049,
        heads=32,
        kv_heads=32,
        seqlen_q=1,
        seqlen_k=2,
        head_dim=8,
        dtypes=HALVES,
        size=Size.FULL,
    ),
    SdpaCase(
        "batch-9",
        "sequences after the fourth left out",
        batch=9,
        heads=2,
        kv_heads=2,
        seqlen_q=33,
        seqlen_k=33,
        head_dim=32,
        causal=True,
        dtypes=HALVES,
    ),
    SdpaCase(
        "batch-33",
        "sequences after the 16th, or the 32nd, left out",
        batch=33,
        heads=2,
        kv_heads=1,
        seqlen_q=17,
        seqlen_k=17,
        head_dim=32,
        dtypes=HALVES,
    ),
    SdpaCase(
        "heads-72",
        "heads after the 64th left out",
        batch=2,
        heads=72,
        kv_heads=8,
        seqlen_q=20,
        seqlen_k=20,
        head_dim=32,
        causal=True,
        dtypes=HALVES,
    ),
    SdpaCase(
        "d256-keys",
        "a second block of keys left out in the gradients of head dim 256",
        heads=2,
        kv_heads=1,
        seqlen_q=70,
        seqlen_k=300,
        head_dim=256,
        dtypes=HALVES,
    ),
    SdpaCase(
        "decode-4100",
        "parts of a split over keys merged wrongly, or only 2048 keys read",
        heads=2,
        kv_heads=2,
        seqlen_q=1,
        seqlen_k=4100,
        dtypes=HALVES,
    ),
    SdpaCase(
        "cross-causal-long",
        "queries after the last key left out, where causal is top-left: they see all keys",
        seqlen_q=133,
        seqlen_k=70,
        causal=True,
        dtypes=HALVES,
    ),
    # not in fp16: correct kernels lose weights below its smallest number, which a large scale shows
    SdpaCase(
        "peaked",
        (
            "exp of a score from which no maximum was subtracted, which overflows "
            "above 88, in the backward pass only"
        ),
        heads=2,
        kv_heads=2,
        scale=3.75,
        dtypes=(torch.bfloat16,),
    ),
    SdpaCase(
        "d32",
        "tile sizes of the smallest usual head dim",
        head_dim=32,
        causal=True,
    ),
    SdpaCase(
        "d72",
        _NAN_D72,
        batch=2,
        head_dim=72,
    ),
    SdpaCase(
        "d80",
        _RACE_D80,
        head_dim=80,
        causal=True,
    ),
    SdpaCase(
        "d96",
        _PADDED,
        head_dim=96,
        causal=True,
    ),
    SdpaCase(
        "d128",
        "LDS or tile sizes of the largest usual head dim",
        head_dim=128,
        causal=True,
    ),
    SdpaCase(
        "d160",
        _PADDED,
        head_dim=160,
    ),
    SdpaCase(
        "d192",
        _PADDED,
        head_dim=192,
        causal=True,
    ),
    SdpaCase(
        "d256",
        "LDS of the largest head dim that gfx11 has kernels for",
        head_dim=256,
    ),
    SdpaCase(
        "d512",
        _D512,
        head_dim=512,
        heads=2,
        kv_heads=2,
        may_refuse=True,
    ),
    *_length_cases(),
    *_grouped_cases(),
    SdpaCase(
        "sam2",
        _NAN_D72,
        batch=4,
        heads=8,
        kv_heads=8,
        seqlen_q=4096,
        seqlen_k=4096,
        head_dim=72,
        on_device=True,
        size=Size.FULL,
    ),
    SdpaCase(
        "long",
        "an index that overflows, or an error that grows with the length",
        heads=2,
        kv_heads=2,
        seqlen_q=8192,
        seqlen_k=8192,
        head_dim=128,
        causal=True,
        on_device=True,
        size=Size.STRESS,
    ),
    SdpaCase(
        "beyond-4-gib",
        "an offset of 32 bits: tensors of more than 2^31 numbers, in more than 2^32 bytes",
        batch=4100,
        heads=64,
        kv_heads=64,
        seqlen_q=64,
        seqlen_k=64,
        head_dim=128,
        causal=True,
        on_device=True,
        gib=48,
        dtypes=(torch.bfloat16,),
        size=Size.STRESS,
    ),
    *_random_cases(),
)

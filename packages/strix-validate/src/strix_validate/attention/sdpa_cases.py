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
    """The arguments of a call of scaled_dot_product_attention, and the bug that the case catches.

    sdpa_problem.Problem builds the call of a case for a dtype.

    Attributes:
        name: Name in ids of checks. It determines the seed of the inputs.
        catches: The bug that the case catches, with a link if there is one.
        batch: Number of sequences.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        seqlen_q: Number of queries.
        seqlen_k: Number of keys.
        head_dim: Size of a head of queries and keys.
        v_dim: Size of a head of values; 0 stands for head_dim.
        causal: Whether the call passes is_causal.
        scale: Scale of the scores; None is torch's default.
        attn_mask: Kind of mask; "" for none.
            "bool" is Boolean and random; each query sees at least one key.
            "padding" is Boolean and hides the last 37 * i keys of sequence i.
            "least" is causal, with padding at the start of the second sequence. It hides keys by
            adding the most negative number of the dtype.
            The other kinds are random numbers that are added to the scores.
            "additive" has the shape (seqlen_q, seqlen_k).
            "learned" has the shape (batch, heads, seqlen_q, seqlen_k).
            "sequence" has the shape (batch, 1, 1, seqlen_k).
            "heads" has the shape (1, heads, seqlen_q, seqlen_k).
            "tiles" and "slice" have the shape (1, 1, seqlen_q, seqlen_k).
            "tiles" is -inf for the second half of the queries, except at the last 4 keys.
            "slice" is a slice of wider rows, in which NaN follows the mask.
        mask_dtype: Dtype of an additive mask; "" is the dtype under test.
        dropout: Share of weights that are dropped. If it is not 0, v begins with an identity
            matrix, so that the output shows the dropped weights.
        layout: Layout of the tensors; "" is contiguous.
            "strided" has the memory layout (batch, seqlen, heads, head_dim).
            "expanded" expands one head of keys and values to all heads.
            "packed" has q, k and v in one tensor.
            "strided-values" is like "strided", but for v only.
            "cache" has k and v as the first part of longer tensors, with NaN in the rest.
            "summed" has the gradient of out.sum(), with strides of 0.
        needs: Letters of the tensors whose gradients are computed; m is the mask.
        again: Whether the gradients are computed a second time from the same output.
        sink: See reference.with_sink.
        low: Level of reference.with_low_scores; 0 for none.
        may_refuse: Whether a refusal by torch is also correct.
        on_device: Whether the reference is computed on the device, because it is too large for the
            CPU.
        gib: Memory in GiB that the case needs, if its tensors exceed 2 GiB; otherwise 0. With such
            tensors, only sequences at the start, in the middle and at the end are compared.
        dtypes: Dtypes in which the case is checked.
        size: The smallest size of run that includes the case.
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
    "NaN in causal attention at head dim 80, as in AOTriton's float32 kernel for gfx1150: "
    "https://github.com/ROCm/aotriton/issues/183"
)
_D512 = (
    "silently wrong values above head dim 256, for which AOTriton has no kernels on gfx11 "
    "(Stable Diffusion's VAE): https://github.com/pytorch/pytorch/issues/189849"
)
_PADDED = "padding of the head dim that reaches the result, or a wrong key/value head"
_STRIDES = "a tensor stored as (batch, seqlen, heads) but read as (batch, heads, seqlen)"
_MASK = "a mask that is read with the wrong strides, or inverted"
_BLOCKS = (
    "the second block of 512 queries or keys left out, or the first sequence read in place of all "
    "others"
)
_LENGTH = "a read past the last key, or rows of the last block that are not written"
_GROUP = "a group size that is rounded up to a power of two, or a wrong head dim"
_DECODE = "a wrong key/value head in the separate kernels for calls with one query (decoding)"
_VALUE_DIM = (
    "values read with the keys' head dim (192 for keys and 128 for values in DeepSeek's MLA)"
)
_ONE_GRADIENT = (
    "a gradient that is correct only if the other gradients are computed too (LoRA, frozen layers)"
)
_RANDOM = "a fault with a combination of lengths, heads and head dim that no other check has"
#: The bug that each layout catches.
_LAYOUTS = {
    "expanded": "a stride of 0 that is ignored (all heads share one head's keys)",
    "packed": "q, k and v in one tensor that are read as if each was a separate tensor",
    "strided-values": ("v read with the strides of k: https://github.com/ROCm/pytorch/issues/3230"),
    "cache": "strides of a static cache's slice that are computed from the slice's shape",
    "summed": "the gradient of out.sum().backward() read as a full tensor, not as one number",
}


def _sink_cases() -> Iterator[SdpaCase]:
    case = SdpaCase(
        "",
        reference.SINK_FAULT,
        heads=2,
        kv_heads=2,
        seqlen_q=577,
        seqlen_k=577,
        head_dim=32,
        dtypes=HALVES,
    )
    yield replace(case, name="sink-key", sink="key", needs="q")
    # Of these two cases, only this one checks dk and dv. With the sink "key", the terms of dk and
    # dv have both signs, so the fault would not show.
    yield replace(case, name="sink-query", sink="query", needs="qkv")


def _low_score_cases() -> Iterator[SdpaCase]:
    """Yield cases of three levels of low scores, with lengths that do not fill a tile."""
    case = SdpaCase(
        "",
        reference.LOW_SCORES_FAULT,
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
    """Yield cases with the heads of models: prompts, and decoding from a static cache.

    A quick run includes one model for each ratio of query heads to key heads.
    """
    first_models = {layer.group: name for name, layer in reversed(plain_layers().items())}
    quick = set(first_models.values())
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
        "a wrong scale, or a head mixed up with another",
        batch=2,
    ),
    SdpaCase(
        "causal",
        "a mask that is off by one",
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
        "seqlen_q used instead of seqlen_k",
        seqlen_q=70,
        seqlen_k=133,
    ),
    SdpaCase(
        "cross-causal",
        (
            "a causal mask aligned bottom-right, as in flash-attn, instead of "
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
        "a wrong result for a block of queries with one row (decoding)",
        seqlen_q=1,
        seqlen_k=133,
    ),
    SdpaCase(
        "one-key",
        "a softmax over one key that is not exactly 1",
        seqlen_q=37,
        seqlen_k=1,
    ),
    SdpaCase(
        "one-token",
        "a fault if both lengths are smaller than any block",
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
        "a scale of 1 / sqrt(head_dim), whichever scale the call passes",
        scale=0.3,
        causal=True,
    ),
    SdpaCase(
        "padding-mask",
        "the first sequence's mask used for all sequences (batches of padded prompts)",
        batch=3,
        seqlen_q=40,
        seqlen_k=133,
        attn_mask="padding",
        dtypes=HALVES,
    ),
    SdpaCase(
        "least-mask",
        (
            "NaN from a mask that adds the dtype's most negative number to a whole tile of scores. "
            "The number becomes infinite if the kernel computes in base 2: "
            "https://github.com/pytorch/pytorch/issues/110213"
        ),
        batch=2,
        seqlen_q=40,
        seqlen_k=133,
        attn_mask="least",
        dtypes=HALVES,
    ),
    SdpaCase(
        "learned-mask",
        "a gradient of the mask that is scaled like q's gradient, or is the same for all heads",
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
        "a fault of the kernel for head dim 128 without a causal mask",
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
    # A quick run leaves this case out, because it takes long, and kernels for CPUs have no grid.
    SdpaCase(
        "heads-65568",
        (
            "a dimension of the grid for batch times heads, which is limited to 65535: "
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
        "wrongly merged results of parts of the keys, or only the first 2048 keys read",
        heads=2,
        kv_heads=2,
        seqlen_q=1,
        seqlen_k=4100,
        dtypes=HALVES,
    ),
    SdpaCase(
        "cross-causal-long",
        "a kernel that skips queries after the last key, which see all keys in torch's mask",
        seqlen_q=133,
        seqlen_k=70,
        causal=True,
        dtypes=HALVES,
    ),
    # This case is not checked in fp16. With a large scale, some weights are below fp16's smallest
    # number, so even a correct kernel loses them.
    SdpaCase(
        "peaked",
        (
            "a backward pass that does not subtract the maximum from the scores, so that "
            "exp overflows above 88"
        ),
        heads=2,
        kv_heads=2,
        scale=3.75,
        dtypes=(torch.bfloat16,),
    ),
    SdpaCase(
        "d32",
        "wrong tile sizes for the smallest usual head dim",
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
        "wrong LDS or tile sizes for the largest usual head dim",
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
        "too much LDS for head dim 256, the largest for which AOTriton has kernels on gfx11",
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
        "an offset of 32 bits in tensors with more than 2^31 numbers and 2^32 bytes",
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

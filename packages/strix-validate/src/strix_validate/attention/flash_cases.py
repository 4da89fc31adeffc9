# SPDX-License-Identifier: BSD-3-Clause
"""The cases of flash-attn, each with the bug that it catches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import torch

from strix_validate.attention import flash
from strix_validate.checks import Size
from strix_validate.layers.pairs import pairwise
from strix_validate.layers.table import plain_layers
from strix_validate.numerics import reference
from strix_validate.triton.cases import Case, Expected, make


@dataclass(frozen=True)
class FlashCase:
    """A call that the tier "attention" checks, in one data type.

    Attributes:
        label: Name without the data type. It determines the seed of the tensors.
        build: Builds the call and its expected function; see triton.cases.Case.
        catches: The bug that the case catches, with a link if there is one.
        refusals: Names of exceptions that are correct as well, because they prevent a wrong answer.
        size: The smallest size of run that includes the case.
        half_only: Whether the case is left out in float32.
        dtype: Data type of the tensors. The function `cases` sets it.
    """

    label: str
    build: partial
    catches: str
    refusals: tuple[str, ...] = ()
    size: Size = Size.QUICK
    half_only: bool = False
    dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        """The label with the data type, as in ids of checks."""
        return f"{self.label}-{_get_dtype_name(self.dtype)}"

    @property
    def title(self) -> str:
        """The end of the check's title: flash_attn's function, the label and the data type."""
        function = flash.get_function_name(self.build.func, self.build.keywords.get("pack", ""))
        return f"{function} {self.label} {_get_dtype_name(self.dtype)}"

    @cached_property
    def call(self) -> flash.FlashCall:
        """The call. It is built when it is first read, because every run lists all cases."""
        return self._problem[0]

    @cached_property
    def expected(self) -> Expected:
        """A function that takes a precision and returns the expected tensors by name, on CPU."""
        return self._problem[1]

    @cached_property
    def _problem(self) -> tuple[flash.FlashCall, Expected]:
        return make(self.label, Case(self.build, self.catches, self.dtype))


def _get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_SDIST_WINDOW_BUG = (
    "kernels that accept window_size and softcap and ignore both, as in the sdist 2.8.3, so that "
    "Mistral and Gemma models compute wrong results (flash_attn_triton_amd/interface_fa.py; "
    "removed in https://github.com/Dao-AILab/flash-attention/pull/2230)"
)
_PASSED_ON = "an argument that the function for packed tensors does not pass on"
_MASKS = "a wrong mask at a block's edge, or a causal mask aligned top-left instead of bottom-right"
_GQA = "a query head that reads the wrong key/value head, or gradients not summed over the group"
_CACHE = "keys written to the wrong row, or cache_seqlens changed by a call (aiter 0.1.20.post1)"
_EMPTY = (
    "a sequence without keys that overwrites the next sequence's logsumexp with its own, and "
    "writes zeros to the next head or to memory after the tensors "
    "(flash_attn_triton_amd/fwd_prefill.py, sdist 2.8.3)"
)
_BATCH = (
    "the first sequence read in place of all others, or blocks after the 512th query or key left "
    "out"
)
_LONG = {"seqlen_q": 577, "seqlen_k": 577}
_LSE = (
    "a logsumexp in base 2, whose error the backward pass cancels, but ring attention does not: "
    "https://github.com/pytorch/pytorch/issues/181645"
)
_PADDED = "a head dim padded to the next power of two, with padding that reaches the result"
_D512 = "silently wrong values above head dim 256: https://github.com/pytorch/pytorch/issues/189849"
_LAYER = (
    "a kernel that is correct for other models, but not for this model's group size or head dim"
)
_ALIBI = (
    "ALiBi slopes that are ignored, have the wrong sign, or are those of another head or sequence "
    "(MPT)"
)
_ROTARY = (
    "rotary angles that begin at 0 instead of the cache's length, wrong pairs of elements "
    "(neighbours instead of halves, or vice versa), or lost elements after the rotated ones"
)
_DECODING = (
    "decoding that leaves out or wrongly merges a part of a longer cache, or reads another "
    "sequence's keys"
)
_REFUSED = ("NotImplementedError",)
#: OutOfResources is an exception of Triton. It means that a tile of the case's head dim does not
#: fit into the LDS, and that no kernel was launched.
_TOO_WIDE = (*_REFUSED, "OutOfResources")
#: Models whose decoding a quick run checks. In this order, they have 3, 4 and 8 query heads for
#: each head of keys, and head dims of 64, 128 and 64.
_DECODED = ("Granite-3.1-3B-A800M", "Llama-3.1-8B", "gpt-oss-20b")


def _model_cases() -> Iterator[FlashCase]:
    """Yield cases of prompts with gradients, for each model's group of heads and head dim.

    The cases differ in four columns: number of query heads in a group, head dim, function and
    mask. For any two columns, the cases of a quick run contain each pair of values that any of the
    cases has.
    """
    builds = {}
    columns = []
    for model, layer in plain_layers().items():
        # Triton's interpreter runs each head as a separate program. To save time, a layer with a
        # group of 8 or 16 gets a single head of keys.
        kv_heads = 1 if layer.group in (8, 16) else layer.kv_heads
        shape = {
            "heads": layer.group * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": layer.head_dim,
        }
        kinds = {
            "fixed": partial(flash.fixed, seqlen_q=40, seqlen_k=70, **shape),
            "varlen": partial(flash.varlen, lengths_q=(20, 33), lengths_k=(50, 33), **shape),
        }
        for (kind, build), causal in product(kinds.items(), (False, True)):
            suffix = "-causal" if causal else ""
            label = f"layer-{model}-{kind}{suffix}"
            builds[label] = partial(build, causal=causal)
            columns.append((label, (layer.group, layer.head_dim, kind, causal)))
    quick = set(pairwise(columns))
    for label, build in builds.items():
        size = Size.QUICK if label in quick else Size.FULL
        yield FlashCase(label, build, _LAYER, half_only=True, size=size)


def _low_score_cases() -> Iterator[FlashCase]:
    builds = {
        "20": partial(flash.fixed, low=-20, seqlen_q=40, seqlen_k=40),
        "120": partial(flash.fixed, low=-120, seqlen_k=133, heads=4, causal=True, lse=True),
        "1000": partial(flash.fixed, low=-1000, seqlen_q=33, seqlen_k=100, head_dim=72),
        "short-k": partial(flash.fixed, low=-120, seqlen_k=40, causal=True),
        "alibi": partial(flash.fixed, low=-120, seqlen_q=40, batch=2, alibi="batch"),
        "window": partial(flash.fixed, low=-120, seqlen_k=90, window=(16, 0), causal=True),
        "varlen": partial(flash.varlen, low=-120, causal=False, heads=2),
        "cache": partial(flash.kv_cache, low=-1000),
    }
    for name, build in builds.items():
        refusals = _REFUSED if name in ("alibi", "window") else ()
        yield FlashCase(f"low-{name}", build, reference.LOW_SCORES_FAULT, refusals, half_only=True)


def _alibi_cases() -> Iterator[FlashCase]:
    for kind in ("heads", "batch"):
        build = partial(
            flash.fixed,
            batch=2,
            seqlen_q=40,
            seqlen_k=70,
            alibi=kind,
            causal=True,
        )
        yield FlashCase(f"alibi-{kind}", build, _ALIBI, _REFUSED, half_only=True)


def _cache_alibi_cases() -> Iterator[FlashCase]:
    for kind in ("heads", "batch"):
        build = partial(flash.kv_cache, alibi=kind)
        refusals = _REFUSED if kind == "heads" else ()
        yield FlashCase(f"cache-alibi-{kind}", build, _ALIBI, refusals, half_only=True)


def _packed_cases() -> Iterator[FlashCase]:
    plain = partial(flash.fixed, seqlen_q=40, seqlen_k=40, head_dim=32)
    catches = "packed k and v that are swapped, or read with the strides of separate tensors"
    for pack in ("kv", "qkv"):
        yield FlashCase(f"packed-{pack}", partial(plain, pack=pack), catches, half_only=True)
    for pack in ("kv", "qkv"):
        build = partial(plain, pack=pack, causal=True, scale=0.3, lse=True)
        yield FlashCase(f"packed-{pack}-options", build, _PASSED_ON, half_only=True)
    for pack in ("kv", "qkv"):
        build = partial(_VARLEN_PACKED, pack=pack, causal=False, lse=True)
        yield FlashCase(f"varlen-packed-{pack}-options", build, _PASSED_ON, half_only=True)


_VARLEN_PACKED = partial(
    flash.varlen,
    lengths_q=(7, 33),
    lengths_k=(7, 33),
    heads=2,
    kv_heads=2,
    head_dim=32,
)


def _varlen_packed_cases() -> Iterator[FlashCase]:
    catches = "packed k and v that are swapped, or softmax_scale ignored"
    for pack in ("kv", "qkv"):
        build = partial(_VARLEN_PACKED, pack=pack, scale=0.25)
        yield FlashCase(f"varlen-packed-{pack}", build, catches, half_only=True)


def _length_cases() -> Iterator[FlashCase]:
    catches = "a last block of a single query or key that is left out, or whose padding is included"
    rows = (
        (129, False, Size.QUICK),
        (257, True, Size.FULL),
        (1025, True, Size.FULL),
    )
    for length, causal, size in rows:
        build = partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            head_dim=32,
            causal=causal,
            infers=True,
            seqlen_q=length,
            seqlen_k=length,
        )
        yield FlashCase(f"length-{length}", build, catches, half_only=True, size=size)


def _no_keys_cases() -> Iterator[FlashCase]:
    """Yield cases in which some sequences have no keys.

    They run in half precision only, because they are slow, and the faults that they look for show
    in any dtype. The tier "emulated" runs such cases too.
    """
    build = partial(flash.varlen, **flash.NO_KEYS)
    case = FlashCase("varlen-no-keys", build, _EMPTY, half_only=True)
    yield case
    full = partial(build, causal=False)
    yield replace(case, label="varlen-no-keys-full", build=full, size=Size.FULL)
    padded = partial(build, head_dim=72)
    yield replace(case, label="varlen-no-keys-d72", build=padded, size=Size.FULL)


def _rotary_cases() -> Iterator[FlashCase]:
    for kind in ("neighbours", "halves"):
        build = partial(flash.kv_cache, rotary=kind)
        yield FlashCase(f"cache-rotary-{kind}", build, _ROTARY, half_only=True)


def _decoding_cases() -> Iterator[FlashCase]:
    for model, layer in plain_layers().items():
        build = partial(
            flash.kv_cache,
            queries=1,
            new=1,
            lengths=(200, 290),
            capacity=300,
            batch=2,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
        )
        size = Size.QUICK if model in _DECODED else Size.FULL
        yield FlashCase(f"cache-{model}", build, _DECODING, half_only=True, size=size)


CASES = (
    *_model_cases(),
    FlashCase(
        "full",
        partial(flash.fixed),
        "a wrong scale, or a missing mask in the last partial block",
    ),
    FlashCase(
        "causal",
        partial(flash.fixed, causal=True),
        _MASKS,
    ),
    FlashCase(
        "long",
        partial(
            flash.fixed,
            causal=True,
            seqlen_q=200,
            seqlen_k=200,
        ),
        _MASKS,
    ),
    FlashCase(
        "short-q",
        partial(
            flash.fixed,
            causal=True,
            seqlen_q=50,
            seqlen_k=130,
        ),
        _MASKS,
    ),
    FlashCase(
        "short-k",
        partial(
            flash.fixed,
            causal=True,
            seqlen_q=130,
            seqlen_k=50,
        ),
        _MASKS,
    ),
    FlashCase(
        "one-query",
        partial(
            flash.fixed,
            causal=True,
            seqlen_q=1,
            seqlen_k=133,
        ),
        _MASKS,
    ),
    FlashCase(
        "one-token",
        partial(
            flash.fixed,
            causal=True,
            seqlen_q=1,
            seqlen_k=1,
        ),
        _MASKS,
    ),
    FlashCase(
        "gqa",
        partial(
            flash.fixed,
            causal=True,
            heads=4,
        ),
        _GQA,
    ),
    FlashCase(
        "mqa-lse",
        partial(
            flash.fixed,
            causal=True,
            heads=4,
            kv_heads=1,
            lse=True,
        ),
        _LSE,
    ),
    FlashCase(
        "batch",
        partial(
            flash.fixed,
            causal=True,
            batch=2,
            heads=4,
        ),
        _BATCH,
    ),
    FlashCase(
        "blocks",
        partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            head_dim=32,
            **_LONG,
        ),
        _BATCH,
    ),
    FlashCase(
        "sink-key",
        partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            head_dim=32,
            sink="key",
            **_LONG,
        ),
        reference.SINK_FAULT,
        half_only=True,
    ),
    FlashCase(
        "sink-query",
        partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            head_dim=32,
            sink="query",
            **_LONG,
        ),
        reference.SINK_FAULT,
        half_only=True,
    ),
    *_low_score_cases(),
    FlashCase(
        "scale",
        partial(
            flash.fixed,
            causal=True,
            scale=0.3,
            seqlen_q=40,
            seqlen_k=40,
            infers=True,
        ),
        "1 / sqrt(head_dim) used instead of softmax_scale, in the forward or backward pass",
        half_only=True,
    ),
    *_alibi_cases(),
    FlashCase(
        "alibi-full",
        partial(
            flash.fixed,
            seqlen_q=40,
            seqlen_k=70,
            alibi="heads",
        ),
        "an ALiBi bias that favours later keys if the call has no causal mask",
        refusals=_REFUSED,
        half_only=True,
    ),
    FlashCase(
        "window-right",
        partial(
            flash.fixed,
            seqlen_q=40,
            seqlen_k=70,
            window=(-1, 8),
        ),
        "an ignored window that has no left bound: " + _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
        half_only=True,
    ),
    FlashCase(
        "window-short-k",
        partial(
            flash.fixed,
            seqlen_q=130,
            seqlen_k=50,
            causal=True,
            window=(16, 0),
        ),
        "wrong results for queries that precede all keys: " + _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
        half_only=True,
    ),
    *_packed_cases(),
    FlashCase(
        "window-blocks",
        partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            head_dim=32,
            causal=True,
            window=(150, 0),
            seqlen_q=330,
            seqlen_k=330,
        ),
        "a window of several blocks whose last blocks are left out: " + _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
        half_only=True,
    ),
    FlashCase(
        "batch-17",
        partial(
            flash.fixed,
            batch=17,
            heads=1,
            kv_heads=1,
            seqlen_q=20,
            seqlen_k=20,
            head_dim=32,
        ),
        "sequences after the fourth, or the 16th, left out",
        half_only=True,
    ),
    *_length_cases(),
    FlashCase(
        "d256-causal",
        partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            causal=True,
            head_dim=256,
            seqlen_q=70,
            seqlen_k=90,
        ),
        "a wrong causal mask at head dim 256",
        half_only=True,
    ),
    FlashCase(
        "d256-keys",
        partial(
            flash.fixed,
            heads=1,
            kv_heads=1,
            head_dim=256,
            seqlen_q=40,
            seqlen_k=200,
        ),
        "keys after the 128th left out at head dim 256",
        half_only=True,
    ),
    FlashCase(
        "d32",
        partial(flash.fixed, head_dim=32),
        "wrong tile sizes for the smallest usual head dim",
    ),
    FlashCase(
        "d72",
        partial(flash.fixed, head_dim=72),
        _PADDED,
    ),
    FlashCase(
        "d80",
        partial(flash.fixed, head_dim=80),
        "a head dim of 80 padded to 128, with padding that reaches the result (ViT)",
    ),
    FlashCase(
        "d96",
        partial(
            flash.fixed,
            head_dim=96,
            causal=True,
        ),
        _PADDED,
    ),
    FlashCase(
        "d128",
        partial(
            flash.fixed,
            head_dim=128,
            causal=True,
        ),
        "wrong tile sizes for head dim 128",
    ),
    FlashCase(
        "d160",
        partial(flash.fixed, head_dim=160),
        _PADDED,
    ),
    FlashCase(
        "d192",
        partial(
            flash.fixed,
            head_dim=192,
            causal=True,
        ),
        _PADDED,
    ),
    FlashCase(
        "d256",
        partial(flash.fixed, head_dim=256),
        "too much LDS for head dim 256",
    ),
    FlashCase(
        "d512",
        partial(flash.fixed, head_dim=512),
        _D512,
        refusals=_TOO_WIDE,
    ),
    FlashCase(
        "strided",
        partial(
            flash.fixed,
            causal=True,
            strided=True,
        ),
        "the output's gradient read with the strides of the output (sdist 2.8.3)",
    ),
    FlashCase(
        "window",
        partial(
            flash.fixed,
            causal=True,
            window=(16, 0),
        ),
        _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
    ),
    FlashCase(
        "window-both",
        partial(flash.fixed, window=(16, 8)),
        _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
    ),
    FlashCase(
        "softcap",
        partial(flash.fixed, softcap=1.0),
        _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
    ),
    FlashCase(
        "dropout",
        partial(
            flash.fixed,
            dropout=0.2,
            repeats=2,
        ),
        (
            "dropout with a constant seed, which drops the same positions in every layer and step "
            "(sdist 2.8.3, aiter 0.1.20.post1)"
        ),
        refusals=_REFUSED,
    ),
    FlashCase(
        "deterministic",
        partial(
            flash.fixed,
            causal=True,
            head_dim=80,
            repeats=3,
        ),
        "a race, or a read of unwritten memory: https://github.com/ROCm/aotriton/issues/183",
    ),
    FlashCase(
        "deterministic-100",
        partial(
            flash.fixed,
            causal=True,
            head_dim=80,
            seqlen_q=513,
            seqlen_k=513,
            repeats=100,
        ),
        "a race that makes only some of the calls wrong: https://github.com/ROCm/aotriton/issues/183",
        size=Size.FULL,
    ),
    FlashCase(
        "n4096-d72",
        partial(
            flash.fixed,
            head_dim=72,
            seqlen_q=4096,
            seqlen_k=4096,
        ),
        "NaN at head dim 72 with 4096 keys: https://github.com/ROCm/aotriton/issues/54",
        size=Size.FULL,
    ),
    FlashCase(
        "varlen",
        partial(flash.varlen),
        "a query that sees keys of another sequence",
    ),
    FlashCase(
        "varlen-short",
        partial(
            flash.varlen,
            lengths_q=(1, 7, 65, 1),
            lengths_k=(1, 64, 65, 129),
            lse=True,
        ),
        "keys of the next sequence read in the last block of a short sequence",
    ),
    FlashCase(
        "varlen-20",
        partial(
            flash.varlen,
            lengths_q=tuple(1 + 5 * i % 23 for i in range(20)),
            lengths_k=tuple(3 + 7 * i % 40 for i in range(20)),
            heads=2,
            kv_heads=1,
            head_dim=32,
            scale=0.3,
        ),
        "sequences after the 16th left out",
        half_only=True,
    ),
    FlashCase(
        "varlen-empty",
        partial(flash.varlen, **flash.NO_TOKENS),
        _EMPTY,
    ),
    *_no_keys_cases(),
    *_varlen_packed_cases(),
    FlashCase(
        "varlen-65600",
        partial(
            flash.varlen,
            lengths_q=(65600, 5),
            lengths_k=(1, 5),
            heads=1,
            kv_heads=1,
            head_dim=32,
        ),
        "16-bit offsets of tokens, or a dimension of the grid that is limited to 65535",
        half_only=True,
        size=Size.FULL,
    ),
    FlashCase(
        "varlen-window",
        partial(flash.varlen, window=(16, 0)),
        _SDIST_WINDOW_BUG,
        refusals=_REFUSED,
    ),
    FlashCase(
        "cache",
        partial(flash.kv_cache),
        _CACHE,
    ),
    FlashCase(
        "cache-scale",
        partial(flash.kv_cache, scale=0.3),
        "1 / sqrt(head_dim) used instead of softmax_scale",
        half_only=True,
    ),
    *_rotary_cases(),
    FlashCase(
        "cache-full-rotary",
        partial(
            flash.kv_cache,
            causal=False,
            rotary="halves",
            lse=True,
        ),
        (
            "queries that are rotated by different angles although they have the same position, a "
            "causal mask although the call has none, or a logsumexp in base 2"
        ),
        half_only=True,
    ),
    FlashCase(
        "cache-integer",
        partial(
            flash.kv_cache,
            integer=True,
            lengths=(50, 50),
            new=0,
            lse=True,
        ),
        "an integer cache_seqlens, the length of all sequences, applied only to the first sequence",
        half_only=True,
    ),
    FlashCase(
        "cache-pages-window",
        partial(
            flash.kv_cache,
            page=20,
            window=(30, 0),
        ),
        "a block_table or a window that is ignored (sdist 2.8.3)",
        refusals=_REFUSED,
        half_only=True,
    ),
    FlashCase(
        "cache-strided",
        partial(flash.kv_cache, strided=True),
        "keys and values that are slices of one tensor, read as if they were contiguous",
        half_only=True,
    ),
    FlashCase(
        "cache-pages-strided",
        partial(
            flash.kv_cache,
            page=20,
            strided=True,
        ),
        "pages read as if they were contiguous",
        refusals=_REFUSED,
        half_only=True,
    ),
    FlashCase(
        "cache-pages-parts",
        partial(
            flash.kv_cache,
            queries=1,
            new=1,
            page=100,
            lengths=(200, 290),
            capacity=300,
            batch=2,
            heads=2,
            kv_heads=1,
        ),
        "keys left out, or counted twice, in a page that lies in two parts of a split cache",
        refusals=_REFUSED,
        half_only=True,
    ),
    *_cache_alibi_cases(),
    FlashCase(
        "cache-prompt",
        partial(
            flash.kv_cache,
            queries=70,
            new=70,
            capacity=160,
            batch=2,
            heads=2,
            kv_heads=2,
            rotary="halves",
        ),
        "a second block of queries or of new keys left out when a prompt is computed in chunks",
        half_only=True,
    ),
    FlashCase(
        "cache-d96",
        partial(
            flash.kv_cache,
            head_dim=96,
            batch=2,
        ),
        "padding of the head dim to 128, written to the cache or used for the result",
        half_only=True,
    ),
    FlashCase(
        "cache-4200",
        partial(
            flash.kv_cache,
            queries=1,
            new=1,
            lengths=(4200, 33),
            heads=2,
            kv_heads=1,
            capacity=4300,
            batch=2,
        ),
        "keys after the 4096th left out, or the parts of a long and a short sequence mixed up",
        half_only=True,
    ),
    *_decoding_cases(),
    FlashCase(
        "cache-rows",
        partial(flash.kv_cache, rows=(3, 1)),
        _CACHE,
    ),
    FlashCase(
        "cache-stale",
        partial(
            flash.kv_cache,
            new=0,
            stale=True,
            lengths=(50, 98),
        ),
        "NaN from cache entries after the sequence's end (sdist 2.8.3, aiter 0.1.20.post1)",
    ),
    FlashCase(
        "cache-pages",
        partial(flash.kv_cache, page=20),
        "a block_table that is ignored (sdist 2.8.3)",
        refusals=_REFUSED,
    ),
    FlashCase(
        "cache-leftpad",
        partial(
            flash.kv_cache,
            new=0,
            leftpad=(5, 9),
        ),
        "a cache_leftpad that is ignored (sdist 2.8.3, aiter 0.1.20.post1)",
        refusals=_REFUSED,
    ),
)


def cases(dtype: torch.dtype) -> Iterator[FlashCase]:
    """Yield the cases of a data type. In float32, the cases with half_only are left out."""
    for case in CASES:
        if case.half_only and dtype is torch.float32:
            continue
        yield replace(case, dtype=dtype)


#: The module `package_checks` reads the public names below. Ids of flash-attn's checks have no
#: prefix.
PREFIX = ""
MODULE = "flash_attn"
_COMPILES = (
    "a kernel that no longer compiles, does not use the matrix unit, or needs more LDS than the "
    "chip has, after a change of Triton or of the kernel: "
    "https://github.com/vllm-project/vllm/issues/56021"
)
_EXECUTED = (
    "a code object that lacks a wait or has a race between waves, or that computes wrong numbers "
    "although its source is correct: https://github.com/ROCm/aotriton/issues/54"
)
_SEQLEN_512 = partial(flash.fixed, seqlen_q=512, seqlen_k=512)
COMPILED = {
    "d64": Case(_SEQLEN_512, _COMPILES),
    "d128-causal": Case(partial(_SEQLEN_512, head_dim=128, causal=True), _COMPILES),
    "d128-causal-gqa": Case(
        partial(_SEQLEN_512, heads=8, head_dim=128, causal=True),
        _COMPILES,
        torch.bfloat16,
    ),
    "d80": Case(partial(_SEQLEN_512, head_dim=80), _COMPILES),
    "varlen": Case(flash.varlen, _COMPILES),
    "decode": Case(flash.kv_cache, _COMPILES),
}
#: Empty, because the tier "attention" runs the cases of the function `cases` instead.
COMPUTED: dict[str, Case] = {}
_NO_KEYS = partial(flash.varlen, heads=2, **flash.NO_KEYS)


def _emulated_head_dims() -> dict[str, Case]:
    """Return cases of three head dims, causal and not, in 16-bit dtypes. Head dim 72 is padded."""
    cases = {}
    dtypes = (torch.float16, torch.bfloat16)
    for size, causal, dtype in product((64, 72, 128), (False, True), dtypes):
        suffix = "-causal" if causal else ""
        build = partial(flash.fixed, head_dim=size, causal=causal)
        cases[f"d{size}{suffix}-{_get_dtype_name(dtype)}"] = Case(build, _EXECUTED, dtype)
    return cases


#: Cases for head dims, grouped queries, ragged lengths, low scores, and varlen. The cases of varlen
#: include sequences without queries or keys.
EMULATED = {
    **_emulated_head_dims(),
    "gqa-causal": Case(
        partial(flash.fixed, causal=True, heads=4, lse=True),
        _EXECUTED,
    ),
    "batch-causal": Case(
        partial(flash.fixed, batch=2, causal=True, seqlen_k=90),
        _EXECUTED,
        torch.bfloat16,
    ),
    "gqa-long-keys": Case(
        partial(flash.fixed, head_dim=128, causal=True, kv_heads=1, seqlen_q=100, seqlen_k=150),
        _EXECUTED,
    ),
    "ragged": Case(
        partial(flash.fixed, seqlen_q=33, seqlen_k=131),
        _EXECUTED,
    ),
    "whole-blocks": Case(
        partial(flash.fixed, seqlen_q=128, seqlen_k=128),
        _EXECUTED,
    ),
    "varlen": Case(
        partial(flash.varlen, lse=True),
        _EXECUTED,
    ),
    "varlen-bfloat16": Case(
        partial(flash.varlen, heads=2, causal=False, lengths_q=(40, 100), lengths_k=(70, 20)),
        _EXECUTED,
        torch.bfloat16,
    ),
    "varlen-empty": Case(
        partial(flash.varlen, heads=2, **flash.NO_TOKENS),
        _EXECUTED,
    ),
    "varlen-empty-gqa": Case(
        partial(flash.varlen, lengths_q=(10, 0, 33), lengths_k=(10, 0, 33)),
        _EXECUTED,
    ),
    "low-20": Case(
        partial(flash.fixed, low=-20, seqlen_q=40, seqlen_k=40, heads=1, kv_heads=1),
        _EXECUTED,
    ),
    "low-120-bfloat16": Case(
        partial(flash.fixed, low=-120, seqlen_k=133, heads=1, kv_heads=1, causal=True),
        _EXECUTED,
        torch.bfloat16,
    ),
    "low-varlen": Case(
        partial(
            flash.varlen,
            low=-120,
            causal=False,
            heads=2,
            lengths_q=(40, 33),
            lengths_k=(70, 20),
        ),
        _EXECUTED,
    ),
    "varlen-no-keys": Case(_NO_KEYS, _EXECUTED),
    "varlen-no-keys-d72": Case(partial(_NO_KEYS, head_dim=72), _EXECUTED),
    "varlen-no-keys-full": Case(partial(_NO_KEYS, causal=False), _EXECUTED),
}

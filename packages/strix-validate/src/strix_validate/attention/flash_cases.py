# SPDX-License-Identifier: BSD-3-Clause
"""The cases of flash-attn that the tier attention checks, each with the bug that it would catch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import torch

from strix_validate.attention import flash
from strix_validate.checks import Size
from strix_validate.layers.pairs import pairwise
from strix_validate.layers.table import plain_layers
from strix_validate.numerics import reference
from strix_validate.triton.cases import Case, Expected, make

_SDIST_WINDOW_BUG = (
    "the sdist 2.8.3 kernels accept window_size and softcap and read neither, so that Mistral and "
    "Gemma models ran as other models (flash_attn_triton_amd/interface_fa.py; the kernels are gone "
    "since https://github.com/Dao-AILab/flash-attention/pull/2230)"
)


@dataclass(frozen=True)
class FlashCase:
    """A call and what it must return, built when first read: every run lists all cases.

    expected(dtype) computes the tensors by name, in dtype, on the CPU. refusals: names
    of exceptions that are also correct, because a wrong answer is impossible then.
    """

    name: str
    title: str
    why: str
    build: Callable[[], tuple[flash.FlashCall, Expected]]
    refusals: tuple[str, ...]
    size: Size
    _built = cached_property(lambda self: self.build())
    call = cached_property(lambda self: self._built[0])
    expected = cached_property(lambda self: self._built[1])


_PASSED_ON = "an argument that the function for packed tensors does not pass on"
_MASKS = "a wrong mask at a block's edge, or causal aligned top-left as in torch, not bottom-right"
_GQA = "a query head that reads the wrong key/value head, or gradients not summed over the group"
_CACHE = "keys written to the wrong row or the caller's cache_seqlens changed (aiter 0.1.20.post1)"
_EMPTY = (
    "the logsumexp of a sequence without keys written over that of the next one, its zeros over "
    "the next head, and both past the end (flash_attn_triton_amd/fwd_prefill.py, sdist 2.8.3)"
)
_BATCH = "the first sequence read for each, or the blocks behind the 512th query or key left out"
_LONG = {"seqlen_q": 577, "seqlen_k": 577}
_LSE = (
    "a logsumexp in base 2, which the backward pass undoes and ring attention does not: "
    "https://github.com/pytorch/pytorch/issues/181645"
)


class _Spec(NamedTuple):
    name: str
    build: partial
    why: str
    refusals: tuple[str, ...] = ()
    size: Size = Size.QUICK
    half_only: bool = False


_REFUSED = ("NotImplementedError",)
#: Triton's as well: a tile of that width does not fit into the LDS, and nothing is launched.
_TOO_WIDE = (*_REFUSED, "OutOfResources")
_PADDED = "padding of the head dim to the next power of two that leaks into the result"
_D512 = (
    "values that are wrong without a word above head dim 256: "
    "https://github.com/pytorch/pytorch/issues/189849"
)
#: Models with 3, 4 and 8 query heads to one of keys, of 64 and 128 lanes.
_DECODED = ("Granite-3.1-3B-A800M", "Llama-3.1-8B", "gpt-oss-20b")
_LAYER = "a kernel that is correct for other groups of heads or lanes than this model's"


def _model_specs() -> Iterator[_Spec]:
    """Yield prompts of each model's group and lanes, with gradients; quick has each pair."""
    rows = {}
    for name, layer in plain_layers().items():
        # a group of 8 or 16 has one head of keys: a program for each head takes longest
        kv_heads = 1 if layer.group in (8, 16) else layer.kv_heads
        shape = {
            "heads": layer.group * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": layer.head_dim,
        }
        fixed = partial(flash.fixed, seqlen_q=40, seqlen_k=70, **shape)
        varlen = partial(flash.varlen, lengths_q=(20, 33), lengths_k=(50, 33), **shape)
        for kind, build in (("fixed", fixed), ("varlen", varlen)):
            for causal in (False, True):
                columns = (layer.group, layer.head_dim, kind, causal)
                rows[f"layer-{name}-{kind}{'-causal' * causal}"] = (
                    partial(build, causal=causal), columns,
                )  # fmt: skip
    quick = set(pairwise([(name, columns) for name, (_, columns) in rows.items()]))
    for name, (build, _) in rows.items():
        size = Size.QUICK if name in quick else Size.FULL
        yield _Spec(name, build, _LAYER, half_only=True, size=size)


SPECS = (
    *_model_specs(),
    _Spec("full", partial(flash.fixed), "wrong scale or a missing mask of the last partial block"),
    _Spec("causal", partial(flash.fixed, causal=True), _MASKS),
    _Spec("long", partial(flash.fixed, causal=True, seqlen_q=200, seqlen_k=200), _MASKS),
    _Spec("short-q", partial(flash.fixed, causal=True, seqlen_q=50, seqlen_k=130), _MASKS),
    _Spec("short-k", partial(flash.fixed, causal=True, seqlen_q=130, seqlen_k=50), _MASKS),
    _Spec("one-query", partial(flash.fixed, causal=True, seqlen_q=1, seqlen_k=133), _MASKS),
    _Spec("one-token", partial(flash.fixed, causal=True, seqlen_q=1, seqlen_k=1), _MASKS),
    _Spec("gqa", partial(flash.fixed, causal=True, heads=4), _GQA),
    _Spec("mqa-lse", partial(flash.fixed, causal=True, heads=4, kv_heads=1, lse=True), _LSE),
    _Spec("batch", partial(flash.fixed, causal=True, batch=2, heads=4), _BATCH),
    _Spec("blocks", partial(flash.fixed, heads=1, kv_heads=1, head_dim=32, **_LONG), _BATCH),
    _Spec("sink-key", partial(flash.fixed, heads=1, kv_heads=1, head_dim=32, sink="key", **_LONG),
        reference.WHY_SINK, half_only=True),
    _Spec("sink-query", partial(flash.fixed, heads=1, kv_heads=1, head_dim=32, sink="query",
        **_LONG), reference.WHY_SINK, half_only=True),
    *(_Spec(f"low-{name}", build, reference.WHY_LOW,
        _REFUSED if name in ("alibi", "window") else (), half_only=True) for name, build in {
            "20": partial(flash.fixed, low=-20, seqlen_q=40, seqlen_k=40),
            "120": partial(flash.fixed, low=-120, seqlen_k=133, heads=4, causal=True, lse=True),
            "1000": partial(flash.fixed, low=-1000, seqlen_q=33, seqlen_k=100, head_dim=72),
            "short-k": partial(flash.fixed, low=-120, seqlen_k=40, causal=True),
            "alibi": partial(flash.fixed, low=-120, seqlen_q=40, batch=2, alibi="batch"),
            "window": partial(flash.fixed, low=-120, seqlen_k=90, window=(16, 0), causal=True),
            "varlen": partial(flash.varlen, low=-120, causal=False, heads=2),
            "cache": partial(flash.kv_cache, low=-1000),
        }.items()),
    _Spec("scale", partial(flash.fixed, causal=True, scale=0.3, seqlen_q=40, seqlen_k=40,
        infers=True), "1 / sqrt(head_dim) instead of softmax_scale, in forward or backward",
        half_only=True),
    *(_Spec(f"alibi-{kind}", partial(flash.fixed, batch=2, seqlen_q=40, seqlen_k=70, alibi=kind,
        causal=True),
        "slopes ignored, of another head or sequence, or with the wrong sign (MPT, Bloom)",
        _REFUSED, half_only=True) for kind in ("heads", "batch")),
    _Spec("alibi-full", partial(flash.fixed, seqlen_q=40, seqlen_k=70, alibi="heads"),
        "slopes that favour later keys where there is no mask", _REFUSED, half_only=True),
    _Spec("window-right", partial(flash.fixed, seqlen_q=40, seqlen_k=70, window=(-1, 8)),
        "a window that is open to the left taken for none: " + _SDIST_WINDOW_BUG, _REFUSED,
        half_only=True),
    _Spec("window-short-k", partial(flash.fixed, seqlen_q=130, seqlen_k=50, causal=True,
        window=(16, 0)), "rows in front of all keys: " + _SDIST_WINDOW_BUG, _REFUSED,
        half_only=True),
    *(_Spec(f"packed-{pack}", partial(flash.fixed, seqlen_q=40, seqlen_k=40, pack=pack,
        head_dim=32), "k and v of one tensor swapped, or read with the strides of three",
        half_only=True) for pack in ("kv", "qkv")),
    *(_Spec(f"packed-{pack}-options", partial(flash.fixed, seqlen_q=40, seqlen_k=40, pack=pack,
        head_dim=32, causal=True, scale=0.3, lse=True), _PASSED_ON,
        half_only=True) for pack in ("kv", "qkv")),
    *(_Spec(f"varlen-packed-{pack}-options", partial(flash.varlen, lengths_q=(7, 33),
        lengths_k=(7, 33), heads=2, kv_heads=2, head_dim=32, pack=pack, causal=False, lse=True),
        _PASSED_ON, half_only=True) for pack in ("kv", "qkv")),
    _Spec("window-blocks", partial(flash.fixed, heads=1, kv_heads=1, head_dim=32, causal=True,
        window=(150, 0), seqlen_q=330, seqlen_k=330),
        "a window of several blocks whose last ones are left out: " + _SDIST_WINDOW_BUG, _REFUSED,
        half_only=True),
    _Spec("batch-17", partial(flash.fixed, batch=17, heads=1, kv_heads=1, seqlen_q=20, seqlen_k=20,
        head_dim=32), "sequences behind the fourth, or the 16th, left out", half_only=True),
    *(_Spec(f"length-{length}", partial(flash.fixed, heads=1, kv_heads=1, head_dim=32,
        causal=causal, infers=True, seqlen_q=length, seqlen_k=length),
        "a block of one query or key left out, or its padding counted", half_only=True,
        size=size) for length, causal, size in ((129, False, Size.QUICK), (257, True, Size.FULL),
        (1025, True, Size.FULL))),
    _Spec("d256-causal", partial(flash.fixed, heads=1, kv_heads=1, causal=True, head_dim=256,
        seqlen_q=70, seqlen_k=90), "the mask of the largest head dim's tiles, which are smaller",
        half_only=True),
    _Spec("d256-keys", partial(flash.fixed, heads=1, kv_heads=1, head_dim=256, seqlen_q=40,
        seqlen_k=200), "a second block of keys left out, which the smaller tests have not",
        half_only=True),
    _Spec("d32", partial(flash.fixed, head_dim=32), "tile sizes of the smallest usual head dim"),
    _Spec("d72", partial(flash.fixed, head_dim=72), _PADDED),
    _Spec("d80", partial(flash.fixed, head_dim=80), "padding of head dim 80 to 128 leaks (ViT)"),
    _Spec("d96", partial(flash.fixed, head_dim=96, causal=True), _PADDED),
    _Spec("d128", partial(flash.fixed, head_dim=128, causal=True),
        "wrong tile sizes of head dim 128"),
    _Spec("d160", partial(flash.fixed, head_dim=160), _PADDED),
    _Spec("d192", partial(flash.fixed, head_dim=192, causal=True), _PADDED),
    _Spec("d256", partial(flash.fixed, head_dim=256), "LDS of the largest head dim"),
    _Spec("d512", partial(flash.fixed, head_dim=512), _D512, _TOO_WIDE),
    _Spec("strided", partial(flash.fixed, causal=True, strided=True),
        "the sdist 2.8.3 kernels read the output's gradient with the strides of the output"),
    _Spec("window", partial(flash.fixed, causal=True, window=(16, 0)), _SDIST_WINDOW_BUG, _REFUSED),
    _Spec("window-both", partial(flash.fixed, window=(16, 8)), _SDIST_WINDOW_BUG, _REFUSED),
    _Spec("softcap", partial(flash.fixed, softcap=1.0), _SDIST_WINDOW_BUG, _REFUSED),
    _Spec("dropout", partial(flash.fixed, dropout=0.2, repeats=2),
        "dropout with a constant seed: the same positions in every layer and step (sdist 2.8.3, "
        "aiter 0.1.20.post1)", _REFUSED),
    _Spec("deterministic", partial(flash.fixed, causal=True, head_dim=80, repeats=3),
        "a race, or memory read that nothing wrote: https://github.com/ROCm/aotriton/issues/183"),
    _Spec("deterministic-100", partial(flash.fixed, causal=True, head_dim=80, seqlen_q=513,
        seqlen_k=513, repeats=100),
        "a race that shows in few of many calls: https://github.com/ROCm/aotriton/issues/183",
        size=Size.FULL),
    _Spec("n4096-d72", partial(flash.fixed, head_dim=72, seqlen_q=4096, seqlen_k=4096),
        "NaN from 4096 keys at head dim 72: https://github.com/ROCm/aotriton/issues/54",
        size=Size.FULL),
    _Spec("varlen", partial(flash.varlen), "one sequence's keys seen by another"),
    _Spec("varlen-short", partial(flash.varlen, lengths_q=(1, 7, 65, 1), lengths_k=(1, 64, 65, 129),
        lse=True),
        "sequences of one token beside long ones: keys of a neighbour in the last block"),
    _Spec("varlen-20", partial(flash.varlen, lengths_q=tuple(1 + 5 * i % 23 for i in range(20)),
        lengths_k=tuple(3 + 7 * i % 40 for i in range(20)), heads=2, kv_heads=1, head_dim=32,
        scale=0.3), "sequences behind the 16th left out", half_only=True),
    _Spec("varlen-empty", partial(flash.varlen, **flash.NO_TOKENS), _EMPTY),
    # the slowest of all, in any dtype alike; emulated has them too
    *(_Spec(f"varlen-no-keys{name}", partial(flash.varlen, **flash.NO_KEYS, **other), _EMPTY,
        half_only=True, size=size)
      for name, other, size in (
          ("", {}, Size.QUICK),
          ("-full", {"causal": False}, Size.FULL),
          ("-d72", {"head_dim": 72}, Size.FULL),
      )),
    *(_Spec(f"varlen-packed-{pack}", partial(flash.varlen, lengths_q=(7, 33), lengths_k=(7, 33),
        heads=2, kv_heads=2, head_dim=32, pack=pack, scale=0.25),
        "k and v of one tensor swapped, or softmax_scale ignored",
        half_only=True) for pack in ("kv", "qkv")),
    _Spec("varlen-65600", partial(flash.varlen, lengths_q=(65600, 5), lengths_k=(1, 5), heads=1,
        kv_heads=1, head_dim=32),
        "offsets of tokens in 16 bits, or a dimension of the grid of 65535", half_only=True,
        size=Size.FULL),
    _Spec("varlen-window", partial(flash.varlen, window=(16, 0)), _SDIST_WINDOW_BUG, _REFUSED),
    _Spec("cache", partial(flash.kv_cache), _CACHE),
    _Spec("cache-scale", partial(flash.kv_cache, scale=0.3),
        "1 / sqrt(head_dim) instead of softmax_scale", half_only=True),
    *(_Spec(f"cache-rotary-{kind}", partial(flash.kv_cache, rotary=kind),
        "angles that begin at 0 instead of the cache's length, neighbours for halves, or the "
        "lanes behind the turned ones lost", half_only=True) for kind in ("neighbours", "halves")),
    _Spec("cache-full-rotary", partial(flash.kv_cache, causal=False, rotary="halves", lse=True),
        "queries that are turned one by one although they have one position, or a causal mask "
        "where there is none; a logsumexp of the cache in base 2", half_only=True),
    _Spec("cache-integer", partial(flash.kv_cache, integer=True, lengths=(50, 50), new=0,
        lse=True), "one length for all sequences taken for the first one's alone", half_only=True),
    _Spec("cache-pages-window", partial(flash.kv_cache, page=20, window=(30, 0)),
        "a block_table or a window that is ignored (sdist 2.8.3)", _REFUSED, half_only=True),
    _Spec("cache-strided", partial(flash.kv_cache, strided=True),
        "keys and values of one tensor taken for two that are contiguous", half_only=True),
    _Spec("cache-pages-strided", partial(flash.kv_cache, page=20, strided=True),
        "pages taken for contiguous ones", _REFUSED, half_only=True),
    _Spec("cache-prompt", partial(flash.kv_cache, queries=70, new=70, capacity=160, batch=2,
        heads=2, kv_heads=2, rotary="halves"),
        "a second block of queries or of new keys left out (a prompt in parts)", half_only=True),
    _Spec("cache-d96", partial(flash.kv_cache, head_dim=96, batch=2),
        "padding of the head dim that leaks into the cache, or out of it", half_only=True),
    _Spec("cache-4200", partial(flash.kv_cache, queries=1, new=1, lengths=(4200, 33), heads=2,
        kv_heads=1, capacity=4300, batch=2),
        "keys behind the 4096th left out, or parts of a long and of a short cache mixed up",
        half_only=True),
    *(_Spec(f"cache-{name}", partial(flash.kv_cache, queries=1, new=1, lengths=(200, 290),
        capacity=300, batch=2, heads=layer.heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim),
        "decoding: a part of a longer cache left out or merged wrongly, or a neighbour's keys",
        half_only=True, size=Size.QUICK if name in _DECODED else Size.FULL)
        for name, layer in plain_layers().items()),
    _Spec("cache-rows", partial(flash.kv_cache, rows=(3, 1)), _CACHE),
    _Spec("cache-stale", partial(flash.kv_cache, new=0, stale=True, lengths=(50, 98)),
        "what lies behind the sequence is loaded and gives NaN (sdist 2.8.3, aiter 0.1.20.post1)"),
    _Spec("cache-pages", partial(flash.kv_cache, page=20),
        "a block_table that is ignored (sdist 2.8.3)", _REFUSED),
    _Spec("cache-leftpad", partial(flash.kv_cache, new=0, leftpad=(5, 9)),
        "a cache_leftpad that is ignored (sdist 2.8.3, aiter 0.1.20.post1)", _REFUSED),
)  # fmt: skip


def cases(dtype: torch.dtype) -> Iterator[FlashCase]:
    """Yield all cases, with tensors in dtype; a case has the same numbers for a seed."""
    suffix = str(dtype).removeprefix("torch.")
    for spec in SPECS:
        if spec.half_only and dtype is torch.float32:
            continue
        function = flash.function_of(spec.build.func, spec.build.keywords.get("pack", ""))
        name, title = f"{spec.name}-{suffix}", f"{function} {spec.name} {suffix}"
        build = partial(make, spec.name, Case(spec.build, spec.why, dtype))
        yield FlashCase(name, title, spec.why, build, spec.refusals, spec.size)


#: Its checks, the first package's, have no prefix.
PREFIX, MODULE = "", "flash_attn"
_BOTH = (torch.float16, torch.bfloat16)
_COMPILES = (
    "Triton or a kernel change that no longer compiles, no longer uses the matrix unit, or needs "
    "more LDS than the chip has: https://github.com/vllm-project/vllm/issues/56021"
)
_EXECUTED = (
    "a code object whose numbers are wrong although its source is correct, a missing wait or a "
    "race between waves: https://github.com/ROCm/aotriton/issues/54"
)
_WHOLE = partial(flash.fixed, seqlen_q=512, seqlen_k=512)
COMPILED = {
    "d64": Case(_WHOLE, _COMPILES),
    "d128-causal": Case(partial(_WHOLE, head_dim=128, causal=True), _COMPILES),
    "d128-causal-gqa": Case(
        partial(_WHOLE, heads=8, head_dim=128, causal=True), _COMPILES, torch.bfloat16
    ),
    "d80": Case(partial(_WHOLE, head_dim=80), _COMPILES),
    "varlen": Case(flash.varlen, _COMPILES),
    "decode": Case(flash.kv_cache, _COMPILES),
}
#: The tier attention computes those of `cases`.
COMPUTED: dict[str, Case] = {}
_NO_KEYS = partial(flash.varlen, heads=2, **flash.NO_KEYS)
#: Three head dims (72 is padded), two types, causal or not; grouped queries; ragged; varlen, also
#: with sequences that have no queries or no keys.
EMULATED = {
    f"d{size}{'-causal' * causal}-{str(dtype).removeprefix('torch.')}": Case(
        partial(flash.fixed, head_dim=size, causal=causal), _EXECUTED, dtype
    )
    for size, causal, dtype in product((64, 72, 128), (False, True), _BOTH)
} | {
    name: Case(build, _EXECUTED, torch.bfloat16
        if name == "batch-causal" or name.endswith("-bfloat16") else torch.float16)
    for name, build in {
        "gqa-causal": partial(flash.fixed, causal=True, heads=4, lse=True),
        "batch-causal": partial(flash.fixed, batch=2, causal=True, seqlen_k=90),
        "gqa-long-keys": partial(flash.fixed, head_dim=128, causal=True, kv_heads=1, seqlen_q=100,
            seqlen_k=150),
        "ragged": partial(flash.fixed, seqlen_q=33, seqlen_k=131),
        "whole-blocks": partial(flash.fixed, seqlen_q=128, seqlen_k=128),
        "varlen": partial(flash.varlen, lse=True),
        "varlen-bfloat16": partial(flash.varlen, heads=2, causal=False, lengths_q=(40, 100),
            lengths_k=(70, 20)),
        "varlen-empty": partial(flash.varlen, heads=2, **flash.NO_TOKENS),
        "varlen-empty-gqa": partial(flash.varlen, lengths_q=(10, 0, 33), lengths_k=(10, 0, 33)),
        "low-20": partial(flash.fixed, low=-20, seqlen_q=40, seqlen_k=40, heads=1, kv_heads=1),
        "low-120-bfloat16": partial(flash.fixed, low=-120, seqlen_k=133, heads=1, kv_heads=1,
            causal=True),
        "low-varlen": partial(flash.varlen, low=-120, causal=False, heads=2, lengths_q=(40, 33),
            lengths_k=(70, 20)),
        "varlen-no-keys": _NO_KEYS,
        "varlen-no-keys-d72": partial(_NO_KEYS, head_dim=72),
        "varlen-no-keys-full": partial(_NO_KEYS, causal=False),
    }.items()
}  # fmt: skip

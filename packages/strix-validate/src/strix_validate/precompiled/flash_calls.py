# SPDX-License-Identifier: BSD-3-Clause
"""Calls of flash-attn whose kernels are shipped or warmed up, by shape.

Triton keys a kernel by what it is compiled for: head dimension, data type, mask and, of integer
arguments, whether they are 1 or multiples of 16. Neither lengths, numbers of heads, scales nor
windows are among that, so a call of each kind finds all kernels of its kind.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import torch

from strix_validate.attention import flash
from strix_validate.triton.call import BF16, FP16, DeferredCall, deferred

#: A change of a call: without gradients.
FORWARD = {"grad_out": None}
#: In tokens, and no multiple of 16.
_ODD = 100
#: A window of flash-attn's: unbounded.
_ALL = (-1, -1)
#: Decoding splits a cache into up to 512 parts; how many it makes of these, for a batch of heads.
_CAPACITIES = tuple(64 << n for n in range(10))


def has_aiter() -> bool:
    """Return whether flash-attn has aiter's kernels, which know windows and pages."""
    try:
        return importlib.util.find_spec("aiter.ops.triton") is not None
    except ModuleNotFoundError:
        return False


def flash_calls(
    head_dims: Iterable[int],
    dtypes: Iterable[torch.dtype] = (FP16, BF16),
    trained: Iterable[int] = (),
    windowed: bool = False,
    capacities: Iterable[int] = _CAPACITIES,
) -> Iterator[DeferredCall]:
    """Yield calls of flash-attn for these head dimensions, backward for those that are trained.

    windowed: with windows too, bounded to both sides and to the left; only aiter's kernels have
    them. capacities: of the caches to decode from, in tokens.
    """
    decode = partial(flash.kv_cache, queries=1, batch=1, lengths=(40,))
    windows = (_ALL, (70, 70), (70, -1)) if windowed and has_aiter() else (_ALL,)
    capacities = tuple(capacities)
    for size, dtype in product(head_dims, dtypes):
        for causal, window in product((False, True), windows):
            plan = partial(_plan, dtype=dtype, gradients=size in trained)
            mask: dict = {"causal": causal, "head_dim": size, "window": window}
            yield plan(flash.fixed, seqlen_q=_ODD, seqlen_k=_ODD, **mask)
            yield plan(flash.varlen, lengths_q=(_ODD, 3), lengths_k=(_ODD, 3), **mask)
        plan = partial(_plan, dtype=dtype)
        for heads, new, window in product((2, 4), (0, 1), windows):
            shape: dict = {"heads": heads, "kv_heads": 2, "head_dim": size, "new": new}
            yield plan(decode, capacity=_ODD, window=window, **shape)
            if has_aiter():
                yield plan(decode, capacity=512, page=256, window=window, **shape)
        for capacity in capacities:
            # numbers of parts that are powers of two, and such that are none: few and many
            shape = {"kv_heads": 1, "head_dim": size, "new": 1}
            yield plan(decode, heads=1, capacity=capacity, **shape)
            yield plan(decode, heads=1, capacity=capacity * 3 // 4, **shape)
            yield plan(decode, heads=5, capacity=capacity, **shape)


def _plan(
    build: Callable, *, dtype: torch.dtype, gradients: bool = False, **options
) -> DeferredCall:
    return deferred(partial(build, **options), dtype, **({} if gradients else FORWARD))


#: Of common models, vision encoders among them.
_HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
#: What the packages are made from. sample is enough to test one, and to see what the kernels cost;
#: core is warmed up by default.
FLASH_SETS: dict[str, Callable[[], Iterator[DeferredCall]]] = {
    "sample": partial(flash_calls, (64, 128), (BF16,), trained=(64, 128), capacities=(1024, 4096)),
    "core": partial(flash_calls, (64, 128), capacities=(1024, 4096)),
    "full": partial(flash_calls, _HEAD_DIMS, trained=_HEAD_DIMS, windowed=True),
}

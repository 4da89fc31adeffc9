# SPDX-License-Identifier: BSD-3-Clause
"""Calls of flash-attn whose kernels are shipped in packages or warmed up.

The key of a kernel in Triton's cache includes the head dim, the data type, the mask, and for each
integer argument that Triton specializes, whether it is 1 or a multiple of 16. It includes no
lengths, numbers of heads, scales or sizes of windows. So one call of each kind is enough to compile
all kernels of its kind.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import torch

from strix_validate.attention import flash
from strix_validate.triton.call import BF16, FP16, DeferredCall, defer

#: Fields with which a call computes no gradients.
FORWARD = {"grad_out": None}
#: A length in tokens that is not a multiple of 16.
_ODD = 100
#: flash-attn's value for a window that contains all keys.
_ALL = (-1, -1)
#: Capacities of KV caches in tokens. Decoding splits a cache into up to 512 parts. The number of
#: parts depends on the capacity, the batch and the heads.
_CAPACITIES = tuple(64 << n for n in range(10))
_DECODE = partial(flash.kv_cache, queries=1, batch=1, lengths=(40,))


def has_aiter() -> bool:
    """Return whether aiter is installed. Its kernels support windows and a paged cache."""
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
    """Yield calls of flash-attn for some head dims.

    Args:
        head_dims: Head dims.
        dtypes: Data types.
        trained: Head dims whose calls for prompts have a backward pass, too.
        windowed: Whether to add two windows: one that is bounded on both sides, and one on the left
            only. They are added only if aiter is installed, because its kernels support them.
        capacities: Capacities in tokens of the caches to decode from.
    """
    windows: tuple[tuple[int, int], ...] = (_ALL,)
    if windowed and has_aiter():
        windows = (_ALL, (70, 70), (70, -1))
    capacities = tuple(capacities)
    for head_dim, dtype in product(head_dims, dtypes):
        change = {} if head_dim in trained else FORWARD
        for build in _prompts(head_dim, windows):
            yield defer(build, dtype, **change)
        for build in _decoding(head_dim, windows, capacities):
            yield defer(build, dtype, **FORWARD)


def _prompts(head_dim: int, windows: Iterable[tuple[int, int]]) -> Iterator[partial]:
    for causal, window in product((False, True), windows):
        mask: dict = {"causal": causal, "head_dim": head_dim, "window": window}
        yield partial(flash.fixed, seqlen_q=_ODD, seqlen_k=_ODD, **mask)
        yield partial(flash.varlen, lengths_q=(_ODD, 3), lengths_k=(_ODD, 3), **mask)


def _decoding(
    head_dim: int,
    windows: Iterable[tuple[int, int]],
    capacities: Iterable[int],
) -> Iterator[partial]:
    for heads, new, window in product((2, 4), (0, 1), windows):
        shape: dict = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "new": new}
        yield partial(_DECODE, capacity=_ODD, window=window, **shape)
        if has_aiter():
            yield partial(_DECODE, capacity=512, page=256, window=window, **shape)
    for capacity in capacities:
        # In some of these calls, the number of parts is a power of two; in others it is not.
        shape = {"kv_heads": 1, "head_dim": head_dim, "new": 1}
        yield partial(_DECODE, heads=1, capacity=capacity, **shape)
        yield partial(_DECODE, heads=1, capacity=capacity * 3 // 4, **shape)
        yield partial(_DECODE, heads=5, capacity=capacity, **shape)


#: Head dims of common models, including vision encoders.
_HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
#: The sets of calls that packages are made from. "sample" is enough to test a package and to
#: measure the cost of the kernels. "core" is what `warm` compiles by default.
FLASH_SETS: dict[str, Callable[[], Iterator[DeferredCall]]] = {
    "sample": partial(
        flash_calls,
        (64, 128),
        (BF16,),
        trained=(64, 128),
        capacities=(1024, 4096),
    ),
    "core": partial(
        flash_calls,
        (64, 128),
        capacities=(1024, 4096),
    ),
    "full": partial(
        flash_calls,
        _HEAD_DIMS,
        trained=_HEAD_DIMS,
        windowed=True,
    ),
}

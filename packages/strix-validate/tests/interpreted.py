# SPDX-License-Identifier: BSD-3-Clause
"""Kernels for tests of Triton's interpreter, in a module that a child process can import."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Interpreted:
    """A kernel with features that Triton's interpreter lacks.

    They are floats and loop counters that are tensors, functions of libdevice, and masks from a
    scalar's condition.
    """

    dtype: torch.dtype = torch.float32

    def prepare(self) -> str:
        return ""

    def execute(self, device: str) -> dict[str, Tensor]:
        # libdevice is imported late, because on import its functions bind to the language that the
        # interpreter offers.
        from triton.language.extra import libdevice

        @triton.jit
        def kernel(x, out, n, factor, SIZE: tl.constexpr):
            place = tl.arange(0, SIZE)
            value = tl.load(x + place)
            total = libdevice.tanh(value * factor.to(tl.float32))
            total += libdevice.rsqrt(1 + value) + libdevice.log1p(value)
            for i in range(n):
                total += i.to(tl.float32)
            is_stored = (n < 4) & (place < SIZE - 1)
            tl.store(out + place, total, mask=is_stored)
            tl.store(out + place, tl.load(x + place, mask=is_stored, other=7.0), mask=place == 3)

        kernel.fn.__globals__["libdevice"] = libdevice
        x = torch.arange(4.0, device=device)
        out = torch.zeros_like(x)
        kernel[(1,)](x, out, 3, 0.5, SIZE=4)
        return {"out": out}


@dataclass(frozen=True)
class Launching:
    """A launch on a grid of 5 by 1. Program n makes n + 1 trips of its loop."""

    dtype: torch.dtype = torch.float32

    def execute(self, device: str) -> dict[str, Tensor]:
        out = torch.zeros(5, device=device)
        _count[(5, 1)](out, None, MODE=2)
        return {"out": out}


@triton.jit
def _count(out, scale, MODE: tl.constexpr):
    place = tl.program_id(0)
    total = 0.0
    for _ in range(place + 1):
        total += 1.0
    if scale is not None:
        total *= tl.load(scale + tl.program_id(1))
    if MODE == 1:
        total = -total
    tl.store(out + place, total)

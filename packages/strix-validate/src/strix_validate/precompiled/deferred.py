# SPDX-License-Identifier: BSD-3-Clause
"""A call that is built where it is executed: its tensors need not travel to the child process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strix_validate.attention.flash import FlashCall
from strix_validate.triton.call import Call
from strix_validate.vllm.vllm_call import VllmCall

FP16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class DeferredCall:
    """A call whose tensors are made where it is executed, and hold zeros.

    build(randn) gives a call and what it must return. gradients: of flash-attn, backward as well.
    source: vLLM's folder.
    """

    name: str
    build: Callable[..., tuple[Call, Any]]
    dtype: torch.dtype
    gradients: bool = True
    source: Path = Path()

    def _call(self) -> Call:
        call, _ = self.build(lambda *shape: torch.zeros(shape, dtype=self.dtype))
        if isinstance(call, VllmCall):
            return replace(call, source=self.source)
        if isinstance(call, FlashCall) and not self.gradients:
            return replace(call, grad_out=None)
        return call

    def prepare(self) -> str:
        """Build the call, and make its library ready; return which kernels it will run."""
        return self._call().prepare()

    def execute(self, device: str) -> dict[str, Tensor]:
        """Build the call, and make it."""
        return self._call().execute(device)


def deferred(build: partial, dtype: torch.dtype, **more) -> DeferredCall:
    """Return the call that a function builds with these keywords, named after both."""
    said = " ".join(f"{name}={value}" for name, value in build.keywords.items())
    kind = str(dtype).removeprefix("torch.")
    return DeferredCall(f"{build.func.__name__} {said} {kind}", build, dtype, **more)

# SPDX-License-Identifier: BSD-3-Clause
"""Convolutions, forward and backward, in each way that torch can ask MIOpen, against float64."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from strix_validate.checks import ANY, Body, Check, Result, RunOptions, State, seed_of
from strix_validate.numerics import comparison, reference

_ISSUE = "https://github.com/ROCm/MIOpen/issues/3964"
#: The environment of each of MIOpen's ways to find a kernel, and torch's own kernels.
MODES = {
    "default": {},
    "normal": {"MIOPEN_FIND_MODE": "NORMAL"},
    "fast": {"MIOPEN_FIND_MODE": "FAST"},
    "hybrid": {"MIOPEN_FIND_MODE": "HYBRID"},
    "dynamic-hybrid": {"MIOPEN_FIND_MODE": "DYNAMIC_HYBRID"},
    "native": {},
}
#: cuDNN's first choice for the gradient of 3x3 weights came to 23 times the error of a plain sum in
#: float32, as an algorithm like Winograd's does; TF32 is still caught.
FACTORS = {torch.float32: 100.0}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FAST = "export MIOPEN_FIND_MODE=FAST"
_OFF = "torch.backends.cudnn.enabled = False"


@dataclass(frozen=True)
class ConvolutionShape:
    """Sizes of a convolution: of the input and the weight, both with their channels."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int = 0
    groups: int = 1


_SHAPES = {
    # of Whisper's encoder, of Mamba and GDN, of a vision encoder
    "1d-speech": ConvolutionShape((1, 80, 300), (96, 80, 3), stride=2, padding=1),
    "1d-depthwise": ConvolutionShape((2, 64, 60), (64, 1, 4), padding=3, groups=64),
    "2d-patches": ConvolutionShape((1, 3, 56, 56), (96, 3, 14, 14), stride=14),
    "2d-same": ConvolutionShape((2, 32, 28, 28), (48, 32, 3, 3), padding=1),
    # Qwen-VL; not more of them, because torch's own kernels add up samples in bfloat16
    "3d-patches": ConvolutionShape((4, 3, 2, 14, 14), (96, 3, 2, 14, 14), stride=(2, 14, 14)),
    # of a video's decoder
    "3d-same": ConvolutionShape((1, 8, 6, 12, 12), (12, 8, 3, 3, 3), padding=1),
}


@cache
def checks() -> dict[Check, Body]:
    """Return one check for each find mode, shape and data type, with its function.

    It wants a process with the environment of its mode.
    """
    why = f"every solver of MIOpen failing, or wrong numbers: {_ISSUE}"
    found: dict[Check, Body] = {}
    for mode, (name, shape), dtype in product(MODES, _SHAPES.items(), _DTYPES):
        case = f"{name}-{str(dtype).removeprefix('torch.')}"
        title = f"convolution, MIOpen's find mode {mode}: {case}"
        check = Check(f"conv/{mode}/{case}", title, why)
        found[check] = partial(_check, check.id, mode, shape, dtype)
    return found


def mode_of(check: Check) -> str:
    """Return the find mode that a check runs in."""
    return check.id.split("/")[1]


def with_remedy(result: Result) -> Result:
    """Return the result; if MIOpen failed, with the known issue and what to do about it."""
    mode = mode_of(result.check)
    if result.state is not State.FAILED or mode == "native" or not torch.version.hip:
        return result
    fast = mode == "fast" or (mode == "default" and os.environ.get("MIOPEN_FIND_MODE") == "FAST")
    fix = _OFF if fast else f"{_FAST}, or in Python {_OFF}"
    reason = f"{result.reason}; convolution failing on gfx1151 is a known issue: {_ISSUE}"
    return replace(result, reason=reason, fix=fix)


def _check(
    id_: str, mode: str, shape: ConvolutionShape, dtype: torch.dtype, options: RunOptions
) -> Result:
    generator = torch.Generator().manual_seed(seed_of(id_))

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    x, weight, bias = randn(*shape.x), randn(*shape.weight), randn(shape.weight[0])
    # fp16 gradients of a long sum would leave its range
    weight = weight / weight[0].numel() ** 0.5
    with torch.no_grad():
        grad_out = randn(*_right(shape, x.float(), weight.float(), bias.float()).shape)
    inputs = x, weight, bias, grad_out
    with torch.backends.cudnn.flags(
        enabled=mode != "native", benchmark=mode != "default", allow_tf32=False
    ):
        found = _gradients(convolve, shape, *(t.to(options.device) for t in inputs))

    def expected(precision: reference.Precision) -> dict[str, Tensor]:
        tensors = [t.to(reference.working(precision)) for t in inputs]
        if precision == reference.TERMS:  # bilinear: the sums of magnitudes are those of magnitudes
            tensors = [t.abs() for t in tensors]
        with torch.backends.mkldnn.flags(enabled=False):
            right = _gradients(_right, shape, *tensors)
        return {name: reference.stored(value, precision) for name, value in right.items()}

    return comparison.compare(ANY, found, expected, dtype, FACTORS.get(dtype))


def _gradients(
    function: Callable[..., Tensor], shape: ConvolutionShape, *tensors: Tensor
) -> dict[str, Tensor]:
    *leaves, grad_out = (t.detach() for t in tensors)
    leaves = [t.requires_grad_() for t in leaves]
    out = function(shape, *leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=True))}


def convolve(shape: ConvolutionShape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute what is under test, a convolution."""
    return _right(shape, x, weight, bias)


def _right(shape: ConvolutionShape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    function = getattr(functional, f"conv{x.ndim - 2}d")
    return function(x, weight, bias, shape.stride, shape.padding, 1, shape.groups)

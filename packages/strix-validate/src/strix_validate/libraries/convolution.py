# SPDX-License-Identifier: BSD-3-Clause
"""Compare convolutions, forward and backward, with float64, with and without MIOpen.

Convolutions with MIOpen are checked in several of MIOpen's find modes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from strix_validate.checks import PLACEHOLDER, Body, Check, Result, RunOptions, State, derive_seed
from strix_validate.numerics import comparison, reference

_ISSUE = "https://github.com/ROCm/MIOpen/issues/3964"
#: Environment variables that are set for each mode in which convolutions are checked. In "default",
#: none is set, so MIOpen uses the validator's environment variables or its own defaults; in
#: "native", torch uses its own kernels. The other modes are MIOpen's find modes, of which
#: TRUST_VERIFY and TRUST_VERIFY_FULL are not checked.
MODES = {
    "default": {},
    "normal": {"MIOPEN_FIND_MODE": "NORMAL"},
    "fast": {"MIOPEN_FIND_MODE": "FAST"},
    "hybrid": {"MIOPEN_FIND_MODE": "HYBRID"},
    "dynamic-hybrid": {"MIOPEN_FIND_MODE": "DYNAMIC_HYBRID"},
    "native": {},
}
#: Allowed error of convolutions, instead of comparison.FACTORS. In float32, the algorithm that
#: cuDNN chooses first for the gradient of 3x3 weights came to 23 times the error of a plain sum.
#: This is normal for an algorithm like Winograd's. The error of TF32 exceeds even this factor.
FACTORS = {torch.float32: 100.0}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FAST = "export MIOPEN_FIND_MODE=FAST"
_OFF = "torch.backends.cudnn.enabled = False"


@dataclass(frozen=True)
class ConvolutionShape:
    """The sizes of a convolution.

    Attributes:
        x: Shape of the input, (batch, channels, ...).
        weight: Shape of the weight, (channels of the output, channels of a group, ...).
        stride: Stride of the convolution.
        padding: Padding of the input on each side.
        groups: Number of groups of channels.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int = 0
    groups: int = 1


_SHAPES = {
    # Whisper's encoder
    "1d-speech": ConvolutionShape((1, 80, 300), (96, 80, 3), stride=2, padding=1),
    # Mamba and gated delta nets
    "1d-depthwise": ConvolutionShape((2, 64, 60), (64, 1, 4), padding=3, groups=64),
    # a vision encoder
    "2d-patches": ConvolutionShape((1, 3, 56, 56), (96, 3, 14, 14), stride=14),
    "2d-same": ConvolutionShape((2, 32, 28, 28), (48, 32, 3, 3), padding=1),
    # Qwen-VL. The batch is small, because torch's own kernels sum over the samples in bfloat16.
    "3d-patches": ConvolutionShape((4, 3, 2, 14, 14), (96, 3, 2, 14, 14), stride=(2, 14, 14)),
    # a video decoder
    "3d-same": ConvolutionShape((1, 8, 6, 12, 12), (12, 8, 3, 3, 3), padding=1),
}


@cache
def checks() -> dict[Check, Body]:
    """Return one check for each mode, shape and data type, with its function.

    A check must run in a process with the environment of its mode.
    """
    bodies: dict[Check, Body] = {}
    for mode, (name, shape), dtype in product(MODES, _SHAPES.items(), _DTYPES):
        case = f"{name}-{str(dtype).removeprefix('torch.')}"
        title = f"convolution, {_describe_mode(mode)}: {case}"
        catches = f"MIOpen without a solver that works, or wrong numbers: {_ISSUE}"
        if mode == "native":
            catches = f"wrong numbers of the kernels that replace MIOpen's: {_ISSUE}"
        check = Check(f"conv/{mode}/{case}", title, catches)
        bodies[check] = partial(_check, check.id, mode, shape, dtype)
    return bodies


def _describe_mode(mode: str) -> str:
    """Return which kernels a mode uses, for the titles of checks."""
    if mode == "native":
        return "torch's own kernels"
    if mode == "default":
        return "MIOpen's own settings"
    return f"MIOpen's find mode {mode}"


def get_mode(check: Check) -> str:
    """Return the mode that a check runs in, a key of MODES."""
    return check.id.split("/")[1]


def add_remedy(result: Result) -> Result:
    """Add the known issue and a workaround to the result of a check in which MIOpen failed.

    Other results are returned unchanged.
    """
    mode = get_mode(result.check)
    if result.state is not State.FAILED or mode == "native" or not torch.version.hip:
        return result
    is_fast = mode == "fast"
    if mode == "default":
        # MIOpen also accepts the mode's number, and lower-case letters.
        is_fast = os.environ.get("MIOPEN_FIND_MODE", "").upper() in ("FAST", "2")
    fix = _OFF if is_fast else f"{_FAST}, or in Python {_OFF}"
    reason = f"{result.reason}; failing convolutions on gfx1151 are a known issue: {_ISSUE}"
    return replace(result, reason=reason, fix=fix)


def _check(
    id_: str,
    mode: str,
    shape: ConvolutionShape,
    dtype: torch.dtype,
    options: RunOptions,
) -> Result:
    generator = torch.Generator().manual_seed(derive_seed(id_))

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    x = randn(*shape.x)
    weight = randn(*shape.weight)
    bias = randn(shape.weight[0])
    # Without this scaling, gradients that are long sums would exceed the range of fp16.
    weight = weight / weight[0].numel() ** 0.5
    with torch.no_grad():
        out = _convolve_by_torch(shape, x.float(), weight.float(), bias.float())
    inputs = (x, weight, bias, randn(*out.shape))
    with torch.backends.cudnn.flags(
        enabled=mode != "native",
        benchmark=mode != "default",
        allow_tf32=False,
    ):
        actual = _differentiate(convolve, shape, *(t.to(options.device) for t in inputs))

    def expected(precision: reference.Precision) -> dict[str, Tensor]:
        tensors = [t.to(reference.working_dtype(precision)) for t in inputs]
        if precision == reference.TERMS:
            # because a convolution is bilinear, these inputs give the sums of its terms' magnitudes
            tensors = [t.abs() for t in tensors]
        with torch.backends.mkldnn.flags(enabled=False):
            results = _differentiate(_convolve_by_torch, shape, *tensors)
        return {name: reference.store(value, precision) for name, value in results.items()}

    return comparison.compare(PLACEHOLDER, actual, expected, dtype, FACTORS.get(dtype))


def _differentiate(
    function: Callable[..., Tensor],
    shape: ConvolutionShape,
    *tensors: Tensor,
) -> dict[str, Tensor]:
    """Return the output and the gradients of a convolution.

    Args:
        function: convolve or _convolve_by_torch.
        shape: Sizes of the convolution.
        tensors: x, weight, bias and the gradient of the output.
    """
    *inputs, grad_out = (t.detach() for t in tensors)
    leaves = [t.requires_grad_() for t in inputs]
    out = function(shape, *leaves)
    dx, dweight, dbias = torch.autograd.grad(out, leaves, grad_out)
    return {
        "out": out.detach(),
        "dx": dx,
        "dweight": dweight,
        "dbias": dbias,
    }


def convolve(shape: ConvolutionShape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute a convolution, the function under test."""
    return _convolve_by_torch(shape, x, weight, bias)


def _convolve_by_torch(
    shape: ConvolutionShape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    function = getattr(functional, f"conv{x.ndim - 2}d")
    return function(x, weight, bias, shape.stride, shape.padding, 1, shape.groups)

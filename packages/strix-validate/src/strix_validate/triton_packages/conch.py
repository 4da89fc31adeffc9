# SPDX-License-Identifier: BSD-3-Clause
"""conch's product with packed weights, as vLLM's ConchLinearKernel calls it.

On RDNA, vLLM has no other kernel for 8-bit weights with bfloat16 (W8A16, AWQ with 8 bits).
"""

from functools import partial
from itertools import product

import torch
from torch import Tensor

from strix_validate.layers.table import FORMATS
from strix_validate.numerics import reference
from strix_validate.triton.call import BF16, PackageCall
from strix_validate.triton.cases import Candidate, Case, Expected, Randn, choose

MODULE = "conch"
PACKAGE = "conch-triton-kernels"
BITS = 8
CODES = 256
#: The code of the number zero if there are no zero points (vLLM's uint8b128).
BIAS = 128


def _product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int,
) -> dict[str, Tensor]:
    from conch.ops.quantization import gemm

    bias = BIAS if zeros is None else 0
    out = gemm.mixed_precision_gemm(
        x=x,
        w_q_packed=codes,
        w_s=scales,
        w_zp=zeros,
        group_size=group_size,
        weight_size_bits=BITS,
        weight_bias=bias,
    )
    return {"out": out}


def w8a16(
    randn: Randn,
    *,
    tokens=5,
    size=256,
    rows=64,
    group=128,
    zeros=False,
) -> tuple[PackageCall, Expected]:
    """Build a call of a layer with 8-bit weights.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        size: Number of columns of x.
        rows: Number of rows of the weight, which are columns of the result.
        group: Number of weights of a row that share a scale. If it equals size, each row has one
            scale.
        zeros: Whether each group has a zero point (AWQ). Without zero points, code 128 is zero.
    """
    x = randn(tokens, size)
    shape = (size // group, rows)
    codes = _draw_codes(randn, size, rows)
    scales = (randn(*shape).abs() * 0.01 + 0.01).to(x.dtype)
    tensors = {"x": x, "codes": _pack(codes), "scales": scales}
    centre: Tensor | int = BIAS
    if zeros:
        zero_points = _draw_codes(randn, *shape)
        tensors["zeros"] = zero_points.to(torch.uint8)
        centre = zero_points.repeat_interleave(group, 0)
    weights = (codes - centre).to(x.dtype) * scales.repeat_interleave(group, 0)
    options = {"group_size": group}
    call = PackageCall(_product, tensors, options, 1, package=PACKAGE)
    return call, reference.layer(x, weights.T)


def _draw_codes(randn: Randn, *shape: int) -> Tensor:
    """Draw integers from 0 to 255."""
    return (randn(*shape).float().abs() * 1000).long() % CODES


def _pack(codes: Tensor) -> Tensor:
    """Pack four rows of codes into one of int32, the first row in the lowest byte."""
    shifts = torch.arange(0, 32, BITS)[:, None]
    rows = codes.view(-1, 32 // BITS, codes.shape[1])
    return (rows << shifts).sum(1).to(torch.int32)


_COMPILES = "a kernel that no longer compiles for gfx1151, or does not use the matrix unit"
_GROUP = "a scale of the wrong group, or bytes in the wrong order"
_CHANNEL = "a read past the end of the scales if each row has one scale, as with a group size of -1"
_ZEROS = "a zero point left out, or the zero point of another group used (AWQ)"
_TILES = "a row after the last full tile that is left out, or that overwrites the next row"
_MODEL = "a fault with a combination of group, tokens and sizes that no other check has"


def model_cases() -> dict[str, Case]:
    """Return cases of layers with a scale per group or row, with and without zero points."""
    group = FORMATS["AWQ"]["group"]
    steps = (("decode", 1), ("prefill", 70))
    columns = product(
        steps,
        (2 * group, 3 * group),
        (64, 136),
        ("group", "channel"),
        (False, True),
    )
    candidates = {}
    for (step, tokens), size, rows, scales, zeros in columns:
        suffix = "-zeros" if zeros else ""
        scale_group = group if scales == "group" else size
        build = partial(
            w8a16,
            tokens=tokens,
            size=size,
            rows=rows,
            group=scale_group,
            zeros=zeros,
        )
        name = f"w8a16-{scales}-{step}-{size}-{rows}{suffix}"
        values = (scales == "group", step, size, rows, zeros)
        candidates[name] = Candidate(build, values)
    return choose(candidates, _MODEL)


_COMPILED_SHAPES: dict[str, dict] = {
    "prefill": {"tokens": 1024},
    "decode": {"tokens": 1},
    "zeros": {"tokens": 64, "zeros": True},
    "channel": {"tokens": 64, "group": 512},
}
COMPILED = {
    f"w8a16-{name}": Case(partial(w8a16, size=512, rows=256, **shape), _COMPILES, BF16)
    for name, shape in _COMPILED_SHAPES.items()
}
COMPUTED = {
    "w8a16": Case(w8a16, _GROUP),
    "w8a16-channel": Case(partial(w8a16, group=256), _CHANNEL),
    "w8a16-zeros": Case(partial(w8a16, zeros=True), _ZEROS),
    "w8a16-tiles": Case(partial(w8a16, tokens=150, size=128, rows=192), _TILES),
    **model_cases(),
}
EMULATED = {
    "w8a16": Case(partial(w8a16, tokens=3), _GROUP, BF16),
    "w8a16-zeros": Case(partial(w8a16, tokens=3, zeros=True), _ZEROS, BF16),
}

# SPDX-License-Identifier: BSD-3-Clause
"""conch's product with packed weights, as vLLM's ConchLinearKernel calls it; the correct answer.

On RDNA vLLM has no other kernel for 8-bit weights beside bfloat16 (W8A16, AWQ with 8 bits).
"""

from functools import partial

import torch
from torch import Tensor

from strix_validate.layers.table import FORMATS
from strix_validate.numerics import reference
from strix_validate.triton.call import PackageCall
from strix_validate.triton.cases import Candidate, Case, Expected, Randn, choose

MODULE, PACKAGE = "conch", "conch-triton-kernels"
BITS, CODES = 8, 256
#: Of uint8b128: what stands for zero where there are no zero points.
BIAS = 128


def _product(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, group_size: int
) -> dict[str, Tensor]:
    from conch.ops.quantization import gemm

    out = gemm.mixed_precision_gemm(
        x=x, w_q_packed=codes, w_s=scales, w_zp=zeros, group_size=group_size,
        weight_size_bits=BITS, weight_bias=BIAS if zeros is None else 0,
    )  # fmt: skip
    return {"out": out}


def w8a16(
    randn: Randn, *, tokens=5, size=256, rows=64, group=128, zeros=False
) -> tuple[PackageCall, Expected]:
    """Build a call of a layer with 8-bit weights.

    Args:
        size: of a token's vector.
        rows: of the answer's vector.
        group: weights of a row that share a scale; size is one scale per row.
        zeros: each group has its zero point (AWQ), instead of 128 for all.
    """
    x, shape = randn(tokens, size), (size // group, rows)
    codes = (randn(size, rows).float().abs() * 1000).long() % CODES
    scales = (randn(*shape).abs() * 0.01 + 0.01).to(x.dtype)
    points = (randn(*shape).float().abs() * 1000).long() % CODES if zeros else None
    # four rows of weights in an int32, the first in its lowest byte
    shifts = torch.arange(0, 32, BITS)[:, None]
    packed = (codes.view(-1, 32 // BITS, rows) << shifts).sum(1).to(torch.int32)
    tensors = {"x": x, "codes": packed, "scales": scales}
    if points is not None:
        tensors["zeros"] = points.to(torch.uint8)
    centre = BIAS if points is None else points.repeat_interleave(group, 0)
    weights = (codes - centre).to(x.dtype) * scales.repeat_interleave(group, 0)
    call = PackageCall(_product, tensors, {"group_size": group}, 1, package=PACKAGE)
    return call, reference.layer(x, weights.T)


_COMPILES = "a kernel that no longer compiles for gfx1151, or uses no matrix unit"
_GROUP = "a scale of the wrong group, or bytes in the wrong order"
_CHANNEL = "one scale per row: a stride that reads past the scales, as a group size of -1 gave"
_ZEROS = "a zero point left out, or of the wrong group (AWQ)"
_TILES = "a row past the last full tile left out, or written over its neighbour"

_MODEL = "groups, steps and sizes that each other check has one of"


def model_cases() -> dict[str, Case]:
    """Return layers of models' formats: a scale per group or row, with zero points or without."""
    group = FORMATS["AWQ"]["group"]
    return choose(
        {
            f"w8a16-{name}-{step}-{size}-{rows}{'-zeros' * zeros}": Candidate(
                partial(w8a16, tokens=tokens, size=size, rows=rows, group=own, zeros=zeros),
                (own == group, step, size, rows, zeros),
            )
            for step, tokens in (("decode", 1), ("prefill", 70))
            for size in (2 * group, 3 * group)
            for rows in (64, 136)
            for name, own in (("group", group), ("channel", size))
            for zeros in (False, True)
        },
        _MODEL,
    )


_SHAPES: dict[str, dict] = {
    "prefill": {"tokens": 1024},
    "decode": {"tokens": 1},
    "zeros": {"tokens": 64, "zeros": True},
    "channel": {"tokens": 64, "group": 512},
}
COMPILED = {
    f"w8a16-{name}": Case(partial(w8a16, size=512, rows=256, **shape), _COMPILES, torch.bfloat16)
    for name, shape in _SHAPES.items()
}
COMPUTED = {
    "w8a16": Case(w8a16, _GROUP),
    "w8a16-channel": Case(partial(w8a16, group=256), _CHANNEL),
    "w8a16-zeros": Case(partial(w8a16, zeros=True), _ZEROS),
    "w8a16-tiles": Case(partial(w8a16, tokens=150, size=128, rows=192), _TILES),
    **model_cases(),
}
EMULATED = {
    "w8a16": Case(partial(w8a16, tokens=3), _GROUP, torch.bfloat16),
    "w8a16-zeros": Case(partial(w8a16, tokens=3, zeros=True), _ZEROS, torch.bfloat16),
}

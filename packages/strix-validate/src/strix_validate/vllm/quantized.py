# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's products with quantized weights: AWQ, 4 bits of compressed-tensors and GPTQ, FP8 blocks.

The kernels that it picks on gfx1151 are awq_triton, RDNAHybridW4A16LinearKernel for more than five
tokens, and TritonFp8BlockScaledMMKernel; fewer tokens of the second go to a HIP kernel.
"""

import importlib
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.attention import FP8
from strix_validate.vllm.source import VllmCall

_LAYERS = "vllm.model_executor.layers.quantization"
_HYBRID = "vllm.model_executor.kernels.linear.mixed_precision.rdna_hybrid_w4a16"
#: Where an int32 of AWQ's has each of eight columns, in nibbles.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _packed(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack eight neighbours into an int32: the i-th into nibble order[i]."""
    eights = codes.long().unflatten(-1, (-1, 8))
    packed = (eights << (4 * torch.tensor(order))).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def _codes(randn: Randn, *shape: int) -> Tensor:
    return (randn(*shape).float().abs() * 1000).long() % 16


def awq(randn: Randn, *, tokens=5, size=256, rows=64, group=64) -> tuple[VllmCall, Expected]:
    """Build a call of awq_gemm_triton, and of awq_dequantize_triton, which larger batches get."""
    codes, points = _codes(randn, size, rows), _codes(randn, size // group, rows)
    tensors = {
        "x": randn(tokens, size),
        "codes": _packed(codes, AWQ_ORDER),
        "scales": (randn(size // group, rows).abs() * 0.01 + 0.01).to(randn(1).dtype),
        "zeros": _packed(points, AWQ_ORDER),
    }
    shifted = (codes - points.repeat_interleave(group, 0)).to(tensors["scales"].dtype)
    weights = shifted * tensors["scales"].repeat_interleave(group, 0)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = weights.to(reference.working(dtype))
        return {
            "out": reference.stored(reference.product(tensors["x"], weights.T, dtype), dtype),
            "weights": work.abs() if dtype == reference.TERMS else work,
        }

    return VllmCall(_awq, tensors, products=1), expected


def _awq(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    module = importlib.import_module(f"{_LAYERS}.awq_triton")
    # eight parts, as awq_gemm's caller has it
    out = module.awq_gemm_triton(x, codes, scales, zeros, 8)
    return {"out": out, "weights": module.awq_dequantize_triton(codes, scales, zeros)}


def w4a16(
    randn: Randn, *, tokens=9, size=256, rows=72, group=32, zeros=False
) -> tuple[VllmCall, Expected]:
    """Build a call of triton_w4a16_skinny_fmt_gemm, with the weights packed by vLLM's own function.

    zeros: zero points (AWQ) instead of 8 for all.
    """
    x, codes = randn(tokens, size), _codes(randn, rows, size)
    scales = (randn(rows, size // group).abs() * 0.01 + 0.01).to(x.dtype)
    tensors, points = {"x": x, "codes": codes.byte(), "scales": scales}, torch.tensor(8)
    if zeros:
        few = _codes(randn, rows, size // group)
        # row n in nibble n % 8 of word n // 8
        tensors["zeros"] = _packed(few.T, tuple(range(8))).T.contiguous()
        points = few.repeat_interleave(group, 1)
    weights = (codes - points).to(x.dtype) * scales.repeat_interleave(group, 1)
    call = VllmCall(_w4a16, tensors, {"group": group}, products=1)
    return call, reference.layer(x, weights)


def _w4a16(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, group: int
) -> dict[str, Tensor]:
    module = importlib.import_module(_HYBRID)
    packed = module.pack_skinny_int4(codes).view(torch.int32)
    return {"out": module.triton_w4a16_skinny_fmt_gemm(x, packed, scales, group, zp=zeros)}


def fp8_blocks(
    randn: Randn, *, tokens=5, size=384, rows=192, block=128
) -> tuple[VllmCall, Expected]:
    """Build a call of w8a8_triton_block_scaled_mm: a scale for 128 numbers of a token, or 128 by
    128 weights.
    """
    x, weights = randn(tokens, size).to(FP8), randn(rows, size).to(FP8)
    blocks = -(-rows // block), size // block
    tensors = {
        "x": x.to(randn(1).dtype),
        "weights": weights.to(randn(1).dtype),
        "x_scales": randn(tokens, blocks[1]).float().abs() + 0.1,
        "scales": randn(*blocks).float().abs() + 0.1,
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        spread = [
            tensors[name].to(work).repeat_interleave(block, 1) for name in ("x_scales", "scales")
        ]
        wide = weights.to(work) * spread[1].repeat_interleave(block, 0)[:rows]
        found = reference.product(x.to(work) * spread[0], wide, dtype)
        return {"out": reference.stored(found, dtype)}

    return VllmCall(_fp8_blocks, tensors, {"block": block}, products=1), expected


def _fp8_blocks(
    x: Tensor, weights: Tensor, x_scales: Tensor, scales: Tensor, *, block: int
) -> dict[str, Tensor]:
    multiply = importlib.import_module(f"{_LAYERS}.utils.fp8_utils").w8a8_triton_block_scaled_mm
    # only here: tensors of fp8 cannot be pickled
    both = x.to(FP8), weights.to(FP8)
    return {"out": multiply(*both, x_scales, scales, [block, block], x.dtype)}


_AWQ = "nibbles in the wrong order, or a zero point or scale of the wrong group (AWQ)"
_HYBRID_WHY = "a scale of the wrong group, or the shuffle of the nibbles undone wrongly (GPTQ)"
_PACKED = "codes of 4 bits that packed instructions turn into the wrong numbers (GPTQ in 16 bits)"
BLOCKS = "a block's scale left out or of the wrong block (Qwen3-FP8, DeepSeek)"
COMPUTED = {
    # of more tokens, and rows, than a tile of either kernel has
    "awq": Case(partial(awq, tokens=40, size=128, rows=264), _AWQ),
    "w4a16": Case(partial(w4a16, tokens=70, rows=40, size=128), _HYBRID_WHY, torch.float32),
    # of 16 bits without zero points the kernel has an instruction of gfx1151
    "w4a16-packed": Case(partial(w4a16, rows=40, size=128), _PACKED),
    "w4a16-zeros": Case(partial(w4a16, rows=40, size=128, zeros=True), _HYBRID_WHY, size=Size.FULL),
    "fp8-blocks": Case(partial(fp8_blocks, tokens=70, size=256), BLOCKS),
}
EMULATED = {
    # executed alone: two weights of 4 bits become numbers of 16 in one instruction of gfx1151
    f"w4a16-{str(dtype).removeprefix('torch.')}": Case(
        partial(w4a16, rows=32, size=64, tokens=6), _PACKED, dtype
    )
    for dtype in (torch.float16, torch.bfloat16)
}
_COMPILES = "a kernel that no longer compiles for gfx1151, or uses no matrix unit"
MINUTES = "a tile whose conversions from FP8 compile for minutes"
_WIDE: dict = {"tokens": 64, "size": 512, "rows": 512}
COMPILED = {
    "awq": Case(partial(awq, group=128, **_WIDE), _COMPILES),
    "w4a16": Case(partial(w4a16, group=128, **_WIDE), _COMPILES, torch.bfloat16),
    "w4a16-float16": Case(partial(w4a16, group=128, **_WIDE), _COMPILES),
    "fp8-blocks": Case(partial(fp8_blocks, tokens=3, size=512), MINUTES, torch.bfloat16),
}

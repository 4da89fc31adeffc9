# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's products with quantized weights: AWQ, W4A16 (compressed-tensors and GPTQ), FP8 in blocks.

For these formats, vLLM uses awq_triton, RDNAHybridW4A16LinearKernel and
TritonFp8BlockScaledMMKernel on gfx1151. RDNAHybridW4A16LinearKernel uses its Triton kernel for more
than five tokens, and a HIP kernel otherwise.
"""

import importlib
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.call import BF16, FP16
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.attention import FP8
from strix_validate.vllm.source import VllmCall

_LAYERS = "vllm.model_executor.layers.quantization"
_HYBRID = "vllm.model_executor.kernels.linear.mixed_precision.rdna_hybrid_w4a16"
#: For each of eight columns, the nibble of an int32 in which AWQ's format stores it.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _pack(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack every eight neighbouring codes into an int32, the i-th into nibble order[i]."""
    eights = codes.long().unflatten(-1, (-1, 8))
    packed = (eights << (4 * torch.tensor(order))).sum(-1)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return signed.int()


def _draw_codes(randn: Randn, *shape: int) -> Tensor:
    """Draw integers from 0 to 15."""
    return (randn(*shape).float().abs() * 1000).long() % 16


def awq(
    randn: Randn,
    *,
    tokens=5,
    size=256,
    rows=64,
    group=64,
) -> tuple[VllmCall, Expected]:
    """Build a call of awq_gemm_triton, and of awq_dequantize_triton, which larger batches use.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        size: Number of columns of x.
        rows: Number of columns of the result.
        group: Number of weights that share a scale and a zero point.
    """
    codes = _draw_codes(randn, size, rows)
    zero_points = _draw_codes(randn, size // group, rows)
    x = randn(tokens, size)
    scales = randn(size // group, rows).abs() * 0.01 + 0.01
    scales = scales.to(randn(1).dtype)
    tensors = {
        "x": x,
        "codes": _pack(codes, AWQ_ORDER),
        "scales": scales,
        "zeros": _pack(zero_points, AWQ_ORDER),
    }
    shifted = (codes - zero_points.repeat_interleave(group, 0)).to(scales.dtype)
    weights = shifted * scales.repeat_interleave(group, 0)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        out = reference.product(x, weights.T, dtype)
        dequantized = weights.to(reference.working_dtype(dtype))
        if dtype == reference.TERMS:
            dequantized = dequantized.abs()
        return {"out": reference.store(out, dtype), "weights": dequantized}

    return VllmCall(_awq, tensors, products=1), expected


def _awq(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    module = importlib.import_module(f"{_LAYERS}.awq_triton")
    # As in vLLM, the sum over the columns of x is split into eight parts.
    out = module.awq_gemm_triton(x, codes, scales, zeros, 8)
    weights = module.awq_dequantize_triton(codes, scales, zeros)
    return {"out": out, "weights": weights}


def w4a16(
    randn: Randn,
    *,
    tokens=9,
    size=256,
    rows=72,
    group=32,
    zeros=False,
) -> tuple[VllmCall, Expected]:
    """Build a call of triton_w4a16_skinny_fmt_gemm, with weights packed by vLLM's own function.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        size: Number of columns of x.
        rows: Number of columns of the result.
        group: Number of weights that share a scale.
        zeros: Whether each group has a zero point (AWQ). Without zero points, code 8 is zero.
    """
    x = randn(tokens, size)
    codes = _draw_codes(randn, rows, size)
    scales = (randn(rows, size // group).abs() * 0.01 + 0.01).to(x.dtype)
    tensors = {"x": x, "codes": codes.byte(), "scales": scales}
    centre: Tensor | int = 8
    if zeros:
        zero_points = _draw_codes(randn, rows, size // group)
        # The zero points of row n are in nibble n % 8 of word n // 8.
        tensors["zeros"] = _pack(zero_points.T, tuple(range(8))).T.contiguous()
        centre = zero_points.repeat_interleave(group, 1)
    weights = (codes - centre).to(x.dtype) * scales.repeat_interleave(group, 1)
    call = VllmCall(_w4a16, tensors, {"group": group}, products=1)
    return call, reference.layer(x, weights)


def _w4a16(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group: int,
) -> dict[str, Tensor]:
    module = importlib.import_module(_HYBRID)
    packed = module.pack_skinny_int4(codes).view(torch.int32)
    out = module.triton_w4a16_skinny_fmt_gemm(x, packed, scales, group, zp=zeros)
    return {"out": out}


def fp8_blocks(
    randn: Randn,
    *,
    tokens=5,
    size=384,
    rows=192,
    block=128,
) -> tuple[VllmCall, Expected]:
    """Build a call of w8a8_triton_block_scaled_mm.

    A scale is shared by a block of a token's numbers, or by a square block of weights.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        size: Number of columns of x.
        rows: Number of columns of the result.
        block: Length of a block of a token's numbers, and side of a block of weights.
    """
    x = randn(tokens, size).to(FP8)
    weights = randn(rows, size).to(FP8)
    block_rows = -(-rows // block)
    block_columns = size // block
    tensors = {
        "x": x.to(randn(1).dtype),
        "weights": weights.to(randn(1).dtype),
        "x_scales": randn(tokens, block_columns).float().abs() + 0.1,
        "scales": randn(block_rows, block_columns).float().abs() + 0.1,
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working_dtype(dtype)
        x_scales = tensors["x_scales"].to(work).repeat_interleave(block, 1)
        scales = tensors["scales"].to(work).repeat_interleave(block, 1)
        scales = scales.repeat_interleave(block, 0)[:rows]
        out = reference.product(x.to(work) * x_scales, weights.to(work) * scales, dtype)
        return {"out": reference.store(out, dtype)}

    return VllmCall(_fp8_blocks, tensors, {"block": block}, products=1), expected


def _fp8_blocks(
    x: Tensor,
    weights: Tensor,
    x_scales: Tensor,
    scales: Tensor,
    *,
    block: int,
) -> dict[str, Tensor]:
    multiply = importlib.import_module(f"{_LAYERS}.utils.fp8_utils").w8a8_triton_block_scaled_mm
    # The tensors are converted here, because FP8 tensors cannot be pickled.
    out = multiply(x.to(FP8), weights.to(FP8), x_scales, scales, [block, block], x.dtype)
    return {"out": out}


_AWQ = "nibbles in the wrong order, or the zero point or scale of the wrong group (AWQ)"
_W4A16 = "the scale of the wrong group, or nibbles that are unpacked in the wrong order (GPTQ)"
_PACKED = "4-bit codes that packed instructions convert to wrong numbers (GPTQ in 16 bits)"
BLOCKS = "a block's scale left out, or the scale of another block used (Qwen3-FP8, DeepSeek)"
MINUTES = "a tile whose conversions from FP8 take minutes to compile"
_COMPILES = "a kernel that no longer compiles for gfx1151, or does not use the matrix unit"
COMPUTED = {
    # There are more tokens and rows than in a tile of either of AWQ's two kernels.
    "awq": Case(partial(awq, tokens=40, size=128, rows=264), _AWQ),
    "w4a16": Case(partial(w4a16, tokens=70, rows=40, size=128), _W4A16, torch.float32),
    # In 16 bits and without zero points, the kernel has another form: it uses an instruction of
    # gfx1151.
    "w4a16-packed": Case(partial(w4a16, rows=40, size=128), _PACKED),
    "w4a16-zeros": Case(
        partial(w4a16, rows=40, size=128, zeros=True),
        _W4A16,
        size=Size.FULL,
    ),
    "fp8-blocks": Case(partial(fp8_blocks, tokens=70, size=256), BLOCKS),
}
_small_w4a16 = partial(w4a16, rows=32, size=64, tokens=6)
EMULATED = {
    # Without a GPU, only emulation executes the instruction of gfx1151 that converts two 4-bit
    # codes to 16-bit numbers.
    "w4a16-float16": Case(_small_w4a16, _PACKED, FP16),
    "w4a16-bfloat16": Case(_small_w4a16, _PACKED, BF16),
}
_WIDE: dict = {"tokens": 64, "size": 512, "rows": 512}
COMPILED = {
    "awq": Case(partial(awq, group=128, **_WIDE), _COMPILES),
    "w4a16": Case(partial(w4a16, group=128, **_WIDE), _COMPILES, BF16),
    "w4a16-float16": Case(partial(w4a16, group=128, **_WIDE), _COMPILES),
    "fp8-blocks": Case(partial(fp8_blocks, tokens=3, size=512), MINUTES, BF16),
}

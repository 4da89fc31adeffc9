# SPDX-License-Identifier: BSD-3-Clause
"""A call of gpt-oss's experts in MXFP4, by vLLM with triton_kernels, and its expected results."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm.source import MXFP4_MODULE, VllmCall

_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
#: The numbers of fp4 by their code. A code has one bit of sign, two of exponent, one of mantissa.
FP4 = torch.cat([_MAGNITUDES, -_MAGNITUDES])
#: How many fp4 numbers share a scale. The scale is a power of two.
_GROUP = 32
#: Constants of gpt-oss's activation, as in vLLM's triton_kernel_fused_experts.
_ALPHA = 1.702
_LIMIT = 7.0
#: The newest version of triton_kernels' interface, that of Triton 3.8; see source.generation.
_NEWEST = "3.8"


def mixture(
    randn: Randn,
    *,
    tokens=5,
    experts=4,
    top_k=2,
    size=128,
    inner=64,
) -> tuple[VllmCall, Expected]:
    """Build a call of a whole layer of gpt-oss's experts.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        experts: Number of experts.
        top_k: Number of experts of each token.
        size: Number of columns of x.
        inner: Number of columns of gate, of up, and of the second product's input. In the first
            product, the columns of gate and up alternate.
    """
    tensors = {"x": randn(tokens, size), "logits": randn(tokens, experts)}
    weights = {}
    for name, rows, columns in (("w1", 2 * inner, size), ("w2", size, inner)):
        codes = (randn(experts, rows, columns).float().abs() * 1000).long() % 16
        exponents = (randn(experts, rows, columns // _GROUP).float().abs() * 1000).long() % 4 + 120
        tensors[name] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scale"] = exponents.to(torch.uint8)
        tensors[f"{name}_bias"] = randn(experts, rows).float()
        scales = torch.exp2(exponents - 127.0)
        weights[name] = FP4[codes] * scales.repeat_interleave(_GROUP, -1)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        best = tensors["logits"].double().topk(top_k, -1)
        shares = best.values.softmax(-1)
        outs = []
        for x, indices, token_shares in zip(tensors["x"], best.indices, shares, strict=True):
            rows = []
            for index in indices.tolist():
                rows.append(_compute_expert(x[None], tensors, weights, index, dtype))
            weighted = torch.cat(rows) * token_shares.to(rows[0])[:, None]
            outs.append(reference.store(weighted, dtype).sum(0))
        return {"out": reference.store(torch.stack(outs), dtype)}

    return VllmCall(launch, tensors, {"top_k": top_k}, products=2), expected


def _compute_expert(
    x: Tensor,
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor],
    index: int,
    dtype: Precision,
) -> Tensor:
    """Compute one expert's result for one token; for TERMS, an upper bound of its magnitudes."""
    work = reference.working_dtype(dtype)

    def multiply(name: str, x: Tensor) -> Tensor:
        bias = tensors[f"{name}_bias"][index].to(work)
        if dtype == reference.TERMS:
            bias = bias.abs()
        return reference.product(x, weights[name][index], dtype) + bias

    projected = multiply("w1", x)
    gate = projected[..., ::2]
    up = projected[..., 1::2]
    if dtype == reference.TERMS:
        # This product is an upper bound: the sigmoid is below 1, and clamping reduces its factors.
        return multiply("w2", gate * (up + 1))
    gate = gate.clamp(max=_LIMIT)
    up = up.clamp(-_LIMIT, _LIMIT)
    activated = gate * (_ALPHA * gate).sigmoid() * (up + 1)
    return multiply("w2", reference.store(activated, dtype))


def launch(x: Tensor, logits: Tensor, *, top_k: int, **weights: Tensor) -> dict[str, Tensor]:
    """Run triton_kernel_moe_forward: routing, both products, the activation, and the sum."""
    module = importlib.import_module(MXFP4_MODULE)
    generation = module.triton_kernels_version
    config = SimpleNamespace()
    wrapped = []
    for name in ("w1", "w2"):
        codes, precision = _wrap(generation, weights[name], weights[f"{name}_scale"])
        wrapped.append(codes)
        setattr(config, f"{name}_precision", precision)
        setattr(config, f"{name}_bias", weights[f"{name}_bias"])
    forward = module.triton_kernel_moe_forward
    return {"out": forward(x, *wrapped, logits, top_k, True, quant_config=config)}


def _wrap(generation: str, codes: Tensor, scale: Tensor) -> tuple[Any, Any]:
    """Wrap weights like vLLM's _swizzle_mxfp4 on RDNA.

    Args:
        generation: Version of triton_kernels' interface; see source.generation.
        codes: Codes of the weights, two in each byte.
        scale: Scales of the weights.

    Returns:
        The wrapped weights, and triton_kernels' PrecisionConfig for products with them.
    """
    is_newest = generation == _NEWEST
    matmul_name = "matmul" if is_newest else "matmul_ogs"
    matmul = importlib.import_module(f"triton_kernels.{matmul_name}")
    numerics = importlib.import_module("triton_kernels.numerics")
    tensor = importlib.import_module("triton_kernels.tensor")
    strided = importlib.import_module("triton_kernels.tensor_details.layout").StridedLayout
    wrapped = tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4)
    wrapped_scale = tensor.wrap_torch_tensor(scale.transpose(-2, -1))
    if is_newest:
        wrapped = tensor.convert_layout(wrapped, strided(-2))
        wrapped_scale = tensor.convert_layout(wrapped_scale, strided())
        options = {"b_mx_scale": wrapped_scale, "b_microblock_size": _GROUP}
    else:
        wrapped = tensor.convert_layout(wrapped, strided)
        wrapped_scale = tensor.convert_layout(wrapped_scale, strided)
        options = {"weight_scale": wrapped_scale}
    flex = matmul.FlexCtx(rhs_data=numerics.InFlexData())
    return wrapped, matmul.PrecisionConfig(flex_ctx=flex, **options)

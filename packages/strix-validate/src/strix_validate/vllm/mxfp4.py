# SPDX-License-Identifier: BSD-3-Clause
"""gpt-oss's experts in MXFP4: vLLM's function over triton_kernels, and what it must return."""

import importlib
from types import SimpleNamespace

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm.source import KERNELS, VllmCall

_SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
#: The numbers of fp4: a sign, two bits of exponent, one of mantissa.
FP4 = torch.cat([_SIZES, -_SIZES])
#: Numbers that share a scale, which is a power of two.
_GROUP = 32
#: Of gpt-oss's activation, as in vLLM's triton_kernel_fused_experts.
_ALPHA, _LIMIT = 1.702, 7.0


def mixture(
    randn: Randn, *, tokens=5, experts=4, top_k=2, size=128, inner=64
) -> tuple[VllmCall, Expected]:
    """Build a call of all of gpt-oss's experts.

    Args:
        size: of a token's vector.
        inner: of the vector between the two products; gate and up are neighbours in the first.
    """
    tensors = {"x": randn(tokens, size), "logits": randn(tokens, experts)}
    values = {}
    for name, rows, columns in (("w1", 2 * inner, size), ("w2", size, inner)):
        codes = (randn(experts, rows, columns).float().abs() * 1000).long() % 16
        powers = (randn(experts, rows, columns // _GROUP).float().abs() * 1000).long() % 4 + 120
        tensors[name] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scale"] = powers.to(torch.uint8)
        tensors[f"{name}_bias"] = randn(experts, rows).float()
        values[name] = FP4[codes] * torch.exp2(powers - 127.0).repeat_interleave(_GROUP, -1)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        best = tensors["logits"].double().topk(top_k, -1)
        shares = best.values.softmax(-1)
        out = []
        for token, indices, share in zip(tensors["x"], best.indices, shares, strict=True):
            parts = [_expert(token[None], tensors, values, int(index), dtype) for index in indices]
            weighted = torch.cat(parts) * share.to(parts[0])[:, None]
            out.append(reference.stored(weighted, dtype).sum(0))
        return {"out": reference.stored(torch.stack(out), dtype)}

    return VllmCall(launch, tensors, {"top_k": top_k}, products=2), expected


def _expert(x: Tensor, tensors: dict, values: dict, index: int, dtype: Precision) -> Tensor:
    """Compute one expert's answer to one token; for TERMS a bound of the sizes of its terms."""
    work = reference.working(dtype)

    def layer(name: str, x: Tensor) -> Tensor:
        bias = tensors[f"{name}_bias"][index].to(work)
        bias = bias.abs() if dtype == reference.TERMS else bias
        return reference.product(x, values[name][index], dtype) + bias

    both = layer("w1", x)
    gate, up = both[..., ::2], both[..., 1::2]
    if dtype == reference.TERMS:  # the activation's slopes are below those of this product
        return layer("w2", gate * (up + 1))
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return layer("w2", reference.stored(gate * (_ALPHA * gate).sigmoid() * (up + 1), dtype))


def launch(x: Tensor, logits: Tensor, *, top_k: int, **weights: Tensor) -> dict[str, Tensor]:
    """Run triton_kernel_moe_forward: routing, both products with the activation, and the sum."""
    module = importlib.import_module(KERNELS[5])
    generation = module.triton_kernels_version
    config, wrapped = SimpleNamespace(), []
    for name in ("w1", "w2"):
        codes, precision = _wrapped(generation, weights[name], weights[f"{name}_scale"])
        wrapped.append(codes)
        setattr(config, f"{name}_precision", precision)
        setattr(config, f"{name}_bias", weights[f"{name}_bias"])
    forward = module.triton_kernel_moe_forward
    return {"out": forward(x, *wrapped, logits, top_k, True, quant_config=config)}


def _wrapped(generation: str, codes: Tensor, scale: Tensor):
    """Wrap weights like vLLM's _swizzle_mxfp4 on RDNA; return them, and how to multiply by them."""
    kernels = {
        name: importlib.import_module(f"triton_kernels.{name}")
        for name in ("matmul" if generation == "3.8" else "matmul_ogs", "numerics", "tensor")
    }
    matmul, numerics, tensor = kernels.values()
    strided = importlib.import_module("triton_kernels.tensor_details.layout").StridedLayout
    layouts = (strided(-2), strided()) if generation == "3.8" else (strided, strided)
    codes = tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4)
    scale = tensor.wrap_torch_tensor(scale.transpose(-2, -1))
    codes, scale = map(tensor.convert_layout, (codes, scale), layouts)
    named = {"b_mx_scale": scale, "b_microblock_size": _GROUP}
    named = named if generation == "3.8" else {"weight_scale": scale}
    flex = matmul.FlexCtx(rhs_data=numerics.InFlexData())
    return codes, matmul.PrecisionConfig(flex_ctx=flex, **named)

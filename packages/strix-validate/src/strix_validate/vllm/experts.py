# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's fused mixture of experts as its server launches it, with the tuned tables of this GPU.

Follows vllm/model_executor/layers/fused_moe/experts/triton_moe.py: two products, and the router
weights the second.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from strix_validate.layers.table import MODELS, Experts
from strix_validate.triton.cases import Randn
from strix_validate.vllm.source import VllmCall

_MODULE = "vllm.model_executor.layers.fused_moe.fused_moe"
#: In a step of a server. Together they need every kernel that any number up to 8192 needs: found by
#: counting, with the tables of the recipe vllm. Those behind 518 are for few experts, and
#: those of 4 modulo 8 for Mixtral: its padded rows are then a multiple of 16, and the others not.
TOKENS = (
    1, 2, 3, 4, 5, 8, 13, 16, 21, 36, 40, 41, 48, 65, 68, 72, 80, 97, 98, 100, 112, 129, 130, 132,
    144, 515, 516, 518, 528, 2065, 2068, 2080,
)  # fmt: skip
#: Layers of the table of models, by a model that has them and the format of its weights.
LAYERS = {
    ", ".join(filter(None, (model, kind))): layer
    for model, row in MODELS.items()
    for kind, layer in row.mixture().items()
}


def mixture(randn: Randn, *, layer: Experts, tokens: int) -> tuple[VllmCall, None]:
    """Build a layer's two products for this many tokens; the weights hold no numbers."""
    return VllmCall(_mix, {"x": randn(tokens, layer.hidden)}, {"layer": layer}), None


def _mix(x: Tensor, *, layer: Experts) -> dict[str, Tensor]:
    """Launch both products, with weights that are made here; return nothing."""
    module, tokens, place = importlib.import_module(_MODULE), len(x), {"device": x.device}
    own = place | {"dtype": x.dtype}
    first = _weights(layer, 2 * layer.inner, layer.hidden, own)
    second = _weights(layer, layer.hidden, layer.inner, own)
    scaled = [layer.block, layer.group or layer.block]
    kind = {"block_shape": scaled} if any(scaled) else {}
    name = "int4_w4a16" if layer.group else "fp8_w8a8" if layer.block else None
    config = module.try_get_optimal_moe_config(
        first[0].shape, second[0].shape, layer.top_k, name, tokens, **kind,
    )  # fmt: skip
    chosen = torch.zeros(tokens, layer.top_k, dtype=torch.int32, **place)
    assigned = module._prepare_expert_assignment(
        chosen, config, tokens, layer.top_k, layer.experts, None,
        use_int4_w4a16=bool(layer.group), **kind,
    )  # fmt: skip
    routed = torch.empty(chosen.shape, **place)
    between = torch.empty(tokens * layer.top_k, layer.inner, **own)
    for rows, (weight, scales, zeros), router, top_k in (
        (x, first, None, layer.top_k),
        (between, second, None if layer.first else routed, 1),
    ):
        out = torch.empty(tokens, layer.top_k, weight.shape[1], **own)
        common = (router, *assigned, router is not None, top_k, config)
        if layer.group:
            module.invoke_fused_moe_wna16_triton_kernel(
                rows, weight, out, scales, zeros, *common, **kind, use_int8_w8a16=False,
                use_int4_w4a16=True,
                compute_type=getattr(module.tl, str(x.dtype).removeprefix("torch.")),
            )  # fmt: skip
            continue
        given, given_scales, computed = rows, None, x.dtype
        if layer.block:  # tokens come in FP8 too, with a scale for each block
            given, computed = torch.empty_like(rows, dtype=weight.dtype), torch.bfloat16
            given_scales = torch.empty(len(rows), rows.shape[1] // layer.block, **place)
        module.invoke_fused_moe_triton_kernel(
            given, weight, out, given_scales, scales, *common, **kind,
            use_fp8_w8a8=bool(layer.block), use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=False, per_channel_quant=False,
            compute_type=getattr(module.tl, str(computed).removeprefix("torch.")),
        )  # fmt: skip
    return {}


def _weights(layer: Experts, rows: int, columns: int, place: dict) -> list[Any]:
    """Allocate one product's weights, their scales and their zero points."""
    if layer.block:
        shape = (layer.experts, -(-rows // layer.block), -(-columns // layer.block))
        scales = torch.empty(shape, device=place["device"])
        fp8 = place | {"dtype": torch.float8_e4m3fn}
        return [torch.empty(layer.experts, rows, columns, **fp8), scales, None]
    if not layer.group:
        return [torch.empty(layer.experts, rows, columns, **place), None, None]
    codes = place | {"dtype": torch.uint8}  # two to a byte
    groups = columns // layer.group
    return [
        torch.empty(layer.experts, rows, columns // 2, **codes),
        torch.empty(layer.experts, rows, groups, **place),
        torch.empty(layer.experts, rows // 2, groups, **codes) if layer.zeros else None,
    ]


def by_expert(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs by expert into whole blocks, as vLLM's HIP code does.

    Returns:
        The pairs, of which a number behind the last is none; each block's expert; their number.
    """
    pairs, owners = [], []
    for expert in range(experts):
        own = (chosen.flatten() == expert).nonzero().flatten().tolist()
        own += [chosen.numel()] * (-len(own) % block)
        pairs += own
        owners += [expert] * (len(own) // block)
    place = {"dtype": torch.int32, "device": chosen.device}
    found = [torch.tensor(x, **place) for x in (pairs, owners, [len(pairs)])]
    return found[0], found[1], found[2]

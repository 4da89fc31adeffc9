# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's fused mixture of experts as its server launches it, with the tuned tables of this GPU.

Follows vllm/model_executor/layers/fused_moe/experts/triton_moe.py: two products, and the router
weights the second.
"""

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from strix_validate.layers.table import MODELS, Experts
from strix_validate.timing import timed
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
    module = importlib.import_module(_MODULE)
    chosen = torch.zeros(len(x), layer.top_k, dtype=torch.int32, device=x.device)
    config = _configure(module, layer, len(x))
    assigned = module._prepare_expert_assignment(
        chosen, config, *chosen.shape, layer.experts, None,
        use_int4_w4a16=bool(layer.group), **_block_shape(layer),
    )  # fmt: skip
    _products(module, x, layer, config, assigned)()
    return {}


def time_mixture(x: Tensor, *, layer: Experts) -> dict[str, Tensor]:
    """Time a layer's two products, of tokens that spread evenly over the experts.

    Returns:
        See :meth:`Timing.pack`.
    """
    module = importlib.import_module(_MODULE)
    pairs = torch.arange(len(x) * layer.top_k, dtype=torch.int32, device=x.device)
    chosen = (pairs % layer.experts).view(len(x), layer.top_k)
    config = _configure(module, layer, len(x))
    kind = "int4_w4a16" if layer.group else None
    assigned = assign(module, chosen, config, layer.experts, kind, [0, layer.group])
    return timed(_products(module, x, layer, config, assigned), x.device.type).pack()


def _block_shape(layer: Experts) -> dict[str, list[int]]:
    """Return the keyword for weights that share scales, and nothing for others."""
    scaled = [layer.block, layer.group or layer.block]
    return {"block_shape": scaled} if any(scaled) else {}


def _configure(module: Any, layer: Experts, tokens: int) -> dict[str, int]:
    """Return the tile that vLLM chooses for a layer and a number of tokens."""
    packed = 2 if layer.group else 1  # int4 weights, two to a byte
    name = "int4_w4a16" if layer.group else "fp8_w8a8" if layer.block else None
    return module.try_get_optimal_moe_config(
        (layer.experts, 2 * layer.inner, layer.hidden // packed),
        (layer.experts, layer.hidden, layer.inner // packed),
        layer.top_k, name, tokens, **_block_shape(layer),
    )  # fmt: skip


def _products(
    module: Any, x: Tensor, layer: Experts, config: dict[str, int], assigned: tuple
) -> Callable[[], None]:
    """Allocate a layer's weights and results; return the launch of its two products."""
    own = {"device": x.device, "dtype": x.dtype}
    routed = torch.ones(len(x), layer.top_k, device=x.device)
    between = torch.zeros(len(x) * layer.top_k, layer.inner, **own)
    first = _weights(layer, 2 * layer.inner, layer.hidden, own)
    second = _weights(layer, layer.hidden, layer.inner, own)

    def multiply(rows: Tensor, weights: list, out: Tensor, router: Tensor | None) -> None:
        weight, scales, zeros = weights
        top_k = layer.top_k if rows is x else 1
        common = (router, *assigned, router is not None, top_k, config)
        if layer.group:
            module.invoke_fused_moe_wna16_triton_kernel(
                rows, weight, out, scales, zeros, *common, **_block_shape(layer),
                use_int8_w8a16=False, use_int4_w4a16=True,
                compute_type=getattr(module.tl, str(x.dtype).removeprefix("torch.")),
            )  # fmt: skip
            return
        given, given_scales, computed = rows, None, x.dtype
        if layer.block:  # tokens come in FP8 too, with a scale for each block
            given, computed = torch.empty_like(rows, dtype=weight.dtype), torch.bfloat16
            given_scales = torch.empty(len(rows), rows.shape[1] // layer.block, device=x.device)
        module.invoke_fused_moe_triton_kernel(
            given, weight, out, given_scales, scales, *common, **_block_shape(layer),
            use_fp8_w8a8=bool(layer.block), use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=False, per_channel_quant=False,
            compute_type=getattr(module.tl, str(computed).removeprefix("torch.")),
        )  # fmt: skip

    outs = [torch.empty(len(x), layer.top_k, n, **own) for n in (2 * layer.inner, layer.hidden)]

    def launch() -> None:
        multiply(x, first, outs[0], None)
        multiply(between, second, outs[1], None if layer.first else routed)

    return launch


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


def assign(
    module: Any, chosen: Tensor, config: dict, experts: int, kind: str | None, block: list | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return whose rows of tokens each tile has, and its expert: vLLM's choice, sorted here."""

    def align(chosen: Tensor, size: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return by_expert(chosen, experts, size)

    with patch.object(module, "moe_align_block_size", align):
        return module._prepare_expert_assignment(
            chosen.contiguous(), config, *chosen.shape, experts, None, block_shape=block,
            use_int4_w4a16=kind == "int4_w4a16",
        )  # fmt: skip

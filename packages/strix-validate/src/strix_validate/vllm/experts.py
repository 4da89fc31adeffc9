# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's fused mixture of experts as its server launches it, with the tuned tables of this GPU.

This module follows vllm/model_executor/layers/fused_moe/experts/triton_moe.py. A layer has two
products. The router's weights are applied to the result of the second product, unless the model
applies them to the layer's input (Llama 4).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from strix_validate.layers.table import MODELS, Experts
from strix_validate.timing import time_call
from strix_validate.triton.cases import Randn
from strix_validate.vllm.source import MOE_MODULE, VllmCall

#: Numbers of tokens in one step of a server. Together, these steps need every kernel that steps of
#: up to 8192 tokens need. This was counted with the tuning tables of the recipe vllm. Mixtral needs
#: the numbers that are 4 modulo 8: only with them, its number of padded rows is a multiple of 16.
TOKENS = (
    *(1, 2, 3, 4, 5, 8, 13, 16, 21, 36, 40, 41, 48, 65, 68, 72, 80, 97, 98, 100),
    *(112, 129, 130, 132, 144, 515, 516, 518),
    # The following numbers are for layers with few experts.
    *(528, 2065, 2068, 2080),
)


def _list_layers() -> dict[str, Experts]:
    layers = {}
    for model, row in MODELS.items():
        for weight_format, layer in row.experts_by_format().items():
            name = f"{model}, {weight_format}" if weight_format else model
            layers[name] = layer
    return layers


#: Layers of experts of the models in models.toml, by model and format of the weights.
LAYERS = _list_layers()


def mixture(randn: Randn, *, layer: Experts, tokens: int) -> tuple[VllmCall, None]:
    """Build a call of a layer's two products. The layer's weights are not initialized."""
    return VllmCall(_mix, {"x": randn(tokens, layer.hidden_size)}, {"layer": layer}), None


def _mix(x: Tensor, *, layer: Experts) -> dict[str, Tensor]:
    """Allocate weights, and launch both products; return no results."""
    module = importlib.import_module(MOE_MODULE)
    chosen = torch.zeros(len(x), layer.top_k, dtype=torch.int32, device=x.device)
    config = _configure(module, layer, len(x))
    assignment = module._prepare_expert_assignment(
        chosen,
        config,
        *chosen.shape,
        layer.experts,
        None,
        use_int4_w4a16=bool(layer.group),
        **_block_shape(layer),
    )
    _bind_products(module, x, layer, config, assignment)()
    return {}


def time_mixture(x: Tensor, *, layer: Experts) -> dict[str, Tensor]:
    """Time a layer's two products, with tokens that are spread evenly over the experts.

    Returns:
        See :meth:`Timing.pack`.
    """
    module = importlib.import_module(MOE_MODULE)
    pairs = torch.arange(len(x) * layer.top_k, dtype=torch.int32, device=x.device)
    chosen = (pairs % layer.experts).view(len(x), layer.top_k)
    config = _configure(module, layer, len(x))
    dtype_name = "int4_w4a16" if layer.group else None
    block = [0, layer.group]
    assignment = assign(module, chosen, config, layer.experts, dtype_name, block)
    launch = _bind_products(module, x, layer, config, assignment)
    return time_call(launch, x.device.type).pack()


def _block_shape(layer: Experts) -> dict[str, list[int]]:
    """Return the keyword block_shape if weights share scales, otherwise no keyword."""
    shape = [layer.block, layer.group or layer.block]
    return {"block_shape": shape} if any(shape) else {}


def _dtype_name(layer: Experts) -> str | None:
    """Return vLLM's name for the dtypes of a layer; None for weights that are not quantized."""
    if layer.group:
        return "int4_w4a16"
    return "fp8_w8a8" if layer.block else None


def _configure(module: Any, layer: Experts, tokens: int) -> dict[str, int]:
    """Return the tile that vLLM chooses for a layer and a number of tokens."""
    weights_per_item = 2 if layer.group else 1  # a byte has two int4 weights
    return module.try_get_optimal_moe_config(
        (layer.experts, 2 * layer.intermediate_size, layer.hidden_size // weights_per_item),
        (layer.experts, layer.hidden_size, layer.intermediate_size // weights_per_item),
        layer.top_k,
        _dtype_name(layer),
        tokens,
        **_block_shape(layer),
    )


@dataclass(frozen=True)
class _Weights:
    """The weights of one product.

    Attributes:
        weights: (experts, rows, columns), or half as many columns for int4.
        scales: Scales of the blocks or groups; None for weights that are not quantized.
        zeros: Zero points of int4 weights; None if there are none.
    """

    weights: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


def _bind_products(
    module: Any,
    x: Tensor,
    layer: Experts,
    config: dict[str, int],
    assignment: tuple,
) -> Callable[[], None]:
    """Allocate a layer's weights and results; return a function that launches its two products.

    Args:
        module: vLLM's module MOE_MODULE.
        x: (tokens, hidden_size).
        layer: The sizes of the layer and the format of its weights.
        config: The tile.
        assignment: The result of vLLM's _prepare_expert_assignment; see assign.
    """
    place = {"device": x.device, "dtype": x.dtype}
    shares = torch.ones(len(x), layer.top_k, device=x.device)
    inner = torch.zeros(len(x) * layer.top_k, layer.intermediate_size, **place)
    first = _allocate_weights(layer, 2 * layer.intermediate_size, layer.hidden_size, x)
    second = _allocate_weights(layer, layer.hidden_size, layer.intermediate_size, x)
    first_out = torch.empty(len(x), layer.top_k, 2 * layer.intermediate_size, **place)
    second_out = torch.empty(len(x), layer.top_k, layer.hidden_size, **place)
    second_shares = None if layer.weights_input else shares
    launcher = _Launcher(module, layer, config, assignment)

    def launch() -> None:
        launcher.multiply(x, first, first_out, None, layer.top_k)
        launcher.multiply(inner, second, second_out, second_shares, 1)

    return launch


@dataclass(frozen=True)
class _Launcher:
    """A launcher of the products of a layer.

    Attributes:
        module: vLLM's module MOE_MODULE.
        layer: The sizes of the layer and the format of its weights.
        config: The tile.
        assignment: The result of vLLM's _prepare_expert_assignment; see assign.
    """

    module: Any
    layer: Experts
    config: dict[str, int]
    assignment: tuple

    def multiply(
        self,
        rows: Tensor,
        weights: _Weights,
        out: Tensor,
        shares: Tensor | None,
        top_k: int,
    ) -> None:
        """Launch one product.

        Args:
            rows: The left factor.
            weights: The right factor.
            out: The tensor for the result.
            shares: The router's weights, which the result is multiplied by; None for no weights.
            top_k: Number of experts of each row.
        """
        common = (shares, *self.assignment, shares is not None, top_k, self.config)
        if self.layer.group:
            self.module.invoke_fused_moe_wna16_triton_kernel(
                rows,
                weights.weights,
                out,
                weights.scales,
                weights.zeros,
                *common,
                **_block_shape(self.layer),
                use_int8_w8a16=False,
                use_int4_w4a16=True,
                compute_type=_compute_type(self.module, rows.dtype),
            )
            return
        row_scales = None
        compute_dtype = rows.dtype
        block = self.layer.block
        if block:
            # The tokens are FP8 as well, with a scale for each block.
            row_scales = torch.empty(len(rows), rows.shape[1] // block, device=rows.device)
            rows = torch.empty_like(rows, dtype=weights.weights.dtype)
            compute_dtype = torch.bfloat16
        self.module.invoke_fused_moe_triton_kernel(
            rows,
            weights.weights,
            out,
            row_scales,
            weights.scales,
            *common,
            **_block_shape(self.layer),
            use_fp8_w8a8=bool(block),
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            compute_type=_compute_type(self.module, compute_dtype),
        )


def _compute_type(module: Any, dtype: torch.dtype) -> Any:
    """Return Triton's type for a dtype."""
    return getattr(module.tl, str(dtype).removeprefix("torch."))


def _allocate_weights(layer: Experts, rows: int, columns: int, x: Tensor) -> _Weights:
    """Allocate one product's weights, their scales and their zero points, on the device of x."""
    shape = (layer.experts, rows, columns)
    if layer.block:
        weights = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale_rows = -(-rows // layer.block)
        scale_columns = -(-columns // layer.block)
        scales = torch.empty(layer.experts, scale_rows, scale_columns, device=x.device)
        return _Weights(weights, scales)
    if not layer.group:
        return _Weights(torch.empty(shape, dtype=x.dtype, device=x.device))
    # A byte holds two 4-bit codes, of weights or of zero points.
    packed = {"dtype": torch.uint8, "device": x.device}
    groups = columns // layer.group
    weights = torch.empty(layer.experts, rows, columns // 2, **packed)
    scales = torch.empty(layer.experts, rows, groups, dtype=x.dtype, device=x.device)
    zeros = None
    if layer.zeros:
        zeros = torch.empty(layer.experts, rows // 2, groups, **packed)
    return _Weights(weights, scales, zeros)


def sort_by_expert(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the (token, expert) pairs by expert, as vLLM's HIP code does.

    The pairs of an expert are padded to whole blocks.

    Args:
        chosen: The experts of each token, (tokens, top_k). A pair's number is its index in the
            flattened tensor.
        experts: Number of experts.
        block: Number of pairs in a block.

    Returns:
        The numbers of the sorted pairs, where a number beyond the last pair's is padding; the
        expert of each block; and the number of pairs including padding.
    """
    pairs: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        expert_pairs = (chosen.flatten() == expert).nonzero().flatten().tolist()
        padding = -len(expert_pairs) % block
        expert_pairs += [chosen.numel()] * padding
        pairs += expert_pairs
        owners += [expert] * (len(expert_pairs) // block)

    def as_tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=chosen.device)

    return as_tensor(pairs), as_tensor(owners), as_tensor([len(pairs)])


def assign(
    module: Any,
    chosen: Tensor,
    config: dict,
    experts: int,
    dtype_name: str | None,
    block: list | None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the result of vLLM's _prepare_expert_assignment; see sort_by_expert.

    sort_by_expert replaces vLLM's HIP code. If vLLM does not sort the pairs, the first tensor is
    None.

    Args:
        module: vLLM's module MOE_MODULE.
        chosen: The experts of each token, (tokens, top_k).
        config: The tile.
        experts: Number of experts.
        dtype_name: vLLM's name for the dtypes of the layer.
        block: vLLM's block_shape, for weights that share scales.
    """

    def align(chosen: Tensor, size: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return sort_by_expert(chosen, experts, size)

    with patch.object(module, "moe_align_block_size", align):
        return module._prepare_expert_assignment(
            chosen.contiguous(),
            config,
            *chosen.shape,
            experts,
            None,
            block_shape=block,
            use_int4_w4a16=dtype_name == "int4_w4a16",
        )

# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's LoRA: the two small products that each token's adapter adds to the output of a layer."""

import importlib
from functools import partial

import torch
from torch import Tensor

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.source import VllmCall

_OPS = "vllm.lora.ops.triton_ops"


def adapted_layer(
    randn: Randn,
    *,
    owners: tuple[int, ...],
    size=96,
    rank=16,
    rows=(64, 32),
    adapters=3,
    scaling=0.5,
) -> tuple[VllmCall, Expected]:
    """Build a call that runs lora_shrink, then lora_expand on lora_shrink's expected result.

    Args:
        randn: Draws the numbers.
        owners: The adapter of each token; -1 for a token without an adapter.
        size: Number of columns of x.
        rank: Rank of the adapters.
        rows: Number of output columns of each slice, for example of q, k and v. The slices are
            adjacent in the output.
        adapters: Number of adapters.
        scaling: Factor by which the first product is multiplied.
    """
    tensors = {"x": randn(len(owners), size), "output": randn(len(owners), sum(rows))}
    for i, n in enumerate(rows):
        tensors[f"a{i}"] = randn(adapters, rank, size) / size**0.5
        tensors[f"b{i}"] = randn(adapters, n, rank) / rank**0.5
    tensors["owners"] = torch.tensor(owners, dtype=torch.int32)

    def shrink(dtype: Precision) -> Tensor:
        """Compute the first product, (slices, tokens, rank)."""
        slices = []
        for i in range(len(rows)):
            parts = []
            for x, owner in zip(tensors["x"], owners, strict=True):
                part = reference.product(x[None], tensors[f"a{i}"][owner], dtype)
                parts.append(part * scaling * (owner >= 0))
            slices.append(torch.cat(parts))
        return torch.stack(slices)

    # vLLM keeps the result of the first product in float32.
    tensors["shrunk"] = shrink(torch.float64).float()

    def expected(dtype: Precision) -> dict[str, Tensor]:
        out = tensors["output"].to(reference.working_dtype(dtype)).clone()
        if dtype == reference.TERMS:
            out = out.abs()
        begin = 0
        for i, n in enumerate(rows):
            for t, owner in enumerate(owners):
                # The kernel rounds the first product's result to the weights' dtype.
                row = reference.store(tensors["shrunk"][i, t : t + 1], dtype)
                part = reference.product(row, tensors[f"b{i}"][owner], dtype)[0]
                out[t, begin : begin + n] += part * (owner >= 0)
            begin += n
        return {"shrunk": shrink(dtype), "out": reference.store(out, dtype)}

    options = {"slices": len(rows), "scaling": scaling}
    return VllmCall(_adapt, tensors, options), expected


def _adapt(
    x: Tensor,
    output: Tensor,
    owners: Tensor,
    shrunk: Tensor,
    *,
    slices: int,
    scaling: float,
    **weights: Tensor,
) -> dict[str, Tensor]:
    a = [weights[f"a{i}"] for i in range(slices)]
    b = [weights[f"b{i}"] for i in range(slices)]
    metadata_class = importlib.import_module(f"{_OPS}.lora_kernel_metadata").LoRAKernelMeta
    metadata = metadata_class.make(len(a[0]), len(x), x.device)
    metadata.prepare_tensors(owners)
    shrink = importlib.import_module(f"{_OPS}.lora_shrink_op")._lora_shrink
    expand = importlib.import_module(f"{_OPS}.lora_expand_op")._lora_expand
    small = torch.zeros_like(shrunk)
    shrink(x, a, small, *metadata.meta_args(len(x), False), scaling)
    out = output.clone()
    expand(shrunk, b, out, *metadata.meta_args(len(x), False), add_inputs=True)
    return {"shrunk": small, "out": out}


_ADAPTER = "an adapter applied to tokens of another adapter or of none, or to the wrong slice"
_OWNERS = (1, -1, 0, 1, 2, -1, 2, 2, 0)
_PROMPT_OWNERS = (0,) * 90 + (-1,) * 10 + (1,) * 30
COMPUTED = {
    "lora": Case(partial(adapted_layer, owners=_OWNERS), _ADAPTER, size=Size.FULL),
    # From 128 tokens on, vLLM uses other tiles.
    "lora-prompt": Case(
        partial(adapted_layer, owners=_PROMPT_OWNERS, size=512, rows=(48,), adapters=2),
        _ADAPTER,
    ),
    "lora-one-slice": Case(partial(adapted_layer, owners=_OWNERS[:5], rows=(48,)), _ADAPTER),
}

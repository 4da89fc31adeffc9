# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's LoRA: the two small products that an adapter adds to a layer, for tokens of several."""

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


def adapted(
    randn: Randn, *, owners: tuple[int, ...], size=96, rank=16, rows=(64, 32), adapters=3,
    scaling=0.5,
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of lora_shrink, and of lora_expand of what it must return, added to what is
    there.

    Args:
        owners: of each token the adapter, -1 for none.
        rows: of each slice (as of q, k and v), which are neighbours in the output.
    """
    tensors = {"x": randn(len(owners), size), "output": randn(len(owners), sum(rows))}
    for i, n in enumerate(rows):
        tensors[f"a{i}"] = randn(adapters, rank, size) / size**0.5
        tensors[f"b{i}"] = randn(adapters, n, rank) / rank**0.5
    tensors["owners"] = torch.tensor(owners, dtype=torch.int32)

    def shrunk(i: int, dtype: Precision) -> Tensor:
        found = [
            reference.product(x[None], tensors[f"a{i}"][owner], dtype) * scaling * (owner >= 0)
            for x, owner in zip(tensors["x"], owners, strict=True)
        ]
        return torch.cat(found)

    # in float32, as vLLM keeps it
    tensors["shrunk"] = torch.stack([shrunk(i, torch.float64) for i in range(len(rows))]).float()

    def expected(dtype: Precision) -> dict[str, Tensor]:
        begin, out = 0, tensors["output"].to(reference.working(dtype)).clone()
        if dtype == reference.TERMS:
            out = out.abs()
        for i, n in enumerate(rows):
            for t, owner in enumerate(owners):
                # the kernel rounds what it reads to the weights' type
                row = reference.stored(tensors["shrunk"][i, t : t + 1], dtype)
                part = reference.product(row, tensors[f"b{i}"][owner], dtype)[0]
                out[t, begin : begin + n] += part * (owner >= 0)
            begin += n
        both = torch.stack([shrunk(i, dtype) for i in range(len(rows))])
        return {"shrunk": both, "out": reference.stored(out, dtype)}

    return VllmCall(_adapt, tensors, {"slices": len(rows), "scaling": scaling}), expected


def _adapt(
    x: Tensor, output: Tensor, owners: Tensor, shrunk: Tensor, *, slices: int, scaling: float,
    **weights: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    a, b = ([weights[f"{name}{i}"] for i in range(slices)] for name in "ab")
    meta = importlib.import_module(f"{_OPS}.lora_kernel_metadata").LoRAKernelMeta.make(
        len(a[0]), len(x), x.device
    )
    meta.prepare_tensors(owners)
    small = torch.zeros_like(shrunk)
    importlib.import_module(f"{_OPS}.lora_shrink_op")._lora_shrink(
        x, a, small, *meta.meta_args(len(x), False), scaling
    )
    out = output.clone()
    importlib.import_module(f"{_OPS}.lora_expand_op")._lora_expand(
        shrunk, b, out, *meta.meta_args(len(x), False), add_inputs=True
    )
    return {"shrunk": small, "out": out}


_WHY = "an adapter applied to another one's tokens, to those of none, or to the wrong slice"
_OWNERS = (1, -1, 0, 1, 2, -1, 2, 2, 0)
COMPUTED = {
    "lora": Case(partial(adapted, owners=_OWNERS), _WHY, size=Size.FULL),
    # prompts have tiles of their own from 128 tokens on
    "lora-prompt": Case(
        partial(
            adapted, owners=(0,) * 90 + (-1,) * 10 + (1,) * 30, size=512, rows=(48,), adapters=2
        ),
        _WHY,
    ),
    "lora-one-slice": Case(partial(adapted, owners=_OWNERS[:5], rows=(48,)), _WHY),
}

# SPDX-License-Identifier: BSD-3-Clause
"""Linear attention of a hybrid model (Qwen3-Next, Qwen3.6) in model.py: one layer, one sequence.

A prompt goes through the convolution and chunks, each later token through the update of the
convolution's state and the packed recurrence.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from strix_validate.numerics import reference
from strix_validate.triton.cases import Randn
from strix_validate.vllm import linear_attention

#: Two heads of keys for four of values, each of 64 numbers.
HEADS, VALUE_HEADS, SIZE, WIDTH = 2, 4, 64, 4
_PARTS = [HEADS * SIZE, HEADS * SIZE, VALUE_HEADS * SIZE]
_CHANNELS = sum(_PARTS)
#: What one product gives: convolved channels, the gate of the output, two numbers for each head.
_CUTS = [_CHANNELS, VALUE_HEADS * SIZE, VALUE_HEADS, VALUE_HEADS]


def weights(randn: Randn, hidden: int) -> dict[str, Tensor]:
    """Draw the weights of the layer."""
    return {
        "in": randn(sum(_CUTS), hidden) / hidden**0.5,
        "conv": randn(_CHANNELS, WIDTH) / 2,
        "log": randn(VALUE_HEADS).float() / 3 - 1,
        "bias": randn(VALUE_HEADS).float() / 2,
        "gated": 1 + randn(SIZE) / 8,
    }


def forward(own: dict[str, Tensor], x: Tensor, prompt: int, dtype: torch.dtype) -> Tensor:
    """Compute what the layer's last product reads, of all tokens, token by token."""
    work = reference.working(dtype)
    wide = reference.stored(reference.product(x, own["in"], dtype), dtype)
    qkv, gate, a, b = wide.split(_CUTS, -1)
    windows = pad(qkv, (0, 0, WIDTH - 1, 0)).unfold(0, WIDTH, 1)
    qkv = reference.stored(silu((windows * own["conv"].to(work)).sum(-1)), dtype)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in qkv.split(_PARTS, 1))
    q, k = (linear_attention.normed(part) for part in (q, k))
    q, k = (part.repeat_interleave(VALUE_HEADS // HEADS, 1) for part in (q, k))
    keep, take = linear_attention.gates(own | {"a": a, "b": b}, work)
    state = torch.zeros(VALUE_HEADS, SIZE, SIZE, dtype=work)
    rows, out = (q * SIZE**-0.5, k, v, keep, take), []
    for tokens, chunks in ((slice(prompt), True), (slice(prompt, None), False)):
        q, k, v, keep, take = (x[tokens] for x in rows)
        found, state = linear_attention.follow(q, k, v, keep, take, state, dtype, chunks)
        out.append(reference.stored(found, dtype))
    heads = torch.cat(out)
    scale = (heads.square().mean(-1, keepdim=True) + linear_attention.EPS).rsqrt()
    heads = heads * scale * own["gated"].to(work) * silu(gate.unflatten(1, (-1, SIZE)))
    return reference.stored(heads, dtype).flatten(1)


def empty(place: dict) -> dict[str, Tensor]:
    """Return the layer's state of a sequence without tokens, in block 1: 0 belongs to none."""
    states = torch.zeros(2, VALUE_HEADS, SIZE, SIZE, device=place["device"])
    return {"conv": torch.full((2, WIDTH - 1, _CHANNELS), float("nan"), **place), "delta": states}


def step(own: dict[str, Tensor], x: Tensor, state: dict[str, Tensor], first: bool) -> Tensor:
    """Compute what the layer's last product reads, of the tokens of a step, by vLLM's kernels."""
    qkv, gate, a, b = (part.contiguous() for part in (x @ own["in"].T).split(_CUTS, -1))
    place = {"dtype": torch.int32, "device": x.device}
    blocks, begins = torch.ones(1, **place), torch.tensor([0, len(x)], **place)
    if first:
        qkv = linear_attention.convolve(qkv, own["conv"], state["conv"], blocks, begins)
    else:
        qkv = linear_attention.convolve_next(qkv, own["conv"], state["conv"], blocks)
    found = linear_attention.run_delta_rule(
        qkv.contiguous(), a, b, own["log"], own["bias"], state["delta"], blocks, begins,
        heads=HEADS, value_heads=VALUE_HEADS, size=SIZE, kernel="chunks" if first else "one",
    )  # fmt: skip
    state["delta"] = found["states"]
    rows = (part.reshape(-1, SIZE) for part in (found["out"], gate))
    out = linear_attention.run_gated_norm(next(rows), own["gated"], next(rows))["out"]
    return out.view(len(x), VALUE_HEADS * SIZE)

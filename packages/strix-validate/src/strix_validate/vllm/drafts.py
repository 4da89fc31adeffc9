# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's linear attention where a model verifies drafted tokens: a state goes on behind those that
the step before accepted.
"""

import importlib
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.linear_attention import CONVOLUTION, OPS, follow, gates, normed
from strix_validate.vllm.source import VllmCall

#: Tokens of each sequence, and how many of its last step's were accepted.
_STEP: dict = {"lengths": (3, 1, 2), "accepted": (1, 3, 2)}


def convolution(
    randn: Randn, *, lengths=(3, 1, 2), accepted=(1, 3, 2), channels=40, width=4
) -> tuple[VllmCall, Expected]:
    """Build a call of causal_conv1d_update that verifies drafted tokens.

    Args:
        lengths: tokens of each sequence. accepted: of the step before, which wrote one state for
            all of its tokens: a sequence goes on behind the last accepted one.
    """
    most = max(*lengths, *accepted)
    tensors = {
        "x": randn(sum(lengths), channels),
        "weight": randn(channels, width),
        "states": randn(len(lengths) + 2, width - 2 + most, channels),
        "blocks": torch.arange(len(lengths) + 1, 1, -1, dtype=torch.int32),
        "begins": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "accepted": torch.tensor(accepted, dtype=torch.int32),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        states, weight = tensors["states"].clone().to(work), tensors["weight"].to(work).T
        parts = []
        for i, part in enumerate(tensors["x"].to(work).split(lengths)):
            block, first = int(tensors["blocks"][i]), accepted[i] - 1
            rows = torch.cat([states[block, first : first + width - 1], part])
            states[block, : len(rows) - 1] = rows[1:]
            windows = rows.unfold(0, width, 1).transpose(1, 2)
            if dtype == reference.TERMS:
                parts.append((windows * weight).abs().sum(1))
            else:
                parts.append(reference.stored(silu((windows * weight).sum(1)), dtype))
        return {"out": torch.cat(parts), "states": states}

    return VllmCall(_convolve, tensors, {"most": most}), expected


def _convolve(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    blocks: Tensor,
    begins: Tensor,
    accepted: Tensor,
    *,
    most: int,
) -> dict[str, Tensor]:
    states = states.clone()
    out = importlib.import_module(CONVOLUTION).causal_conv1d_update(
        x.clone(),
        states.transpose(-1, -2),
        weight,
        None,
        "silu",
        conv_state_indices=blocks,
        num_accepted_tokens=accepted,
        query_start_loc=begins,
        max_query_len=most,
    )
    return {"out": out, "states": states}


def delta_rule(
    randn: Randn, *, lengths=(3, 1, 2), accepted=(1, 3, 2), heads=1, value_heads=2, size=64
) -> tuple[VllmCall, Expected]:
    """Build a call of fused_sigmoid_gating_delta_rule_update that verifies drafted tokens.

    Each token of a sequence has a block for the state behind it; see convolution for the rest.
    """
    tokens, most = sum(lengths), max(*lengths, *accepted)
    blocks = 1 + torch.arange(len(lengths) * most, dtype=torch.int32).flip(0)
    blocks = blocks.view(len(lengths), most)
    tensors = {
        "q": randn(tokens, heads, size),
        "k": randn(tokens, heads, size),
        "v": randn(tokens, value_heads, size),
        "a": randn(tokens, value_heads),
        "b": randn(tokens, value_heads),
        "log": randn(value_heads).float() / 3 - 1,
        "bias": randn(value_heads).float() / 2,
        "states": randn(1 + blocks.numel(), value_heads, size, size).float() / 8,
        "blocks": blocks,
        "begins": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "accepted": torch.tensor(accepted, dtype=torch.int32),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        before, ratio = tensors["states"].to(work), value_heads // heads
        after, parts = before.clone(), []
        q, k = (normed(tensors[n].to(work)).repeat_interleave(ratio, 1) for n in "qk")
        rows = (q * size**-0.5, k, tensors["v"].to(work), *gates(tensors, work))
        for i, own in enumerate(zip(*(x.split(lengths) for x in rows), strict=True)):
            first = before[blocks[i, accepted[i] - 1]]
            for t in range(lengths[i]):
                q, k, v, keep, take = (x[: t + 1] for x in own)
                out, after[blocks[i, t]] = follow(q, k, v, keep, take, first, dtype, False)
                parts.append(reference.stored(out[-1:], dtype))
        return {"out": torch.cat(parts), "states": after}

    return VllmCall(_remember, tensors), expected


def _remember(  # noqa: PLR0913 (what the kernels take)
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log: Tensor, bias: Tensor,
    states: Tensor, blocks: Tensor, begins: Tensor, accepted: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    states = states.clone()
    module = importlib.import_module(f"{OPS}.fused_sigmoid_gating")
    out, _ = module.fused_sigmoid_gating_delta_rule_update(
        log, a, b, bias, *(x[None] for x in (q, k, v)), initial_state=states,
        inplace_final_state=True, cu_seqlens=begins, ssm_state_indices=blocks,
        num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return {"out": out[0], "states": states}


_WHY = "a state that goes on behind a drafted token that was not accepted"
COMPUTED = {
    "conv1d-drafts": Case(partial(convolution, **_STEP), _WHY),
    "gdn-drafts": Case(partial(delta_rule, **_STEP), _WHY, torch.float32),
}

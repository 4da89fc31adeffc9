# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's linear attention in speculative decoding, in which a model verifies drafted tokens.

A sequence continues from the state after the last token that the previous step accepted.
"""

import importlib
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.linear_attention import (
    CONVOLUTION,
    OPS,
    compute_gates,
    follow_recurrence,
    normalize_rows,
)
from strix_validate.vllm.source import VllmCall


def convolution(
    randn: Randn,
    *,
    lengths=(3, 1, 2),
    accepted=(1, 3, 2),
    channels=40,
    width=4,
) -> tuple[VllmCall, Expected]:
    """Build a call of causal_conv1d_update that verifies drafted tokens.

    Args:
        randn: Draws the numbers.
        lengths: Number of tokens of each sequence.
        accepted: Number of tokens of each sequence that the previous step accepted. That step
            wrote one long state, which contains the state after each of its tokens.
        channels: Number of channels of the convolution.
        width: Number of tokens that the convolution spans.
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
        work = reference.working_dtype(dtype)
        states = tensors["states"].clone().to(work)
        weight = tensors["weight"].to(work).T
        outs = []
        for i, part in enumerate(tensors["x"].to(work).split(lengths)):
            block = int(tensors["blocks"][i])
            first = accepted[i] - 1
            rows = torch.cat([states[block, first : first + width - 1], part])
            states[block, : len(rows) - 1] = rows[1:]
            terms = rows.unfold(0, width, 1).transpose(1, 2) * weight
            if dtype == reference.TERMS:
                outs.append(terms.abs().sum(1))
            else:
                outs.append(reference.store(silu(terms.sum(1)), dtype))
        return {"out": torch.cat(outs), "states": states}

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
    randn: Randn,
    *,
    lengths=(3, 1, 2),
    accepted=(1, 3, 2),
    heads=1,
    value_heads=2,
    size=64,
) -> tuple[VllmCall, Expected]:
    """Build a call of fused_sigmoid_gating_delta_rule_update that verifies drafted tokens.

    Each token of a sequence has a block for the state after the token.

    Args:
        randn: Draws the numbers.
        lengths: Number of tokens of each sequence.
        accepted: Number of tokens of each sequence that the previous step accepted.
        heads: Heads of queries and keys.
        value_heads: Heads of values.
        size: Size of a head.
    """
    tokens = sum(lengths)
    most = max(*lengths, *accepted)
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
        work = reference.working_dtype(dtype)
        before = tensors["states"].to(work)
        after = before.clone()
        q = normalize_rows(tensors["q"].to(work)).repeat_interleave(value_heads // heads, 1)
        k = normalize_rows(tensors["k"].to(work)).repeat_interleave(value_heads // heads, 1)
        log_decay, beta = compute_gates(tensors, work)
        rows = (q * size**-0.5, k, tensors["v"].to(work), log_decay, beta)
        sequences = zip(*(x.split(lengths) for x in rows), strict=True)
        outs = []
        for i, sequence in enumerate(sequences):
            state = before[blocks[i, accepted[i] - 1]]
            for t in range(lengths[i]):
                first_tokens = [x[: t + 1] for x in sequence]
                out, new_state = follow_recurrence(first_tokens, state, dtype, False)
                after[blocks[i, t]] = new_state
                outs.append(reference.store(out[-1:], dtype))
        return {"out": torch.cat(outs), "states": after}

    return VllmCall(_remember, tensors), expected


def _remember(  # noqa: PLR0913 (the parameters of the kernel)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log: Tensor,
    bias: Tensor,
    states: Tensor,
    blocks: Tensor,
    begins: Tensor,
    accepted: Tensor,
) -> dict[str, Tensor]:
    states = states.clone()
    module = importlib.import_module(f"{OPS}.fused_sigmoid_gating")
    out, _ = module.fused_sigmoid_gating_delta_rule_update(
        log,
        a,
        b,
        bias,
        q[None],
        k[None],
        v[None],
        initial_state=states,
        inplace_final_state=True,
        cu_seqlens=begins,
        ssm_state_indices=blocks,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )
    return {"out": out[0], "states": states}


_ACCEPTED = "a sequence that continues from the state after a token that was not accepted"
COMPUTED = {
    "conv1d-drafts": Case(convolution, _ACCEPTED),
    "gdn-drafts": Case(delta_rule, _ACCEPTED, torch.float32),
}

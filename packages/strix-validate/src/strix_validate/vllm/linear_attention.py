# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's linear attention of Qwen3-Next and Qwen3.6: a short convolution and the gated delta rule.

This module follows _forward_core and _forward_core_decode_non_spec in
vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py. vLLM uses this code on gfx1151,
because it uses amd-aiter's kernels for decoding on CDNA and RDNA 4 only.
"""

import importlib
import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from strix_validate.checks import Size
from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Case, Expected, Randn
from strix_validate.vllm.source import VllmCall

OPS = "vllm.third_party.flash_linear_attention.ops"
CONVOLUTION = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
EPS = 1e-6
#: Number of tokens that a workgroup of causal_conv1d_fn computes.
_TILE = 8


def convolution(
    randn: Randn,
    *,
    lengths: tuple[int, ...] = (3, 19),
    channels=40,
    width=4,
    bias=False,
) -> tuple[VllmCall, Expected]:
    """Build a call of causal_conv1d_fn, then of causal_conv1d_update with a token per sequence.

    The first sequence begins without a state. The other sequences continue from the state in their
    block.

    Args:
        randn: Draws the numbers.
        lengths: Number of new tokens of each sequence.
        channels: Number of channels of the convolution.
        width: Number of tokens that the convolution spans.
        bias: Whether each channel has a bias (Mamba).
    """
    count = len(lengths)
    tensors = {
        "x": randn(sum(lengths), channels),
        "new": randn(count, channels),
        "weight": randn(channels, width) / 2,
        "states": randn(count + 2, width - 1, channels),
        # The blocks of the sequences are out of order. Block 0 belongs to no sequence.
        "blocks": torch.arange(count + 1, 1, -1, dtype=torch.int32),
        "begins": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    }
    if bias:
        tensors["bias"] = randn(channels)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working_dtype(dtype)
        offset = tensors["bias"].to(work) if bias else torch.zeros(1, dtype=work)
        states = tensors["states"].clone().to(work)
        weight = tensors["weight"].to(work).T
        outs = []
        next_outs = []
        for i, part in enumerate(tensors["x"].to(work).split(lengths)):
            block = int(tensors["blocks"][i])
            before = states[block] if i else torch.zeros_like(states[block])
            rows = torch.cat([before, part, tensors["new"][i : i + 1].to(work)])
            states[block] = rows[1 - width :]
            terms = rows.unfold(0, width, 1).transpose(1, 2) * weight
            if dtype == reference.TERMS:
                out = terms.abs().sum(1) + offset.abs()
            else:
                out = reference.store(silu(terms.sum(1) + offset), dtype)
            outs.append(out[:-1])
            next_outs.append(out[-1:])
        return {"out": torch.cat(outs), "next": torch.cat(next_outs), "states": states}

    return VllmCall(_convolve, tensors), expected


def _convolve(
    x: Tensor,
    new: Tensor,
    weight: Tensor,
    states: Tensor,
    blocks: Tensor,
    begins: Tensor,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    states = states.clone()
    out = convolve(x, weight, states, blocks, begins, bias)
    next_out = convolve_next(new.clone(), weight, states, blocks, bias)
    return {"out": out, "next": next_out, "states": states}


def convolve(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    blocks: Tensor,
    begins: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Run causal_conv1d_fn, which updates the states. The first sequence begins without a state."""
    out = importlib.import_module(CONVOLUTION).causal_conv1d_fn(
        x.T,
        weight,
        bias,
        states.transpose(-1, -2),
        begins,
        cache_indices=blocks,
        has_initial_state=torch.arange(len(blocks), device=blocks.device) > 0,
        activation="silu",
        metadata=_assign_tiles(begins),
    )
    return out.T


def convolve_next(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    blocks: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Run causal_conv1d_update with one token of each sequence. It overwrites x."""
    return importlib.import_module(CONVOLUTION).causal_conv1d_update(
        x,
        states.transpose(-1, -2),
        weight,
        bias,
        "silu",
        conv_state_indices=blocks,
    )


def _assign_tiles(begins: Tensor) -> SimpleNamespace:
    """Assign parts of sequences to workgroups, as vLLM's compute_causal_conv1d_metadata does."""
    counts = (begins.diff() + _TILE - 1) // _TILE
    place = {"dtype": torch.int32, "device": begins.device}
    owners = torch.repeat_interleave(torch.arange(len(counts), **place), counts)
    parts = torch.cat([torch.arange(n, **place) for n in counts.tolist()])
    pointers = {"batch_ptr": owners, "token_chunk_offset_ptr": parts}
    tiles = {
        **pointers,
        "tot": len(parts),
        "mlist": owners,
        "mlist_len": len(parts),
        "offsetlist": parts,
    }
    if os.environ.get("TRITON_INTERPRET"):
        # The launch function puts these tensors in the place of arguments that the interpreter has
        # already converted, so they must be converted as well.
        from triton.runtime.interpreter import _implicit_cvt

        for name, pointer in pointers.items():
            tiles[name] = _implicit_cvt(pointer)
    return SimpleNamespace(nums_dict={_TILE: tiles}, **pointers)


def compute_gates(tensors: dict[str, Tensor], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gates of the state, (tokens, heads) each.

    The first tensor has the logarithms of the factors by which the state decays. The second tensor
    has the factors of the new values.
    """
    a, b, log, bias = (tensors[name].to(work) for name in ("a", "b", "log", "bias"))
    log_decay = -log.exp() * softplus(a + bias)
    return log_decay, b.sigmoid()


def normalize_rows(x: Tensor) -> Tensor:
    """Scale rows to length 1, as the kernels do with queries and keys."""
    return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()


def follow_recurrence(
    rows: Sequence[Tensor],
    state: Tensor,
    dtype: Precision,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule token by token.

    Args:
        rows: q and k, (tokens, heads, K); v, (tokens, heads, V); and both results of compute_gates.
        state: (heads, V, K).
        dtype: Precision of the results; see cases.Expected.
        rounded: Whether corrected values and states are rounded to the dtype, as in the kernels
            that compute chunks.

    Returns:
        The output, (tokens, heads, V), and the final state. With TERMS, the sums of the magnitudes
        of the terms, which are the values and their corrections.
    """
    q, k, v, log_decay, beta = rows
    outs = []
    terms = state.abs()
    for t in range(len(q)):
        decay = log_decay[t].exp()[:, None, None]
        share = beta[t][:, None]
        state = decay * state
        terms = decay * terms
        read = torch.einsum("hvk,hk->hv", state, k[t])
        new = share * (v[t] - read)
        if rounded:
            new = reference.store(new, dtype)
        state = state + new[..., None] * k[t][:, None]
        size = torch.maximum(new.abs(), share * v[t].abs())
        terms = terms + size[..., None] * k[t].abs()[:, None]
        if dtype == reference.TERMS:
            outs.append(torch.einsum("hvk,hk->hv", terms, q[t].abs()))
            continue
        multiplied = reference.store(state, dtype) if rounded else state
        outs.append(torch.einsum("hvk,hk->hv", multiplied, q[t]))
    final_state = terms if dtype == reference.TERMS else state
    return torch.stack(outs), final_state


def delta_rule(
    randn: Randn,
    *,
    lengths: tuple[int, ...],
    heads=2,
    value_heads=4,
    size=64,
    kernel="chunks",
    steep=False,
) -> tuple[VllmCall, Expected]:
    """Build a call of the kernels that follow the convolution in layers of Qwen3-Next.

    Args:
        randn: Draws the numbers.
        lengths: Number of tokens of each sequence.
        heads: Heads of queries and keys.
        value_heads: Heads of values.
        size: Size of a head.
        kernel: "chunks" runs fused_post_conv_prep and chunk_gated_delta_rule, which vLLM uses for
            prompts.
            "one" runs fused_recurrent_gated_delta_rule_packed_decode, for one token of each
            sequence. The first sequence then has block 0, which stands for no sequence.
            "several" runs fused_sigmoid_gating_delta_rule_update, for decoding in a batch with
            prompts.
        steep: Whether the first head's gates are so large that their exp overflows, so that
            softplus must return the gate itself.
    """
    tokens = sum(lengths)
    count = len(lengths)
    tensors = {
        "qkv": randn(tokens, (2 * heads + value_heads) * size),
        "a": randn(tokens, value_heads),
        "b": randn(tokens, value_heads),
        "log": randn(value_heads).float() / 3 - 1,
        "bias": randn(value_heads).float() / 2,
        "states": randn(count + 2, value_heads, size, size).float() / 8,
        "blocks": torch.arange(count + 1, 1, -1, dtype=torch.int32),
        "begins": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    }
    if kernel == "one":
        tensors["blocks"][0] = 0
    if steep:
        tensors["bias"][0] = 100
        # With this small factor of the gate, a token removes only about a fifth of the state,
        # despite the large bias.
        tensors["log"][0] = -6
    options = {"heads": heads, "value_heads": value_heads, "size": size, "kernel": kernel}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working_dtype(dtype)
        uses_chunks = kernel == "chunks"
        states = tensors["states"].clone().to(work)
        q, k, v = _split_qkv(tensors["qkv"].to(work), heads, value_heads, size)
        q = normalize_rows(q)
        k = normalize_rows(k)
        results = {}
        if uses_chunks:
            # The first kernel stores q and k for the second one.
            q = reference.store(q, dtype)
            k = reference.store(k, dtype)
            results = {"q": q, "k": k, "v": v}
        q = q.repeat_interleave(value_heads // heads, 1) * size**-0.5
        k = k.repeat_interleave(value_heads // heads, 1)
        log_decay, beta = compute_gates(tensors, work)
        outs = []
        for i, (begin, n) in enumerate(zip(tensors["begins"].tolist(), lengths, strict=False)):
            block = int(tensors["blocks"][i])
            if not block:
                outs.append(torch.zeros(n, value_heads, size, dtype=work))
                continue
            rows = [x[begin : begin + n] for x in (q, k, v, log_decay, beta)]
            out, final_state = follow_recurrence(rows, states[block], dtype, uses_chunks)
            states[block] = final_state
            outs.append(reference.store(out, dtype))
        return results | {"out": torch.cat(outs), "states": states}

    return VllmCall(run_delta_rule, tensors, options), expected


def _split_qkv(
    qkv: Tensor,
    heads: int,
    value_heads: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into q, k and v, (tokens, heads, size) each; v has value_heads heads."""
    widths = [heads * size, heads * size, value_heads * size]
    q, k, v = qkv.split(widths, 1)
    return (
        q.unflatten(1, (-1, size)),
        k.unflatten(1, (-1, size)),
        v.unflatten(1, (-1, size)),
    )


def run_delta_rule(  # noqa: PLR0913 (the parameters of the kernels)
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    log: Tensor,
    bias: Tensor,
    states: Tensor,
    blocks: Tensor,
    begins: Tensor,
    *,
    heads: int,
    value_heads: int,
    size: int,
    kernel: str,
) -> dict[str, Tensor]:
    """Run the kernels that delta_rule describes. The returned states are an updated copy."""
    states = states.clone()
    if kernel == "one":
        out = torch.full((len(qkv), 1, value_heads, size), float("nan")).to(qkv)
        module = importlib.import_module(f"{OPS}.fused_recurrent")
        module.fused_recurrent_gated_delta_rule_packed_decode(
            qkv,
            a,
            b,
            log,
            bias,
            size**-0.5,
            states,
            out,
            blocks,
            use_qk_l2norm_in_kernel=True,
        )
        return {"out": out[:, 0], "states": states}
    if kernel == "several":
        q, k, v = _split_qkv(qkv, heads, value_heads, size)
        module = importlib.import_module(f"{OPS}.fused_sigmoid_gating")
        out, _ = module.fused_sigmoid_gating_delta_rule_update(
            log,
            a,
            b,
            bias,
            q[None].contiguous(),
            k[None].contiguous(),
            v[None].contiguous(),
            initial_state=states,
            inplace_final_state=True,
            cu_seqlens=begins,
            ssm_state_indices=blocks,
            use_qk_l2norm_in_kernel=True,
        )
        return {"out": out[0], "states": states}
    prepare = importlib.import_module(f"{OPS}.fused_gdn_prefill_post_conv").fused_post_conv_prep
    parts = prepare(qkv, a, b, log, bias, heads, size, size)
    out, final_states = importlib.import_module(f"{OPS}.chunk").chunk_gated_delta_rule(
        *(x[None] for x in parts),
        initial_state=states[blocks.long()],
        output_final_state=True,
        cu_seqlens=begins,
    )
    states[blocks.long()] = final_states.to(states.dtype)
    q, k, v = parts[:3]
    return {"q": q, "k": k, "v": v, "out": out[0], "states": states}


def gated_norm(
    randn: Randn,
    *,
    rows=5,
    columns=96,
    activation="swish",
) -> tuple[VllmCall, Expected]:
    """Build a call of rmsnorm_fn, the norm of each head times the activation of a gate.

    Args:
        randn: Draws the numbers.
        rows: Number of rows of the input.
        columns: Number of columns of the input.
        activation: "swish", which is silu, or "sigmoid", which Kimi Linear uses.
    """
    tensors = {
        "x": randn(rows, columns),
        "weight": randn(columns),
        "gate": randn(rows, columns),
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        x, weight, gate = (x.to(reference.working_dtype(dtype)) for x in tensors.values())
        factor = gate.sigmoid() if activation == "sigmoid" else silu(gate)
        scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        out = x * scale * weight * factor
        if dtype == reference.TERMS:
            out = out.abs()
        return {"out": reference.store(out, dtype)}

    options = {} if activation == "swish" else {"activation": activation}
    return VllmCall(run_gated_norm, tensors, options), expected


def run_gated_norm(x: Tensor, weight: Tensor, gate: Tensor, **options: str) -> dict[str, Tensor]:
    """Run rmsnorm_fn."""
    function = importlib.import_module(f"{OPS}.layernorm_guard").rmsnorm_fn
    return {"out": function(x, weight, None, z=gate, eps=EPS, **options)}


#: The layer of linear attention in the hybrid model of model.py: number of key heads and of value
#: heads, size of a head, and number of tokens that its convolution spans.
HEADS = 2
VALUE_HEADS = 4
SIZE = 64
WIDTH = 4
#: Numbers of columns of q, k and v.
_QKV_WIDTHS = [HEADS * SIZE, HEADS * SIZE, VALUE_HEADS * SIZE]
_CHANNELS = sum(_QKV_WIDTHS)
#: Numbers of columns of the four parts of the layer's first product: the convolved channels, the
#: gate of the output, and the numbers a and b of each head.
_INPUT_WIDTHS = [_CHANNELS, VALUE_HEADS * SIZE, VALUE_HEADS, VALUE_HEADS]


def draw_layer_weights(randn: Randn, hidden: int) -> dict[str, Tensor]:
    """Draw the weights of the hybrid model's layer of linear attention."""
    return {
        "in": randn(sum(_INPUT_WIDTHS), hidden) / hidden**0.5,
        "conv": randn(_CHANNELS, WIDTH) / 2,
        "log": randn(VALUE_HEADS).float() / 3 - 1,
        "bias": randn(VALUE_HEADS).float() / 2,
        "gated": 1 + randn(SIZE) / 8,
    }


def compute_layer(
    weights: dict[str, Tensor],
    x: Tensor,
    prompt: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the input of the layer's last product for one sequence, token by token.

    The rounding is that of vLLM's kernels. For the prompt, these kernels compute chunks; for each
    later token, they compute the recurrence.

    Args:
        weights: See draw_layer_weights.
        x: (tokens, hidden).
        prompt: Number of tokens of the prompt.
        dtype: The dtype of the kernels.
    """
    work = reference.working_dtype(dtype)
    projected = reference.store(reference.product(x, weights["in"], dtype), dtype)
    qkv, gate, a, b = projected.split(_INPUT_WIDTHS, -1)
    windows = pad(qkv, (0, 0, WIDTH - 1, 0)).unfold(0, WIDTH, 1)
    convolved = silu((windows * weights["conv"].to(work)).sum(-1))
    q, k, v = _split_qkv(reference.store(convolved, dtype), HEADS, VALUE_HEADS, SIZE)
    q = normalize_rows(q).repeat_interleave(VALUE_HEADS // HEADS, 1) * SIZE**-0.5
    k = normalize_rows(k).repeat_interleave(VALUE_HEADS // HEADS, 1)
    log_decay, beta = compute_gates(weights | {"a": a, "b": b}, work)
    state = torch.zeros(VALUE_HEADS, SIZE, SIZE, dtype=work)
    outs = []
    for tokens, uses_chunks in ((slice(prompt), True), (slice(prompt, None), False)):
        rows = [y[tokens] for y in (q, k, v, log_decay, beta)]
        out, state = follow_recurrence(rows, state, dtype, uses_chunks)
        outs.append(reference.store(out, dtype))
    heads = torch.cat(outs)
    scale = (heads.square().mean(-1, keepdim=True) + EPS).rsqrt()
    factor = silu(gate.unflatten(1, (-1, SIZE)))
    heads = heads * scale * weights["gated"].to(work) * factor
    return reference.store(heads, dtype).flatten(1)


def build_layer_state(place: dict) -> dict[str, Tensor]:
    """Return the layer's state before a sequence's first token.

    The state is in block 1, because block 0 belongs to no sequence.

    Args:
        place: Device and dtype of the tensors.
    """
    delta = torch.zeros(2, VALUE_HEADS, SIZE, SIZE, device=place["device"])
    conv = torch.full((2, WIDTH - 1, _CHANNELS), float("nan"), **place)
    return {"conv": conv, "delta": delta}


def run_layer_step(
    weights: dict[str, Tensor],
    x: Tensor,
    state: dict[str, Tensor],
    first: bool,
) -> Tensor:
    """Compute the input of the layer's last product for a step's tokens, with vLLM's kernels.

    Args:
        weights: See draw_layer_weights.
        x: (tokens, hidden).
        state: See build_layer_state; it is updated.
        first: Whether the tokens are a prompt.
    """
    projected = (x @ weights["in"].T).split(_INPUT_WIDTHS, -1)
    qkv, gate, a, b = (part.contiguous() for part in projected)
    blocks = torch.ones(1, dtype=torch.int32, device=x.device)
    begins = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
    if first:
        qkv = convolve(qkv, weights["conv"], state["conv"], blocks, begins)
    else:
        qkv = convolve_next(qkv, weights["conv"], state["conv"], blocks)
    results = run_delta_rule(
        qkv.contiguous(),
        a,
        b,
        weights["log"],
        weights["bias"],
        state["delta"],
        blocks,
        begins,
        heads=HEADS,
        value_heads=VALUE_HEADS,
        size=SIZE,
        kernel="chunks" if first else "one",
    )
    state["delta"] = results["states"]
    rows = results["out"].reshape(-1, SIZE)
    out = run_gated_norm(rows, weights["gated"], gate.reshape(-1, SIZE))["out"]
    return out.view(len(x), VALUE_HEADS * SIZE)


_CONVOLUTION = "the state of another sequence, or a state that is not updated (Qwen3-Next)"
_CHUNKS = (
    "a wrong state passed to the next chunk, a fault if the last chunk is full, another sequence's "
    "state, or the keys of another head (Qwen3-Next has 16 key heads for 32 value heads)"
)
_RECURRENT = "a gate left out, or a state that is read but not written"
_BIAS = "a channel's bias left out (Mamba)"
_STEPS = partial(delta_rule, lengths=(1, 1, 1))
COMPUTED = {
    "conv1d": Case(convolution, _CONVOLUTION),
    "conv1d-bias": Case(partial(convolution, lengths=(2, 19), bias=True), _BIAS),
    # Some sequences have fewer new tokens than their convolution state, which has three tokens.
    "conv1d-short": Case(partial(convolution, lengths=(5, 2, 1, 9)), _CONVOLUTION),
    "gdn-prefill": Case(partial(delta_rule, lengths=(3, 64, 66), steep=True), _CHUNKS),
    "gdn-decode": Case(partial(_STEPS, kernel="one", steep=True), _RECURRENT, torch.float32),
    "gdn-mixed": Case(partial(_STEPS, kernel="several"), _RECURRENT, torch.float32, Size.FULL),
    "gated-norm": Case(gated_norm, "a gate that is applied before the norm, or left out"),
    "gated-norm-sigmoid": Case(
        partial(gated_norm, activation="sigmoid"),
        "silu applied to the gate instead of sigmoid (Kimi Linear)",
    ),
}

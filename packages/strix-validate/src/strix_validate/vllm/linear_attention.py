# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's linear attention of Qwen3-Next and Qwen3.6: short convolution and gated delta rule.

Follows _forward_core and _forward_core_decode_non_spec of
vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, which gfx1151 gets: amd-aiter's
kernels for decoding are for RDNA 4.
"""

import importlib
import os
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


def convolution(
    randn: Randn, *, lengths: tuple[int, ...] = (3, 19), channels=40, width=4, bias=False
) -> tuple[VllmCall, Expected]:
    """Build a call of causal_conv1d_fn over new sequences, then causal_conv1d_update by a token for
    each.

    The first sequence begins anew, the others go on from the state in their block. bias: of each
    channel (Mamba).
    """
    count = len(lengths)
    tensors = {
        "x": randn(sum(lengths), channels),
        "new": randn(count, channels),
        "weight": randn(channels, width) / 2,
        "states": randn(count + 2, width - 1, channels),
        # not in sequence; block 0 belongs to none
        "blocks": torch.arange(count + 1, 1, -1, dtype=torch.int32),
        "begins": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    }
    if bias:
        tensors["bias"] = randn(channels)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        more = tensors["bias"].to(work) if bias else torch.zeros(1, dtype=work)
        found: dict[str, list[Tensor]] = {"out": [], "next": []}
        states, weight = tensors["states"].clone().to(work), tensors["weight"].to(work).T
        for i, part in enumerate(tensors["x"].to(work).split(lengths)):
            block = int(tensors["blocks"][i])
            before = states[block] if i else torch.zeros_like(states[block])
            rows = torch.cat([before, part, tensors["new"][i : i + 1].to(work)])
            states[block] = rows[1 - width :]
            windows = rows.unfold(0, width, 1).transpose(1, 2)
            if dtype == reference.TERMS:
                out = (windows * weight).abs().sum(1) + more.abs()
            else:
                out = reference.stored(silu((windows * weight).sum(1) + more), dtype)
            found["out"].append(out[:-1])
            found["next"].append(out[-1:])
        return {name: torch.cat(x) for name, x in found.items()} | {"states": states}

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
    last = convolve_next(new.clone(), weight, states, blocks, bias)
    return {"out": out, "next": last, "states": states}


def convolve(
    x: Tensor, weight: Tensor, states: Tensor, blocks: Tensor, begins: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run causal_conv1d_fn, which writes the states; the first sequence begins anew."""
    found = importlib.import_module(CONVOLUTION).causal_conv1d_fn(
        x.T, weight, bias, states.transpose(-1, -2), begins, cache_indices=blocks,
        has_initial_state=torch.arange(len(blocks), device=blocks.device) > 0,
        activation="silu", metadata=_tiles(begins),
    )  # fmt: skip
    return found.T


def convolve_next(
    x: Tensor, weight: Tensor, states: Tensor, blocks: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Run causal_conv1d_update by a token of each sequence; x is overwritten."""
    return importlib.import_module(CONVOLUTION).causal_conv1d_update(
        x, states.transpose(-1, -2), weight, bias, "silu", conv_state_indices=blocks
    )


def _tiles(begins: Tensor) -> SimpleNamespace:
    """Assign parts of sequences to workgroups, as vLLM's compute_causal_conv1d_metadata does."""
    numbers = (begins.diff() + 7) // 8
    place = {"dtype": torch.int32, "device": begins.device}
    owners = torch.repeat_interleave(torch.arange(len(numbers), **place), numbers)
    parts = torch.cat([torch.arange(n, **place) for n in numbers.tolist()])
    both = {"batch_ptr": owners, "token_chunk_offset_ptr": parts}
    known = {"tot": len(parts), "mlist": owners, "mlist_len": len(parts), "offsetlist": parts}
    if os.environ.get("TRITON_INTERPRET"):
        # the launch replaces arguments by these after the interpreter has converted those
        from triton.runtime.interpreter import _implicit_cvt

        known |= {name: _implicit_cvt(x) for name, x in both.items()}
    return SimpleNamespace(nums_dict={8: both | known}, **both)


def gates(tensors: dict[str, Tensor], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the logarithm of how much a state keeps, and how much it takes, by token and head."""
    a, b, log, bias = (tensors[name].to(work) for name in ("a", "b", "log", "bias"))
    return -log.exp() * softplus(a + bias), b.sigmoid()


def normed(x: Tensor) -> Tensor:
    """Scale to length 1, as queries and keys are."""
    return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()


def follow(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, take: Tensor, state: Tensor, dtype: Precision,
    rounded: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gated delta rule token by token: q, k (tokens, heads, K), v alike, state (heads,
    V, K).

    rounded: as chunks do it, which hand corrected values and states on in 16 bits. With TERMS also
    what each value and its correction add to the state.
    """
    out, terms = [], state.abs()
    for t in range(len(q)):
        state, terms = (keep[t].exp()[:, None, None] * x for x in (state, terms))
        seen = torch.einsum("hvk,hk->hv", state, k[t])
        new = take[t][:, None] * (v[t] - seen)
        new = reference.stored(new, dtype) if rounded else new
        state = state + new[..., None] * k[t][:, None]
        size = torch.maximum(new.abs(), take[t][:, None] * v[t].abs())
        terms = terms + size[..., None] * k[t].abs()[:, None]
        handed = reference.stored(state, dtype) if rounded else state
        if dtype == reference.TERMS:
            out.append(torch.einsum("hvk,hk->hv", terms, q[t].abs()))
        else:
            out.append(torch.einsum("hvk,hk->hv", handed, q[t]))
    return torch.stack(out), terms if dtype == reference.TERMS else state


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
    """Build a call of layers of Qwen3-Next behind their convolution.

    kernel: "chunks": fused_post_conv_prep and chunk_gated_delta_rule, of prompts. "one": a token of
    each sequence, fused_recurrent_gated_delta_rule_packed_decode. "several": in a batch with
    prompts, fused_sigmoid_gating_delta_rule_update. The first sequence of "one" has block 0, which
    belongs to none. steep: the first head's gates are so large that exp of them overflows, and
    softplus is the gate.
    """
    tokens, count = sum(lengths), len(lengths)
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
    if steep:  # and weigh so little that the state stays
        tensors["bias"][0], tensors["log"][0] = 100, -6
    options = {"heads": heads, "value_heads": value_heads, "size": size, "kernel": kernel}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work, chunks = reference.working(dtype), kernel == "chunks"
        states = tensors["states"].clone().to(work)
        cuts = [heads * size, heads * size, value_heads * size]
        q, k, v = (x.unflatten(1, (-1, size)).to(work) for x in tensors["qkv"].split(cuts, 1))
        q, k = (normed(x) for x in (q, k))
        if chunks:  # written between the kernels
            q, k = (reference.stored(x, dtype) for x in (q, k))
        found = {"q": q, "k": k, "v": v} if chunks else {}
        q, k = (x.repeat_interleave(value_heads // heads, 1) for x in (q, k))
        keep, take = gates(tensors, work)
        parts = []
        for i, (begin, n) in enumerate(zip(tensors["begins"].tolist(), lengths, strict=False)):
            block, own = int(tensors["blocks"][i]), slice(begin, begin + n)
            if block:
                rows = (q[own] * size**-0.5, k[own], v[own], keep[own], take[own])
                out, states[block] = follow(*rows, states[block], dtype, chunks)
                parts.append(reference.stored(out, dtype))
            else:
                parts.append(torch.zeros(n, value_heads, size, dtype=work))
        return found | {"out": torch.cat(parts), "states": states}

    return VllmCall(run_delta_rule, tensors, options), expected


def run_delta_rule(  # noqa: PLR0913 (what the kernels take)
    qkv: Tensor, a: Tensor, b: Tensor, log: Tensor, bias: Tensor, states: Tensor, blocks: Tensor,
    begins: Tensor, *, heads: int, value_heads: int, size: int, kernel: str,
) -> dict[str, Tensor]:  # fmt: skip
    """See delta_rule; states are a copy."""
    states = states.clone()
    if kernel == "one":
        out = torch.full((len(qkv), 1, value_heads, size), float("nan")).to(qkv)
        module = importlib.import_module(f"{OPS}.fused_recurrent")
        module.fused_recurrent_gated_delta_rule_packed_decode(
            qkv, a, b, log, bias, size**-0.5, states, out, blocks, use_qk_l2norm_in_kernel=True
        )
        return {"out": out[:, 0], "states": states}
    if kernel == "several":
        cuts = [heads * size, heads * size, value_heads * size]
        q, k, v = (x.unflatten(1, (-1, size))[None].contiguous() for x in qkv.split(cuts, 1))
        module = importlib.import_module(f"{OPS}.fused_sigmoid_gating")
        out, _ = module.fused_sigmoid_gating_delta_rule_update(
            log, a, b, bias, q, k, v, initial_state=states, inplace_final_state=True,
            cu_seqlens=begins, ssm_state_indices=blocks, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return {"out": out[0], "states": states}
    parts = importlib.import_module(f"{OPS}.fused_gdn_prefill_post_conv").fused_post_conv_prep(
        qkv, a, b, log, bias, heads, size, size
    )
    out, last = importlib.import_module(f"{OPS}.chunk").chunk_gated_delta_rule(
        *(x[None] for x in parts), initial_state=states[blocks.long()], output_final_state=True,
        cu_seqlens=begins,
    )  # fmt: skip
    states[blocks.long()] = last.to(states.dtype)
    return dict(zip("qkv", parts[:3], strict=True)) | {"out": out[0], "states": states}


def gated_norm(
    randn: Randn, *, rows=5, columns=96, activation="swish"
) -> tuple[VllmCall, Expected]:
    """Build a call of rmsnorm_fn: a norm of each head, then times silu of the gate.

    activation: "sigmoid" instead of silu (Kimi Linear).
    """
    tensors = {"x": randn(rows, columns), "weight": randn(columns), "gate": randn(rows, columns)}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        x, weight, gate = (x.to(reference.working(dtype)) for x in tensors.values())
        gate = gate.sigmoid() if activation == "sigmoid" else silu(gate)
        out = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight * gate
        return {"out": reference.stored(out.abs() if dtype == reference.TERMS else out, dtype)}

    options = {} if activation == "swish" else {"activation": activation}
    return VllmCall(run_gated_norm, tensors, options), expected


def run_gated_norm(x: Tensor, weight: Tensor, gate: Tensor, **options: str) -> dict[str, Tensor]:
    """Run rmsnorm_fn."""
    function = importlib.import_module(f"{OPS}.layernorm_guard").rmsnorm_fn
    return {"out": function(x, weight, None, z=gate, eps=EPS, **options)}


#: Of the one layer that a hybrid model of model.py has: two heads of keys for four of values, each
#: of 64 numbers, and tokens of its convolution.
HEADS, VALUE_HEADS, SIZE, WIDTH = 2, 4, 64, 4
_PARTS = [HEADS * SIZE, HEADS * SIZE, VALUE_HEADS * SIZE]
_CHANNELS = sum(_PARTS)
#: What one product gives: convolved channels, the gate of the output, two numbers for each head.
_CUTS = [_CHANNELS, VALUE_HEADS * SIZE, VALUE_HEADS, VALUE_HEADS]


def layer_weights(randn: Randn, hidden: int) -> dict[str, Tensor]:
    """Draw the weights of the layer."""
    return {
        "in": randn(sum(_CUTS), hidden) / hidden**0.5,
        "conv": randn(_CHANNELS, WIDTH) / 2,
        "log": randn(VALUE_HEADS).float() / 3 - 1,
        "bias": randn(VALUE_HEADS).float() / 2,
        "gated": 1 + randn(SIZE) / 8,
    }


def layer_forward(own: dict[str, Tensor], x: Tensor, prompt: int, dtype: torch.dtype) -> Tensor:
    """Compute what the layer's last product reads, of one sequence's tokens, token by token.

    A prompt goes through the convolution and chunks, each later token through the update of the
    convolution's state and the packed recurrence.
    """
    work = reference.working(dtype)
    wide = reference.stored(reference.product(x, own["in"], dtype), dtype)
    qkv, gate, a, b = wide.split(_CUTS, -1)
    windows = pad(qkv, (0, 0, WIDTH - 1, 0)).unfold(0, WIDTH, 1)
    qkv = reference.stored(silu((windows * own["conv"].to(work)).sum(-1)), dtype)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in qkv.split(_PARTS, 1))
    q, k = (normed(part) for part in (q, k))
    q, k = (part.repeat_interleave(VALUE_HEADS // HEADS, 1) for part in (q, k))
    keep, take = gates(own | {"a": a, "b": b}, work)
    state = torch.zeros(VALUE_HEADS, SIZE, SIZE, dtype=work)
    rows, out = (q * SIZE**-0.5, k, v, keep, take), []
    for tokens, chunks in ((slice(prompt), True), (slice(prompt, None), False)):
        q, k, v, keep, take = (x[tokens] for x in rows)
        found, state = follow(q, k, v, keep, take, state, dtype, chunks)
        out.append(reference.stored(found, dtype))
    heads = torch.cat(out)
    scale = (heads.square().mean(-1, keepdim=True) + EPS).rsqrt()
    heads = heads * scale * own["gated"].to(work) * silu(gate.unflatten(1, (-1, SIZE)))
    return reference.stored(heads, dtype).flatten(1)


def layer_state(place: dict) -> dict[str, Tensor]:
    """Return the layer's state of a sequence without tokens, in block 1: 0 belongs to none."""
    states = torch.zeros(2, VALUE_HEADS, SIZE, SIZE, device=place["device"])
    return {"conv": torch.full((2, WIDTH - 1, _CHANNELS), float("nan"), **place), "delta": states}


def layer_step(own: dict[str, Tensor], x: Tensor, state: dict[str, Tensor], first: bool) -> Tensor:
    """Compute what the layer's last product reads, of the tokens of a step, by vLLM's kernels."""
    qkv, gate, a, b = (part.contiguous() for part in (x @ own["in"].T).split(_CUTS, -1))
    place = {"dtype": torch.int32, "device": x.device}
    blocks, begins = torch.ones(1, **place), torch.tensor([0, len(x)], **place)
    if first:
        qkv = convolve(qkv, own["conv"], state["conv"], blocks, begins)
    else:
        qkv = convolve_next(qkv, own["conv"], state["conv"], blocks)
    found = run_delta_rule(
        qkv.contiguous(), a, b, own["log"], own["bias"], state["delta"], blocks, begins,
        heads=HEADS, value_heads=VALUE_HEADS, size=SIZE, kernel="chunks" if first else "one",
    )  # fmt: skip
    state["delta"] = found["states"]
    rows = (part.reshape(-1, SIZE) for part in (found["out"], gate))
    out = run_gated_norm(next(rows), own["gated"], next(rows))["out"]
    return out.view(len(x), VALUE_HEADS * SIZE)


_CONVOLUTION = "a state of another sequence, or one that does not move on (Qwen3-Next)"
_CHUNKS = (
    "a chunk's state handed on wrongly, a last chunk that is full, another sequence's state, or a "
    "neighbour's keys (Qwen3-Next has 16 heads of keys for 32)"
)
_RECURRENT = "a gate left out, or a state that is read and not written"
_BIAS = "a channel's bias left out (Mamba)"
_STEPS = partial(delta_rule, lengths=(1, 1, 1))
COMPUTED = {
    "conv1d": Case(convolution, _CONVOLUTION),
    "conv1d-bias": Case(partial(convolution, lengths=(2, 19), bias=True), _BIAS),
    # chunks of a prompt that are shorter than the state they go on from
    "conv1d-short": Case(partial(convolution, lengths=(5, 2, 1, 9)), _CONVOLUTION),
    "gdn-prefill": Case(partial(delta_rule, lengths=(3, 64, 66), steep=True), _CHUNKS),
    "gdn-decode": Case(partial(_STEPS, kernel="one", steep=True), _RECURRENT, torch.float32),
    "gdn-mixed": Case(partial(_STEPS, kernel="several"), _RECURRENT, torch.float32, Size.FULL),
    "gated-norm": Case(gated_norm, "the gate before the norm, or left out"),
    "gated-norm-sigmoid": Case(
        partial(gated_norm, activation="sigmoid"), "silu for a gate of sigmoid (Kimi Linear)"
    ),
}

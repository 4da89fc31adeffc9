# SPDX-License-Identifier: BSD-3-Clause
"""A Llama of two layers with random weights that decodes through vLLM's kernels, token by token.

Norms, rope, the cache's writer, attention, linear attention and experts are vLLM's, in the order of
a server's step; the other matrix products are torch's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm import attention, kernels, linear_attention
from strix_validate.vllm.source import VllmCall

LAYERS, HEADS, KV_HEADS, SIZE, VOCABULARY, TOP_K = 2, 4, 2, 32, 96, 2
HIDDEN = HEADS * SIZE
#: Prompt, and tokens that are decoded one by one.
PROMPT, STEPS = 5, 24
_EPS = 1e-5
_CUTS = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]


def decoding(
    randn: Randn, *, window: int = 0, experts: int = 0, linear: int = 0
) -> tuple[VllmCall, Expected]:
    """Build a call that computes the log probabilities after each of STEPS given tokens.

    experts: of each layer, 0 is none. linear: how many layers, the first ones, have linear
    attention.
    """
    inner = HIDDEN
    tensors = {"embedding": randn(VOCABULARY, HIDDEN), "head": randn(VOCABULARY, HIDDEN) / 6}
    for i in range(LAYERS):
        tensors[f"qkv{i}"] = randn(sum(_CUTS), HIDDEN) / HIDDEN**0.5
        width = linear_attention.VALUE_HEADS * linear_attention.SIZE if i < linear else HIDDEN
        tensors[f"out{i}"] = randn(HIDDEN, width) / width**0.5
        tensors[f"router{i}"] = randn(max(experts, 1))
        tensors[f"up{i}"] = randn(max(experts, 1), 2 * inner, HIDDEN) / HIDDEN**0.5
        tensors[f"down{i}"] = randn(max(experts, 1), HIDDEN, inner) / inner**0.5
        tensors |= {f"norm{i}{part}": 1 + randn(HIDDEN) / 8 for part in "ab"}
        if i < linear:
            own = linear_attention.layer_weights(randn, HIDDEN)
            tensors |= {f"linear{i}-{name}": x for name, x in own.items()}
    tensors["norm"] = 1 + randn(HIDDEN) / 8
    angle = torch.arange(PROMPT + STEPS)[:, None] / 100.0 ** torch.linspace(0, 1, SIZE // 2)
    tensors |= {"cos": angle.cos().to(tensors["norm"].dtype)}
    tensors |= {"sin": angle.sin().to(tensors["norm"].dtype)}
    tensors["tokens"] = (torch.arange(PROMPT + STEPS) * 37 + 5) % VOCABULARY
    options = {"window": window, "experts": experts, "linear": linear}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        precise = torch.float64 if dtype == reference.TERMS else dtype
        x = _forward(tensors, precise, **options)
        logits = reference.product(x, tensors["head"], precise)
        if dtype == reference.TERMS:
            # each layer rounds what it hands on
            return {"logprobs": LAYERS * reference.product(x, tensors["head"], dtype)[-STEPS:]}
        return {"logprobs": reference.stored(logits.log_softmax(-1), dtype)[-STEPS:]}

    return VllmCall(_decode, tensors, options), expected


def _norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight.to(x.dtype)
    return reference.stored(scaled, dtype)


def _linear(tensors: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """Return the weights of a layer's linear attention."""
    begin = f"linear{i}-"
    return {name.removeprefix(begin): x for name, x in tensors.items() if name.startswith(begin)}


def _forward(
    tensors: dict[str, Tensor], dtype: torch.dtype, window: int, experts: int, linear: int
) -> Tensor:
    """Compute what the head reads, of all tokens at once, without a cache."""

    def times(x: Tensor, weight: Tensor) -> Tensor:
        return reference.stored(reference.product(x, weight, dtype), dtype)

    cos, sin = (tensors[name][:, None] for name in ("cos", "sin"))

    def turned(x: Tensor) -> Tensor:
        heads = x.view(len(x), -1, SIZE)
        return reference.stored(reference.rotated(heads, cos, sin, dtype), dtype)

    x = tensors["embedding"].to(reference.working(dtype))[tensors["tokens"]]
    for i in range(LAYERS):
        normed = _norm(x, tensors[f"norm{i}a"], dtype)
        if i < linear:
            found = linear_attention.layer_forward(_linear(tensors, i), normed, PROMPT, dtype)
        else:
            q, k, v = times(normed, tensors[f"qkv{i}"]).split(_CUTS, -1)
            heads = (y.view(len(x), -1, SIZE) for y in (turned(q), turned(k), v))
            rows = [y.transpose(0, 1)[None] for y in heads]
            found = reference.attention(
                rows[0], rows[1], rows[2], rows[0], causal="bottom-right",
                window=(window - 1, 0) if window else (-1, -1), dtype=dtype,
            )["out"][0].transpose(0, 1).reshape(len(x), HIDDEN)  # fmt: skip
        x = reference.stored(x + times(found, tensors[f"out{i}"]), dtype)
        normed = _norm(x, tensors[f"norm{i}b"], dtype)
        shares, chosen = _routed(tensors[f"router{i}"], tensors["tokens"], experts)
        part = torch.zeros_like(x)
        for j in range(chosen.shape[1]):
            for t in range(len(x)):
                expert = int(chosen[t, j])
                both = times(normed[t : t + 1], tensors[f"up{i}"][expert])
                gate, up = both.chunk(2, -1)
                inner = reference.stored(silu(gate) * up, dtype)
                part[t] += shares[t, j] * times(inner, tensors[f"down{i}"][expert])[0]
        x = reference.stored(x + part, dtype)
    return _norm(x, tensors["norm"], dtype)


def _routed(router: Tensor, tokens: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the share of each token's experts, and which they are.
    They are chosen by token, so that rounding decides nothing."""
    if not experts:
        return torch.ones(len(tokens), 1), torch.zeros(len(tokens), 1, dtype=torch.int32)
    chosen = torch.stack([(tokens + j) % experts for j in range(TOP_K)], 1)
    shares = router.float().sigmoid().to(tokens.device)[chosen]
    return shares, chosen.int()


def _decode(*, window: int, experts: int, linear: int, **tensors: Tensor) -> dict[str, Tensor]:
    """Prefill the prompt, then decode token by token."""
    step = partial(_step, tensors, window=window, experts=experts, linear=linear)
    block, place = 16, {"device": tensors["head"].device, "dtype": tensors["head"].dtype}
    caches: list[Any] = [
        linear_attention.layer_state(place)
        if i < linear
        else torch.full((4, KV_HEADS, block, 2 * SIZE), float("nan"), **place)
        for i in range(LAYERS)
    ]
    found = [step(caches, 0, PROMPT)[-1:]]
    found += [step(caches, at, at + 1) for at in range(PROMPT, PROMPT + STEPS)]
    return {"logprobs": torch.cat(found)[1:]}


def _step(
    tensors: dict[str, Tensor], caches: list, begin: int, end: int, *, window: int, experts: int,
    linear: int,
) -> Tensor:  # fmt: skip
    """Compute the log probabilities after the tokens from begin to end."""
    device = tensors["head"].device
    tokens = tensors["tokens"][begin:end]
    # not in order: blocks 3, 0, 2, 1
    table = torch.tensor([[3, 0, 2, 1]], dtype=torch.int32, device=device)
    places = torch.arange(begin, end, device=device)
    slots = table[0].long()[places // 16] * 16 + places % 16
    cos, sin = (tensors[x][begin:end].expand(3, -1, -1).contiguous() for x in ("cos", "sin"))
    sections = [SIZE // 2 - 2 * (SIZE // 8), SIZE // 8, SIZE // 8]
    turn: dict[str, Any] = {
        "mrope_section": sections, "head_size": SIZE, "rotary_dim": SIZE,
        "mrope_interleaved": False, "is_neox_style": True,
    }  # fmt: skip
    layer = attention.Attention(HEADS, KV_HEADS, SIZE, window)

    def norm(x: Tensor, weight: str) -> Tensor:
        return kernels.run_rms_norm(x, tensors[weight], eps=_EPS)["out"]

    def attended(i: int, normed: Tensor) -> Tensor:
        rows = (normed @ tensors[f"qkv{i}"].T).view(len(normed), -1, SIZE)
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], 1)
        both = kernels.run_rope(q=q.flatten(1), k=k.flatten(1), cos=cos, sin=sin, **turn)
        q, k = (both[name].view(len(normed), -1, SIZE) for name in "qk")
        # as the server has them: slices of one tensor
        rows = torch.cat([q, k, v], 1)
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], 1)
        halves = attention.halves(caches[i])
        attention.store(k, v, halves, slots)
        starts = torch.tensor([0, len(normed)], dtype=torch.int32, device=device)
        keys = torch.tensor([end], dtype=torch.int32, device=device)
        return attention.attend(
            q, halves, layer, starts=starts, keys=keys, table=table, queries=len(normed), most=end
        ).view(len(normed), HIDDEN)

    x = tensors["embedding"][tokens]
    for i, cache in enumerate(caches):
        normed = norm(x, f"norm{i}a")
        if i < linear:
            seen = linear_attention.layer_step(_linear(tensors, i), normed, cache, not begin)
        else:
            seen = attended(i, normed)
        x = x + seen @ tensors[f"out{i}"].T
        normed = norm(x, f"norm{i}b")
        shares, chosen = _routed(tensors[f"router{i}"], tokens, experts)
        if experts:
            wide = kernels.run_moe(normed, chosen, shares, tensors[f"up{i}"], routed=False)
            gate, up = wide["out"].flatten(0, 1).chunk(2, -1)
            each = chosen.reshape(-1, 1), shares.reshape(-1, 1)
            down = kernels.run_moe(silu(gate) * up, *each, tensors[f"down{i}"])
            x = x + down["out"].view(len(x), TOP_K, HIDDEN).sum(1)
        else:
            gate, up = (normed @ tensors[f"up{i}"][0].T).chunk(2, -1)
            x = x + (silu(gate) * up) @ tensors[f"down{i}"][0].T
    logits = norm(x, "norm") @ tensors["head"].T
    return logits.float().log_softmax(-1).to(x.dtype)

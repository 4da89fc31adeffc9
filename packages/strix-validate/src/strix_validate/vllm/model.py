# SPDX-License-Identifier: BSD-3-Clause
"""A small Llama with random weights that decodes with vLLM's kernels, one token at a time.

The kernels of norms, rope, the KV cache, attention, linear attention and experts are vLLM's, and
run in the same order as in a server's step. The other matrix products are torch's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm import attention, kernels, linear_attention
from strix_validate.vllm.source import VllmCall

LAYERS = 2
HEADS = 4
KV_HEADS = 2
#: Size of a head.
SIZE = 32
VOCABULARY = 96
TOP_K = 2
HIDDEN = HEADS * SIZE
#: Number of tokens of the prompt, and of tokens that are decoded after it.
PROMPT = 5
STEPS = 24
_EPS = 1e-5
_QKV_WIDTHS = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
#: Numbers of heads of q, k and v.
_QKV_HEADS = [HEADS, KV_HEADS, KV_HEADS]
#: Number of tokens in a block of the KV cache, and the sequence's blocks, which are out of order.
_BLOCK = 16
_BLOCKS = [3, 0, 2, 1]


def decoding(
    randn: Randn,
    *,
    window: int = 0,
    experts: int = 0,
    linear: int = 0,
) -> tuple[VllmCall, Expected]:
    """Build a call that computes the log probabilities after each of STEPS fixed tokens.

    Args:
        randn: Draws the numbers.
        window: Number of keys that a query sees; 0 is all.
        experts: Number of experts in each layer; 0 is none.
        linear: How many layers, from the first, have linear attention.
    """
    tensors = _draw_weights(randn, experts, linear)
    angle = torch.arange(PROMPT + STEPS)[:, None] / 100.0 ** torch.linspace(0, 1, SIZE // 2)
    tensors["cos"] = angle.cos().to(tensors["norm"].dtype)
    tensors["sin"] = angle.sin().to(tensors["norm"].dtype)
    tensors["tokens"] = (torch.arange(PROMPT + STEPS) * 37 + 5) % VOCABULARY
    options = {"window": window, "experts": experts, "linear": linear}

    def expected(dtype: Precision) -> dict[str, Tensor]:
        exact = torch.float64 if dtype == reference.TERMS else dtype
        x = _forward(tensors, exact, **options)
        if dtype == reference.TERMS:
            # Each layer rounds the numbers that it passes to the next one.
            terms = LAYERS * reference.product(x, tensors["head"], dtype)
            return {"logprobs": terms[-STEPS:]}
        logits = reference.product(x, tensors["head"], exact)
        logprobs = reference.store(logits.log_softmax(-1), dtype)
        return {"logprobs": logprobs[-STEPS:]}

    return VllmCall(_decode, tensors, options), expected


def _draw_weights(randn: Randn, experts: int, linear: int) -> dict[str, Tensor]:
    """Draw the weights of the model; see decoding."""
    inner = HIDDEN
    tensors = {
        "embedding": randn(VOCABULARY, HIDDEN),
        "head": randn(VOCABULARY, HIDDEN) / 6,
    }
    count = max(experts, 1)
    for i in range(LAYERS):
        is_linear = i < linear
        width = HIDDEN
        if is_linear:
            width = linear_attention.VALUE_HEADS * linear_attention.SIZE
        tensors[f"qkv{i}"] = randn(sum(_QKV_WIDTHS), HIDDEN) / HIDDEN**0.5
        tensors[f"out{i}"] = randn(HIDDEN, width) / width**0.5
        tensors[f"router{i}"] = randn(count)
        tensors[f"up{i}"] = randn(count, 2 * inner, HIDDEN) / HIDDEN**0.5
        tensors[f"down{i}"] = randn(count, HIDDEN, inner) / inner**0.5
        tensors[f"norm{i}a"] = 1 + randn(HIDDEN) / 8
        tensors[f"norm{i}b"] = 1 + randn(HIDDEN) / 8
        if is_linear:
            for name, x in linear_attention.draw_layer_weights(randn, HIDDEN).items():
                tensors[f"linear{i}-{name}"] = x
    tensors["norm"] = 1 + randn(HIDDEN) / 8
    return tensors


def _select_linear(tensors: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """Return the weights of a layer's linear attention."""
    prefix = f"linear{i}-"
    weights = {}
    for name, x in tensors.items():
        if name.startswith(prefix):
            weights[name.removeprefix(prefix)] = x
    return weights


def _route(router: Tensor, tokens: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of each token's experts.

    A token's id determines its experts, so that rounding does not affect the choice.
    """
    if not experts:
        return torch.ones(len(tokens), 1), torch.zeros(len(tokens), 1, dtype=torch.int32)
    chosen = torch.stack([(tokens + j) % experts for j in range(TOP_K)], 1)
    shares = router.float().sigmoid().to(tokens.device)[chosen]
    return shares, chosen.int()


def _forward(
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    window: int,
    experts: int,
    linear: int,
) -> Tensor:
    """Compute the input of the language-model head for all tokens at once, without a KV cache."""
    embedding = tensors["embedding"].to(reference.working_dtype(dtype))
    x = embedding[tensors["tokens"]]
    for i in range(LAYERS):
        normed = _norm(x, tensors[f"norm{i}a"], dtype)
        if i < linear:
            weights = _select_linear(tensors, i)
            attended = linear_attention.compute_layer(weights, normed, PROMPT, dtype)
        else:
            attended = _attend(tensors, i, normed, dtype, window)
        projected = _multiply(attended, tensors[f"out{i}"], dtype)
        x = reference.store(x + projected, dtype)
        normed = _norm(x, tensors[f"norm{i}b"], dtype)
        x = reference.store(x + _mix(tensors, i, normed, dtype, experts), dtype)
    return _norm(x, tensors["norm"], dtype)


def _norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    return reference.store(x * scale * weight.to(x.dtype), dtype)


def _multiply(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return reference.store(reference.product(x, weight, dtype), dtype)


def _attend(
    tensors: dict[str, Tensor],
    i: int,
    normed: Tensor,
    dtype: torch.dtype,
    window: int,
) -> Tensor:
    """Compute the attention of a layer, (tokens, HIDDEN)."""
    cos = tensors["cos"][:, None]
    sin = tensors["sin"][:, None]

    def rotate_heads(x: Tensor) -> Tensor:
        heads = x.view(len(x), -1, SIZE)
        return reference.store(reference.rotate(heads, cos, sin, dtype), dtype)

    q, k, v = _multiply(normed, tensors[f"qkv{i}"], dtype).split(_QKV_WIDTHS, -1)
    heads = (rotate_heads(q), rotate_heads(k), v.view(len(v), -1, SIZE))
    q, k, v = (x.transpose(0, 1)[None] for x in heads)
    keys_before = window - 1 if window else -1
    keys_after = 0 if window else -1
    results = reference.attention(
        q,
        k,
        v,
        q,
        causal="bottom-right",
        window=(keys_before, keys_after),
        dtype=dtype,
    )
    return results["out"][0].transpose(0, 1).reshape(len(normed), HIDDEN)


def _mix(
    tensors: dict[str, Tensor],
    i: int,
    normed: Tensor,
    dtype: torch.dtype,
    experts: int,
) -> Tensor:
    """Compute the experts of a layer, (tokens, HIDDEN)."""
    shares, chosen = _route(tensors[f"router{i}"], tensors["tokens"], experts)
    mixed = torch.zeros_like(normed)
    for j in range(chosen.shape[1]):
        for t in range(len(normed)):
            expert = int(chosen[t, j])
            projected = _multiply(normed[t : t + 1], tensors[f"up{i}"][expert], dtype)
            gate, up = projected.chunk(2, -1)
            inner = reference.store(silu(gate) * up, dtype)
            out = _multiply(inner, tensors[f"down{i}"][expert], dtype)
            mixed[t] += shares[t, j] * out[0]
    return mixed


def _decode(*, window: int, experts: int, linear: int, **tensors: Tensor) -> dict[str, Tensor]:
    """Prefill the prompt, then decode one token at a time."""
    device = tensors["head"].device
    dtype = tensors["head"].dtype
    caches: list[Any] = []
    for i in range(LAYERS):
        if i < linear:
            state = linear_attention.build_layer_state({"device": device, "dtype": dtype})
            caches.append(state)
            continue
        shape = (len(_BLOCKS), KV_HEADS, _BLOCK, 2 * SIZE)
        caches.append(torch.full(shape, float("nan"), device=device, dtype=dtype))
    decoder = _Decoder(tensors, caches, window, experts, linear)
    logprobs = [decoder.step(0, PROMPT)[-1:]]
    for position in range(PROMPT, PROMPT + STEPS):
        logprobs.append(decoder.step(position, position + 1))
    return {"logprobs": torch.cat(logprobs)[1:]}


@dataclass(frozen=True)
class _Decoder:
    """A decoder of one sequence with vLLM's kernels.

    Attributes:
        tensors: Weights, angles and tokens; see decoding.
        caches: The KV cache of each layer, or the state of its linear attention.
        window: See decoding.
        experts: See decoding.
        linear: See decoding.
    """

    tensors: dict[str, Tensor]
    caches: list[Any]
    window: int
    experts: int
    linear: int

    def step(self, begin: int, end: int) -> Tensor:
        """Compute the log probabilities after each of the tokens begin to end - 1."""
        tokens = self.tensors["tokens"][begin:end]
        x = self.tensors["embedding"][tokens]
        for i, cache in enumerate(self.caches):
            normed = self._norm(x, f"norm{i}a")
            if i < self.linear:
                weights = _select_linear(self.tensors, i)
                attended = linear_attention.run_layer_step(weights, normed, cache, begin == 0)
            else:
                attended = self._attend(i, normed, begin, end)
            x = x + attended @ self.tensors[f"out{i}"].T
            x = x + self._mix(i, self._norm(x, f"norm{i}b"), tokens)
        logits = self._norm(x, "norm") @ self.tensors["head"].T
        return logits.float().log_softmax(-1).to(x.dtype)

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        return kernels.run_rms_norm(x, self.tensors[weight], eps=_EPS)["out"]

    def _attend(self, i: int, normed: Tensor, begin: int, end: int) -> Tensor:
        """Store the keys and values of the new tokens, and compute attention over all tokens."""
        device = normed.device
        rows = (normed @ self.tensors[f"qkv{i}"].T).view(len(normed), -1, SIZE)
        q, k, v = rows.split(_QKV_HEADS, 1)
        q, k = self._rotate(q, k, begin, end)
        # As in the server, q, k and v are slices of one tensor.
        q, k, v = torch.cat([q, k, v], 1).split(_QKV_HEADS, 1)
        table = torch.tensor([_BLOCKS], dtype=torch.int32, device=device)
        positions = torch.arange(begin, end, device=device)
        slots = table[0].long()[positions // _BLOCK] * _BLOCK + positions % _BLOCK
        halves = attention.split_cache(self.caches[i])
        attention.store(k, v, halves, slots)
        out = attention.attend(
            q,
            halves,
            attention.Attention(HEADS, KV_HEADS, SIZE, self.window),
            starts=torch.tensor([0, len(normed)], dtype=torch.int32, device=device),
            keys=torch.tensor([end], dtype=torch.int32, device=device),
            table=table,
            queries=len(normed),
            most=end,
        )
        return out.view(len(normed), HIDDEN)

    def _rotate(self, q: Tensor, k: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Apply rope to queries and keys, (tokens, heads, SIZE) each."""
        cos = self.tensors["cos"][begin:end].expand(3, -1, -1).contiguous()
        sin = self.tensors["sin"][begin:end].expand(3, -1, -1).contiguous()
        share = SIZE // 8
        rotated = kernels.run_rope(
            q=q.flatten(1),
            k=k.flatten(1),
            cos=cos,
            sin=sin,
            mrope_section=[SIZE // 2 - 2 * share, share, share],
            head_size=SIZE,
            rotary_dim=SIZE,
            mrope_interleaved=False,
            is_neox_style=True,
        )
        return rotated["q"].view(len(q), -1, SIZE), rotated["k"].view(len(k), -1, SIZE)

    def _mix(self, i: int, normed: Tensor, tokens: Tensor) -> Tensor:
        up_weights = self.tensors[f"up{i}"]
        down_weights = self.tensors[f"down{i}"]
        if not self.experts:
            gate, up = (normed @ up_weights[0].T).chunk(2, -1)
            return (silu(gate) * up) @ down_weights[0].T
        shares, chosen = _route(self.tensors[f"router{i}"], tokens, self.experts)
        projected = kernels.run_moe(normed, chosen, shares, up_weights, routed=False)["out"]
        gate, up = projected.flatten(0, 1).chunk(2, -1)
        out = kernels.run_moe(
            silu(gate) * up,
            chosen.reshape(-1, 1),
            shares.reshape(-1, 1),
            down_weights,
        )["out"]
        return out.view(len(normed), TOP_K, HIDDEN).sum(1)
